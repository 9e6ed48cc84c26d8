"""Times to first token by length of the prompt, hot and cold apart."""

from __future__ import annotations

from eval.report.blocks import Block, Fold, Heading, Paragraph, Plot, Table, table
from eval.report.charts.lines import Axis, lines
from eval.report.numbers import count, milliseconds, times
from eval.report.sections import Section
from eval.report.speed import Speed, by_length, chosen, speeds

_TIME = Axis("median time to first token, ms", lambda ms: f"{ms:,.4g}", log=True)
_TOKENS = Axis("prompt tokens, median of the group", lambda tokens: f"{tokens:,.0f}", log=True)
_HEADER = ("Arm", "Tokens", "Pairs", "request ratio", "forward ratio", "request p50 ms", "p95 ms", "forward p50 ms")


def length_part(section: Section) -> list[Block]:
    """The blocks; none where nothing was timed."""
    out: list[Block] = []
    for state, text in (("hot", "hot: the documents had been read before"), ("cold", "cold: a document's first use")):
        found = {of: speeds(section, timings) for of, timings in by_length(chosen(section, state)).items()}
        if not found:
            continue
        curves: dict[str, list[tuple[float, float]]] = {}
        for arms in found.values():
            for arm, speed in arms.items():
                curves.setdefault(arm, []).append((speed.tokens, 1000 * speed.request_p50))
        title = f"Time to first token by length, {text} (request)"
        out += [Heading(title, 3), Plot(lines(curves, _TOKENS, _TIME, title), "From the call to the first token.")]
        out += [Fold(f"{state}, about {of:,} tokens", (_table(arms),)) for of, arms in found.items()]
    if not out:
        return []
    text = (
        "Prompts are grouped by the nearest power of two. Ratios: recompute's time over the arm's, medians over pairs."
    )
    return [Heading("Time to first token by length"), Paragraph(text), *out]


def _table(arms: dict[str, Speed]) -> Table:
    rows = [
        (
            arm,
            count(round(speed.tokens)),
            count(speed.n),
            times(speed.request),
            times(speed.forward),
            milliseconds(speed.request_p50),
            milliseconds(speed.request_p95),
            milliseconds(speed.forward_p50),
        )
        for arm, speed in arms.items()
    ]
    return table(_HEADER, rows)
