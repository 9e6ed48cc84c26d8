"""Prefill and decode beyond parity: segments in their own frames, subsets of rows, split heads, unset memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redknot.latents.session import Session
from redknot.model.geometry import LayerKind
from redknot.model.heads import fixed_table
from redknot.ops.moe import FanOut
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import HeadSplit, Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.prefill import decode, dense_session, prefill
from tests.kit.heads import mixed_table
from tests.kit.memory import nan_memory
from tests.kit.naive import naive_forward
from tests.kit.oracle import Oracle, settled_as
from tests.kit.rows import all_layers, every_row, poisoned_session, segmented_session, widest

LENGTH = 300
SAME = 1e-5


@pytest.fixture(params=["small", "wide"])
def oracle(request: pytest.FixtureRequest) -> Oracle:
    made: Oracle = request.getfixturevalue(request.param)
    return made


def ids_of(oracle: Oracle) -> Tensor:
    return oracle.run(LENGTH, 32).ids[:LENGTH]


def run_rows(oracle: Oracle, session: Session, ids: Tensor, rows: Tensor, **options: Any) -> Tensor:
    """One forward over some rows of a session; logits of all of them."""
    row_set = RowSet(oracle.geometry, (session,), (rows,))
    with torch.inference_mode():
        return forward(oracle.model, [all_layers(row_set, ids[rows], **options)], Counters())


def all_latents(session: Session, oracle: Oracle, rows: int) -> list[Tensor]:
    """What a one-segment session holds for its first ``rows`` rows."""
    found = []
    for layer, latents in enumerate(session.segments[0].layers):
        ratio = oracle.geometry.ratio(layer)
        entries = rows // ratio if ratio else 0
        found.append(latents.window[:rows])
        found += [paged[:entries] for paged in (latents.entries, latents.index_keys) if paged]
    return found


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("small", (1,)), ("small", (1, 1)), ("small", (2, 1, 3)), ("wide", (1,)), ("wide", (2,)), ("wide", (1, 1))],
    ids=str,
)
@pytest.mark.parametrize("shifted", [False, True])
def test_segments_on_block_boundaries_equal_one_segment(
    name: str, blocks: tuple[int, ...], shifted: bool, request: pytest.FixtureRequest
) -> None:
    """Whole blocks in frames of their own, the CSA overlap carried over the seams: the same function (identity c).

    Keys are turned from each segment's frame to the request's, so this is relocation end to end.
    """
    oracle: Oracle = request.getfixturevalue(name)
    block, ids = oracle.geometry.block_length, ids_of(oracle)
    lengths = [count * block for count in blocks]
    lengths.append(LENGTH - sum(lengths))
    starts = [block * (number % 2 + 1) for number in range(len(lengths))] if shifted else None
    with settled_as(oracle.run(LENGTH, 32)):
        expected = every_row(oracle.model, ids)
        session = segmented_session(oracle.model, lengths, starts)
        assert widest(every_row(oracle.model, ids, session=session), expected) <= SAME
        session = segmented_session(oracle.model, lengths, starts)
        cuts = (7, 100, 101, 131, 257)
        assert widest(every_row(oracle.model, ids, cuts, session), expected) <= SAME


def test_the_last_segment_goes_on_through_decode(oracle: Oracle) -> None:
    run, block = oracle.run(LENGTH, 32), oracle.geometry.block_length
    session = segmented_session(oracle.model, [block, LENGTH - block])
    with settled_as(run):
        prefill(oracle.model, [session], [run.ids[:LENGTH]], Counters())
        for at in range(LENGTH, LENGTH + 32):
            found = decode(oracle.model, [session], run.ids[at : at + 1], Counters())
            assert widest(found[0], run.logits[at]) <= 1e-4
    assert session.segments[0].length == block
    assert session.length == LENGTH + 32


@pytest.mark.parametrize(
    "lengths", [(150,), (1, 1, 1, 147), (3, 66, 5, 76), (130, 20), (149, 1), (37, 36, 35, 42), (2, 30, 118)], ids=str
)
def test_segments_that_end_anywhere(oracle: Oracle, lengths: tuple[int, ...]) -> None:
    """Open groups at seams and segments of one token, against the definition of segment grouping."""
    ids = ids_of(oracle)[:150]
    expected = naive_forward(oracle.model, ids, lengths)
    starts = [oracle.geometry.block_length * (number % 2) for number in range(len(lengths))]
    for cuts in ((), (50, 129)):
        session = segmented_session(oracle.model, lengths, starts)
        assert widest(every_row(oracle.model, ids, cuts, session), expected) <= 1e-4


def test_a_closed_segment_has_a_partial_entry(small: Oracle) -> None:
    """Its open group is pooled over the rows present; every row after the segment's last one sees it."""
    ids, layer = ids_of(small)[:40], 2  # the first HCA layer
    session = segmented_session(small.model, [37, 3])
    every_row(small.model, ids, session=session)
    first = session.segments[0]
    assert first.entries(32) == 2
    entry = first.layers[layer].entries[1:2]
    assert entry.isfinite().all()
    # The same rows in a dense session give no second entry: its group is open.
    dense = poisoned_session(small.model, 40)
    every_row(small.model, ids, session=dense)
    assert dense.segments[0].layers[layer].entries[1:2].isnan().all()
    assert widest(first.layers[layer].entries[:1], dense.segments[0].layers[layer].entries[:1]) <= SAME


