"""A server under load: times and throughput by arrival rate, or by number of clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.names import RECOMPUTE
from eval.report.blocks import Block, Heading, Paragraph, Plot, table
from eval.report.charts.lines import Axis, lines
from eval.report.numbers import count, percent, spelled, times
from eval.report.sections import Section
from eval.results import Load
from eval.statistics import Interval, clustered_mean, clustered_quantile, quantile, ratio
from redknot.nano.shares import wilson

_LEVELS = {"open": "requests a second that arrive", "closed": "clients"}
_TTFT = Axis("median time to first token, ms", lambda ms: f"{ms:,.4g}", log=True)
_HEADER = (
    "Arm",
    "Requests",
    "Errors",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "TTFT ratio",
    "Latency p50 ms",
    "Latency p95 ms",
    "Requests a second",
    "Tokens a second",
    "Client late p95 ms",
)


@dataclass(frozen=True)
class Level:
    """One arm at one arrival rate or number of clients; seconds. Throughput counts requests that ended well."""

    requests: int
    errors: int
    ttft_p50: Interval | None  # None where every request failed
    ttft_p95: Interval | None
    latency_p50: Interval | None
    latency_p95: Interval | None
    ratio: Interval | None  # of TTFT, recompute over the arm, per request of the same round and number
    requests_a_second: Interval
    tokens_a_second: Interval
    late_p95: float  # by which the client itself sent requests behind the plan


def serving_part(section: Section) -> list[Block]:
    """The blocks; none where no server was measured."""
    out: list[Block] = []
    for dataset, loop in sorted({(load.dataset, load.loop) for load in section.loads}):
        found = levels(section, [load for load in section.loads if (load.dataset, load.loop) == (dataset, loop)])
        curves: dict[str, list[tuple[float, float]]] = {}
        for (rate, arm), level in found.items():
            if level.ttft_p50 is not None:
                curves.setdefault(arm, []).append((rate, 1000 * level.ttft_p50.value))
        title = f"{dataset}, {loop} loop: median time to first token at the client"
        axis = Axis(_LEVELS[loop], lambda level: f"{level:g}")
        out.append(Heading(f"{dataset}, {loop} loop", 3))
        if curves:
            out.append(Plot(lines(curves, axis, _TTFT, title), title))
        rows = [_row(rate, arm, level) for (rate, arm), level in found.items()]
        out.append(table((axis.name.capitalize(), *_HEADER), rows, left=2))
    if not out:
        return []
    text = (
        "Open loop: requests arrive at planned times, the same for every arm, and wait where the server is busy. "
        "Closed loop: each of so many clients sends its next request when it has an answer. Times are the client's. "
        "Intervals are clustered by round; the ratio is recompute's time over the arm's for the same request."
    )
    return [Heading("Serving"), Paragraph(text), *out]


def levels(section: Section, loads: Sequence[Load]) -> dict[tuple[float, str], Level]:
    """Every arm at every level of one workload, the lowest first."""
    groups: dict[tuple[float, str], list[Load]] = {}
    for load in loads:
        groups.setdefault((load.level, load.arm), []).append(load)
    order = sorted({rate for rate, _ in groups})
    keys = [(rate, arm) for rate in order for arm in section.arms if (rate, arm) in groups]
    return {key: _level(groups[key], groups.get((key[0], RECOMPUTE), []), key[1]) for key in keys}


def _level(loads: Sequence[Load], base: Sequence[Load], arm: str) -> Level:
    good = [load for load in loads if not load.error]
    rounds = [_round(load) for load in good]

    def quantiles(of: Callable[[Load], float]) -> tuple[Interval | None, Interval | None]:
        if not good:
            return None, None
        values = [of(load) for load in good]
        return clustered_quantile(values, rounds, 0.5), clustered_quantile(values, rounds, 0.95)

    ttft, latency = quantiles(lambda load: load.ttft_s), quantiles(lambda load: load.latency_s)
    under = {(load.round, load.number): load.ttft_s for load in base if not load.error} if arm != RECOMPUTE else {}
    pairs = [(under[key], load.ttft_s) for load in good if (key := (load.round, load.number)) in under]
    return Level(
        requests=len(loads),
        errors=len(loads) - len(good),
        ttft_p50=ttft[0],
        ttft_p95=ttft[1],
        latency_p50=latency[0],
        latency_p95=latency[1],
        ratio=ratio([base for base, _ in pairs], [own for _, own in pairs]) if pairs else None,
        requests_a_second=_rate(loads, lambda load: 1),
        tokens_a_second=_rate(loads, lambda load: load.new_tokens),
        late_p95=quantile([load.late_s for load in loads], 0.95),
    )


def _rate(loads: Sequence[Load], amount: Callable[[Load], int]) -> Interval:
    """What was done in a second of a round, from its start to its last end; the mean over rounds."""
    rounds: dict[str, list[Load]] = {}
    for load in loads:
        rounds.setdefault(_round(load), []).append(load)
    rates = []
    for of in rounds.values():
        good = [load for load in of if not load.error]
        last = max((load.arrived_s + load.latency_s for load in good), default=0.0)
        rates.append(sum(map(amount, good)) / last if last > 0 else 0.0)
    return clustered_mean(rates, list(rounds))


def _round(load: Load) -> str:
    return str(load.round)


def _row(rate: float, arm: str, level: Level) -> tuple[str, ...]:
    low, high = wilson(level.errors, level.requests)
    errors = f"{count(level.errors)} [{percent(max(low, 0.0))}, {percent(high)}]"
    return (
        f"{rate:g}",
        arm,
        count(level.requests),
        errors,
        _ms(level.ttft_p50),
        _ms(level.ttft_p95),
        times(level.ratio),
        _ms(level.latency_p50),
        _ms(level.latency_p95),
        spelled(level.requests_a_second, lambda value: f"{value:.2f}"),
        spelled(level.tokens_a_second, lambda value: f"{value:.1f}"),
        f"{1000 * level.late_p95:.1f}",
    )


def _ms(interval: Interval | None) -> str:
    return spelled(interval, lambda seconds: f"{1000 * seconds:,.0f}")
