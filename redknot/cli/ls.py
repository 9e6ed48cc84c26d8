"""`redknot ls`: the artifacts of a store, one a line."""

from __future__ import annotations

import argparse

from redknot.artifact.store import ArtifactStore
from redknot.cli.common import (
    SHORT_ID,
    add_namespace_filter,
    add_store,
    artifact_json,
    human_bytes,
    human_time,
    plural,
    print_json,
    settings,
    table,
)

_HEADER = ("ID", "NAMESPACE", "TOKENS", "SIZE", "TP", "GEN", "STATE", "CREATED", "NEEDS", "NAMES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_store(parser)
    add_namespace_filter(parser)


def run(args: argparse.Namespace) -> int:
    """Print the artifacts, oldest first."""
    settings()
    with ArtifactStore(args.store) as store:
        rows = store.list(args.namespace)
        if args.json:
            print_json([artifact_json(store, row) for row in rows])
            return 0
        lines = [
            (
                row.artifact_id[:SHORT_ID],
                row.namespace,
                row.token_count,
                human_bytes(row.nbytes),
                row.world,
                row.generation,
                row.state,
                human_time(row.created),
                ",".join(row.needs),
                ", ".join(store.names(row.artifact_id, row.namespace)),
            )
            for row in rows
        ]
    if lines:
        print(table(_HEADER, lines, right=(2, 3, 4, 5)))
    tokens, nbytes = sum(row.token_count for row in rows), sum(row.nbytes for row in rows)
    print(f"{plural(len(rows), 'artifact')}, {tokens:,} tokens, {human_bytes(nbytes)}")
    return 0
