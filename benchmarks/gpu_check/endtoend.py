"""A whole model from first token id to first answer token: recompute against reuse, with the engine's own runtime.

Documents are evaluated once, their artifacts lie in host memory, and every arm gets the same ids. ``request`` counts
from the call to the first token on the host, the restoring of artifacts included; ``forward`` from the choice of rows
on. Nothing is stored, matched or certified.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.clock import synchronise
from benchmarks.gpu_check.model import on
from redknot.build.capture import evaluate_in
from redknot.build.inmemory import InMemory
from redknot.config import LatentSettings
from redknot.latents.formats import FP32
from redknot.latents.layout import model_layout
from redknot.latents.sizing import arena_bytes, sized_for, slot_bytes
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.model.geometry import Geometry
from redknot.model.policy import Policy, Selector, Treatment
from redknot.plan.rows import KnownRun
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.prefill import dense_session, prefill
from redknot.runtime.restore import Source, restored_session
from redknot.runtime.reuse import choose_rows, prefill_reusing

DOCUMENTS = 4
ROUNDS = 3


@dataclass(frozen=True)
class Protected:
    """As ``redknot.model.profile.Protected``."""

    first_windows: int = 1
    last_windows: int = 1
    recent_tail: int = 0
    indexed_share: float = 0.05


@dataclass(frozen=True)
class Arm(Policy):
    """A profile of Flash's fences as plain data: pydantic, which checks users' profiles, need not be there."""

    name: str
    fence_layers: int = 3
    fence_idle: Treatment = Treatment.FULL
    middle_active: Treatment = Treatment.FULL
    middle_idle: Treatment = Treatment.SKIP
    protected: Protected = Protected()
    selector: Selector = Selector.INDEXER
    deviation_layer: int = 4
    budget: float = 0.10
    fan_out: None = None


ROWSPARSE = Arm("flash-rowsparse")
TURBO = Arm(
    "flash-turbo",
    fence_idle=Treatment.SKIP,
    selector=Selector.NONE,
    budget=0.0,
    protected=Protected(last_windows=0, indexed_share=0.0),
)
ARMS = (ROWSPARSE, TURBO)


@dataclass(frozen=True)
class Prompt:
    """Documents of whole blocks behind one token, and a question of one window behind them."""

    token_ids: Tensor  # [n] int64
    documents: tuple[Tensor, ...]
    runs: tuple[KnownRun, ...]


def make_prompt(g: Geometry, tokens: int) -> Prompt:
    """A prompt of about ``tokens`` random ids, the same every time."""
    length = max(tokens // DOCUMENTS // g.block_length, 1) * g.block_length
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, g.vocab_size, (1 + DOCUMENTS * length + g.window,), generator=generator)
    starts = range(1, 1 + DOCUMENTS * length, length)
    runs = tuple(KnownRun(str(start), start, 0, length, length) for start in starts)
    return Prompt(ids, tuple(ids[start : start + length] for start in starts), runs)


def latent_settings(g: Geometry, tokens: int) -> LatentSettings:
    """Room for one request of ``tokens``, the copies of its blocks, and the probe that ranks its rows."""
    layout = model_layout(g, FP32)
    blocks = 2 * (-(-tokens // layout.block_tokens) + DOCUMENTS + 2)
    arena = arena_bytes(layout, tokens + g.block_length, 1, 2 * DOCUMENTS + 2)
    return LatentSettings(device_bytes=blocks * slot_bytes(layout), arena_bytes=arena, arenas=2)


def latent_bytes(g: Geometry, tokens: int) -> int:
    """Bytes that ``latent_settings`` takes."""
    settings = latent_settings(g, tokens)
    return (settings.device_bytes or 0) + settings.arenas * (settings.arena_bytes or 0)


def artifacts(model: Model, prompt: Prompt, needs: tuple[str, ...], device: torch.device) -> list[InMemory]:
    """The documents' artifacts, one evaluated after the other, in host memory."""
    made = []
    for document in prompt.documents:
        settings = sized_for(model.geometry, [len(document)])
        with LatentSpace(model.geometry, settings, **on(device)) as space, Workspace(space) as memory:
            (sections,) = evaluate_in(memory, model, [document], needs, Counters())
            made.append(InMemory({name: section.cpu() for name, section in sections.items()}))
    return made


