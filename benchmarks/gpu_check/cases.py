"""One call of every kernel at a geometry: its inputs, the function under test, the float32 reference, the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_check.floors import Sizes, attended, key_format, latent_format
from redknot.model.geometry import Geometry
from redknot.model.weights import MoeWeights
from redknot.ops.dispatch import Choice, Features, Mode, Op, choose
from redknot.ops.moe import Routing
from redknot.ops.records import Records, RowFormat, split_pages
from redknot.ops.rope import Rotation, rotation_at

PAGE_ROWS = 64
# The largest difference over the largest magnitude. Attention, scores and experts round what is between their two
# products to bf16; merge and projection sum float32 in another order; packing is exact.
ALLOWED = {
    Op.SEGMENT_ATTENTION: 2e-2,
    Op.MERGE: 1e-5,
    Op.PROJECTION: 1e-5,
    Op.SCORES: 1e-2,
    Op.EXPERTS: 1e-2,
    Op.PACK: 0.0,
    Op.UNPACK: 0.0,
}
Chooser = Callable[[Op, Features, torch.device, Mode], Choice]


@dataclass(frozen=True)
class Case:
    """``kernel()`` is what is timed; ``found()`` and ``expected()`` are the tensors that must agree, one by one."""

    op: Op
    kernel: Callable[[], object]
    found: Callable[[], list[Tensor]]
    expected: Callable[[], list[Tensor]]


class Inputs:
    """Seeded inputs on one device."""

    def __init__(self, g: Geometry, sizes: Sizes, device: torch.device) -> None:
        self.g, self.sizes, self.device = g, sizes, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        made = torch.randn(*shape, generator=self._generator, device=self.device)
        return made.mul_(scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def rotation(self) -> Rotation:
        """Angles of the rows' positions."""
        half = self.g.rope_dim // 2
        frequencies = 10000.0 ** -(torch.arange(half, device=self.device) / half)
        return rotation_at(self.integers(0, 65536, self.sizes.rows), frequencies)

    def pages(self, layout: RowFormat, rows: int) -> Records:
        """Unwritten pages of packed rows: every byte 0xFF, which is NaN in each element."""
        nbytes = PAGE_ROWS * (layout.data_bytes + 8 + layout.scale_bytes)
        memory = torch.full((-(-rows // PAGE_ROWS), nbytes), 0xFF, dtype=torch.uint8, device=self.device)
        return split_pages(memory, layout, PAGE_ROWS)

    def packed(self, layout: RowFormat, rows: int) -> Records:
        """Pages filled by the reference."""
        records = self.pages(layout, rows)
        pack = choose(Op.PACK, Features(torch.float32, layout.width), self.device, Mode.REFERENCE).function
        pack(records, torch.arange(rows, device=self.device), self.normal(rows, layout.width))
        return records


def make_case(op: Op, inputs: Inputs, chooser: Chooser = choose) -> Case:
    """The case of one kernel; ConfigError where the device cannot run it."""
    return _MAKERS[op](inputs, chooser)


def _pair(
    op: Op, features: Features, inputs: Inputs, chooser: Chooser
) -> tuple[Callable[..., object], Callable[..., object]]:
    kernel = chooser(op, features, inputs.device, Mode.KERNEL).function
    return kernel, choose(op, features, inputs.device, Mode.REFERENCE).function


def _tensors(found: object) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [value for value in vars(found).values() if isinstance(value, Tensor)]


def _attention(inputs: Inputs, chooser: Chooser) -> Case:
    g, sizes = inputs.g, inputs.sizes
    layout, held = latent_format(g), sizes.entries
    features = Features(torch.bfloat16, g.head_dim, g.rope_dim, g.num_heads, layout)
    kernel, reference = _pair(Op.SEGMENT_ATTENTION, features, inputs, chooser)
    q = inputs.normal(sizes.rows, g.num_heads, g.head_dim, scale=g.head_dim**-0.5)
    records, indices = inputs.packed(layout, held), inputs.integers(0, held, sizes.rows, attended(g))
    absent = inputs.integers(0, 50, sizes.rows, attended(g))
    indices[absent == 0], indices[absent == 1] = -1, records.capacity
    arguments = (q, inputs.rotation(), records, indices)
    return _case(Op.SEGMENT_ATTENTION, kernel, reference, arguments)


def _merge(inputs: Inputs, chooser: Chooser) -> Case:
    g, sizes = inputs.g, inputs.sizes
    kernel, reference = _pair(Op.MERGE, Features(torch.float32, g.head_dim), inputs, chooser)
    shape = (sizes.parts, sizes.rows, g.num_heads)
    outputs, lses = inputs.normal(*shape, g.head_dim, dtype=torch.float32), inputs.normal(*shape, dtype=torch.float32)
    empty = inputs.integers(0, 4, *shape) == 0
    lses.masked_fill_(empty, -torch.inf)
    outputs.masked_fill_(empty.unsqueeze(-1), torch.nan)  # what is empty is unset memory
    return _case(Op.MERGE, kernel, reference, (outputs, lses, inputs.normal(g.num_heads, dtype=torch.float32)))


def _projection(inputs: Inputs, chooser: Chooser) -> Case:
    g, t = inputs.g, inputs.sizes.rows
    depth = g.heads_per_group * g.head_dim
    kernel, reference = _pair(Op.PROJECTION, Features(torch.bfloat16, depth), inputs, chooser)
    output = inputs.normal(t, g.o_groups, g.heads_per_group, g.head_dim)
    wo_a = inputs.normal(g.o_groups, depth, g.o_lora_rank, scale=depth**-0.5)
    restored = inputs.normal(t, g.o_groups * g.o_lora_rank, dtype=torch.float32)
    rows = torch.randperm(t, generator=torch.Generator().manual_seed(1)).to(inputs.device)
    into = [torch.full((t, g.o_groups, g.o_lora_rank), torch.nan, device=inputs.device) for _ in range(2)]

    def run(function: Callable[..., object], z: Tensor) -> list[Tensor]:
        function(z, output, wo_a, rows, restored)
        return [z]

    return Case(
        Op.PROJECTION,
        lambda: run(kernel, into[0]),
        lambda: run(kernel, into[0]),
        lambda: run(reference, into[1]),
    )


def _scores(inputs: Inputs, chooser: Chooser) -> Case:
    g, sizes = inputs.g, inputs.sizes
    layout, n = key_format(g), sizes.entries
    features = Features(torch.bfloat16, g.index_head_dim, g.rope_dim, g.index_heads, layout)
    kernel, reference = _pair(Op.SCORES, features, inputs, chooser)
    weights = inputs.normal(
        sizes.rows, g.index_heads, dtype=torch.float32, scale=(g.index_heads * layout.width) ** -0.5
    )
    q = inputs.normal(sizes.rows, g.index_heads, g.index_head_dim)
    rows, visible = torch.arange(n, device=inputs.device), inputs.integers(0, n + 1, sizes.rows)
    return _case(Op.SCORES, kernel, reference, (q, inputs.rotation(), inputs.packed(layout, n), rows, weights, visible))


def _experts(inputs: Inputs, chooser: Chooser) -> Case:
    g, t = inputs.g, inputs.sizes.rows
    kernel, reference = _pair(Op.EXPERTS, Features(torch.bfloat16, g.hidden_size), inputs, chooser)
    hidden, width = g.hidden_size, g.expert_width
    weights = MoeWeights(
        gate=torch.empty(0),
        bias=None,
        tid2eid=None,
        w13=inputs.normal(g.num_experts, 2 * width, hidden, scale=hidden**-0.5),
        w2=inputs.normal(g.num_experts, hidden, width, scale=width**-0.5),
        first_expert=0,
        shared_w13=inputs.normal(2 * width, hidden, scale=hidden**-0.5),
        shared_w2=inputs.normal(hidden, width, scale=width**-0.5),
    )
    x, chosen = inputs.normal(t, hidden), inputs.normal(t, g.num_experts, dtype=torch.float32).argsort(-1)
    kept = inputs.integers(0, 3, t, g.experts_per_token) > 0
    shares = torch.where(kept, 0.3, torch.nan)  # the weight of a dropped pair is not read
    routing = Routing(chosen[:, : g.experts_per_token], shares, kept)

    def expected() -> list[Tensor]:
        whole = {name: value.float() for name, value in vars(weights).items() if isinstance(value, Tensor)}
        return [reference(replace(weights, **whole), x.float(), routing, g.swiglu_limit)[0]]  # type: ignore[index]

    def run() -> object:
        return kernel(weights, x, routing, g.swiglu_limit)

    return Case(Op.EXPERTS, run, lambda: [run()[0]], expected)  # type: ignore[index]


def _pack(inputs: Inputs, chooser: Chooser) -> Case:
    layout, t = latent_format(inputs.g), inputs.sizes.rows
    kernel, reference = _pair(Op.PACK, Features(torch.float32, layout.width, records=layout), inputs, chooser)
    values, rows = inputs.normal(t, layout.width, dtype=torch.float32), torch.arange(t, device=inputs.device)
    pages = [inputs.pages(layout, t) for _ in range(2)]

    def run(function: Callable[..., object], records: Records) -> list[Tensor]:
        function(records, rows, values)
        return [records.pages.float()]

    return Case(
        Op.PACK,
        lambda: kernel(pages[0], rows, values),
        lambda: run(kernel, pages[0]),
        lambda: run(reference, pages[1]),
    )


def _unpack(inputs: Inputs, chooser: Chooser) -> Case:
    layout, t = latent_format(inputs.g), inputs.sizes.rows
    kernel, reference = _pair(Op.UNPACK, Features(torch.float32, layout.width, records=layout), inputs, chooser)
    return _case(Op.UNPACK, kernel, reference, (inputs.packed(layout, t), torch.arange(t, device=inputs.device)))


def _case(
    op: Op, kernel: Callable[..., object], reference: Callable[..., object], arguments: tuple[object, ...]
) -> Case:
    return Case(
        op,
        lambda: kernel(*arguments),
        lambda: _tensors(kernel(*arguments)),
        lambda: _tensors(reference(*arguments)),
    )


_MAKERS = {
    Op.SEGMENT_ATTENTION: _attention,
    Op.MERGE: _merge,
    Op.PROJECTION: _projection,
    Op.SCORES: _scores,
    Op.EXPERTS: _experts,
    Op.PACK: _pack,
    Op.UNPACK: _unpack,
}
