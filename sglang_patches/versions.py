"""Which SGLang this plugin was made for: it relies on private names, and says so before anything runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from redknot.errors import ConfigError

SUPPORTED = ("0.5.23",)


def check_version() -> None:
    """ConfigError, in one line with what was found and what is supported, unless this SGLang is supported."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(f"sglang is not installed; supported: {', '.join(SUPPORTED)}") from None
    if found not in SUPPORTED:
        raise ConfigError(f"sglang {found} is installed; supported: {', '.join(SUPPORTED)}")