def compare(
    model: Model, tokens: int, device: torch.device, lacks: Callable[[float], str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """All arms over one prompt; ``lacks(seconds)`` says why no time is left for a part, and names what is skipped."""
    g = model.geometry
    prompt = make_prompt(g, tokens)
    result: dict[str, Any] = {"tokens": len(prompt.token_ids), "documents": len(prompt.documents), "arms": {}}
    skipped: list[dict[str, str]] = []
    started = time.perf_counter()
    needs = tuple(sorted({need for arm in ARMS for need in arm.row_needs()}))
    made = artifacts(model, prompt, needs, device)
    synchronise(device)
    result["build_seconds"] = last = time.perf_counter() - started
    with LatentSpace(g, latent_settings(g, len(prompt.token_ids)), **on(device)) as space:
        for arm in (None, *ARMS):
            name = "recompute" if arm is None else arm.name.removeprefix("flash-")
            if lack := lacks(2 * last):
                skipped.append({"what": f"{name} at {tokens} tokens", "why": lack})
                continue
            print(f"{name} at {len(prompt.token_ids)} tokens", file=sys.stderr, flush=True)
            found, last = _timed(lambda arm=arm: request(model, space, prompt, made, arm, device), lacks, rounds)
            result["arms"][name] = found
    result["skipped"] = skipped
    _add_ratios(result)
    return result


@dataclass(frozen=True)
class Run:
    """One request."""

    request_s: float
    forward_s: float
    token: int
    finite: bool
    flops: int
    row_layers: int
    probe_row_layers: int
    rows_running: int


def request(
    model: Model, space: LatentSpace, prompt: Prompt, made: list[InMemory], arm: Arm | None, device: torch.device
) -> Run:
    """One prompt to its first token; without an arm every row runs."""
    ids, counters, total = prompt.token_ids, Counters(), len(prompt.token_ids)
    synchronise(device)
    started = time.perf_counter()
    with Workspace(space) as memory:
        if arm is None:
            session = dense_session(memory, total, total)
            forward = time.perf_counter()
            logits, running = prefill(model, [session], [ids], counters)[0], total
        else:
            sources = [Source(run, held) for run, held in zip(prompt.runs, made, strict=True)]
            session = restored_session(memory, sources, total, 0)
            synchronise(device)
            forward = time.perf_counter()
            rows = choose_rows(model, session, list(prompt.runs), ids, arm, counters)
            logits = prefill_reusing(model, session, sources, rows, ids, arm, counters)
            running = int(rows.running.sum())
        token = int(logits.argmax())  # waits for the device
        ended = time.perf_counter()
        finite = bool(logits.isfinite().all())
    probe = counters.probe_row_layers
    return Run(ended - started, ended - forward, token, finite, counters.flops, counters.row_layers, probe, running)


def _timed(run: Callable[[], Run], lacks: Callable[[float], str], rounds: int) -> tuple[dict[str, Any], float]:
    """The median run by request time, behind a warm-up where there are rounds; fewer where the budget ends."""
    started = time.perf_counter()
    if rounds > 1:
        run()
    runs = [run()]
    while len(runs) < rounds and not lacks(2 * runs[-1].request_s):
        runs.append(run())
    middle = sorted(runs, key=lambda one: one.request_s)[len(runs) // 2]
    return asdict(middle) | {"rounds": len(runs)}, time.perf_counter() - started


def _add_ratios(result: dict[str, Any]) -> None:
    base = result["arms"].get("recompute")
    for found in result["arms"].values():
        if base is not None:
            found["ratio_request"] = base["request_s"] / found["request_s"]
            found["ratio_forward"] = base["forward_s"] / found["forward_s"]
            found["flops_allow"] = base["flops"] / found["flops"]


def tiny_run(model: Model) -> None:
    """A few rows of a toy, which show whether a model of its kind runs at all."""
    g, device = model.geometry, model.weights.embed.device
    prompt = make_prompt(g, DOCUMENTS * g.block_length)
    with LatentSpace(g, latent_settings(g, len(prompt.token_ids)), **on(device)) as space:
        made = artifacts(model, prompt, ROWSPARSE.row_needs(), device)
        request(model, space, prompt, made, ROWSPARSE, device)
