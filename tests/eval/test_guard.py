"""Every reason for which a reply does not count, and what is kept of a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.arms import find_arms
from eval.encoded import encoded
from eval.guard import objection, slim
from tests.kit.arms import CHECKPOINT, FakeEngine, document, ran_dense

PROMPT = encoded([([1], False), ([2, 3, 4], True), ([5, 6], False)])
ARMS = find_arms(["turbo", "adaptive-80", "headsplit", "prefix", "fan-out"])


def ask(arm, lie=lambda reply: reply):
    engine = FakeEngine(ARMS)
    return objection(lie(engine.answer(arm, PROMPT, 4)), PROMPT, 4, CHECKPOINT, ARMS[arm].profile)


def with_report(**changes):
    return lambda reply: replace(reply, report={**reply.report, **changes})


@pytest.mark.parametrize("arm", ARMS)
def test_an_honest_reply_counts(arm):
    assert ask(arm) is None


@pytest.mark.parametrize(
    ("arm", "lie", "reason"),
    [
        ("turbo", ran_dense, "ran dense: nothing_to_reuse (no document of the request can be reused)"),
        ("turbo", lambda reply: replace(reply, prompt_sha256="0" * 64), "unequal tokens"),
        ("turbo", with_report(prompt_tokens=5), "unequal tokens: 5 were answered, 6 were asked"),
        ("turbo", lambda reply: replace(reply, max_new_tokens=5), "unequal output cap: 5, not 4"),
        ("turbo", lambda reply: replace(reply, token_ids=(1,) * 5), "unequal output cap: 5 tokens came back"),
        ("turbo", lambda reply: replace(reply, checkpoint="d" * 64), "unequal checkpoint: dddddddddddd answered"),
        ("turbo", with_report(profile_digest="0", profile="other"), "another profile ran: other"),
        ("recompute", with_report(arm="reuse"), "ran reuse: reuse_off"),
        ("recompute", lambda reply: replace(reply, checkpoint=""), "unequal checkpoint"),
    ],
)
def test_what_does_not_count(arm, lie, reason):
    assert str(ask(arm, lie)).startswith(reason)


def test_recompute_may_run_under_a_servers_profile():
    assert ask("recompute", with_report(profile_digest="another", profile="rowsparse")) is None


def test_fan_out_that_ran_dense_does_not_count_either():
    assert ask("fan-out", ran_dense) == "ran dense: nothing_to_reuse (no document of the request can be reused)"
    assert ask("prefix", with_report(arm="fan-out", reason=None)) == "ran fan-out: not dense"


def test_of_documents_the_counts_are_kept():
    report = FakeEngine(ARMS).answer("turbo", PROMPT, 4).report
    kept = slim({**report, "documents": [document(3), document(2, "too_short"), document(2, "too_short")]})
    assert kept["documents"] == {"all": 3, "reused": 1, "new_text": {"too_short": 2}}
    assert kept.keys() >= {"arm", "reason", "reused_tokens", "forwarded_rows", "certified", "ledgers"}
    assert set(kept["ledgers"]) == {"head_rows", "token_rows", "arithmetic", "wall_clock"}
