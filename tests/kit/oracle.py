"""The oracle: tiny but complete DeepSeek-V4 checkpoints made by ``transformers``, every parameter and buffer random.

Left as they are initialised, sinks, position biases, router biases and hyper-connections are zero and half of V4
could be missing unnoticed. The settings are chosen so that every feature moves the logits: see the assertions of
``tests/model/test_parity.py`` on logit spread and clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redknot.model.checkpoint import load_model
from redknot.model.geometry import Geometry
from redknot.runtime.model import Model

VOCAB = 384
_SLIDING, _HCA, _CSA = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
_ROPE = {"partial_rotary_factor": 0.25}

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "layer_types": [_SLIDING, _SLIDING, _HCA, _CSA, _HCA, _CSA, _CSA],
    "compress_rates": {_CSA: 4, _HCA: 32},
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 5,
    "num_attention_heads": 16,
    "head_dim": 64,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 65536,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, **_ROPE},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
            **_ROPE,
        },
    },
}
"""Proportions of nano: window and HCA ratio 32, two output groups."""

WIDE: dict[str, Any] = SMALL | {
    "layer_types": [_SLIDING, _HCA, _CSA, _HCA, _CSA, _CSA],
    "num_hidden_layers": 6,
    "mlp_layer_types": ["hash_moe"] + ["moe"] * 5,
    "compress_rates": {_CSA: 4, _HCA: 128},
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 16,
    "n_routed_experts": 16,
    "hc_mult": 4,
    "routed_scaling_factor": 2.5,
}
"""Proportions of Flash: window and HCA ratio 128, eight output groups, four streams."""


@dataclass
class Oracle:
    """One checkpoint folder, as transformers and as RedKnot load it."""

    path: Path

    @cached_property
    def reference(self) -> Any:
        """transformers' model, float32, eager attention."""
        from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

        return DeepseekV4ForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()

    @cached_property
    def model(self) -> Model:
        """RedKnot's model."""
        return Model(*load_model(self.path))

    @property
    def geometry(self) -> Geometry:
        return self.model.geometry

    @cached_property
    def _runs(self) -> dict[tuple[int, int], Reference]:
        return {}

    def run(self, length: int, steps: int = 0) -> Reference:
        """What transformers computes for ``tokens(length)``, computed once."""
        key = (length, steps)
        if key not in self._runs:
            self._runs[key] = _reference_run(self.reference, tokens(length, steps), length)
        return self._runs[key]


@dataclass
class Reference:
    """transformers' logits of a prompt and of the decode steps behind it, and what its indexers chose."""

    ids: Tensor  # [length + steps]
    logits: Tensor  # [length + steps, vocab]
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)  # layer -> [T, k] entries, -1 where none


def tokens(length: int, more: int = 0) -> Tensor:
    """Random token ids of a prompt and its continuation, the same ones for the same length."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length + more,), generator=generator)


def make(path: Path, config: dict[str, Any] = SMALL, seed: int = 0) -> Oracle:
    """Save a checkpoint with every parameter and buffer randomised."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**config)).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random(name, tensor, config["n_routed_experts"]))
    model.save_pretrained(path)
    return Oracle(path)


def _random(name: str, tensor: Tensor, experts: int) -> Tensor:
    if name.endswith("tid2eid"):
        return torch.rand(tensor.shape[0], experts).argsort(-1)[:, : tensor.shape[1]]
    noise = torch.randn(tensor.shape)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(("sinks", "position_bias", "e_score_correction_bias", "_hc.base")):
        return 0.5 * noise
    if name.endswith("scale"):
        return 1 + 0.3 * noise
    if name == "lm_head.weight":
        return noise * 1.2 * tensor.shape[-1] ** -0.5
    return noise if tensor.dim() < 2 or "embed" in name else noise * tensor.shape[-1] ** -0.5


