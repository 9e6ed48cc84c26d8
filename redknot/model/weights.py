"""The weights of one tensor-parallel rank, as frozen trees of tensors in the order the arithmetic reads them.

Tensors are asked for by DeepSeek's own names (``layers.N.attn.wq_a.weight``, ...). Matrices that read the same
input are stored as one, so each input is read once: ``w_in`` holds, in this order, the latent, compressor and
indexer-compressor projections (all that a row must leave behind for others), then the query projections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from redknot.comm.shard import SINGLE, Shard
from redknot.model.geometry import Geometry, LayerKind


class TensorSource(Protocol):
    """Where canonical tensors come from: a checkpoint, or a trainer's parameters."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, dequantised; raises CheckpointError when it is missing."""

    def experts(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """Routed experts ``part``: (w1 over w3 [E, 2 * width, hidden], w2 [E, hidden, width])."""


@dataclass(frozen=True)
class CompressorWeights:
    """Pooling parameters of one compressor; its projections are rows of ``AttentionWeights.w_in``."""

    ape: Tensor  # [ratio, c * d] position bias, c = 2 with overlap (CSA), 1 without (HCA)
    norm: Tensor  # [d]


@dataclass(frozen=True)
class IndexerWeights:
    """Lightning indexer: its own compressor, its query up-projection; replicated on every rank."""

    compressor: CompressorWeights
    wq_b: Tensor  # [index_heads * index_head_dim, q_lora_rank]


@dataclass(frozen=True)
class AttentionWeights:
    """One attention block; heads and output groups are this rank's own."""

    w_in: Tensor  # [sum(in_sizes), hidden], replicated
    in_sizes: tuple[int, ...]  # rows of latent, comp kv, comp gate, index kv, index gate, q_a, index weights
    q_norm: Tensor  # [q_lora_rank]
    wq_b: Tensor  # [H, d, q_lora_rank]
    kv_norm: Tensor  # [d]
    sinks: Tensor  # [H] float32
    wo_a: Tensor  # [G, R, H / G * d]
    wo_b: Tensor  # [hidden, G * R]
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class HyperConnectionWeights:
    """One hyper-connection (or, with ``hc_mult`` rows only, the final stream collapse); float32."""

    fn: Tensor  # [(2 + hc) * hc, hc * hidden] or [hc, hc * hidden]
    base: Tensor  # [(2 + hc) * hc] or [hc]
    scale: Tensor  # [3] or [1]


@dataclass(frozen=True)
class MoeWeights:
    """Router (replicated), this rank's routed experts, and its slice of the shared expert's width."""

    gate: Tensor  # [num_experts, hidden]
    bias: Tensor | None  # [num_experts] float32, top-k layers
    tid2eid: Tensor | None  # [vocab, experts_per_token] int64, hash layers
    w13: Tensor  # [E, 2 * width, hidden]
    w2: Tensor  # [E, hidden, width]
    first_expert: int
    shared_w13: Tensor  # [2 * shared width, hidden]
    shared_w2: Tensor  # [hidden, shared width]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    attn_hc: HyperConnectionWeights
    attn_norm: Tensor  # [hidden]
    attn: AttentionWeights
    ffn_hc: HyperConnectionWeights
    ffn_norm: Tensor  # [hidden]
    moe: MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """A whole model as one rank holds it."""

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    head_hc: HyperConnectionWeights
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]


def build_model(source: TensorSource, geometry: Geometry, shard: Shard = SINGLE) -> ModelWeights:
    """Assemble one rank's weights; raises CheckpointError for missing tensors."""
    shard.check(geometry.shardable())
    embed = source.tensor("embed.weight")
    return ModelWeights(
        embed=embed,
        layers=tuple(build_layer(source, geometry, layer, shard) for layer in range(geometry.num_layers)),
        head_hc=_hyper_connection(source, "hc_head"),
        norm=source.tensor("norm.weight"),
        head=embed if geometry.tie_embeddings else source.tensor("head.weight"),
    )


def build_layer(source: TensorSource, geometry: Geometry, layer: int, shard: Shard = SINGLE) -> LayerWeights:
    """Assemble one rank's weights of one layer."""
    prefix = f"layers.{layer}"
    return LayerWeights(
        attn_hc=_hyper_connection(source, f"{prefix}.hc_attn"),
        attn_norm=source.tensor(f"{prefix}.attn_norm.weight"),
        attn=_attention(source, geometry, layer, shard),
        ffn_hc=_hyper_connection(source, f"{prefix}.hc_ffn"),
        ffn_norm=source.tensor(f"{prefix}.ffn_norm.weight"),
        moe=_moe(source, geometry, layer, shard),
    )


