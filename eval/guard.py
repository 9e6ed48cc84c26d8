"""What makes an answer count: the arm did what its name says, on the same tokens, cap and checkpoint as all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.names import RECOMPUTE
from redknot.model.profile import Profile


def objection(reply: Reply, prompt: Encoded, max_new_tokens: int, checkpoint: str, profile: Profile) -> str | None:
    """Why a reply does not count, in one line; None when it does."""
    report = reply.report
    if reply.prompt_sha256 != prompt.sha256 or report["prompt_tokens"] != len(prompt):
        return f"unequal tokens: {report['prompt_tokens']} were answered, {len(prompt)} were asked, or others"
    if reply.max_new_tokens != max_new_tokens:
        return f"unequal output cap: {reply.max_new_tokens}, not {max_new_tokens}"
    if len(reply.token_ids) > max_new_tokens:
        return f"unequal output cap: {len(reply.token_ids)} tokens came back, {max_new_tokens} were allowed"
    if reply.checkpoint != checkpoint:
        return f"unequal checkpoint: {reply.checkpoint[:12]} answered, not {checkpoint[:12]}"
    # A server runs recompute as reuse turned off, under whatever profile it has.
    if profile.name != RECOMPUTE and report["profile_digest"] != profile.digest():
        return f"another profile ran: {report['profile']}"
    if report["arm"] != profile.arm:
        why = f"{report['reason']} ({report['detail']})" if report["reason"] is not None else f"not {profile.arm}"
        return f"ran {report['arm']}: {why}"
    return None


def slim(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a report with every answer: what was reused and why not, and the four ledgers."""
    documents = report["documents"]
    reasons: dict[str, int] = {}
    for document in documents:
        if document["reason"] is not None:
            reasons[str(document["reason"])] = reasons.get(str(document["reason"]), 0) + 1
    kept = ("arm", "reason", "reused_tokens", "forwarded_rows", "cached_tokens", "certified", "ledgers")
    counts = {"all": len(documents), "reused": sum(document["reason"] is None for document in documents)}
    return {name: report[name] for name in kept} | {"documents": counts | {"new_text": reasons}}
