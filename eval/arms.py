"""Arms: what is compared. Each is a profile, by name or as a file; recompute is the one that others are held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.names import NO_DOCUMENTS, RECOMPUTE
from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile, load_profile

_FOLDERS = (Path("configs/profiles"), Path(__file__).resolve().parents[1] / "configs/profiles")


@dataclass(frozen=True)
class Arm:
    """A profile under its name."""

    profile: Profile
    source: str  # what load_profile and --redknot-profile take: a shipped name, or an absolute path

    @property
    def name(self) -> str:
        """The profile's."""
        return self.profile.name


def find_arms(names: Iterable[str]) -> dict[str, Arm]:
    """Arms by name, recompute first whether it is named or not; ConfigError for one that is not to be found."""
    arms: dict[str, Arm] = {}
    for given in (RECOMPUTE, *names):
        arm = _find(given)
        if arms.setdefault(arm.name, arm) != arm:
            raise ConfigError(f"arm {given}: another arm is named {arm.name!r}; give each profile a name of its own")
    return arms


def _find(given: str) -> Arm:
    if given in SHIPPED:
        return Arm(SHIPPED[given], given)
    for path in (*(folder / f"{given}.json" for folder in _FOLDERS), Path(given)):
        if path.is_file():
            profile = load_profile(str(path))
            if profile.name == NO_DOCUMENTS:
                raise ConfigError(f"arm {given}: the name {NO_DOCUMENTS!r} is taken")
            return Arm(profile, str(path.resolve()))
    raise ConfigError(f"arm {given!r} is neither a file nor one of {', '.join(_known())}")


def _known() -> list[str]:
    files = {path.stem for folder in _FOLDERS if folder.is_dir() for path in folder.glob("*.json")}
    return [*SHIPPED, *sorted(files - SHIPPED.keys())]
