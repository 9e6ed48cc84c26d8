"""The least each kernel can move and compute, by arithmetic over a geometry: bytes once in, once out, and useful FLOPs.

    python -m benchmarks.gpu_check.floors --rows 1 1024

Bytes are those that must cross the memory bus when a cache held everything that is read twice: every operand once, and
of packed latents only the distinct records. FLOPs count a multiply-add as two, as the engine's counters do. The time
that no kernel of this arithmetic can go below is ``Work.seconds``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from redknot.model.geometry import Geometry, geometry_from_config
from redknot.model.published import PUBLISHED, published_config
from redknot.ops.dispatch import Op
from redknot.ops.records import V4_INDEX_FP8, RowFormat

INPUT, SUM, INDEX = 2, 4, 8  # bytes of a bf16 input, a float32 result, an int64 index
RECORD_PAD = 8  # bytes of scales beside a record, padding included (SGLang's pages)
DEFAULT_ENTRIES, DEFAULT_PARTS = 16384, 5  # CSA entries of 64K tokens; four documents and the new text


@dataclass(frozen=True)
class Sizes:
    """One call: rows that run, entries of a segment that an indexer scores, parts that a merge takes."""

    rows: int
    entries: int = DEFAULT_ENTRIES
    parts: int = DEFAULT_PARTS


@dataclass(frozen=True)
class Work:
    """Bytes that must move and FLOPs that must run."""

    nbytes: int
    flops: int

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The longer of the two times at measured rates."""
        return max(self.nbytes / bytes_per_s, self.flops / flops_per_s)


def record_bytes(layout: RowFormat) -> int:
    """A packed row with its scales: 584 bytes of a V4 record, 132 of an FP8 indexer key."""
    return layout.data_bytes + (RECORD_PAD if layout.rope else layout.scale_bytes)


def latent_format(g: Geometry) -> RowFormat:
    """The packed record of a model's latents: tiles of 64 e4m3 values, or of 16 where a toy has fewer."""
    values = g.head_dim - g.rope_dim
    return RowFormat(V4_INDEX_FP8.element, values, 64 if values % 64 == 0 else 16, False, g.rope_dim)


def key_format(g: Geometry) -> RowFormat:
    """The packed row of an indexer key, one fp32 scale each."""
    return RowFormat(V4_INDEX_FP8.element, g.index_head_dim, g.index_head_dim, True)


def attended(g: Geometry) -> int:
    """Entries that a CSA row reads at most: its window and the indexer's choice."""
    return g.window + g.index_topk


def floors(g: Geometry, sizes: Sizes) -> dict[Op, Work]:
    """The floor of every kernel for one call."""
    t, n, heads, d = sizes.rows, sizes.entries, g.num_heads, g.head_dim
    partial = t * heads * (d + 1) * SUM  # an output and its LSE
    rank, hidden, width, index = g.o_groups * g.o_lora_rank, g.hidden_size, g.expert_width, g.index_heads
    k, pairs = attended(g), t * g.experts_per_token
    record, key = record_bytes(latent_format(g)), record_bytes(key_format(g))
    weights = (min(g.num_experts, pairs) + g.num_shared_experts) * 3 * hidden * width * INPUT
    moved = t * (d * SUM + record + INDEX)
    return {
        Op.SEGMENT_ATTENTION: Work(
            t * heads * d * INPUT + t * k * INDEX + min(t * k, n) * record + partial, 4 * t * k * heads * d
        ),
        Op.MERGE: Work((sizes.parts + 1) * partial + heads * SUM, 2 * sizes.parts * t * heads * d),
        Op.PROJECTION: Work(
            t * heads * d * INPUT + heads * d * g.o_lora_rank * INPUT + 2 * t * rank * SUM + t * INDEX,
            2 * t * heads * d * g.o_lora_rank,
        ),
        Op.SCORES: Work(
            t * index * (g.index_head_dim * INPUT + SUM) + t * INDEX + n * (key + INDEX) + t * n * SUM,
            2 * t * n * index * (g.index_head_dim + 1),
        ),
        Op.EXPERTS: Work(
            2 * t * hidden * INPUT + weights + pairs * (INDEX + SUM),
            6 * (pairs + t * g.num_shared_experts) * hidden * width,
        ),
        Op.PACK: Work(moved, 0),
        Op.UNPACK: Work(moved, 0),
    }


def table(rows: Sequence[int]) -> str:
    """The floors of the published models as a Markdown table."""
    lines = [
        "| kernel | model | rows | bytes | FLOPs | FLOPs / byte |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for op in Op:
        for name in PUBLISHED:
            for count in rows:
                work = floors(geometry_from_config(published_config(name)), Sizes(count))[op]
                ratio = work.flops / work.nbytes
                lines.append(f"| `{op}` | {name} | {count:,} | {work.nbytes:,} | {work.flops:,} | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 1024])
    args = parser.parse_args()
    if min(args.rows) < 1:
        parser.error("--rows counts from 1")
    print(table(args.rows))


if __name__ == "__main__":
    main()
