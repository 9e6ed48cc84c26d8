"""A small SVG writer: every text is escaped, every coordinate has one decimal, colours are named classes."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from redknot.cli.printable import printable

CHARACTER = 7.3  # width of a strong letter of 12 px, on average, that labels are placed with
SERIES = 8  # colours there are

_LIGHT = ("#2563c9", "#c2410c", "#15803d", "#9333ea", "#0e7490", "#be185d", "#854d0e", "#4d5a6b")
_DARK = ("#7cb0ff", "#fb9a5b", "#5fd38d", "#cf9bff", "#4fd1e8", "#ff8cc0", "#e0b551", "#a9b6c8")


def _colours(ink: str, soft: str, line: str, accent: str, ground: str, series: tuple[str, ...]) -> str:
    named = {"ink": ink, "soft": soft, "line": line, "accent": accent, "ground": ground}
    named |= {f"s{number}": colour for number, colour in enumerate(series)}
    return "".join(f"--{name}:{colour};" for name, colour in named.items())


COLOURS = (
    f":root{{{_colours('#1b1f26', '#667085', '#dfe3ea', '#1d4ed8', '#ffffff', _LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{"
    f"{_colours('#e7eaf0', '#98a2b3', '#313846', '#7cb0ff', '#12151b', _DARK)}}}}}"
)
RULES = (
    ".plot{font-family:system-ui,sans-serif;font-size:12px}"
    ".plot text{fill:var(--ink);paint-order:stroke;stroke:var(--ground);stroke-width:3px;stroke-linejoin:round}"
    ".plot .soft{fill:var(--soft)}.plot .strong{font-weight:600}"
    ".plot .grid{stroke:var(--line);stroke-width:1}.plot .axis{stroke:var(--soft);stroke-width:1}"
    ".plot .whisker{stroke:var(--soft);stroke-width:1.2}.plot .leader{stroke:var(--soft);stroke-width:.7}"
    ".plot .frontier{stroke:var(--accent);stroke-width:1.6;fill:none;stroke-dasharray:5 4}"
    ".plot .best{fill:var(--accent)}.plot .other{fill:var(--ground);stroke:var(--soft);stroke-width:1.6}"
    ".plot .series{fill:none;stroke-width:2}"
    + "".join(
        f".plot .line{n}{{stroke:var(--s{n})}}.plot .fill{n}{{fill:var(--s{n})}}.plot text.text{n}{{fill:var(--s{n})}}"
        for n in range(SERIES)
    )
)


@dataclass(frozen=True)
class Picture:
    """A drawn plot; ``title`` is what a screen reader says."""

    width: int
    height: int
    title: str
    body: str  # SVG elements

    def inline(self) -> str:
        """For a page that has ``COLOURS`` and ``RULES`` in its style."""
        return self._svg("", "")

    def standalone(self) -> str:
        """A file of its own: brings its colours, light and dark, and its ground."""
        style = f"<style>{COLOURS}{RULES}.ground{{fill:var(--ground)}}</style>"
        ground = f'<rect class="ground" width="{self.width}" height="{self.height}"/>'
        return self._svg(' xmlns="http://www.w3.org/2000/svg"', style + ground) + "\n"

    def _svg(self, namespace: str, head: str) -> str:
        title = f"<title>{shown(self.title)}</title>"
        return (
            f'<svg{namespace} class="plot" role="img" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}">{title}{head}{self.body}</svg>'
        )


def shown(text: str) -> str:
    """Any text as content or attribute of an element; control characters, which XML forbids, as their escapes."""
    return escape(printable(text))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: list[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{kind}" points="{steps}"/>'


def circle(x: float, y: float, radius: float, kind: str, title: str = "") -> str:
    """A dot; ``title`` shows under the pointer."""
    inside = f"<title>{shown(title)}</title>" if title else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{inside}</circle>'


def bar(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A filled box; ``title`` shows under the pointer."""
    inside = f"<title>{shown(title)}</title>" if title else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{inside}</rect>'


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start", turned: bool = False) -> str:
    """One line of text; ``turned`` reads upwards."""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{shown(text)}</text>'


def short(text: str, most: int = 28) -> str:
    """A label that fits; the full text belongs in a title."""
    clean = printable(text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"
