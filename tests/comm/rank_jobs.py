"""What the ranks of test_tensor_parallel do; runs in their processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from redknot.comm.group import TorchGroup
from redknot.model.checkpoint import load_model
from redknot.model.weights import named_tensors
from redknot.ops.moe import FanOut
from redknot.runtime.capture import Capture
from redknot.runtime.counters import Counters
from redknot.runtime.forward import HeadSplit, Stage, forward
from redknot.runtime.layout import RowSet
from redknot.runtime.model import Model
from redknot.runtime.prefill import decode, prefill
from tests.kit.heads import mixed_table
from tests.kit.oracle import tokens
from tests.kit.ranks import SHARDED
from tests.kit.rows import all_layers, every_row, poisoned_session

LENGTH, STEPS = 200, 4


def logits(group: TorchGroup, folder: Path) -> dict[str, Any]:
    """Logits of every path on this rank, and the bytes of the model that computed them."""
    checkpoint = Path((folder / "checkpoint.txt").read_text())
    return run(Model(*load_model(checkpoint, shard=group.shard), group))


def run(model: Model) -> dict[str, Any]:
    ids, counters = tokens(LENGTH, STEPS), Counters()
    session = poisoned_session(model, LENGTH)
    steps = [prefill(model, [session], [ids[:LENGTH]], counters, chunk=128)]
    steps += [decode(model, [session], ids[at : at + 1], counters) for at in range(LENGTH, LENGTH + STEPS)]
    rows = torch.arange(40)
    row_set = RowSet(model.geometry, (poisoned_session(model, 40),), (rows,))
    pruned = Counters()
    with torch.inference_mode():
        few = forward(model, [all_layers(row_set, ids[:40], fan_out=FanOut(3, 0.6))], pruned)
    held = [t.untyped_storage().nbytes() for name, t in named_tensors(model.weights) if name.endswith(SHARDED)]
    prepared = [heads.wo_a.nbytes for heads in model._slices.values()]
    return {
        "steps": torch.cat(steps),
        "rows": every_row(model, ids[:LENGTH]),
        "pruned": few,
        "sharded": sum(held),
        "prepared": sum(prepared),
        "pairs": pruned.expert_pairs,
        "native": pruned.expert_pairs_native,
        "flops": counters.flops,
    }


def split(group: TorchGroup, folder: Path) -> dict[str, Any]:
    """Rows with restored Local heads under a head table that differs in every layer and group."""
    checkpoint = Path((folder / "checkpoint.txt").read_text())
    return run_split(Model(*load_model(checkpoint, shard=group.shard), group))


@torch.inference_mode()
def run_split(model: Model) -> dict[str, Any]:
    geometry, ids, rows = model.geometry, tokens(LENGTH), torch.arange(LENGTH)
    heads, last = mixed_table(geometry, 2), geometry.num_layers - 1
    capture = Capture(heads, range(last))
    whole = forward(
        model, [all_layers(RowSet(geometry, (poisoned_session(model, LENGTH),), (rows,)), ids)], Counters(), capture
    )
    local = {layer: torch.cat(parts) for layer, parts in capture.z_local.items()}
    picked = rows[20:150]
    row_set = RowSet(geometry, (poisoned_session(model, LENGTH),), (rows,))
    restored = HeadSplit(heads, picked, lambda layer: local[layer][picked])
    stages = [
        Stage(range(last), row_set, ids, go_on=rows, split=restored),
        Stage(range(last, last + 1), row_set, ids, go_on=rows),
    ]
    logits = forward(model, stages, Counters())
    return {"whole": whole, "split": logits, "local": torch.stack(list(local.values()))}


def votes(group: TorchGroup, folder: Path) -> list[bool]:
    """Agreement: all yes, one no, all no; and a sum over a tensor with odd strides."""
    rank, world = group.shard.rank, group.shard.world
    total = group.all_reduce(torch.full((3, 2), float(rank)).t())
    return [
        group.all_agree(True),
        group.all_agree(rank != world - 1),
        group.all_agree(False),
        bool((total == world * (world - 1) / 2).all()),
    ]


def fails(group: TorchGroup, folder: Path) -> None:
    """One rank fails while the others wait for it."""
    if group.shard.rank == 1:
        raise ValueError("on purpose")
    time.sleep(60)


def hangs(group: TorchGroup, folder: Path) -> None:
    time.sleep(60)
