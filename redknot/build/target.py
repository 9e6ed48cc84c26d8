"""What artifacts are built for: the united needs of some profiles, TP ranks, a namespace, and the bytes it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.identity import ModelIdentity
from redknot.artifact.needs import WINDOW_ALL, WINDOW_TAIL, WindowKind, Windows, stored_windows
from redknot.artifact.publish import planned_bytes
from redknot.artifact.schema import need_is_sharded
from redknot.artifact.sections import section_specs
from redknot.comm.shard import Shard
from redknot.errors import ConfigError
from redknot.model.geometry import Geometry
from redknot.model.heads import HeadTable
from redknot.model.profile import Profile, misfit
from redknot.runtime.identity import PROMPT_ENCODER

ALL_READ = Windows(WindowKind.ALL)  # every row that the profiles read


@dataclass(frozen=True)
class Target:
    """One kind of artifact."""

    geometry: Geometry
    needs: tuple[str, ...]
    world: int  # 1 unless something is sharded
    namespace: str
    heads: HeadTable | None = None  # of Z_L, where something is of it

    def draft(self, model: ModelIdentity) -> CertificateDraft:
        """What the certificates of this build have in common."""
        return CertificateDraft(self.namespace, model, self.needs, self.world)

    def nbytes(self, tokens: int) -> int:
        """Bytes on disk of the artifact of a document of that many tokens."""
        return planned_bytes(self._draft_of_size, section_specs(self.geometry, tokens, self.needs, self.world))

    @property
    def windows(self) -> Windows | None:
        """What is kept of window rows; None where nothing reads any."""
        return stored_windows(self.needs) if "latents" in self.needs else None

    @cached_property
    def _draft_of_size(self) -> CertificateDraft:
        """A draft with an identity of the right size, for which no weights have to be read."""
        identity = ModelIdentity.of(
            weights_hash="0" * 64,
            geometry=self.geometry.identity_fields(),
            dtype="float32",
            tokenizer_hash="0" * 64,
            prompt_encoder=PROMPT_ENCODER,
        )
        return self.draft(identity)


def make_target(
    geometry: Geometry, profiles: Sequence[Profile], tp_size: int, namespace: str, windows: Windows = ALL_READ
) -> Target:
    """Unite the needs of some profiles, so that one artifact serves them all; ConfigError when it cannot.

    ``windows`` says what is kept on disk of the window rows that they read.
    """
    needs = with_windows(united_needs(geometry, profiles), windows)
    if tp_size < 1:
        raise ConfigError(f"TP size {tp_size}: there is at least one rank")
    Shard(0, tp_size).check(geometry.shardable())
    if not namespace or not namespace.isprintable():
        raise ConfigError(f"{namespace!r} is no namespace: it must be printable and not empty")
    world = tp_size if any(need_is_sharded(need) for need in needs) else 1
    heads = next((profile.heads(geometry) for profile in profiles if profile.splits_heads), None)
    return Target(geometry, needs, world, namespace, heads)


def united_needs(geometry: Geometry, profiles: Sequence[Profile]) -> tuple[str, ...]:
    """The needs of all profiles together, sorted; ConfigError for profiles that one artifact cannot serve."""
    needs: dict[str, str] = {}
    names = ", ".join(profile.name for profile in profiles)
    for profile in profiles:
        if problem := misfit(profile, geometry):
            raise ConfigError(f"profile {profile.name} does not fit the model: {problem}")
        for need in profile.needs():
            kind = need.partition(":")[0]
            if needs.setdefault(kind, need) != need:
                clash = f"{needs[kind]} and {need}"
                raise ConfigError(f"profiles {names}: one artifact cannot hold both {clash}; build them one by one")
    if not needs:
        raise ConfigError(f"nothing to build: {names or 'no profile'} reuses nothing")
    if WINDOW_ALL in needs:
        needs[WINDOW_TAIL] = WINDOW_TAIL  # all rows hold the last ones too
    return tuple(sorted(needs.values()))


def with_windows(needs: tuple[str, ...], windows: Windows) -> tuple[str, ...]:
    """Needs whose window rows are kept as ``windows`` says; ConfigError where a profile cannot be served so."""
    if not windows.rebuilt:
        return needs
    if WINDOW_ALL in needs:
        raise ConfigError(
            f"windows {windows}: a profile that runs rows inside documents reads all window rows; only windows all "
            "serves it (turbo reads the last ones and is served by any)"
        )
    if WINDOW_TAIL not in needs:
        raise ConfigError(f"windows {windows}: these profiles read no window rows of documents; leave it at all")
    return tuple(sorted({*needs, windows.need} - {WINDOW_TAIL}))
