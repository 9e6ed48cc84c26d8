"""The profiles that a server's requests may name."""

from __future__ import annotations

from collections.abc import Sequence

from redknot.errors import ConfigError
from redknot.model.profile import FAN_OUT, SHIPPED, Profile, load_profile


def served_profile(name_or_path: str) -> Profile:
    """A profile that a server can run; ConfigError for one that only the embedded engine runs, or that is none."""
    profile = load_profile(name_or_path)
    if profile.prefix_cache:
        raise ConfigError(f"profile {profile.name}: prefix_cache is for the embedded engine; SGLang has a prefix cache")
    if profile.arm == FAN_OUT:
        raise ConfigError(
            f"profile {profile.name}: fan_out without reuse is for the embedded engine; a server's pages are exact"
        )
    return profile


def named_profiles(default: str, files: Sequence[str]) -> tuple[Profile, dict[str, Profile]]:
    """The default, and all by name: the shipped ones, those of the files, and the default; ConfigError as one line.

    Two that differ never have one name: a client could not say which it wants.
    """
    named = dict(SHIPPED)
    for source in (*files, default):
        profile = served_profile(source)
        if named.setdefault(profile.name, profile) != profile:
            raise ConfigError(f"profile {source}: there is another profile {profile.name!r}; give it another name")
    return served_profile(default), named
