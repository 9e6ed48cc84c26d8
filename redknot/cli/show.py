"""`redknot show ID|NAME`: one artifact's certificate, sections, sizes and faults."""

from __future__ import annotations

import argparse
import json

from redknot.artifact.certificate import Certificate
from redknot.artifact.loaded import read_certificate
from redknot.artifact.needs import stored_windows
from redknot.artifact.reasons import describe_os_error
from redknot.artifact.rows import ArtifactRow
from redknot.artifact.schema import CERTIFICATE_FILE, generation_dir
from redknot.artifact.store import ArtifactStore
from redknot.cli.common import (
    add_namespace_filter,
    add_store,
    artifact_json,
    find_artifact,
    human_bytes,
    human_time,
    print_json,
    settings,
    table,
)
from redknot.cli.printable import printable
from redknot.errors import StoreError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("artifact", metavar="ID|NAME", help="document name, or the first digits of an artifact id")
    add_store(parser)
    add_namespace_filter(parser)


def run(args: argparse.Namespace) -> int:
    """Print one artifact; its payload is not read."""
    settings()
    with ArtifactStore(args.store) as store:
        row = find_artifact(store, args.artifact, args.namespace)
        faults = store.quarantined(row.artifact_id)
        certificate = _certificate(store, row)
        if args.json:
            found = artifact_json(store, row) | {
                "windows": _windows(certificate),
                "certificate": json.loads(certificate.model_dump_json()),
                "faults": [{"section": fault.section, "file": fault.file, "reason": fault.reason} for fault in faults],
            }
            print_json(found)
            return 0
        names = store.names(row.artifact_id, row.namespace)
    _print(row, certificate, names)
    for fault in faults:
        print(printable(f"fault      {fault.section} in {fault.file}: {fault.reason}"))
    return 0


def _certificate(store: ArtifactStore, row: ArtifactRow) -> Certificate:
    """The certificate as it is on disk, in quarantine or not: showing never moves anything."""
    directory = generation_dir(store.root, row.artifact_id, row.generation)
    try:
        return read_certificate(directory)
    except OSError as error:
        raise StoreError(describe_os_error("read", directory / CERTIFICATE_FILE, error)) from error


def _windows(certificate: Certificate) -> str:
    """What is kept of window rows, in the words of ``build --windows``, or ``tail``."""
    if "latents" not in certificate.needs:
        return "-"
    return str(stored_windows(certificate.needs))


def _print(row: ArtifactRow, certificate: Certificate, names: tuple[str, ...]) -> None:
    model = certificate.model
    per_token = row.nbytes / max(row.token_count, 1)
    facts = {
        "id": row.artifact_id,
        "names": ", ".join(names) or "-",
        "namespace": row.namespace,
        "state": f"{row.state}, generation {row.generation}, layout {certificate.layout_version}",
        "tokens": f"{row.token_count:,}  (hash {row.token_hash[:16]})",
        "needs": " ".join(row.needs),
        "windows": _windows(certificate),
        "TP size": str(row.world),
        "size": f"{human_bytes(row.nbytes)} ({row.nbytes:,} bytes, {per_token:,.0f} a token)",
        "created": human_time(row.created),
        "last used": human_time(row.last_used),
        "weights": model.weights_hash,
        "config": model.config_hash,
        "tokenizer": model.tokenizer_hash,
        "encoder": f"{model.prompt_encoder}, {model.dtype}",
    }
    for name, value in facts.items():
        print(f"{name:<10} {printable(value)}")
    lines = [
        (name, record.dtype, "x".join(map(str, record.shape)), human_bytes(record.nbytes), record.file)
        for name, record in certificate.sections.items()
    ]
    print()
    print(table(("SECTION", "DTYPE", "SHAPE", "SIZE", "FILE"), lines, right=(3,)))
