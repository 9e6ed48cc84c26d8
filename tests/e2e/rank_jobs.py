"""What the ranks of test_ranks do; runs in their processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from redknot.comm.group import TorchGroup
from redknot.runtime.engine import Engine


def serve(group: TorchGroup, folder: Path) -> list[list[dict[str, Any]]]:
    """Per scenario of jobs.json, what each request got on this rank."""
    jobs = json.loads((folder / "jobs.json").read_text())
    return [_scenario(group, jobs, scenario) for scenario in jobs["scenarios"]]


def _scenario(group: TorchGroup, jobs: dict[str, Any], scenario: dict[str, Any]) -> list[dict[str, Any]]:
    store = scenario["stores"][group.shard.rank]
    engine = Engine(jobs["checkpoint"], store, scenario["profile"], group=group)
    if scenario.get("slow") == group.shard.rank:
        assert engine.library is not None
        native = engine.library.certified
        engine.library.certified = lambda *asked: time.sleep(1) or native(*asked)  # type: ignore[method-assign,func-returns-value]
    answers = []
    for segments in scenario["requests"]:
        result = engine.generate(segments=segments, max_new_tokens=4)
        report = result.report
        answers.append(
            {
                "tokens": list(result.token_ids),
                "arm": report.arm,
                "reason": str(report.reason),
                "reused": [found.reused for found in report.documents],
                "windows": report.counters.window_row_layers,
                "flops": report.ledgers.arithmetic.share,
            }
        )
    return answers
