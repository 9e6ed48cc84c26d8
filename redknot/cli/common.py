"""What several verbs share: arguments, settings, how an artifact is named, tables and sizes."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redknot.artifact.rows import ArtifactRow
from redknot.artifact.store import ArtifactStore
from redknot.cli.printable import printable
from redknot.config import Settings, load_settings
from redknot.errors import ConfigError, StoreError

DEFAULT_STORE = Path("redknot-store")
DEFAULT_MODEL = Path("models/nano")
DEFAULT_NAMESPACE = "default"
DEFAULT_PROFILE = "rowsparse"
SHORT_ID = 12  # digits shown; any unambiguous prefix is accepted
_LISTED = 8  # candidates that an error names


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store and --json."""
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="artifact store (default: ./%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def add_namespace_filter(parser: argparse.ArgumentParser) -> None:
    """--namespace as a filter: none given means every namespace."""
    parser.add_argument("--namespace", help="only artifacts of this namespace (default: all)")


def add_artifacts(parser: argparse.ArgumentParser, nargs: str, default: str = "") -> None:
    """Artifacts by name or id, and where to look for them; ``default`` says what none given means."""
    text = f"document names, or first digits of artifact ids{default}"
    parser.add_argument("artifacts", nargs=nargs, metavar="ID|NAME", help=text)
    add_store(parser)
    add_namespace_filter(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """--model."""
    text = f"folder of a DeepSeek-V4 checkpoint (default: ./{DEFAULT_MODEL} where that is one)"
    parser.add_argument("--model", type=Path, help=text)


def add_verify_weights(parser: argparse.ArgumentParser) -> None:
    """--verify-weights."""
    text = "read all weights again instead of trusting the hashes kept by path, size, time and inode"
    parser.add_argument("--verify-weights", action="store_true", help=text)


def model_path(given: Path | None) -> Path:
    """The checkpoint to use; ConfigError when none was given and there is no default here."""
    if given is not None:
        return given
    if (DEFAULT_MODEL / "config.json").is_file():
        return DEFAULT_MODEL
    raise ConfigError(f"give --model: the current folder has no {DEFAULT_MODEL} checkpoint to default to")


class _Lines(logging.Formatter):
    """One printable line a record: what is logged may name files."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def settings() -> Settings:
    """The settings of this process, with logging set up accordingly."""
    found = load_settings()
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("redknot: %(message)s"))
    logging.basicConfig(level=found.log_level, handlers=[handler])
    return found


def find_artifact(store: ArtifactStore, text: str, namespace: str | None) -> ArtifactRow:
    """The one artifact with this document name or id prefix; StoreError lists the candidates when there are several."""
    rows = {row.artifact_id: row for row in store.catalogue.rows(namespace, name=text)}
    if len(text) >= 4 and set(text) <= set("0123456789abcdef"):
        rows |= {row.artifact_id: row for row in store.list(namespace) if row.artifact_id.startswith(text)}
    if len(rows) == 1:
        return next(iter(rows.values()))
    where = f" in namespace {namespace!r}" if namespace is not None else ""
    if not rows:
        raise StoreError(f"no artifact has the name or id {text!r}{where}; `redknot ls` shows what there is")
    shown = "; ".join(_candidate(row) for row in list(rows.values())[:_LISTED])
    more = f"; and {len(rows) - _LISTED} more" if len(rows) > _LISTED else ""
    raise StoreError(f"{text!r} is ambiguous{where}, give an id: {shown}{more}")


def _candidate(row: ArtifactRow) -> str:
    return f"{row.artifact_id[:SHORT_ID]} ({row.namespace}, {row.token_count} tokens, {' '.join(row.needs)})"


def artifact_json(store: ArtifactStore, row: ArtifactRow) -> dict[str, Any]:
    """One catalogue row as plain JSON values."""
    return {
        "artifact_id": row.artifact_id,
        "namespace": row.namespace,
        "names": list(store.names(row.artifact_id, row.namespace)),
        "tokens": row.token_count,
        "bytes": row.nbytes,
        "needs": list(row.needs),
        "tp_size": row.world,
        "generation": row.generation,
        "state": str(row.state),
        "created": row.created,
        "last_used": row.last_used,
        "model": row.model,
    }


def print_json(value: object) -> None:
    """One JSON document on stdout, in ASCII: it then reads the same in every encoding."""
    print(json.dumps(value, indent=2))


def human_bytes(count: int) -> str:
    """A size that reads well: "512 B", "3.4 kB", "1.23 GB" (powers of 1000)."""
    value, units = float(count), ("B", "kB", "MB", "GB", "TB", "PB")
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def human_time(seconds: float) -> str:
    """A time of this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Aligned columns of printable cells; those numbered in ``right`` are right-aligned, the last one not padded."""
    cells = [[printable(str(value)) for value in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            value.rjust(width) if index in right else value.ljust(width)
            for index, (value, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def plural(count: int, noun: str) -> str:
    """ "1 document", "2 documents"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
