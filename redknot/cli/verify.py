"""`redknot verify [ID|NAME ...]`: read artifacts completely and compare every checksum."""

from __future__ import annotations

import argparse

from redknot.artifact.store import ArtifactStore
from redknot.cli.common import (
    SHORT_ID,
    add_artifacts,
    find_artifact,
    human_bytes,
    plural,
    print_json,
    settings,
    table,
)
from redknot.cli.printable import printable

EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_artifacts(parser, "*", " (default: everything)")


def run(args: argparse.Namespace) -> int:
    """Verify and print; 1 when something is damaged (it is then in quarantine; `redknot build` makes it again)."""
    settings()
    with ArtifactStore(args.store) as store:
        if args.artifacts:
            rows = [find_artifact(store, text, args.namespace) for text in args.artifacts]
            results = [result for row in rows for result in store.verify(row.artifact_id, row.namespace)]
        else:
            results = list(store.verify(namespace=args.namespace))
        names = {result.artifact_id: store.names(result.artifact_id, result.namespace) for result in results}
    damaged = [result for result in results if result.problems]
    if args.json:
        print_json(
            [
                {
                    "artifact_id": result.artifact_id,
                    "namespace": result.namespace,
                    "names": list(names[result.artifact_id]),
                    "generation": result.generation,
                    "sections": result.sections,
                    "bytes": result.nbytes,
                    "problems": list(result.problems),
                }
                for result in results
            ]
        )
        return EXIT_DAMAGED if damaged else 0
    lines = [
        (
            result.artifact_id[:SHORT_ID],
            "DAMAGED" if result.problems else "ok",
            result.sections,
            human_bytes(result.nbytes),
            ", ".join(names[result.artifact_id]),
        )
        for result in results
    ]
    if lines:
        print(table(("ID", "RESULT", "SECTIONS", "READ", "NAMES"), lines, right=(2, 3)))
    for result in damaged:
        for problem in result.problems:
            print(printable(problem))
    print(f"{plural(len(results), 'artifact')} read, {len(damaged)} damaged")
    return EXIT_DAMAGED if damaged else 0