@torch.inference_mode()
def _reference_run(reference: Any, ids: Tensor, length: int) -> Reference:
    from transformers import DynamicCache

    run = Reference(ids, torch.empty(0))
    cache = DynamicCache(config=reference.config)
    with _indexers(reference, run.chosen):
        rows = [reference(ids[None, :length], cache=cache, use_cache=True).logits[0]]
        for at in range(length, len(ids)):
            rows.append(reference(ids[None, at : at + 1], cache=cache, use_cache=True).logits[0])
    run.logits = torch.cat(rows)
    return run


@contextmanager
def _indexers(reference: Any, into: dict[int, list[Tensor]]) -> Iterator[None]:
    """Write down what each layer's indexer returns."""
    handles = []
    for layer, block in enumerate(reference.model.layers):
        indexer = getattr(block.self_attn.compressor, "indexer", None)
        if indexer is not None:
            into[layer] = []
            handles.append(
                indexer.register_forward_hook(lambda _m, _a, out, kept=into[layer]: kept.append(out[0].clone()))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def clipped_share(oracle: Oracle, length: int = 64) -> float:
    """Share of the gate and up values that the SwiGLU limit clips in transformers' experts."""
    clipped = total = 0
    limit = oracle.reference.config.swiglu_limit

    def count(gate: Tensor, up: Tensor) -> None:
        nonlocal clipped, total
        clipped += int((gate > limit).sum()) + int((up.abs() > limit).sum())
        total += gate.numel() + up.numel()

    def experts(module: Any, args: tuple[Tensor, ...]) -> None:
        hidden, index = args[:2]
        for expert in range(module.num_experts):
            rows = (index == expert).any(-1)
            count(*(hidden[rows] @ module.gate_up_proj[expert].T).chunk(2, dim=-1))

    def shared(module: Any, args: tuple[Tensor, ...]) -> None:
        count(module.gate_proj(args[0]), module.up_proj(args[0]))

    handles = []
    for block in oracle.reference.model.layers:
        handles.append(block.mlp.experts.register_forward_pre_hook(experts))
        handles.append(block.mlp.shared_experts.register_forward_pre_hook(shared))
    with torch.inference_mode():
        oracle.reference(tokens(length)[None])
    for handle in handles:
        handle.remove()
    return clipped / total if total else math.nan


@dataclass
class Ties:
    """What :func:`settled_as` did."""

    settled: list[tuple[int, int, float]] = field(default_factory=list)  # layer, position, margin
    differing: list[tuple[int, int, float]] = field(default_factory=list)  # clear cuts with another choice: a bug
    rows: int = 0  # (row, layer) pairs with a cut


@contextmanager
def settled_as(reference: Reference, margin: float = 1e-5) -> Iterator[Ties]:
    """Let rows whose top-k cut is closer than ``margin`` keep what transformers kept, and compare all others.

    Indexer scores are sums of ReLUs, so scores that are exactly equal (to 0) are common. transformers keeps whichever
    of them ``topk`` returns, RedKnot the lower position. Settling the tie keeps every later row comparable.
    """
    from redknot.ops.indexer import cut_margins
    from redknot.runtime import attention

    chosen = {layer: [row for part in parts for row in part] for layer, parts in reference.chosen.items()}
    ties, at = Ties(), []
    native_scores, native_best = attention._scores, attention.keep_best

    def scores_of(scope: Any, p: Any, q_a: Any, block: Any, parts: Any) -> Tensor:
        at[:] = [(scope.layer, position) for position in block.positions.tolist()]
        return native_scores(scope, p, q_a, block, parts)

    def keep_best(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        indices, mask = native_best(scores, topk)
        margins = cut_margins(scores, topk).tolist()
        for row, ((layer, position), distance) in enumerate(zip(at, margins, strict=True)):
            theirs = chosen[layer][position]
            theirs = theirs[theirs >= 0]
            ties.rows += math.isfinite(distance)
            if distance < margin:
                ties.settled.append((layer, position, distance))
                assert len(theirs) == topk
                indices[row] = theirs
            elif set(indices[row][mask[row] == 0].tolist()) != set(theirs.tolist()):
                ties.differing.append((layer, position, distance))
        return indices, mask

    attention._scores, attention.keep_best = scores_of, keep_best
    try:
        yield ties
    finally:
        attention._scores, attention.keep_best = native_scores, native_best
