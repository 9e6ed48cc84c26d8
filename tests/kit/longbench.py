"""Rows in LongBench's format, written by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PASSAGES = "Passage 1:\nLiora\nThe lamp of Liora is green.\n\nPassage 2:\nTamsin\nThe lamp of Tamsin is red.\n"
ROW = {
    "input": "What colour is the lamp of Liora?",
    "context": PASSAGES,
    "answers": ["green", "dark green"],
    "length": 18,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "0f1e",
}


def write(path: Path, *changes: dict[str, Any], drop: str | None = None) -> Path:
    """A file of rows, each the one above with some fields changed, one of them left out."""
    rows = [{name: value for name, value in {**ROW, **change}.items() if name != drop} for change in changes or ({},)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path
