"""How far the first token's distribution of an arm is from recompute's."""

from __future__ import annotations

from torch import Tensor


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL(reference || other) of two logits [vocab], in nats."""
    p, q = reference.double().log_softmax(0), other.double().log_softmax(0)
    return max(0.0, float((p.exp() * (p - q)).sum()))


def same_first(reference: Tensor, other: Tensor) -> bool:
    """Whether both have the same likeliest token."""
    return bool(reference.argmax() == other.argmax())