def test_running_rows_again_changes_nothing(oracle: Oracle) -> None:
    """Any subset of rows over latents that are there: the same logits, and the latents stay what they are."""
    ids, run = ids_of(oracle), oracle.run(LENGTH, 32)
    with settled_as(run):
        session = poisoned_session(oracle.model, LENGTH)
        expected = every_row(oracle.model, ids, session=session)
        before = [tensor.clone() for tensor in all_latents(session, oracle, LENGTH)]
        for rows in (
            torch.arange(200, 300),
            torch.arange(0, 300, 3),
            torch.tensor([0, 1, 2, 3, 127, 128, 129, 250, 251, 252, 253, 299]),
            torch.tensor([299]),
        ):
            session.tails.clear()
            found = run_rows(oracle, session, ids, rows)
            assert widest(found, expected[rows]) <= SAME
            for now, then in zip(all_latents(session, oracle, LENGTH), before, strict=True):
                assert widest(now, then) <= SAME if now.numel() else True


def test_latents_do_not_depend_on_where_the_forward_ends(oracle: Oracle) -> None:
    """The same chunks give the same latents bit for bit; other chunks give the same up to rounding."""
    ids, run = ids_of(oracle), oracle.run(LENGTH, 32)
    sessions = [poisoned_session(oracle.model, LENGTH) for _ in range(3)]
    with settled_as(run):
        for session, cuts in zip(sessions, ((128, 256), (128, 256), (1, 77, 130)), strict=True):
            every_row(oracle.model, ids, cuts, session)
    first, second, third = (all_latents(session, oracle, LENGTH) for session in sessions)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert a.numel() == 0 or widest(a, c) <= SAME


