"""The transform that spreads a key over its channels: against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redknot.errors import ConfigError
from redknot.ops.hadamard import hadamard


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_its_matrix_has_the_sign_of_the_common_bits(width):
    signs = [[1.0 - 2 * ((row & column).bit_count() % 2) for column in range(width)] for row in range(width)]
    assert torch.allclose(hadamard(torch.eye(width)), torch.tensor(signs) / width**0.5)


@given(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 7), st.integers(0, 10**6))
def test_it_undoes_itself_and_keeps_products(shape, power, seed):
    x, y = torch.randn(2, *shape, 2**power, generator=torch.Generator().manual_seed(seed))
    assert hadamard(x).shape == x.shape
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-5)
    assert torch.allclose((hadamard(x) * hadamard(y)).sum(-1), (x * y).sum(-1), atol=1e-3)


def test_other_strides_and_types():
    x = torch.randn(16, 6).t()
    assert torch.equal(hadamard(x), hadamard(x.contiguous()))
    assert hadamard(x.bfloat16()).dtype == torch.bfloat16
    assert hadamard(x.double()).dtype == torch.float64


@pytest.mark.parametrize("width", [0, 3, 96])
def test_other_widths_are_refused(width):
    with pytest.raises(ConfigError, match=f"{width} channels are not a power of two"):
        hadamard(torch.zeros(2, width))
