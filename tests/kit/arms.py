"""An engine that answers at once, does what its arms say, and can be told to lie: what harness tests run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from eval.arms import Arm
from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.names import RECOMPUTE
from redknot.model.profile import DENSE

CHECKPOINT = "c" * 64


class FakeEngine:
    """Answers "green" in every arm, reusing each document where the profile does; ``lie`` changes replies."""

    name = "embedded"
    tp = 1
    versions: Mapping[str, str] = {"fake": "1"}

    def __init__(self, arms: Mapping[str, Arm], checkpoint: str = CHECKPOINT) -> None:
        self.arms = dict(arms)
        self.checkpoint = checkpoint
        self.asked: list[tuple[str, str, int]] = []  # arm, prompt, cap
        self.forgotten: list[str] = []
        self.closed = False
        self.lie: Callable[[str, Reply], Reply] = lambda arm, reply: reply
        self.text = "green"

    def answer(self, arm: str, prompt: Encoded, max_new_tokens: int) -> Reply:
        self.asked.append((arm, prompt.sha256, max_new_tokens))
        logits = torch.linspace(0, 1, 8) + (0 if arm == RECOMPUTE else 0.1 * torch.arange(8.0).cos())
        reply = Reply(
            text=self.text,
            token_ids=(1,),
            report=fake_report(self.arms[arm], prompt),
            ttft_request_s=0.4 if arm == RECOMPUTE else 0.1,
            ttft_forward_s=0.3 if arm == RECOMPUTE else 0.09,
            prompt_sha256=prompt.sha256,
            max_new_tokens=max_new_tokens,
            checkpoint=self.checkpoint,
            logits=logits,
        )
        return self.lie(arm, reply)

    def forget(self, arm: str) -> None:
        self.forgotten.append(arm)

    def close(self) -> None:
        self.closed = True


def fake_report(arm: Arm, prompt: Encoded) -> dict[str, Any]:
    """A report as the engine's, of a request whose documents are all reused where the profile reuses."""
    dense, reuses = arm.profile.arm == DENSE, arm.profile.reuses
    saving = {"share": 0.5, "saved": 1, "whole": 2}
    return {
        "arm": arm.profile.arm,
        "profile": arm.name,
        "profile_digest": arm.profile.digest(),
        "reason": "reuse_off" if dense else None,
        "detail": "",
        "prompt_tokens": len(prompt),
        "cached_tokens": 0,
        "reused_tokens": sum(end - start for start, end in prompt.spans) if reuses else 0,
        "forwarded_rows": len(prompt),
        "certified": len(prompt.spans),
        "documents": [document(end - start) for start, end in prompt.spans] if reuses else [],
        "ledgers": {"head_rows": saving, "token_rows": saving, "arithmetic": saving, "wall_clock": {"match_s": 0.1}},
    }


def document(length: int, reason: str | None = None) -> dict[str, Any]:
    reused = 0 if reason else length
    found = {"artifact_id": "a", "start": 0, "matched": length, "artifact_tokens": length, "cached": 0}
    return found | {"length": length, "reused": reused, "recomputed": length - reused, "reason": reason}


def ran_dense(reply: Reply) -> Reply:
    """The same reply of a request that reused nothing."""
    changed = {"arm": "dense", "reason": "nothing_to_reuse", "detail": "no document of the request can be reused"}
    return replace(reply, report={**reply.report, **changed})
