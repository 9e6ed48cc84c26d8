"""The profiles that a server's requests may name."""

from __future__ import annotations

from collections.abc import Sequence

from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile, load_profile


def named_profiles(default: str, files: Sequence[str]) -> tuple[Profile, dict[str, Profile]]:
    """The default, and all by name: the shipped ones, those of the files, and the default; ConfigError as one line.

    Two that differ never have one name: a client could not say which it wants.
    """
    named = dict(SHIPPED)
    for source in (*files, default):
        profile = load_profile(source)
        if named.setdefault(profile.name, profile) != profile:
            raise ConfigError(f"profile {source}: there is another profile {profile.name!r}; give it another name")
    return load_profile(default), named
