"""The books of the pools in memory, counted again from everything that holds a part of them."""

from __future__ import annotations

from collections import Counter

from redknot.latents.blocks import places_to_leave
from redknot.latents.books import differences
from redknot.latents.handles import DEVICE, HOST
from redknot.latents.moves import Moves
from redknot.latents.runs import RunTable


def recount(table: RunTable, moves: Moves) -> list[str]:
    """Every difference between what the store keeps count of and a walk over its blocks; none when all is well."""
    with table.lock:
        held = [block for run in table.runs.values() for block in run.blocks if block is not None]
        references = Counter(map(id, held))
        blocks = {id(block): block for block in (*held, *table.index.values())}
        found = []
        for region, slots, tier in ((DEVICE, table.device, "device"), (HOST, table.host, "host")):
            holders = [slot for block in blocks.values() if (slot := (block.device, block.host)[region]) is not None]
            holders += [slot for where, slot in moves.transit if where == region]
            found += slots.recount(tier, holders)
            found += differences(f"{tier} bytes live", slots.book().live, len(holders) * slots.nbytes)
            may_leave = {identity for identity, block in blocks.items() if places_to_leave(block) >> region & 1}
            found += differences(f"blocks that may leave {tier}", {id(b) for b in table.policies[region]}, may_leave)
        for identity, block in blocks.items():
            found += differences("references of a block", block.refs, references[identity])
            found += differences("places of a block that may leave", block.cached, places_to_leave(block))
        for name, block in table.index.items():
            found += differences("name of a block", name, block.name)
            found += differences("a found block is sealed", True, block.sealed)
        for serial, run in table.runs.items():
            empty = [number for number, block in enumerate(run.blocks) if block is None]
            found += differences(f"places without a block of run {serial}", run.holes, empty)
        return found
