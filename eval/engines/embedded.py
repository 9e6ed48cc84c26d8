"""The embedded engine: one `redknot.Engine` an arm, all of one loaded model over one store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eval.arms import Arm
from eval.encoded import Encoded, prompt_sha256
from eval.engines.base import Reply
from eval.names import RECOMPUTE
from redknot.artifact.store import ArtifactStore
from redknot.build.plan import is_store
from redknot.runtime.engine import Engine
from redknot.runtime.loaded import load


class EmbeddedEngine:
    """Arms in this process; what each keeps of latents is its own."""

    name = "embedded"
    tp = 1
    versions: Mapping[str, str] = {}

    def __init__(self, checkpoint: Path, store: Path, arms: Mapping[str, Arm]) -> None:
        if not is_store(store):  # with arms that need no artifacts, nobody has built one
            ArtifactStore(store, create=True).close()
        self._store = store
        self._arms = dict(arms)
        self._loaded = load(checkpoint)
        self._engines = {name: self._open(arm) for name, arm in self._arms.items()}

    def answer(self, arm: str, prompt: Encoded, max_new_tokens: int) -> Reply:
        """Answer in one arm; InputError for a prompt that does not fit."""
        ids, spans = prompt.token_ids.tolist(), list(prompt.spans)
        result = self._engines[arm].generate(
            token_ids=ids, spans=spans, reuse="off" if arm == RECOMPUTE else "auto", max_new_tokens=max_new_tokens
        )
        return Reply(
            text=result.text,
            token_ids=result.token_ids,
            report=result.report.to_dict(),
            ttft_request_s=result.report.ttft_request_s,
            ttft_forward_s=result.report.ttft_forward_s,
            prompt_sha256=prompt_sha256(ids, spans),
            max_new_tokens=max_new_tokens,
            checkpoint=self._loaded.identity.digest,
            logits=result.logits,
        )

    def forget(self, arm: str) -> None:
        """An engine of its own for the next request, which has read the catalogue and no document."""
        self._engines[arm].close()
        self._engines[arm] = engine = self._open(self._arms[arm])
        engine.generate(token_ids=[0], spans=[], max_new_tokens=1)

    def close(self) -> None:
        """End all arms."""
        for engine in self._engines.values():
            engine.close()

    def _open(self, arm: Arm) -> Engine:
        return Engine(self._loaded, self._store, arm.profile)
