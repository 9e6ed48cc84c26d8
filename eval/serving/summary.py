"""What rounds come to: a line for every arm at every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.report.sections import Section, sections
from eval.report.serving import Level, levels
from eval.results import Load, Record, Run
from eval.statistics import Interval
from redknot.cli.common import table

_HEADER = (
    *("LEVEL", "ARM", "N", "ERRORS", "REQUESTS/S", "TOKENS/S", "TTFT P50 MS", "TTFT P95 MS", "TTFT RATIO"),
    *("LATENCY P50 MS", "LATENCY P95 MS", "CLIENT LATE MS"),
)


@dataclass(frozen=True)
class Line:
    """One arm at one level; intervals are clustered by round, of the ratio over requests."""

    level: float  # requests a second that arrive, or clients
    arm: str
    found: Level

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"level": self.level, "arm": self.arm} | asdict(self.found)


def summary(records: Sequence[Record], dataset: str, loop: str) -> list[Line]:
    """The lines of a data set in an open or a closed loop, from the latest record of each request."""
    runs = [record for record in records if isinstance(record, Run)]
    of = {run.run: [record for record in records if getattr(record, "run", "") == run.run] for run in runs}
    return [
        Line(level, arm, found)
        for section in sections([(run, of[run.run]) for run in runs])
        for (level, arm), found in levels(section, _loads(section, dataset, loop)).items()
    ]


def _loads(section: Section, dataset: str, loop: str) -> list[Load]:
    return [load for load in section.loads if (load.dataset, load.loop) == (dataset, loop)]


def as_text(lines: Sequence[Line]) -> str:
    """A table."""
    return table(_HEADER, [_row(line) for line in lines], right=(0, *range(2, len(_HEADER))))


def _row(line: Line) -> tuple[object, ...]:
    found = line.found
    return (
        f"{line.level:g}",
        line.arm,
        found.requests,
        found.errors,
        f"{found.requests_a_second:.2f}",
        f"{found.tokens_a_second:.1f}",
        _ms(found.ttft_p50),
        _ms(found.ttft_p95),
        "" if found.ratio is None else f"{found.ratio:.2f}",
        _ms(found.latency_p50),
        _ms(found.latency_p95),
        f"{1000 * found.late_p95:.1f}",
    )


def _ms(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.scaled(1000):.0f}"
