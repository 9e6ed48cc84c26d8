"""`redknot rm ID|NAME ...`: remove artifacts."""

from __future__ import annotations

import argparse

from redknot.artifact.store import ArtifactStore
from redknot.cli.common import (
    SHORT_ID,
    add_artifacts,
    find_artifact,
    human_bytes,
    print_json,
    settings,
)
from redknot.cli.printable import printable
from redknot.errors import StoreError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_artifacts(parser, "+")


def run(args: argparse.Namespace) -> int:
    """Remove all that were named, or none when one of them is not clear."""
    settings()
    removed = []
    with ArtifactStore(args.store) as store:
        chosen = {}
        for text in args.artifacts:
            row = find_artifact(store, text, args.namespace)
            names = store.names(row.artifact_id, row.namespace)
            others = [name for name in names if name != text]
            if text in names and others and not set(names) <= set(args.artifacts):
                shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
                raise StoreError(
                    f"{text!r} has the same content as {shown}; to remove both give the id {row.artifact_id[:SHORT_ID]}"
                )
            chosen[row.artifact_id] = (row, names)
        for row, names in chosen.values():
            freed = store.remove(row.artifact_id, row.namespace)
            removed.append({"artifact_id": row.artifact_id, "names": list(names), "freed_bytes": freed})
            if not args.json:
                called = printable(", ".join(names)) or "no name"
                print(f"removed {row.artifact_id[:SHORT_ID]} ({called}), {human_bytes(freed)}")
    if args.json:
        print_json(removed)
    return 0
