"""`redknot doctor`: look at the machine, the model and the store, and say what does not fit together."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from redknot import __version__
from redknot.artifact.identity import ModelIdentity, differences
from redknot.artifact.maintenance import Finding
from redknot.artifact.store import ArtifactStore
from redknot.cli.common import DEFAULT_MODEL, add_model, add_store, add_verify_weights, plural, print_json, settings
from redknot.cli.printable import printable
from redknot.config import Settings
from redknot.errors import RedKnotError
from redknot.model.checkpoint import Checkpoint
from redknot.model.geometry import Geometry, load_geometry
from redknot.model.tokenizer import load_tokenizer
from redknot.runtime.identity import model_identity

EXIT_ERRORS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    add_store(parser)
    add_verify_weights(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when one of them is an error."""
    configured = settings()
    findings = list(_machine(configured))
    model = args.model or (DEFAULT_MODEL if (DEFAULT_MODEL / "config.json").is_file() else None)
    geometry = identity = None
    if model is None:
        findings.append(Finding("note", "no_model", "", "no model given: the machine and the store alone"))
    else:
        geometry = _model(model, findings)
        if args.verify_weights and geometry is not None:
            identity = _verified(model, geometry, configured, findings)
    findings += _store(args.store, model, geometry, configured, identity)
    errors = sum(finding.severity == "error" for finding in findings)
    if args.json:
        print_json({"version": __version__, "errors": errors, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            where = f"{finding.path}: " if finding.path else ""
            print(f"{finding.severity:<8} {finding.code:<24} {printable(where + finding.message)}")
        print(f"{plural(errors, 'error')} found")
    return EXIT_ERRORS if errors else 0


def _machine(configured: Settings) -> Iterator[Finding]:
    """Versions, cores, memory and the cache folder."""
    gpu = f", {torch.cuda.device_count()} GPU" if torch.cuda.is_available() else ""
    cores = plural(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "core")
    versions = f"redknot {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    yield Finding("ok", "machine", "", f"{versions}, {cores}, {torch.get_num_threads()} torch threads{gpu}")
    if sys.byteorder != "little":
        yield Finding("error", "byte_order", "", "artifacts are little-endian; this machine is not")
    folder = configured.cache_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        text = "not writable, so every start hashes all weights again; set REDKNOT_CACHE_DIR"
        yield Finding("warning", "cache_read_only", str(configured.cache_dir), text)


def _model(path: Path, findings: list[Finding]) -> Geometry | None:
    """Check configuration, tensor headers and tokenizer of a checkpoint; weights are not read."""
    where, geometry = str(path), None
    try:
        geometry = load_geometry(path)
        Checkpoint(path, geometry)
        kinds = ", ".join(f"{geometry.kinds.count(kind)} {kind.name}" for kind in dict.fromkeys(geometry.kinds))
        text = f"{geometry.num_layers} layers ({kinds}), {geometry.max_positions:,} positions"
        findings.append(Finding("ok", "model", where, text))
    except RedKnotError as error:
        findings.append(Finding("error", "model", "", str(error)))
        return None
    try:
        tokenizer = load_tokenizer(path, geometry)
        tokenizer.encode("RedKnot")
        findings.append(Finding("ok", "tokenizer", where, f"hash {tokenizer.file_hash[:16]}"))
    except RedKnotError as error:
        findings.append(Finding("error", "tokenizer", "", str(error)))
        return None
    return geometry


def _verified(path: Path, geometry: Geometry, configured: Settings, findings: list[Finding]) -> ModelIdentity | None:
    """Read all weights and compare them with the hashes that a start goes by; None when they cannot be read."""
    try:
        known = model_identity(path, geometry, torch.float32, configured.cache_dir)
        found = model_identity(path, geometry, torch.float32, configured.cache_dir, verify_weights=True)
    except RedKnotError as error:
        findings.append(Finding("error", "weights", "", str(error)))
        return None
    if known == found:
        findings.append(Finding("ok", "weights", str(path), f"read again, hash {found.weights_hash[:16]}"))
    else:
        text = "other content than when they were hashed, under the same size and time; build artifacts again"
        findings.append(Finding("error", "weights_changed", str(path), text))
    return found


def _store(
    path: Path, model: Path | None, geometry: Geometry | None, configured: Settings, identity: ModelIdentity | None
) -> Iterator[Finding]:
    """What the store says of itself, and whether its artifacts are of this model; ``identity`` where it is known."""
    if not path.exists():
        yield Finding("note", "no_store", str(path), "there is no store yet; `redknot build` makes one")
        return
    try:
        with ArtifactStore(path) as store:
            found = store.doctor()
            rows = store.list()
            yield from found
            size = store.bytes_on_disk().total
            yield Finding("ok", "store", str(path), f"{plural(len(rows), 'artifact')}, {size:,} bytes")
            if model is not None and geometry is not None and rows:
                mine = identity or model_identity(model, geometry, torch.float32, configured.cache_dir)
                yield from _other_models(store, sorted({row.namespace for row in rows}), mine)
    except RedKnotError as error:
        yield Finding("error", "store", "", str(error))


def _other_models(store: ArtifactStore, namespaces: list[str], mine: ModelIdentity) -> Iterator[Finding]:
    """Artifacts that this model can never use, and the fields that say so."""
    for namespace in namespaces:
        identities = store.identities(namespace)
        for identity in identities:
            fields = differences(identity, mine)
            if fields:
                shown = ", ".join(fields[:6]) + (f" and {len(fields) - 6} more" if len(fields) > 6 else "")
                count = sum(row.model == identity.digest for row in store.list(namespace))
                text = f"{plural(count, 'artifact')} of another model, which differs in {shown}"
                yield Finding("warning", "other_model", f"namespace {namespace}", text)
