"""Choose a verb, import its module, and turn what goes wrong into one line and an exit code.

Each verb is a module of this folder with `add_arguments(parser)` and `run(args) -> int`. Only the chosen one is
imported, so the help and the usage errors of this file never wait for torch. Exit codes: 0 done, 1 ran but the answer
or the check failed (the verb's own verdict), 2 refused or not possible, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from redknot import __version__
from redknot.cli.printable import printable
from redknot.errors import RedKnotError

VERBS = {
    "build": "evaluate the documents of a corpus once and publish their artifacts",
    "ask": "answer a question over documents, reusing their artifacts",
    "ls": "list the artifacts of a store",
    "show": "show one artifact: sections, sizes and certificate",
    "verify": "check every section of a store against its checksum",
    "rm": "remove artifacts from a store",
    "gc": "delete old generations, quarantined sections and unfinished builds",
    "store-check": "check the disk tier of latents: every file, and the bytes of its books",
    "profile-heads": "measure every head's drift on a corpus and choose the Global heads of each layer and group",
    "layout": "show what a model's latents weigh, by layer, block, page and document",
    "doctor": "check the machine, the model and the store, and say what does not fit",
    "report": "rebuild the report of an evaluation from its results files",
    "demo": "build a small corpus and compare both arms on questions about it",
}

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class Verb(Protocol):
    """What a verb's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


def available_verbs() -> dict[str, str]:
    """The verbs of the table whose module is installed, with their one-line help; imports none of them."""
    return {verb: line for verb, line in VERBS.items() if importlib.util.find_spec(_module(verb)) is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `redknot ARGV...` and return the exit code."""
    _print_anything()
    arguments = sys.argv[1:] if argv is None else list(argv)
    verbs = available_verbs()
    if not arguments:
        print(_help(verbs), file=sys.stderr)
        return EXIT_REFUSED
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(_help(verbs))
        return 0
    if first in ("-V", "--version"):
        print(f"redknot {__version__}")
        return 0
    if first not in verbs:
        kind = "option" if first.startswith("-") else "verb"
        print(f"redknot: error: unknown {kind} {first!r}; the verbs are: {', '.join(verbs)}", file=sys.stderr)
        return EXIT_REFUSED
    return _run_verb(first, rest)


def _module(verb: str) -> str:
    return f"redknot.cli.{verb.replace('-', '_')}"


class _Parser(argparse.ArgumentParser):
    """Shows an argument that it refuses without sending its control characters to the terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _print_anything() -> None:
    """Let text that the streams' encoding lacks (ascii, say) be printed as escapes instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run_verb(verb: str, arguments: list[str]) -> int:
    try:
        module = cast(Verb, importlib.import_module(_module(verb)))
        parser = _Parser(prog=f"redknot {verb}", description=VERBS[verb], allow_abbrev=False)
        module.add_arguments(parser)
        code = module.run(parser.parse_args(arguments))
        sys.stdout.flush()
        return code
    except RedKnotError as error:
        print(f"redknot {verb}: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        print(f"redknot {verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        # What no module could say better: a path that may not be looked at, a name too long, a disk that fails.
        if isinstance(error, BrokenPipeError):  # `redknot ls | head`: nobody reads any more, which is no error of ours
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        where = f" {printable(str(error.filename))}" if error.filename else ""
        print(f"redknot {verb}: error:{where}: {printable(error.strerror or str(error))}", file=sys.stderr)
        return EXIT_REFUSED


def _help(verbs: dict[str, str]) -> str:
    width = max(map(len, verbs), default=0)
    listing = [f"  {verb:<{width}}  {line}" for verb, line in verbs.items()]
    return "\n".join(
        [
            "usage: redknot VERB [ARGUMENT ...]",
            "",
            "Reuse documents evaluated once, offline, to start long DeepSeek-V4 requests faster.",
            "",
            "verbs:",
            *listing,
            "",
            "`redknot VERB --help` shows a verb's arguments, `redknot --version` the version.",
        ]
    )
