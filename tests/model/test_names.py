"""The three spellings of a tensor's name, and the shapes a geometry calls for."""

from __future__ import annotations

import pytest

from redknot.model.geometry import geometry_from_config
from redknot.model.names import canonical_name, expected_shapes, ignored, scale_name
from tests.kit.quantised import ODD_CONFIG, tensor_list

SPELLINGS = [
    ("embed.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("head.weight", "head.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight", "model.norm.weight"),
    ("hc_head_base", "model.hc_head.hc_base", "model.hc_head.hc_base"),
    ("layers.2.attn_norm.weight", "model.layers.2.attn_norm.weight", "model.layers.2.input_layernorm.weight"),
    ("layers.2.ffn_norm.weight", "model.layers.2.ffn_norm.weight", "model.layers.2.post_attention_layernorm.weight"),
    ("layers.2.hc_attn_scale", "model.layers.2.hc_attn_scale", "model.layers.2.attn_hc.scale"),
    ("layers.2.hc_ffn_fn", "model.layers.2.hc_ffn_fn", "model.layers.2.ffn_hc.fn"),
    ("layers.2.attn.attn_sink", "model.layers.2.attn.attn_sink", "model.layers.2.self_attn.sinks"),
    ("layers.2.attn.wq_a.weight", "model.layers.2.attn.wq_a.weight", "model.layers.2.self_attn.q_a_proj.weight"),
    ("layers.2.attn.q_norm.weight", "model.layers.2.attn.q_norm.weight", "model.layers.2.self_attn.q_a_norm.weight"),
    ("layers.2.attn.wq_b.weight", "model.layers.2.attn.wq_b.weight", "model.layers.2.self_attn.q_b_proj.weight"),
    ("layers.2.attn.wkv.weight", "model.layers.2.attn.wkv.weight", "model.layers.2.self_attn.kv_proj.weight"),
    ("layers.2.attn.kv_norm.weight", "model.layers.2.attn.norm.weight", "model.layers.2.self_attn.kv_norm.weight"),
    ("layers.2.attn.wo_a.weight", "model.layers.2.attn.wo_a.weight", "model.layers.2.self_attn.o_a_proj.weight"),
    ("layers.2.attn.wo_b.weight", "model.layers.2.attn.wo_b.weight", "model.layers.2.self_attn.o_b_proj.weight"),
    (
        "layers.2.attn.compressor.norm.weight",
        "model.layers.2.attn.compressor.norm.weight",
        "model.layers.2.self_attn.compressor.kv_norm.weight",
    ),
    (
        "layers.2.attn.compressor.ape",
        "model.layers.2.attn.compressor.ape",
        "model.layers.2.self_attn.compressor.position_bias",
    ),
    (
        "layers.2.attn.indexer.compressor.wgate.weight",
        "model.layers.2.attn.indexer.compressor.wgate.weight",
        "model.layers.2.self_attn.compressor.indexer.gate_proj.weight",
    ),
    (
        "layers.2.attn.indexer.wq_b.weight",
        "model.layers.2.attn.indexer.wq_b.weight",
        "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
    ),
    (
        "layers.2.attn.indexer.weights_proj.weight",
        "model.layers.2.attn.indexer.weights_proj.weight",
        "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (
        "layers.2.ffn.gate.bias",
        "model.layers.2.ffn.gate.bias",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ),
    ("layers.2.ffn.gate.tid2eid", "model.layers.2.ffn.gate.tid2eid", "model.layers.2.mlp.gate.tid2eid"),
    (
        "layers.2.ffn.shared_experts.w2.weight",
        "model.layers.2.ffn.shared_experts.w2.weight",
        "model.layers.2.mlp.shared_experts.down_proj.weight",
    ),
]


@pytest.mark.parametrize(("canonical", "saved", "module"), SPELLINGS)
def test_three_spellings_are_one_name(canonical: str, saved: str, module: str) -> None:
    assert canonical_name(canonical) == canonical
    assert canonical_name(saved) == canonical
    assert canonical_name(module) == canonical


def test_routed_experts() -> None:
    assert canonical_name("layers.0.ffn.experts.11.w3.weight") == "layers.0.ffn.experts.11.w3.weight"
    assert canonical_name("model.layers.0.mlp.experts.11.up_proj.weight") == "layers.0.ffn.experts.11.w3.weight"
    assert canonical_name("model.layers.0.mlp.experts.gate_up_proj") == "layers.0.ffn.experts.w13"
    assert canonical_name("model.layers.0.mlp.experts.down_proj") == "layers.0.ffn.experts.w2"


@pytest.mark.parametrize(
    "name", ["layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.weight_scale_inv", "layers.0.self_attn.q_a_proj.scale"]
)
def test_a_scale_is_named_after_its_weight(name: str) -> None:
    assert canonical_name(name) == "layers.0.attn.wq_a.scale" == scale_name("layers.0.attn.wq_a.weight")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model.",
        "weight",
        "layers.0",
        "layers.01.attn_norm.weight",
        "layers.-1.attn_norm.weight",
        "layers.0.attn.wq_a",
        "layers.0.attn.wq_a.bias",
        "layers.0.attn.wq_a.weight.scale",
        "layers.0.attn.wq_a.weight_scale",
        "layers.0.attn.attn_sink.scale",
        "layers.0.ffn.experts.00.w1.weight",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.0.ffn.experts.0.scale",
        "layers.0.experts.0.w1.weight",
        "layers.0.attn.engram.weight",
        "model.model.norm.weight",
        "transformer.h.0.attn.c_attn.weight",
    ],
)
def test_other_names_are_unknown(name: str) -> None:
    assert canonical_name(name) is None
    assert not ignored(name)


def test_only_the_prediction_head_is_ignored() -> None:
    assert ignored("mtp.0.attn.wq_a.weight")
    assert ignored("model.mtp.0.head.weight")
    assert not ignored("layers.0.mtp.weight")
    assert not ignored("mtp_norm.weight")


def test_expected_shapes_are_those_of_deepseeks_checkpoint() -> None:
    shapes = expected_shapes(geometry_from_config(ODD_CONFIG))
    assert shapes == {name: shape for name, (_, shape) in tensor_list(ODD_CONFIG).items()}


def test_tied_embeddings_have_no_head_of_their_own() -> None:
    plain, tied = (
        expected_shapes(geometry_from_config({**ODD_CONFIG, "tie_word_embeddings": tie})) for tie in (False, True)
    )
    assert plain.keys() - tied.keys() == {"head.weight"}
