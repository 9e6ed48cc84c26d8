"""Evaluate contents in batches and publish them in the background, so that the disk never holds up the model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from redknot.artifact.certificate import Certificate, CertificateDraft
from redknot.artifact.publish import Publication
from redknot.artifact.store import ArtifactStore
from redknot.build.capture import evaluate
from redknot.build.contents import Content
from redknot.build.plan import OnContent, Present, find_present, record_names
from redknot.model.heads import HeadTable
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model

BATCH_TOKENS = 2048  # rows that keep the matrix products busy; longer documents run alone, in forwards of this many
_WAITING = 2  # evaluated batches that may wait for the disk


@dataclass
class BuildResult:
    """What a build did."""

    certificates: list[Certificate] = field(default_factory=list)
    elsewhere: list[Present] = field(default_factory=list)  # published by another builder meanwhile
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)

    @property
    def tokens(self) -> int:
        """Tokens evaluated and published."""
        return sum(certificate.token_count for certificate in self.certificates)

    @property
    def nbytes(self) -> int:
        """Bytes on disk of what was published."""
        return sum(certificate.nbytes for certificate in self.certificates)

    @property
    def tokens_per_second(self) -> float:
        """Of what was evaluated, evaluation to publication."""
        return self.tokens / self.seconds if self.seconds else 0.0


def batches(contents: Sequence[Content], tokens: int) -> Iterator[list[Content]]:
    """Contents of similar length, together at least ``tokens`` tokens where there are so many; short ones first."""
    batch: list[Content] = []
    for content in sorted(contents, key=len):
        batch.append(content)
        if sum(map(len, batch)) >= tokens:
            yield batch
            batch = []
    if batch:
        yield batch


def build(
    model: Model,
    store: ArtifactStore,
    draft: CertificateDraft,
    contents: Sequence[Content],
    on_done: OnContent = lambda content: None,
    heads: HeadTable | None = None,
) -> BuildResult:
    """Evaluate and publish contents, batch by batch; each batch becomes visible as a whole.

    An interrupt publishes what was evaluated, a second one drops it; either way KeyboardInterrupt goes on, nothing is
    half written, and the next build takes up where this one stopped. ``on_done`` is called from the publishing thread
    too. ``heads`` is the head table of the target. StoreError when the disk refuses.
    """
    started, result = time.perf_counter(), BuildResult()
    with _Publisher(store, draft, result, on_done) as publisher:
        for batch in batches(contents, BATCH_TOKENS):
            batch = _still_missing(store, draft, batch, result, on_done)
            if batch:
                publisher.submit(batch, evaluate_batch(model, draft, batch, result.counters, heads))
    result.seconds = time.perf_counter() - started
    return result


def evaluate_batch(
    model: Model,
    draft: CertificateDraft,
    batch: Sequence[Content],
    counters: Counters,
    heads: HeadTable | None = None,
) -> list[dict[str, Tensor]]:
    """The sections of each content of a batch."""
    documents = [torch.from_numpy(content.token_ids).long() for content in batch]
    return evaluate(model, documents, draft.needs, counters, draft.world, BATCH_TOKENS, heads)


def _still_missing(
    store: ArtifactStore, draft: CertificateDraft, batch: list[Content], result: BuildResult, on_done: OnContent
) -> list[Content]:
    """The contents that no other builder has published since the build was planned."""
    missing = []
    for content in batch:
        present = find_present(store, draft, content, checked=False)
        if present is None:
            missing.append(content)
        else:
            record_names(store, present, draft.namespace)
            result.elsewhere.append(present)
            on_done(content)
    return missing


class _Publisher:
    """Publishes batches one after the other in a thread of its own; its errors surface in the caller."""

    def __init__(self, store: ArtifactStore, draft: CertificateDraft, result: BuildResult, on_done: OnContent) -> None:
        self._store, self._draft, self._result, self._on_done = store, draft, result, on_done
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redknot-publish")
        self._pending: deque[Future[None]] = deque()

    def submit(self, batch: list[Content], sections: list[dict[str, Tensor]]) -> None:
        """Hand a batch over; waits while too many wait already."""
        self._pending.append(self._thread.submit(self._publish, batch, sections))
        while len(self._pending) > _WAITING or self._pending[0].done():
            self._pending[0].result()
            self._pending.popleft()
            if not self._pending:
                return

    def _publish(self, batch: list[Content], sections: list[dict[str, Tensor]]) -> None:
        items = (
            Publication(self._draft, tensors, content.token_ids, content.names)
            for content, tensors in zip(batch, sections, strict=True)
        )
        self._result.certificates.extend(self._store.publish_many(items))
        for content in batch:
            self._on_done(content)

    def _finish(self) -> None:
        for future in self._pending:
            future.result()

    def __enter__(self) -> _Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or kind is KeyboardInterrupt:
                self._finish()
        finally:
            # What has begun is finished, so that no file is left half written; what waits is dropped.
            self._thread.shutdown(wait=True, cancel_futures=True)
