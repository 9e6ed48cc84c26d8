"""What the environment decides."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from redknot.config import load_settings
from redknot.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"REDKNOT_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/redknot")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/redknot"),
        ({"REDKNOT_CACHE_DIR": ""}, Path.home() / ".cache/redknot"),
        ({"REDKNOT_CACHE_DIR": "here"}, Path.cwd() / "here"),
    ],
)
def test_cache_dir(environment, expected):
    assert load_settings(environment).cache_dir == expected


@pytest.mark.parametrize(("text", "level"), [(None, "WARNING"), ("", "WARNING"), ("debug", "DEBUG"), ("INFO", "INFO")])
def test_log_level(text, level):
    environment = {} if text is None else {"REDKNOT_LOG_LEVEL": text}
    assert load_settings(environment).log_level == getattr(logging, level)


def test_unknown_log_level():
    with pytest.raises(ConfigError, match=r"REDKNOT_LOG_LEVEL='loud' is none of DEBUG"):
        load_settings({"REDKNOT_LOG_LEVEL": "loud"})


def test_this_process():
    assert load_settings().cache_dir.is_absolute()


def test_eviction_is_one_of_two() -> None:
    assert load_settings({}).latents.eviction == "lru"
    assert load_settings({"REDKNOT_LATENT_EVICTION": "cost"}).latents.eviction == "cost"
    with pytest.raises(ConfigError, match=r"REDKNOT_LATENT_EVICTION='fifo' is none of lru, cost"):
        load_settings({"REDKNOT_LATENT_EVICTION": "fifo"})
