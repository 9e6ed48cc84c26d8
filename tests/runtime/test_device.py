"""The engine on a device: nothing in the layer loop waits for it, host and device never meet, the answers stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from redknot.model.profile import SHIPPED, Profile, load_profile
from redknot.model.weights import MoeWeights
from redknot.ops import indexer, merge, moe, projection, segment
from redknot.runtime import engine as engines
from redknot.runtime import forward
from redknot.runtime.engine import Engine, Result
from redknot.runtime.loaded import Loaded, load
from redknot.runtime.model import Model
from redknot.runtime.operations import Operations
from redknot.runtime.staging import CopyStream
from tests.kit.alter import mapped
from tests.kit.engines import write_smallest
from tests.kit.requests import BOS, ROOT, document, publish, use_cache
from tests.kit.simulated import DEVICE, OnDevice, Simulation, on_host, simulated
from tests.kit.streams import Streams

moe_triton = pytest.importorskip("redknot.ops.moe_triton", reason="triton is in the dev extra on Linux")
DOCS = [document(length, number) for number, length in enumerate((64, 96, 45))]
IDS = [BOS, *document(5, 3), *DOCS[0], *DOCS[1], *document(7, 5), *DOCS[2], *document(9, 4)]
PROFILES = ("fan-out", "headsplit", "combined", "rowsparse", "turbo", "deviation")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("device")
    patch = use_cache(folder / "cache")
    checkpoint = write_smallest(folder / "model")
    publish(checkpoint, folder / "store", DOCS, [profile_of(name) for name in PROFILES[1:]])
    yield checkpoint, folder / "store"
    patch.undo()


def profile_of(name: str) -> Profile:
    if name in SHIPPED:
        return SHIPPED[name]
    found = load_profile(ROOT / f"configs/profiles/{name}.json")
    return found.model_copy(update={"deviation_layer": 2}) if name == "deviation" else found


def add_experts_(output: Tensor, weights: MoeWeights, x: Tensor, laid_out: Any, limit: float) -> None:
    """What the kernels do with the slots that were laid out."""
    start = 0
    for expert, end in enumerate(laid_out.ends.tolist()):
        rows = laid_out.rows[start:end]
        part = moe.gated(x[rows], weights.w13[expert], weights.w2[expert], limit)
        output.index_add_(0, rows, part * laid_out.scale[start:end].unsqueeze(-1))
        start = end


class Inline:
    """A reading thread that is this one: the simulation is a thread's own."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  as an executor does
            done.set_exception(error)
        return done

    def shutdown(self, **_: object) -> None:
        pass


@contextmanager
def device_engine(
    world: tuple[Path, Path], profile: str, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Simulation, Streams]]:
    """An engine on the simulated device, its kernels stood in for, its layer loop forbidden to wait."""
    checkpoint, store = world
    cpu, streams = load(checkpoint).model, Streams()
    patch.setattr(moe_triton, "add_experts_", on_host(add_experts_))
    patch.setattr(engines, "CopyStream", lambda device: CopyStream(device, streams))
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: streams.used.append(stream))
    with simulated() as simulation:
        for name in ("_require", "_entering", "_layer"):
            patch.setattr(forward, name, forbidden(simulation, getattr(forward, name)))
        model = Model(cpu.geometry, mapped(cpu.weights, lambda _, tensor: OnDevice(tensor)), device=DEVICE)
        model.__dict__["operations"] = Operations(
            attend=on_host(segment.segment_attention),
            merge=on_host(merge.merge_segments),
            scores=on_host(indexer.segment_scores),
            project=on_host(projection.project_rows_),
            experts=moe_triton.experts_forward,
            in_place=True,
            reasons={},
        )
        with Engine(Loaded(checkpoint, model), store, profile_of(profile)) as engine:
            engine._threads = Inline()  # type: ignore[assignment]
            yield engine, simulation, streams


def forbidden(simulation: Simulation, native: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        with simulation.no_waiting():
            return native(*args)

    return step


def ask(engine: Engine) -> Result:
    return engine.generate(token_ids=IDS, max_new_tokens=4, stop_at_eos=False)


@pytest.mark.parametrize("profile", PROFILES)
def test_nothing_waits_in_the_layer_loop(
    world: tuple[Path, Path], profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, store = world
    with Engine(checkpoint, store, profile_of(profile)) as engine:
        expected = ask(engine)
    with device_engine(world, profile, monkeypatch) as (engine, simulation, streams):
        for _ in range(2):  # cold, and over the blocks that the first request left
            found = ask(engine)
            assert found.token_ids == expected.token_ids
            assert float((found.logits - expected.logits).abs().max()) <= 1e-4 * float(expected.logits.abs().max())
            assert found.report.arm == expected.report.arm == profile_of(profile).arm
            assert found.report.counters == expected.report.counters
        assert engine.check_books() == []
        assert simulation.copies
        # Whatever was staged was used on the stream that computes, behind an event of the stream that copies.
        assert bool(streams.used) == (profile not in ("fan-out", "headsplit"))
        assert {"compute"} >= set(streams.used)
