"""Requests over known documents: a random checkpoint of nano's proportions, documents as ids, artifacts, engines.

Every parameter is random, so that a wrong row, entry or head moves the logits; nothing needs ``transformers``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from redknot.artifact.certificate import Certificate
from redknot.artifact.needs import Windows
from redknot.artifact.publish import Publication
from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.build.target import ALL_READ, make_target
from redknot.config import CACHE_DIR, load_settings
from redknot.latents.session import Session
from redknot.model.checkpoint import load_model
from redknot.model.profile import SHIPPED, Profile
from redknot.nano import parameters
from redknot.plan.rows import KnownRun
from redknot.plan.windows import Rebuild, window_plan
from redknot.runtime.counters import Counters
from redknot.runtime.identity import model_identity
from redknot.runtime.model import Model
from redknot.runtime.restore import Source, restored_session
from redknot.runtime.windows import rebuild_windows
from tests.kit.memory import nan_memory

ROOT = Path(__file__).resolve().parents[2]
BOS, BLOCK, WINDOW = 0, 32, 32
LAYERS = (0, 2, 3, 4, 5)  # of nano: sliding, HCA, CSA, HCA, CSA; the three in the middle are no fences
MAX_POSITIONS = 2048
REUSING = [name for name, profile in SHIPPED.items() if profile.reuses]


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Five random layers with nano's tokenizer; ``changes`` go into config.json. Index top-k drops most entries."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = parameters.initial_tensors(torch.Generator().manual_seed(seed))
    kept = {name: value for name, value in tensors.items() if not name.startswith("layers.")}
    for new, old in enumerate(LAYERS):
        prefix = f"layers.{old}."
        kept |= {
            f"layers.{new}.{name.removeprefix(prefix)}": value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
    save_file({name: _random(name, value, generator) for name, value in kept.items()}, folder / "model.safetensors")
    config = parameters.CONFIG | {"num_hidden_layers": len(LAYERS), "max_position_embeddings": MAX_POSITIONS}
    config |= {"index_topk": 16, "hc_sinkhorn_iters": 3}
    for key in ("layer_types", "mlp_layer_types"):
        config[key] = [parameters.CONFIG[key][layer] for layer in LAYERS]
    (folder / "config.json").write_text(json.dumps(config | changes))
    shutil.copy(ROOT / "models/nano/tokenizer.json", folder)
    return folder


def _random(name: str, value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value.contiguous()
    noise = torch.randn(value.shape, generator=generator)
    if name.endswith("norm.weight") or name.endswith("scale"):
        return 1 + 0.2 * noise
    if name.endswith(("attn_sink", "ape", "gate.bias", "base")):
        return value + 0.5 * noise
    return noise if "embed" in name else noise * value.shape[-1] ** -0.5


def document(length: int, seed: int = 0) -> list[int]:
    """Random ids without control tokens, other ones for each seed and length."""
    return np.random.default_rng([seed, length]).integers(8, 2048, length).tolist()


@dataclass(frozen=True)
class Memory:
    """An artifact's sections in a dictionary."""

    sections: dict[str, Tensor]

    def section(self, name: str) -> Tensor:
        return self.sections[name]


@dataclass(frozen=True)
class Piece:
    """A part of a request: new text, or a run of a document from a block on."""

    ids: list[int]
    document: int | None = None
    doc_start: int = 0
    doc_length: int = 0
    whole: Sequence[int] = ()  # the document


def new(length: int, seed: int = 99) -> Piece:
    return Piece(document(length, seed))


def known(documents: Sequence[list[int]], number: int, start: int = 0, stop: int | None = None) -> Piece:
    whole = documents[number]
    return Piece(whole[start:stop], number, start, len(whole), whole)


def assemble(pieces: Sequence[Piece], offset: int = 0) -> tuple[Tensor, list[KnownRun]]:
    """Token ids of the pieces and the runs among them, which begin at request position ``offset``."""
    ids: list[int] = []
    runs = []
    for piece in pieces:
        if piece.document is not None:
            start = offset + len(ids)
            runs.append(KnownRun(str(piece.document), start, piece.doc_start, len(piece.ids), piece.doc_length))
        ids += piece.ids
    return torch.tensor(ids), runs


def publish(
    checkpoint: Path,
    store: Path,
    documents: Sequence[Sequence[int]],
    profiles: Sequence[Profile] = tuple(SHIPPED.values()),
    *,
    tp_size: int = 1,
    namespace: str = "default",
    windows: Windows = ALL_READ,
) -> list[Certificate]:
    """Build artifacts that serve these profiles, in the order of the documents; one that is there is built again."""
    model = Model(*load_model(checkpoint))
    identity = model_identity(checkpoint, model.geometry, torch.float32, load_settings().cache_dir)
    target = make_target(model.geometry, profiles, tp_size, namespace, windows)
    draft, ids = target.draft(identity), [torch.tensor(ids) for ids in documents]
    made = evaluate(model, ids, draft.needs, Counters(), tp_size, heads=target.heads)
    names = [(f"d{number}",) for number in range(len(documents))]
    with ArtifactStore(store, create=True) as opened:
        return list(
            opened.publish_many(
                Publication(draft, sections, np.array(ids, dtype=np.int32), name)
                for sections, ids, name in zip(made, documents, names, strict=True)
            )
        )


def restored(
    model: Model, artifacts: Sequence[Memory], pieces: Sequence[Piece], windows: Windows = ALL_READ
) -> tuple[Tensor, list[Source], Session]:
    """A request over restored documents, with room for 4 tokens: ids, sources, session; unset memory is NaN.

    The artifacts keep window rows as ``windows`` says; what they do not keep is recomputed.
    """
    ids, runs = assemble(pieces)
    whole = {str(piece.document): torch.tensor(piece.whole) for piece in pieces}
    sources = []
    for run in runs:
        plan = window_plan(model.geometry, windows, run.doc_start + run.length)
        rebuild = Rebuild(plan, whole[run.artifact_id]) if windows.rebuilt else None
        sources.append(Source(run, artifacts[int(run.artifact_id)], rebuild=rebuild))
    memory = nan_memory(model.geometry)
    session = restored_session(memory, sources, len(ids), 4)
    rebuild_windows(model, memory, session, sources, Counters())
    return ids, sources, session


def use_cache(folder: Path) -> pytest.MonkeyPatch:
    """Keep weight hashes out of the user's cache; undo the returned patch afterwards."""
    patch = pytest.MonkeyPatch()
    patch.setenv(CACHE_DIR, str(folder))
    return patch
