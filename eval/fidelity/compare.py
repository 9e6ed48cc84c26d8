"""One prompt through recompute and through an arm, compared on rows that both run: those behind the last document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.encoded import Encoded
from eval.logits import divergence, same_first
from redknot.build.inmemory import InMemory, in_memory, restored_request
from redknot.build.target import Target
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.profile import RECOMPUTE, Profile
from redknot.plan.rows import KnownRun, protected_rows
from redknot.plan.rows import Rows as RowClasses
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import CHUNK_ROWS, dense_session
from redknot.runtime.restore import Source
from redknot.runtime.reuse import Stages, run_stages

NOISE_CUTS = 3  # forwards of the noise floor, at least: other sums of the same numbers


@dataclass(frozen=True)
class Trace:
    """What a forward made of the last rows of a prompt."""

    hidden: tuple[Tensor, ...]  # behind each layer: residual streams [rows, hc * hidden]
    logits: Tensor  # [rows, vocab]


@dataclass(frozen=True)
class Difference:
    """How far one trace is from another."""

    layers: tuple[float, ...]  # |h - reference| / |reference| behind each layer, over all rows and channels
    kl: float  # nats, the mean over rows
    top1: float  # share of the rows whose likeliest token is the same


@dataclass
class _Behind(Capture):
    """Keeps the residual streams behind each layer, of the rows from request position ``start`` on."""

    start: int = 0
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def after_layer(self, layer: int, rows: RowSet, streams: Tensor) -> None:
        (positions,) = rows.positions
        self.kept.setdefault(layer, []).append(streams[positions >= self.start].flatten(1))


def query_rows(prompt: Encoded) -> int:
    """Rows behind the last document, which run in every arm; the last row where a document ends the prompt."""
    end = prompt.spans[-1][1] if prompt.spans else 0
    return max(len(prompt) - end, 1)


def recomputed(model: Model, prompt: Encoded, profile: Profile = RECOMPUTE, chunk: int = CHUNK_ROWS) -> Trace:
    """A prompt with every row run, in forwards of ``chunk`` rows."""
    ids = _ids(prompt)
    rows = RowClasses(len(ids), protected_rows(len(ids), [], profile, 0, 1), torch.zeros(len(ids), dtype=torch.bool))
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session = dense_session(memory, len(ids), len(ids))
        return _traced(Stages(model, session, [], rows, ids, profile, query_rows(prompt)), chunk)


def noise_floor(model: Model, prompt: Encoded) -> Trace:
    """Recompute, equally exact, cut into other forwards."""
    return recomputed(model, prompt, chunk=max(min(CHUNK_ROWS, len(prompt)) // NOISE_CUTS, 1))


def reused(model: Model, prompt: Encoded, artifacts: Sequence[InMemory], profile: Profile) -> Trace:
    """A prompt with its documents read from artifacts, as the profile says."""
    ids, sources = _ids(prompt), []
    for (start, end), artifact in zip(prompt.spans, artifacts, strict=True):
        sources.append(Source(KnownRun(str(start), start, 0, end - start, end - start), artifact))
    with LatentSpace(model.geometry) as space, Workspace(space) as memory:
        session, rows = restored_request(model, memory, sources, ids, profile)
        return _traced(Stages(model, session, sources, rows, ids, profile, query_rows(prompt)), CHUNK_ROWS)


def _ids(prompt: Encoded) -> Tensor:
    return torch.from_numpy(prompt.token_ids).long()


def _traced(stages: Stages, chunk: int) -> Trace:
    capture = _Behind(start=stages.rows.total - stages.last)
    logits = run_stages(stages, Counters(), chunk, capture)
    return Trace(tuple(torch.cat(parts) for _, parts in sorted(capture.kept.items())), logits)


def traces(
    model: Model, prompt: Encoded, profiles: Mapping[str, Profile], targets: Sequence[Target]
) -> dict[str, Trace]:
    """The prompt through each profile; ``targets`` are what artifacts are made for (``eval.artifacts.targets``)."""
    documents = [torch.from_numpy(ids).long() for ids in prompt.documents]
    found: dict[str, Trace] = {}
    made: dict[Target, list[InMemory]] = {}
    for name, profile in profiles.items():
        if not profile.reuses or not documents:
            found[name] = recomputed(model, prompt, profile)
            continue
        target = next(target for target in targets if set(profile.needs()) <= set(target.needs))
        if target not in made:
            made[target] = in_memory(model, target, documents)
        found[name] = reused(model, prompt, made[target], profile)
    return found


def difference(reference: Trace, other: Trace) -> Difference:
    """Compare two traces of the same rows."""
    pairs = list(zip(reference.logits, other.logits, strict=True))
    return Difference(
        layers=tuple(_relative(a, b) for a, b in zip(reference.hidden, other.hidden, strict=True)),
        kl=sum(divergence(a, b) for a, b in pairs) / len(pairs),
        top1=sum(same_first(a, b) for a, b in pairs) / len(pairs),
    )


def _relative(reference: Tensor, other: Tensor) -> float:
    norm = float(reference.double().norm())
    error = float((other.double() - reference.double()).norm())
    return error / norm if norm else error
