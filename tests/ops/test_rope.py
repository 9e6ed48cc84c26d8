"""Rotation: relocation to a million tokens against float64 angles, both kinds, the two spellings of one rotation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redknot.model.ropespec import RopeSpec, YarnScaling
from redknot.ops.rope import inverse_frequencies, rotate, rotate_, rotation_at

DIM = 64
MILLION = 1 << 20
KINDS = {
    "main": RopeSpec(10000.0),
    "compress": RopeSpec(160000.0, YarnScaling(16.0, 65536)),
    "plain-compress": RopeSpec(160000.0),
}
SHIFTS = (0, 1, 3, 4, 127, 128, 129, 1000, 65536, MILLION)


def frequencies(kind: str) -> Tensor:
    return inverse_frequencies(KINDS[kind], DIM)


def turned(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """The rotation in float64, by complex numbers: an independent statement of it."""
    angles = positions.double().unsqueeze(-1) * inverse.double()
    pairs = torch.view_as_complex(x.double()[..., -DIM:].unflatten(-1, (-1, 2)))
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((x.double()[..., :-DIM], torch.view_as_real(pairs).flatten(-2)), -1)


def unit(rows: int, width: int, seed: int) -> Tensor:
    return torch.nn.functional.normalize(
        torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_relocation_against_float64_angles(kind: str, shift: int) -> None:
    """A query turned back to a document's frame meets its latents as if both stood at their request positions."""
    n = 96
    inverse, offset = frequencies(kind), min(shift, MILLION - n)
    canonical = torch.arange(n)
    keys, queries = unit(n, 96, seed=1), unit(8, 96, seed=2)
    at = offset + n - 1 - torch.arange(8) * 11
    stored = rotate(keys, rotation_at(canonical, inverse))
    found = rotate(queries, rotation_at(at - offset, inverse)) @ stored.T
    expected = turned(queries, at, inverse) @ turned(keys, offset + canonical, inverse).T
    assert (found - expected).abs().max() <= 1e-5
    # And the output: a mean of latents in the document's frame, turned back by the query's position in it.
    output = rotate(found.softmax(-1) @ stored, rotation_at(at - offset, inverse).inverse())
    right = turned(expected.softmax(-1) @ turned(keys, offset + canonical, inverse), -at, inverse)
    assert (output - right).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [*SHIFTS, MILLION - 4096, -1, -MILLION])
def test_angles_are_right_to_a_million_tokens(kind: str, position: int) -> None:
    inverse = frequencies(kind)
    rotation = rotation_at(torch.tensor([position]), inverse)
    for channel, frequency in enumerate(inverse.tolist()):
        angle = math.fmod(position * frequency, 2 * math.pi)
        assert abs(rotation.cos[0, channel].item() - math.cos(angle)) <= 1e-6
        assert abs(rotation.sin[0, channel].item() - math.sin(angle)) <= 1e-6


def test_float32_angles_would_not_be() -> None:
    """Why angles are float64: the reference's own product is off by hundredths of a radian at a million tokens."""
    inverse, position = frequencies("main"), torch.arange(MILLION - 4096, MILLION)
    product = position.float().unsqueeze(-1) * inverse
    assert (product.double() - position.double().unsqueeze(-1) * inverse.double()).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_the_references(kind: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    spec, partial = KINDS[kind], {"partial_rotary_factor": 0.125}
    main = {"rope_type": "default", "rope_theta": 10000.0, **partial}
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": spec.theta, **partial}
    if spec.yarn is not None:
        parameters |= {"rope_type": "yarn", "factor": spec.yarn.factor, "attention_factor": 1.0}
        parameters |= {"original_max_position_embeddings": spec.yarn.original_max_positions}
        parameters |= {"beta_fast": spec.yarn.beta_fast, "beta_slow": spec.yarn.beta_slow}
    config = DeepseekV4Config(
        head_dim=512, partial_rotary_factor=0.125, rope_parameters={"main": main, "compress": parameters}
    )
    make = DeepseekV4RotaryEmbedding.compute_default_rope_parameters
    if spec.yarn is not None:
        make = ROPE_INIT_FUNCTIONS["yarn"]
    expected, amplitude = make(config, None, layer_type="compress")
    assert amplitude == 1
    assert torch.equal(frequencies(kind), expected)


def test_yarn_keeps_fast_channels_and_divides_slow_ones() -> None:
    plain, scaled = frequencies("plain-compress"), frequencies("compress")
    share = plain / scaled
    assert share[0] == 1
    assert share[-1] == pytest.approx(16)
    assert bool((share[1:] >= share[:-1] - 1e-6).all())


positions = st.lists(st.integers(-MILLION, MILLION), min_size=1, max_size=6)


@given(positions, st.sampled_from(list(KINDS)), st.integers(0, 2), st.integers(0, 100))
def test_rotate_equals_the_definition(at: list[int], kind: str, spare: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(at), 3, DIM + 16 * spare, generator=generator)
    inverse = frequencies(kind)
    found = rotate(x, rotation_at(torch.tensor(at), inverse))
    angles = torch.tensor(at)
    expected = torch.stack([turned(x[:, head], angles, inverse) for head in range(3)], 1)
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(found[..., :-DIM], x[..., :-DIM])


@given(positions, st.integers(0, 100))
def test_rotating_in_place_equals_rotating(at: list[int], seed: int) -> None:
    x = torch.randn(len(at), 2, DIM + 16, generator=torch.Generator().manual_seed(seed))
    rotation = rotation_at(torch.tensor(at), frequencies("compress"))
    expected = rotate(x, rotation)
    rotate_(x, rotation)
    assert (x - expected).abs().max() <= 1e-6


@given(positions, st.integers(0, 100))
def test_inverse_undoes_the_rotation(at: list[int], seed: int) -> None:
    x = torch.randn(len(at), DIM, generator=torch.Generator().manual_seed(seed))
    rotation = rotation_at(torch.tensor(at), frequencies("main"))
    assert (rotate(rotate(x, rotation), rotation.inverse()) - x).abs().max() <= 1e-5
    assert torch.equal(rotation_at(-torch.tensor(at), frequencies("main")).sin, rotation.inverse().sin)