def _hyper_connection(source: TensorSource, prefix: str) -> HyperConnectionWeights:
    parts = (source.tensor(f"{prefix}_{part}").float() for part in ("fn", "base", "scale"))
    return HyperConnectionWeights(*parts)


def _attention(source: TensorSource, geometry: Geometry, layer: int, shard: Shard) -> AttentionWeights:
    prefix = f"layers.{layer}.attn"
    kind = geometry.kinds[layer]
    matrices = [source.tensor(f"{prefix}.wkv.weight")]
    for part, present in (("compressor", kind is not LayerKind.SLIDING), ("indexer.compressor", kind is LayerKind.CSA)):
        for name in ("wkv", "wgate"):
            empty = matrices[0][:0]
            matrices.append(source.tensor(f"{prefix}.{part}.{name}.weight") if present else empty)
    matrices.append(source.tensor(f"{prefix}.wq_a.weight"))
    indexed = kind is LayerKind.CSA
    matrices.append(source.tensor(f"{prefix}.indexer.weights_proj.weight") if indexed else matrices[0][:0])
    groups = shard.part(geometry.o_groups)
    heads = slice(groups.start * geometry.heads_per_group, groups.stop * geometry.heads_per_group)
    wq_b = source.tensor(f"{prefix}.wq_b.weight").unflatten(0, (geometry.num_heads, geometry.head_dim))
    wo_a = source.tensor(f"{prefix}.wo_a.weight").unflatten(0, (geometry.o_groups, geometry.o_lora_rank))
    wo_b = source.tensor(f"{prefix}.wo_b.weight")
    columns = slice(groups.start * geometry.o_lora_rank, groups.stop * geometry.o_lora_rank)
    return AttentionWeights(
        w_in=torch.cat(matrices),
        in_sizes=tuple(matrix.shape[0] for matrix in matrices),
        q_norm=source.tensor(f"{prefix}.q_norm.weight"),
        wq_b=_own(wq_b, heads, 0),
        kv_norm=source.tensor(f"{prefix}.kv_norm.weight"),
        sinks=_own(source.tensor(f"{prefix}.attn_sink").float(), heads, 0),
        wo_a=_own(wo_a, groups, 0),
        wo_b=_own(wo_b, columns, 1),
        compressor=None if kind is LayerKind.SLIDING else _compressor(source, f"{prefix}.compressor"),
        indexer=_indexer(source, f"{prefix}.indexer") if indexed else None,
    )


def _compressor(source: TensorSource, prefix: str) -> CompressorWeights:
    return CompressorWeights(source.tensor(f"{prefix}.ape").float(), source.tensor(f"{prefix}.norm.weight"))


def _indexer(source: TensorSource, prefix: str) -> IndexerWeights:
    return IndexerWeights(_compressor(source, f"{prefix}.compressor"), source.tensor(f"{prefix}.wq_b.weight"))


def _moe(source: TensorSource, geometry: Geometry, layer: int, shard: Shard) -> MoeWeights:
    prefix = f"layers.{layer}.ffn"
    experts = shard.part(geometry.num_experts)
    w13, w2 = source.experts(layer, experts)
    width = shard.part(geometry.expert_width * geometry.num_shared_experts)
    shared = [source.tensor(f"{prefix}.shared_experts.w{index}.weight") for index in (1, 3, 2)]
    hashed = geometry.hash_layers[layer]
    return MoeWeights(
        gate=source.tensor(f"{prefix}.gate.weight"),
        bias=None if hashed else source.tensor(f"{prefix}.gate.bias").float(),
        tid2eid=source.tensor(f"{prefix}.gate.tid2eid").long() if hashed else None,
        w13=w13,
        w2=w2,
        first_expert=experts.start,
        shared_w13=torch.cat((_own(shared[0], width, 0), _own(shared[1], width, 0))),
        shared_w2=_own(shared[2], width, 1),
    )


def _own(tensor: Tensor, part: slice, dim: int) -> Tensor:
    """This rank's slice, in memory of its own so that the whole tensor can be freed; whole tensors stay shared."""
    length = part.stop - part.start
    if length == tensor.shape[dim]:
        return tensor
    return tensor.narrow(dim, part.start, length).clone()


def named_tensors(tree: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a weight tree with its dotted path, e.g. ``layers.3.attn.wo_a``."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, tuple):
        for index, item in enumerate(tree):
            yield from named_tensors(item, f"{prefix}.{index}")
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from named_tensors(getattr(tree, field.name), f"{prefix}.{field.name}".lstrip("."))
