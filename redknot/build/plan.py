"""What a build will do, before anything is evaluated or written: contents, needs, bytes, and what is there already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from redknot.artifact.certificate import CertificateDraft
from redknot.artifact.identity import ModelIdentity, token_array, token_hash
from redknot.artifact.publish import planned_bytes
from redknot.artifact.rows import ArtifactRow, ArtifactState
from redknot.artifact.schema import need_is_sharded
from redknot.artifact.sections import parse_needs, section_specs
from redknot.artifact.store import ArtifactStore
from redknot.build.documents import CorpusReport, Document
from redknot.comm.shard import Shard
from redknot.errors import ConfigError, InputError
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile
from redknot.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Content:
    """One distinct content: its token ids, and every document that has it."""

    names: tuple[str, ...]
    source: str  # of the first of them
    token_ids: npt.NDArray[np.int32]
    token_hash: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Present:
    """A content that an artifact of the store covers already."""

    content: Content
    artifact_id: str


@dataclass(frozen=True)
class Target:
    """What artifacts are built for: a geometry, a profile's needs, TP ranks, a namespace."""

    geometry: Geometry
    needs: tuple[str, ...]
    world: int  # 1 unless something is sharded
    namespace: str

    def draft(self, model: ModelIdentity) -> CertificateDraft:
        """What the certificates of this build have in common."""
        return CertificateDraft(self.namespace, model, self.needs, self.world)

    def nbytes(self, tokens: int) -> int:
        """Bytes on disk of the artifact of a document of that many tokens."""
        # The model's identity has the same size for every model, so any will do here.
        nobody = ModelIdentity.of(weights_hash="", geometry={}, dtype="", tokenizer_hash="", prompt_encoder="")
        return planned_bytes(self.draft(nobody), section_specs(self.geometry, tokens, self.needs, self.world))


@dataclass
class Contents:
    """The distinct contents of a corpus, in reading order."""

    all: list[Content] = field(default_factory=list)
    documents: int = 0  # names

    @property
    def tokens(self) -> int:
        """Tokens of all distinct contents."""
        return sum(map(len, self.all))

    @property
    def identical(self) -> int:
        """Documents whose content another one has."""
        return self.documents - len(self.all)


def make_target(geometry: Geometry, profiles: Sequence[Profile], tp_size: int, namespace: str) -> Target:
    """Unite the needs of some profiles, so that one artifact serves them all; ConfigError when it cannot."""
    needs = united_needs(geometry, profiles)
    Shard(0, tp_size).check(geometry.shardable())
    if not namespace or not namespace.isprintable():
        raise ConfigError(f"{namespace!r} is no namespace: it must be printable and not empty")
    world = tp_size if any(need_is_sharded(need) for need in needs) else 1
    return Target(geometry, needs, world, namespace)


def united_needs(geometry: Geometry, profiles: Sequence[Profile]) -> tuple[str, ...]:
    """The needs of all profiles together, sorted; ConfigError for profiles that one artifact cannot serve."""
    needs: dict[str, str] = {}
    for profile in profiles:
        _check_fits(geometry, profile)
        for need in profile.needs():
            kind = need.partition(":")[0]
            if needs.setdefault(kind, need) != need:
                names = ", ".join(one.name for one in profiles)
                raise ConfigError(
                    f"profiles {names}: one artifact holds one {kind}, not {needs[kind]} and {need}; build them apart"
                )
    if not needs:
        names = ", ".join(profile.name for profile in profiles)
        raise ConfigError(f"nothing to build: profile {names} reuses nothing")
    if "window_all" in needs:
        needs["window_tail"] = "window_tail"  # all rows hold the last ones too
    return tuple(sorted(needs.values()))


def _check_fits(geometry: Geometry, profile: Profile) -> None:
    split = parse_needs(profile.needs())[3]
    if 2 * profile.fence_layers >= geometry.num_layers:
        raise ConfigError(
            f"profile {profile.name}: {profile.fence_layers} fence layers at each end of {geometry.num_layers}"
        )
    if split is not None and split[0] == 0:
        raise ConfigError(f"profile {profile.name}: restoring Z_L needs fence_layers >= 1, the last layer has none")
    if split is not None and max(split[1]) >= geometry.heads_per_group:
        raise ConfigError(
            f"profile {profile.name}: Global head {max(split[1])} of groups of {geometry.heads_per_group} heads"
        )


def tokenise(documents: Iterable[Document], tokenizer: Tokenizer, max_positions: int, report: CorpusReport) -> Contents:
    """Encode documents and bring those with the same token ids together.

    A document that does not encode or exceeds the model's positions is a problem of its own.
    """
    found: dict[str, Content] = {}
    contents = Contents()
    for document in documents:
        try:
            ids = token_array(tokenizer.encode(document.text))
        except InputError as error:
            report.problem(document.source, str(error))
            continue
        if len(ids) > max_positions:
            report.problem(document.source, f"{len(ids)} tokens, the model has {max_positions} positions")
            continue
        if not len(ids):
            report.empty += 1
            continue
        contents.documents += 1
        key = token_hash(ids)
        known = found.get(key)
        if known is None:
            found[key] = Content((document.name,), document.source, ids, key)
        else:
            found[key] = replace(known, names=(*known.names, document.name))
    contents.all = list(found.values())
    return contents


def covering(store: ArtifactStore, draft: CertificateDraft, content: Content) -> tuple[ArtifactRow, ...]:
    """The usable artifacts that hold at least what a build would make of a content."""
    rows = store.catalogue.rows(draft.namespace, token_hash=content.token_hash, model=draft.model.digest)
    sharded = any(need_is_sharded(need) for need in draft.needs)
    return tuple(
        row
        for row in rows
        if row.state is ArtifactState.READY
        and set(draft.needs) <= set(row.needs)
        and (not sharded or row.world == draft.world)
    )


def find_present(store: ArtifactStore, draft: CertificateDraft, content: Content, *, checked: bool) -> Present | None:
    """The artifact that makes building a content unnecessary; with ``checked`` its every byte is read first.

    A damaged one goes to quarantine and is built again.
    """
    for row in covering(store, draft, content):
        if not checked or not any(result.problems for result in store.verify(row.artifact_id, row.namespace)):
            return Present(content, row.artifact_id)
    return None


def record_names(store: ArtifactStore, present: Present, namespace: str) -> None:
    """Give an artifact the names of a content that it lacks."""
    missing = set(present.content.names) - set(store.names(present.artifact_id, namespace))
    if missing:
        store.add_names(present.artifact_id, namespace, sorted(missing))
