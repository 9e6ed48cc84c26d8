"""What ``--engine`` may be."""

from __future__ import annotations

import pytest

from eval.engines.opening import parse_engine
from redknot.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("embedded", ("embedded", None)),
        ("sglang", ("sglang", None)),
        ("sglang=http://localhost:30000", ("sglang", "http://localhost:30000")),
    ],
)
def test_engines_and_their_servers(given, expected):
    assert parse_engine(given) == expected


@pytest.mark.parametrize("given", ["", "vllm", "sglang=", "embedded=http://localhost", "=x"])
def test_what_is_none(given):
    with pytest.raises(ConfigError, match="it must be embedded, sglang"):
        parse_engine(given)
