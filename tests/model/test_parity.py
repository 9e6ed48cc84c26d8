"""RedKnot computes what transformers' DeepSeek-V4 computes: prefill, decode, chunks and batches, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redknot.runtime.counters import Counters
from redknot.runtime.prefill import decode, dense_session, prefill
from tests.kit.memory import nan_memory
from tests.kit.oracle import Oracle, Reference, Ties, clipped_share, settled_as, tokens
from tests.kit.rows import every_row, poisoned_session, widest

LENGTHS = (1, 3, 4, 5, 31, 127, 128, 129, 300, 1000)
STEPS = 32
TOLERANCE = 1e-4
SAME = 1e-5  # two ways of running our own arithmetic


@pytest.fixture(params=["small", "wide"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    made: Oracle = request.getfixturevalue(request.param)
    return made


def run_of(oracle: Oracle, length: int) -> Reference:
    return oracle.run(length, STEPS)


def check_ties(ties: Ties, rows: int, record: Any) -> None:
    """Clear cuts agree, and at most 1 % of rows had a near tie settled the oracle's way."""
    record("settled_ties", ties.settled)
    assert not ties.differing
    assert len({position for _, position, _ in ties.settled}) <= 0.01 * rows, ties.settled


def test_the_oracle_is_demanding(oracle: Oracle) -> None:
    """Spread logits, clipped activations, dropped entries, and nothing left at its initial value."""
    reference, geometry = oracle.reference, oracle.geometry
    assert run_of(oracle, 300).logits.std() >= 1
    assert clipped_share(oracle) > 0.01
    assert geometry.index_heads >= 8
    assert geometry.index_topk < 300 // geometry.csa_ratio
    assert geometry.hc_sinkhorn_iters == 20
    assert geometry.rope_compress.yarn is not None
    assert geometry.rope_compress.yarn.factor == 16
    assert len(set(geometry.kinds)) == 3
    for name, tensor in reference.state_dict().items():
        if name.endswith("tid2eid"):
            assert all(len(set(row.tolist())) == geometry.experts_per_token for row in tensor)
        else:
            assert tensor.numel() == 1 or tensor.float().std() > 0.02, name


@pytest.mark.parametrize("length", LENGTHS)
def test_every_row_of_a_prefill(oracle: Oracle, length: int, record_property: Any) -> None:
    run = run_of(oracle, length)
    counters = Counters(cuts=[])
    with settled_as(run) as ties:
        found = every_row(oracle.model, run.ids[:length], counters=counters)
    assert widest(found, run.logits[:length]) <= TOLERANCE
    check_ties(ties, length, record_property)
    # What the engine reports about its cuts is what the oracle helper saw.
    assert counters.cuts is not None
    near = sum(int((margins < 1e-5).sum()) for _, margins in counters.cuts)
    assert near == len(ties.settled)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_last_row_of_a_prefill(oracle: Oracle, length: int, record_property: Any) -> None:
    """The path that requests take: only the last row goes through the last layer's attention and experts."""
    run = run_of(oracle, length)
    session = dense_session(nan_memory(oracle.geometry), length, length)
    with settled_as(run) as ties:
        found = prefill(oracle.model, [session], [run.ids[:length]], Counters())
    assert widest(found[0], run.logits[length - 1]) <= TOLERANCE
    check_ties(ties, length, record_property)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_steps(oracle: Oracle, length: int, record_property: Any) -> None:
    run = run_of(oracle, length)
    session = poisoned_session(oracle.model, length)
    with settled_as(run) as ties:
        prefill(oracle.model, [session], [run.ids[:length]], Counters())
        for at in range(length, length + STEPS):
            found = decode(oracle.model, [session], run.ids[at : at + 1], Counters())
            assert widest(found[0], run.logits[at]) <= TOLERANCE, f"step {at - length}"
    check_ties(ties, length + STEPS, record_property)
    assert session.length == length + STEPS


@pytest.mark.parametrize("chunk", [128, 256, 333])
def test_chunked_prefill_equals_one_shot(oracle: Oracle, chunk: int) -> None:
    run = run_of(oracle, 1000)
    with settled_as(run):
        whole = prefill(oracle.model, [poisoned_session(oracle.model, 1000)], [run.ids[:1000]], Counters())
        parts = prefill(oracle.model, [poisoned_session(oracle.model, 1000)], [run.ids[:1000]], Counters(), chunk=chunk)
    assert widest(parts, whole) <= SAME


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param((1, 2, 3, 4, 5, 6, 7, 8, 9), id="single-rows"),
        pytest.param((3, 8, 31, 32, 33, 127, 130, 131, 259), id="inside-groups"),
        pytest.param(tuple(range(37, 300, 37)), id="every-37"),
        pytest.param((299,), id="last-row"),
    ],
)
def test_odd_cuts_equal_one_shot(oracle: Oracle, cuts: tuple[int, ...]) -> None:
    """A forward may end anywhere, also inside a group, a window or a block."""
    run = run_of(oracle, 300)
    ids = run.ids[:300]
    with settled_as(run):
        assert widest(every_row(oracle.model, ids, cuts), every_row(oracle.model, ids)) <= SAME


def test_decode_alone_equals_prefill(small: Oracle) -> None:
    """A request that is fed token by token from its first one."""
    run = run_of(small, 128)
    session = poisoned_session(small.model, 0, spare=100)
    with settled_as(run):
        for at in range(100):
            found = decode(small.model, [session], run.ids[at : at + 1], Counters())
            assert widest(found[0], run.logits[at]) <= TOLERANCE


def test_a_batch_equals_each_request_alone(oracle: Oracle) -> None:
    """Several requests of different lengths in the same forwards, prefill and decode."""
    model, lengths = oracle.model, (5, 300, 31, 1, 129)
    ids = [tokens(length, 8) for length in lengths]
    alone = []
    for length, row in zip(lengths, ids, strict=True):
        session = poisoned_session(model, length)
        steps = [prefill(model, [session], [row[:length]], Counters())]
        steps += [decode(model, [session], row[at : at + 1], Counters()) for at in range(length, length + 8)]
        alone.append(torch.cat(steps))
    memory = nan_memory(model.geometry)
    sessions = [poisoned_session(model, length, memory=memory) for length in lengths]
    prompts = [row[:length] for length, row in zip(lengths, ids, strict=True)]
    together = [prefill(model, sessions, prompts, Counters(), chunk=640)]
    for step in range(8):
        fresh = torch.stack([row[length + step] for length, row in zip(lengths, ids, strict=True)])
        together.append(decode(model, sessions, fresh, Counters()))
    for number, expected in enumerate(alone):
        found = torch.stack([step[number] for step in together])
        assert widest(found, expected) <= SAME, f"request of {lengths[number]} tokens"
