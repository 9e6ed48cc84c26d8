"""Admission: what a request will reuse, decided on every rank alike before the server looks for its prefix.

The server's prefix cache is a tree of pages. Exact pages lie under one key; what a reusing request leaves is
approximate, and lies on a branch whose key says what was reused where, so that only a request that would reuse the
same ever reads it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from redknot.errors import InputError, RequestReason, ReuseUnavailableError
from redknot.model.profile import Profile
from redknot.runtime.agreement import Agreement
from redknot.runtime.library import Refused
from redknot.runtime.progress import Request
from redknot.runtime.request import read_ids
from redknot.runtime.restore import Source
from redknot.serving.batch import Ask, CachedPages
from redknot.serving.libraries import Libraries
from redknot.serving.reading import Readers
from redknot.serving.served import Served


def exact_key(namespace: str, default: str) -> str | None:
    """The extra key of a namespace's exact pages; the default namespace shares what SGLang itself would."""
    return None if namespace == default else f"redknot-namespace:{namespace}"


def branch_key(namespace: str, profile: Profile, sources: Sequence[Source]) -> str:
    """The extra key of pages that are as these sources leave them under this profile."""
    read = [(source.run, source.key) for source in sources]
    content = repr((namespace, profile.digest(), read)).encode()
    return f"redknot:{hashlib.blake2b(content, digest_size=16, person=b'redknot-branch').hexdigest()}"


class Admissions:
    """Admits requests of one server process; every rank makes the same calls in the same order."""

    def __init__(
        self,
        libraries: Libraries,
        readers: Readers,
        profile: Profile,
        profiles: Mapping[str, Profile],
        context: int,
        namespace: str,
    ) -> None:
        self._libraries = libraries
        self._readers = readers
        self._profile = profile
        self._profiles = profiles
        self._context = context
        self._default = namespace

    def admit(
        self,
        token_ids: Sequence[int],
        ask: Ask,
        namespace: str,
        arrived: float | None,
        cached_pages: CachedPages,
    ) -> Served:
        """Plan a request; InputError for a malformed one, ReuseUnavailableError where it requires what cannot be."""
        geometry = self._libraries.geometry
        ids, spans = read_ids(geometry, token_ids, ask.spans, 0)
        if len(ids) >= self._context:
            raise InputError(f"{len(ids)} prompt tokens leave no room for an answer in {self._context} positions")
        started = time.perf_counter() if arrived is None else arrived
        request = Request(torch.tensor(ids, dtype=torch.int64), spans, started, ExitStack())
        served = Served(request, ask, exact=exact_key(namespace, self._default), cached_pages=cached_pages)
        served.branch = served.exact
        profile = self._profile if ask.profile is None else self._named(ask.profile)
        served.agreement = self._libraries.agreement(namespace, profile)
        if ask.reuse == "off":
            request.refuse(RequestReason.REUSE_OFF, "reuse was turned off for this request")
        else:
            self._plan(served, namespace, served.agreement)
            if ask.reuse == "required":
                require(served)
        return served

    def _named(self, name: str) -> Profile:
        """A profile that a client may name; which files are profiles, the server says."""
        profile = self._profiles.get(name)
        if profile is None:
            raise InputError(f"there is no profile {name!r}; this server has {', '.join(self._profiles)}")
        return profile

    def _plan(self, served: Served, namespace: str, agreement: Agreement) -> None:
        """Plan, and plan again behind a longer exact prefix; the branch is the same on every rank, or there is none."""
        request, profile = served.request, agreement.profile
        try:
            agreement.plan(request)
            served.sources = agreement.sources(request)
            branch = branch_key(namespace, profile, served.sources)
            exact = self._cached(served, served.exact)
            if exact > self._cached(served, branch) and exact > served.sources[0].run.start:
                agreement.plan(request, exact)
                served.sources = agreement.sources(request)
                branch = branch_key(namespace, profile, served.sources)
        except Refused as refused:
            request.refuse(refused.reason, refused.detail)
        if agreement.vote(request):
            served.branch = branch
            self._readers.start(served)

    def _cached(self, served: Served, key: str | None) -> int:
        assert served.cached_pages is not None
        return len(served.cached_pages(key)) * self._libraries.geometry.block_length


def require(served: Served) -> None:
    """ReuseUnavailableError for a request that would run dense; it is counted."""
    request = served.request
    if request.reason is not None:
        assert served.agreement is not None  # every admission has one
        served.agreement.metrics.refused(request.reason)
        raise ReuseUnavailableError(f"reuse is required but not possible: {request.reason} ({request.detail})")
