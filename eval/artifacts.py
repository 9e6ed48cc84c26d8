"""Artifacts of the documents of a data set: looked up in the store, built where they are missing, all arms' at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eval.progress import progress
from redknot.artifact.identity import token_hash
from redknot.artifact.store import ArtifactStore
from redknot.build.builder import BuildResult, build
from redknot.build.contents import Content
from redknot.build.plan import BuildPlan, is_store, plan_build
from redknot.build.target import Target, make_target
from redknot.cli.common import DEFAULT_NAMESPACE
from redknot.errors import ConfigError
from redknot.model.geometry import Geometry
from redknot.model.profile import Profile, misfit
from redknot.runtime.loaded import Loaded, load


@dataclass(frozen=True)
class Built:
    """What was built or found; a document of several arms that no one artifact can serve counts once for each."""

    documents: int
    tokens: int
    found: int  # that the store had
    seconds: float  # of building the others
    nbytes: int  # on disk, found ones included


def targets(geometry: Geometry, profiles: Iterable[Profile], tp: int) -> list[Target]:
    """As few kinds of artifacts as serve all profiles; ConfigError for a profile that does not fit the model."""
    groups: list[list[Profile]] = []
    for profile in profiles:
        if problem := misfit(profile, geometry):
            raise ConfigError(f"arm {profile.name} does not fit the model: {problem}")
        if not profile.needs():
            continue
        make_target(geometry, [profile], tp, DEFAULT_NAMESPACE)
        group = next((group for group in groups if _together(geometry, [*group, profile], tp)), None)
        if group is None:
            groups.append([profile])
        else:
            group.append(profile)
    return [make_target(geometry, group, tp, DEFAULT_NAMESPACE) for group in groups]


def _together(geometry: Geometry, profiles: Sequence[Profile], tp: int) -> bool:
    try:
        make_target(geometry, profiles, tp, DEFAULT_NAMESPACE)
    except ConfigError:
        return False
    return True


def distinct(name: str, documents: Iterable[npt.NDArray[np.int32]]) -> list[Content]:
    """Each content once, under a name of the data set."""
    found: dict[str, Content] = {}
    for ids in documents:
        key = token_hash(ids)
        if key not in found:
            found[key] = Content((f"{name}-{len(found)}",), name, ids, key)
    return list(found.values())


class Builder:
    """Builds for all arms into one store; the model is loaded when the first document is missing."""

    def __init__(self, checkpoint: Path, store: Path, wanted: Sequence[Target]) -> None:
        self._checkpoint = checkpoint
        self._store = store
        self._targets = wanted

    @cached_property
    def _loaded(self) -> Loaded:
        return load(self._checkpoint)

    def build(self, name: str, documents: Iterable[npt.NDArray[np.int32]]) -> Built:
        """Make sure that the store has artifacts of all documents; StoreError when the disk cannot hold them."""
        contents = distinct(name, documents)
        built = [self._build(target, name, contents) for target in self._targets]
        return Built(
            sum(one.documents for one in built),
            sum(one.tokens for one in built),
            sum(one.found for one in built),
            sum(one.seconds for one in built),
            sum(one.nbytes for one in built),
        )

    def _build(self, target: Target, name: str, contents: Sequence[Content]) -> Built:
        draft = target.draft(self._loaded.identity)
        plan = plan_build(target, self._store, contents, draft if is_store(self._store) else None)
        plan.check_space()
        result = BuildResult()
        with ArtifactStore(self._store, create=True) as store:
            if plan.missing:
                tokens = sum(len(content) for content in plan.missing)
                with progress(tokens, "tok", f"{name}: artifacts") as bar:

                    def on_done(content: Content) -> None:
                        bar.update(len(content))

                    result = build(self._loaded.model, store, draft, plan.missing, on_done, target.heads)
            nbytes = result.nbytes + _bytes_found(store, plan)
        return Built(plan.total, sum(map(len, contents)), len(plan.present), result.seconds, nbytes)


def _bytes_found(store: ArtifactStore, plan: BuildPlan) -> int:
    rows = (store.catalogue.row(present.artifact_id, plan.target.namespace) for present in plan.present)
    return sum(row.nbytes for row in rows if row is not None)
