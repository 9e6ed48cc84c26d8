"""The books of the pools in memory, counted again from everything that holds a part of them."""

from __future__ import annotations

from collections import Counter

from redknot.latents.blocks import BlockTable, StoredBlock
from redknot.latents.books import differences
from redknot.latents.handles import DEVICE, HOST
from redknot.latents.moves import Moves


def recount(table: BlockTable, moves: Moves) -> list[str]:
    """Every difference between what the store keeps count of and a walk over its blocks; none when all is well."""
    with table.lock:
        references = Counter(id(block) for block in table.refs.values())
        blocks = {id(block): block for block in (*table.refs.values(), *table.index.values())}
        found = []
        for region, slots, tier in ((DEVICE, table.device, "device"), (HOST, table.host, "host")):
            holders = [slot for block in blocks.values() if (slot := (block.device, block.host)[region]) is not None]
            holders += [slot for where, slot in moves.transit if where == region]
            found += slots.recount(tier, holders)
            found += differences(f"{tier} bytes live", slots.book().live, len(holders) * slots.nbytes)
            may_leave = {identity for identity, block in blocks.items() if _cached(block)[region]}
            found += differences(f"blocks that may leave {tier}", {id(b) for b in table.policies[region]}, may_leave)
        for identity, block in blocks.items():
            found += differences("references of a block", block.refs, references[identity])
            found += differences("places of a block that may leave", block.cached, _cached(block))
        for name, block in table.index.items():
            found += differences("name of a block", name, block.name)
            found += differences("a found block is sealed", True, block.sealed)
        return found


def _cached(block: StoredBlock) -> tuple[bool, bool]:
    idle = block.refs == 0
    return idle and block.device is not None and not block.pins and not block.lease, idle and block.host is not None
