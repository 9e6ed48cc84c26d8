"""What a forward really did, counted by the code that did it, from the shapes it ran."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from redknot.ops.moe import Routing


@dataclass
class Counters:
    """Sums over one request (or one forward).

    FLOPs count a multiply-add as two: matrix products of rows that run, useful (visible) pairs only, and merges of
    partial attention as one more key each; other elementwise work is not counted. No sum depends on the chunking.
    """

    flops: int = 0
    row_layers: int = 0  # (row, layer) pairs whose attention and experts ran
    split_row_layers: int = 0  # those of them that ran Global heads only, with the stored Z_L restored
    window_row_layers: int = 0  # those of them that recomputed window rows which an artifact does not keep
    window_rows: int = 0  # rows that ran for that in at least one layer
    probe_row_layers: int = 0  # as row_layers, of a ranking probe: rows that run again for the request itself
    entries_refreshed: int = 0
    expert_pairs: int = 0  # (row, routed expert) pairs that ran on this rank
    expert_pairs_native: int = 0  # and those that the native router chose, over all ranks
    rows: dict[int, int] = field(default_factory=dict)  # layer -> rows of the request that left latents in it
    fan_out: dict[int, int] = field(default_factory=dict)  # experts per row -> rows
    cuts: list[tuple[Tensor, Tensor]] | None = None  # (positions, top-k cut margins) when a test asks for them

    def add_rows(self, layer: int, rows: int) -> None:
        """Rows that left their latents in a layer."""
        self.rows[layer] = self.rows.get(layer, 0) + rows

    def add_product(self, rows: int, inner: int, columns: int) -> None:
        """A matrix product [rows, inner] x [inner, columns]."""
        self.flops += 2 * rows * inner * columns

    def add_pairs(self, pairs: int, heads: int, d: int) -> None:
        """Attention over visible (row, key) pairs: scores and weighted sum."""
        self.flops += 4 * pairs * heads * d

    def add_scores(self, visible: Tensor, topk: int, rank: int, heads: int, d: int) -> None:
        """Indexer queries and scores of the rows that see more than ``topk`` entries; ``visible`` [t] per row.

        A block scores all its rows as soon as one of them must choose; the others' scores decide nothing.
        """
        choosing = visible[visible > topk]
        self.add_product(len(choosing), rank, heads * d)
        self.add_product(int(choosing.sum()), heads, d + 1)  # dot products and their weighted sum over heads

    def add_streams(self, entering: int, leaving: int, hc: int, hidden: int) -> None:
        """Hyper-connections of rows that enter a block (coefficients and collapse) or leave one (mix, add)."""
        self.add_product(entering, hc * hidden, hc * (hc + 2) + 1)
        self.add_product(leaving, hc * hidden, hc + 1)

    def add_probe(self, probe: Counters) -> None:
        """A probe's arithmetic; its rows are kept apart, since the same rows run for the request too."""
        self.flops += probe.flops
        self.probe_row_layers += probe.row_layers

    def add_experts(self, routing: Routing, ran: int, hidden: int, width: int, shared_width: int) -> None:
        """Routed pairs that ran on this rank, the shared expert, and the experts each row kept."""
        rows, native = routing.experts.shape
        self.add_product(ran, hidden, 3 * width)
        self.add_product(rows, hidden, 3 * shared_width)
        self.expert_pairs += ran
        self.expert_pairs_native += rows * native
        kept = torch.full((rows,), native) if routing.kept is None else routing.kept.sum(-1)
        for count, number in zip(*(v.tolist() for v in kept.unique(return_counts=True)), strict=True):
            self.fan_out[count] = self.fan_out.get(count, 0) + number
