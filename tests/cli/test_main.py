"""The dispatcher: which verb runs, what it is given, and what the caller sees when something goes wrong."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from redknot import __version__
from redknot.cli import main as dispatcher
from redknot.cli.printable import printable
from redknot.errors import RedKnotError, StoreError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install_verb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a verb in the table whose module exists only in memory."""

    def install(run: Callable[[argparse.Namespace], int], verb: str = "fakeverb") -> None:
        name = f"redknot.cli.{verb}"
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
        module.add_arguments = lambda parser: parser.add_argument("--count", type=int, default=1)  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(dispatcher.VERBS, verb, "a verb that only this test knows")

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("code", [0, 1])
def test_verb_gets_its_arguments_and_gives_the_exit_code(install_verb, code):
    seen = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args.count)
        return code

    install_verb(run)
    assert dispatcher.main(["fakeverb", "--count", "7"]) == code
    assert seen == [7]


def test_arguments_default_to_the_command_line(install_verb, monkeypatch):
    install_verb(lambda args: args.count)
    monkeypatch.setattr(sys, "argv", ["redknot", "fakeverb", "--count", "0"])
    assert dispatcher.main() == 0


@pytest.mark.parametrize("error", [RedKnotError("no such store"), StoreError("no such\n  store")])
def test_redknot_error_is_one_line_and_exit_2(install_verb, capsys, error):
    install_verb(raising(error))
    assert dispatcher.main(["fakeverb"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "redknot fakeverb: error: no such store\n"


def test_interrupt_is_one_line_and_exit_130(install_verb, capsys):
    install_verb(raising(KeyboardInterrupt()))
    assert dispatcher.main(["fakeverb"]) == 130
    assert capsys.readouterr().err == "redknot fakeverb: interrupted\n"


def test_a_bug_is_not_dressed_up_as_a_refusal(install_verb):
    install_verb(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        dispatcher.main(["fakeverb"])


@pytest.mark.parametrize("wrong", [["--unknown"], ["--count", "many"], ["--cou", "1"], ["extra"]])
def test_wrong_arguments_are_argparse_usage_errors(install_verb, capsys, wrong):
    install_verb(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        dispatcher.main(["fakeverb", *wrong])
    assert exit_.value.code == 2
    assert "redknot fakeverb: error: " in capsys.readouterr().err


def test_verb_help_names_the_verb(install_verb, capsys):
    install_verb(lambda args: 0)
    with pytest.raises(SystemExit) as exit_:
        dispatcher.main(["fakeverb", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: redknot fakeverb")
    assert "only this test knows" in out


@pytest.mark.parametrize("unknown", ["fakeverbs", "--verbose"])
def test_unknown_verb_lists_the_verbs(install_verb, capsys, unknown):
    install_verb(lambda args: 0)
    assert dispatcher.main([unknown]) == 2
    err = capsys.readouterr().err
    assert repr(unknown) in err
    assert "fakeverb" in err.partition("the verbs are:")[2]
    assert err.count("\n") == 1


def test_a_verb_without_a_module_does_not_exist(monkeypatch, capsys):
    monkeypatch.setitem(dispatcher.VERBS, "notwritten", "planned")
    assert "notwritten" not in dispatcher.available_verbs()
    assert dispatcher.main(["--help"]) == 0
    assert "notwritten" not in capsys.readouterr().out
    assert dispatcher.main(["notwritten"]) == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_verbs(install_verb, capsys, flag):
    install_verb(lambda args: 0)
    assert dispatcher.main([flag]) == 0
    out, err = capsys.readouterr()
    assert "a verb that only this test knows" in out
    assert err == ""


def test_no_arguments_shows_the_help_on_stderr(capsys):
    assert dispatcher.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: redknot VERB")


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(capsys, flag):
    assert dispatcher.main([flag]) == 0
    assert capsys.readouterr().out == f"redknot {__version__}\n"


def test_help_imports_nothing_heavy():
    probe = (
        "import sys; from redknot.cli.main import main; main(['--help']); main(['nonsense']); "
        "sys.exit(' '.join({'torch', 'numpy', 'transformers', 'pydantic'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"imported: {done.stderr}"


def test_python_m_redknot():
    done = subprocess.run([sys.executable, "-m", "redknot", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"redknot {__version__}\n")


def test_python_m_build_artifacts_is_the_build_verb(install_verb, monkeypatch):
    import runpy

    install_verb(lambda args: args.count, verb="build")
    monkeypatch.setattr(sys, "argv", ["build_artifacts", "--count", "5"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("redknot.build_artifacts", run_name="__main__")
    assert exit_.value.code == 5


def test_a_closed_pipe_is_no_error(tmp_path):
    """A verb that prints more than a pipe holds, into a reader that has gone."""
    script = tmp_path / "closed_pipe.py"
    script.write_text(
        "import importlib.machinery, importlib.util, sys\n"
        "from redknot.cli import main as dispatcher\n"
        "module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec('redknot.cli.fakeverb', None))\n"
        "module.add_arguments = lambda parser: None\n"
        "module.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.modules['redknot.cli.fakeverb'] = module\n"
        "dispatcher.VERBS['fakeverb'] = ''\n"
        "sys.exit(dispatcher.main(['fakeverb']))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


VERB_SCRIPT = (
    "import importlib.machinery, importlib.util, sys\n"
    "from redknot.cli import common, main as dispatcher\n"
    "from redknot.errors import RedKnotError\n"
    "def run(args):\n"
    "    {body}\n"
    "    return 0\n"
    "module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec('redknot.cli.fakeverb', None))\n"
    "module.add_arguments = lambda parser: None\n"
    "module.run = run\n"
    "sys.modules['redknot.cli.fakeverb'] = module\n"
    "dispatcher.VERBS['fakeverb'] = ''\n"
    "sys.exit(dispatcher.main(['fakeverb']))\n"
)
SAID = "café 日本 🦊"


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=lambda found: "+".join(found),
)
@pytest.mark.parametrize(
    ("body", "out", "err"),
    [
        (f"print({SAID!r})", b"caf\\xe9 \\u65e5\\u672c \\U0001f98a\n", b""),
        (f"raise RedKnotError({SAID[:4]!r})", b"", b"redknot fakeverb: error: caf\\xe9\n"),
    ],
    ids=["stdout", "stderr"],
)
def test_a_terminal_that_lacks_the_letters_gets_escapes(tmp_path, environment, body, out, err):
    script = tmp_path / "verb.py"
    script.write_text(VERB_SCRIPT.format(body=body), encoding="utf-8")
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, timeout=60, env=os.environ | environment, check=False
    )
    assert (found.stdout, found.stderr) == (out, err)


def test_json_is_the_same_in_every_encoding(tmp_path):
    script = tmp_path / "verb.py"
    script.write_text(VERB_SCRIPT.format(body=f"common.print_json({[SAID]!r})"), encoding="utf-8")
    found = [
        subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, env=os.environ | env, check=True)
        for env in ({"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8"})
    ]
    assert found[0].stdout == found[1].stdout
    assert json.loads(found[0].stdout) == [SAID]


ESCAPES = "a\x1b[31m\x9b1m\u202e\r\udcff.txt"
SHOWN = "a\\x1b[31m\\x9b1m\\u202e\\r\\udcff.txt"


def test_printable_escapes_what_a_terminal_would_obey():
    assert printable(ESCAPES) == SHOWN
    assert printable(SAID) == SAID
    assert printable("a\nb\tc\x00") == "a\\nb\\tc\\x00"


@pytest.mark.parametrize("error", [RedKnotError("no \x1b[2Jstore"), OSError(2, "no \x1b[2Jstore", "x\x1b]0;y\x07")])
def test_an_error_that_names_escape_sequences(install_verb, capsys, error):
    install_verb(raising(error))
    assert dispatcher.main(["fakeverb"]) == 2
    err = capsys.readouterr().err
    assert "no \\x1b[2Jstore" in err
    assert err.removesuffix("\n").isprintable()


def test_an_argument_that_is_refused_is_shown_escaped(install_verb, capsys):
    install_verb(lambda args: 0)
    with pytest.raises(SystemExit):
        dispatcher.main(["fakeverb", "x\x1b[31m"])
    err = capsys.readouterr().err
    assert "unrecognized arguments: x\\x1b[31m" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--store", "x" * 300],
        ["doctor", "--store", "x" * 300],
        ["build", "x" * 300],
        ["layout", "--model", "x" * 300],
        ["build", str(ROOT / "examples/corpus"), "--model", str(ROOT / "models/nano"), "--profile", "x" * 300],
    ],
    ids=lambda arguments: " ".join(arguments[:2])[:20],
)
def test_a_name_that_no_file_system_holds_is_one_line(arguments, capsys):
    """Looking at it raises on some Python versions; never a traceback for a user's mistake."""
    assert dispatcher.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"redknot {arguments[0]}: error:")
    assert err.count("\n") == 1
