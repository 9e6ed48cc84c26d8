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

    def __post_init__(self) -> None:
        """Nothing is left to be counted; what is, is no part of the sums (see ``settle``)."""
        self._later: list[tuple[Tensor, int, int]] = []

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

    def add_experts(self, routing: Routing, ran: int | Tensor, hidden: int, width: int, shared_width: int) -> None:
        """Routed pairs that ran on this rank, the shared expert, and the experts each row kept.

        What only the device knows is counted when ``settle`` asks it.
        """
        rows, native = routing.experts.shape
        self.add_product(rows, hidden, 3 * shared_width)
        self.expert_pairs_native += rows * native
        if routing.kept is None:
            self._add_kept([rows if number == native else 0 for number in range(native + 1)])
        if routing.kept is None and isinstance(ran, int):
            self._add_ran(ran, hidden, width)
            return
        device = routing.experts.device
        counts = torch.zeros(native + 2, dtype=torch.int64, device=device)
        counts[0] = ran
        if routing.kept is not None:
            number = torch.arange(native + 1, device=device)
            counts[1:] = (routing.kept.sum(-1, keepdim=True) == number).sum(0)
        self._later.append((counts, hidden, width))

    def settle(self) -> None:
        """Count what was left on the device, all of it in one copy; only then are the sums those of what ran."""
        if not self._later:
            return
        lengths = [len(counts) for counts, _, _ in self._later]
        found = torch.cat([counts for counts, _, _ in self._later]).cpu()
        for counts, (_, hidden, width) in zip(found.split(lengths), self._later, strict=True):
            ran, *kept = counts.tolist()
            self._add_ran(ran, hidden, width)
            self._add_kept(kept)
        self._later.clear()

    def _add_ran(self, pairs: int, hidden: int, width: int) -> None:
        self.add_product(pairs, hidden, 3 * width)
        self.expert_pairs += pairs

    def _add_kept(self, rows: list[int]) -> None:
        """``rows`` by the number of experts that they kept."""
        for number, count in enumerate(rows):
            if count:
                self.fan_out[number] = self.fan_out.get(number, 0) + count