def test_nothing_but_rows_that_ran_is_written(oracle: Oracle) -> None:
    """Spare memory stays NaN: no row, entry or key beyond what the rows complete."""
    session = poisoned_session(oracle.model, 130)
    every_row(oracle.model, ids_of(oracle)[:130], session=session)
    for layer, latents in enumerate(session.segments[0].layers):
        ratio = oracle.geometry.ratio(layer)
        assert latents.window[:130].isfinite().all()
        assert latents.window[130:].isnan().all()
        if ratio:
            assert latents.entries[: 130 // ratio].isfinite().all()
            assert latents.entries[130 // ratio :].isnan().all()
        if oracle.geometry.kinds[layer] is LayerKind.CSA:
            assert latents.index_keys[: 130 // ratio].isfinite().all()
            assert latents.index_keys[130 // ratio :].isnan().all()


@pytest.mark.parametrize("global_heads", [(0,), (7, 2), None], ids=str)
def test_heads_in_two_parts_equal_the_whole_layer(small: Oracle, global_heads: tuple[int, ...] | None) -> None:
    """Z = Z_L + Z_G: kept while capturing, and restored instead of run; None: other heads in every layer and group."""
    geometry, ids = small.geometry, ids_of(small)
    heads = mixed_table(geometry, 2) if global_heads is None else fixed_table(geometry, global_heads)
    capture = Capture(heads, range(geometry.num_layers - 1), stream_layer=3)
    rows = torch.arange(LENGTH)
    with settled_as(small.run(LENGTH, 32)), torch.inference_mode():
        expected = every_row(small.model, ids)
        session = poisoned_session(small.model, LENGTH)
        stage = all_layers(RowSet(geometry, (session,), (rows,)), ids)
        assert torch.equal(forward(small.model, [stage], Counters(), capture), expected)  # bit for bit as without
        assert set(capture.z_local) == set(range(geometry.num_layers - 1))
        assert torch.cat(capture.streams).shape == (LENGTH, geometry.hc_mult, geometry.hidden_size)
        # Now with the stored contribution of some rows; the last layer has none stored, so it runs apart.
        picked = torch.cat((torch.arange(40, 120), torch.tensor([130, 131, 299])))
        restored = {layer: torch.cat(parts)[picked] for layer, parts in capture.z_local.items()}
        session, counters = poisoned_session(small.model, LENGTH), Counters()
        row_set = RowSet(geometry, (session,), (rows,))
        last = geometry.num_layers - 1
        stages = [
            Stage(range(last), row_set, ids, go_on=rows, split=HeadSplit(heads, picked, restored.__getitem__)),
            Stage(range(last, last + 1), row_set, ids, go_on=rows),
        ]
        assert widest(forward(small.model, stages, counters), expected) <= SAME
        # And where only some rows go on, restored and whole ones among them; the last layer's latents are there.
        few = torch.tensor([0, 39, 40, 77, 125, 131, 298, 299])
        session.tails.clear()
        stages = [
            Stage(range(last), row_set, ids, go_on=few, split=HeadSplit(heads, picked, restored.__getitem__)),
            Stage(
                range(last, last + 1),
                RowSet(geometry, (session,), (few,)),
                ids[few],
                go_on=torch.arange(len(few)),
            ),
        ]
        assert widest(forward(small.model, stages, Counters()), expected[few]) <= SAME
    assert counters.split_row_layers == last * len(picked)
    assert counters.row_layers == geometry.num_layers * LENGTH


def test_restored_streams_equal_streams_that_ran(small: Oracle) -> None:
    """Rows that enter at a later layer with captured streams, over latents that are there."""
    geometry, ids, enter = small.geometry, ids_of(small), 4
    capture, rows = Capture(stream_layer=enter), torch.arange(LENGTH)
    with settled_as(small.run(LENGTH, 32)), torch.inference_mode():
        session = poisoned_session(small.model, LENGTH)
        row_set = RowSet(geometry, (session,), (rows,))
        expected = forward(small.model, [all_layers(row_set, ids)], Counters(), capture)
        session.tails.clear()
        early = torch.arange(0, LENGTH, 5)
        late = torch.ones(LENGTH, dtype=torch.bool)
        late[early] = False
        entering = late.nonzero().flatten()
        stages = [
            Stage(
                range(enter),
                RowSet(geometry, (session,), (early,)),
                ids[early],
                go_on=torch.arange(len(early)),
            ),
            Stage(
                range(enter, geometry.num_layers),
                row_set,
                ids,
                go_on=rows,
                restored=(entering, lambda: torch.cat(capture.streams)[entering]),
            ),
        ]
        assert widest(forward(small.model, stages, Counters()), expected) <= SAME


def test_rows_that_leave_between_stages(small: Oracle) -> None:
    """Rows that go on read latents of the ones that left, which are there in every later layer."""
    geometry, ids, leave = small.geometry, ids_of(small), 3
    rows, few = torch.arange(LENGTH), torch.tensor([0, 3, 31, 32, 33, 150, 151, 152, 153, 299])
    with settled_as(small.run(LENGTH, 32)), torch.inference_mode():
        session, counters = poisoned_session(small.model, LENGTH), Counters()
        expected = every_row(small.model, ids, session=session)
        session.tails.clear()
        stages = [
            Stage(range(leave), RowSet(geometry, (session,), (rows,)), ids, go_on=few),
            Stage(
                range(leave, geometry.num_layers),
                RowSet(geometry, (session,), (few,)),
                ids[few],
                go_on=torch.arange(len(few)),
            ),
        ]
        assert widest(forward(small.model, stages, counters), expected[few]) <= SAME
    assert counters.row_layers == (leave - 1) * LENGTH + (geometry.num_layers - leave + 1) * len(few)


def test_wanted_rows_only_change_the_work(oracle: Oracle) -> None:
    """The last layer computes wanted rows only; their logits are those of a full run, the latents too."""
    ids, wanted = ids_of(oracle)[:140], torch.tensor([0, 5, 77, 139])
    with settled_as(oracle.run(LENGTH, 32)), torch.inference_mode():
        expected = every_row(oracle.model, ids)
        session, counters = poisoned_session(oracle.model, 140), Counters()
        rows = RowSet(oracle.geometry, (session,), (torch.arange(140),))
        found = forward(oracle.model, [all_layers(rows, ids, go_on=wanted)], counters)
    assert widest(found, expected[wanted]) <= SAME
    assert all(tensor.isfinite().all() for tensor in all_latents(session, oracle, 140))
    assert counters.row_layers == (oracle.geometry.num_layers - 1) * 140 + len(wanted)


def test_counters_of_a_prefill(small: Oracle) -> None:
    """Work is counted from what ran: the same for any chunking, and by kind."""
    geometry, ids = small.geometry, ids_of(small)
    found = []
    for chunk in (64, 1024):
        counters = Counters()
        prefill(small.model, [dense_session(nan_memory(geometry), LENGTH, LENGTH)], [ids], counters, chunk=chunk)
        found.append(counters)
    chunked, whole = found
    layers = geometry.num_layers
    assert whole.row_layers == (layers - 1) * LENGTH + 1
    assert whole.entries_refreshed == sum(
        LENGTH // geometry.ratio(layer) for layer in range(layers) if geometry.ratio(layer)
    )
    assert whole.entries_refreshed == chunked.entries_refreshed
    assert whole.expert_pairs == whole.expert_pairs_native == whole.row_layers * geometry.experts_per_token
    assert whole.fan_out == {geometry.experts_per_token: whole.row_layers}
    assert whole.flops > 2 * LENGTH * geometry.hidden_size * sum(
        sum(layer.attn.in_sizes) for layer in small.model.weights.layers
    )


def test_fan_out_is_run_and_counted(small: Oracle) -> None:
    geometry, ids, rows = small.geometry, ids_of(small)[:64], torch.arange(64)
    session, counters = poisoned_session(small.model, 64), Counters()
    stage = all_layers(RowSet(geometry, (session,), (rows,)), ids, fan_out=FanOut(3, 0.5))
    with torch.inference_mode():
        pruned = forward(small.model, [stage], counters)
    assert counters.fan_out == {3: 64 * geometry.num_layers}
    assert counters.expert_pairs == counters.expert_pairs_native // 2
    assert pruned.isfinite().all()
    assert widest(pruned, every_row(small.model, ids)) > 1e-2


def test_prefill_of_a_rest_over_rows_that_are_there(oracle: Oracle) -> None:
    ids, block = ids_of(oracle), oracle.geometry.block_length
    with settled_as(oracle.run(LENGTH, 32)):
        session = poisoned_session(oracle.model, LENGTH)
        expected = prefill(oracle.model, [session], [ids], Counters())
        again = prefill(oracle.model, [session], [ids], Counters(), start=2 * block)
    assert widest(again, expected) <= SAME
