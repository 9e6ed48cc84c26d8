"""``redknot demo``: the main job on a bundled corpus: build artifacts, ask in every arm, show the trade."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from redknot.build.documents import read_text
from redknot.cli import build
from redknot.cli.common import add_model, model_path, print_json
from redknot.cli.printable import printable
from redknot.errors import ConfigError
from redknot.nano.corpus import questions
from redknot.runtime.engine import Engine
from redknot.runtime.ledger import Bounds
from redknot.runtime.report import Report

ARMS = ("recompute", "rowsparse", "turbo")


@dataclass(frozen=True)
class Row:
    """One question in one arm."""

    number: int
    question: str
    expected: str
    arm: str
    answer: str
    report: Report

    @property
    def right(self) -> bool:
        """Whether the answer is exactly the expected one."""
        return self.answer.strip() == self.expected.strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser)
    parser.add_argument("--corpus", default="examples/corpus", help="documents (default: %(default)s)")
    parser.add_argument("--store", default="out/demo/store", help="artifact store (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=8, help="documents in a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which questions, documents and orders")
    parser.add_argument("--out", default="out/demo", help="folder of the picture and the rows (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Build, ask, show; 1 when recomputation itself gets more than one question in twelve wrong."""
    if min(args.questions, args.documents) < 1:
        raise ConfigError(f"--questions {args.questions} --documents {args.documents}: each must be at least 1")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} must be 0 or more")
    corpus = sorted(Path(args.corpus).glob("*.txt"))
    if len(corpus) < args.documents:
        raise ConfigError(f"{args.corpus}: {len(corpus)} .txt documents, {args.documents} are needed for a prompt")
    texts = [read_text(path) for path in corpus]
    silent = [path for path, text in zip(corpus, texts, strict=True) if not questions(text)]
    if silent:
        raise ConfigError(f"{silent[0]}: states nothing that the demo can ask about; its documents are nano's own")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    model = model_path(args.model)
    _build(args, model)
    with contextlib.ExitStack() as stack:
        engines = {arm: stack.enter_context(Engine(model, args.store, arm)) for arm in ARMS}
        rows = _ask(engines, texts, args)
    with (out / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_record(row)) + "\n" for row in rows)
    summary = summarise(rows)
    if args.json:
        print_json({"summary": summary, "rows": [_record(row) for row in rows]})
    else:
        _show(rows, summary)
    picture = _draw(rows, out / "demo.png")
    made = f"rows: {out / 'rows.jsonl'}" + (f"   picture: {picture}" if picture else "")
    print(printable(made), file=sys.stderr)
    wrong = args.questions - summary["recompute"]["right"]
    return 1 if wrong > max(args.questions // 12, 1) else 0


def _build(args: argparse.Namespace, model: Path) -> None:
    parser = argparse.ArgumentParser()
    build.add_arguments(parser)
    profiles = [word for arm in ARMS[1:] for word in ("--profile", arm)]
    options = parser.parse_args([args.corpus, "--model", str(model), "--store", args.store, *profiles])
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):  # stdout is one JSON object or the table
        failed = build.run(options)
    if failed:
        raise ConfigError(f"{args.corpus}: some documents could not be built; see above")


def _ask(engines: dict[str, Engine], texts: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Draw questions over different sets and orders of documents; arms alternate their order from one to the next."""
    rng = np.random.default_rng(args.seed)
    rows = []
    for number in tqdm(range(args.questions), desc="questions", disable=not sys.stderr.isatty()):
        chosen = [texts[i] for i in rng.permutation(len(texts))[: args.documents]]
        facts = [fact for text in chosen for fact in questions(text)]
        question, expected = facts[rng.integers(len(facts))]
        arms = list(engines.items())
        for arm, engine in arms if number % 2 else reversed(arms):
            mode = "off" if arm == "recompute" else "auto"
            if not number:
                engine.generate(segments=[*chosen, question], reuse=mode, max_new_tokens=1)  # warm-up, not counted
            result = engine.generate(segments=[*chosen, question], reuse=mode, max_new_tokens=4)
            rows.append(Row(number, question, expected, arm, result.text, result.report))
    order = {arm: index for index, arm in enumerate(engines)}
    return sorted(rows, key=lambda row: (row.number, order[row.arm]))


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Per arm: right answers, median TTFT, and the medians of ratios and bounds question by question."""
    base = {row.number: row.report.ttft_request_s for row in rows if row.arm == "recompute"}
    out: dict[str, Any] = {}
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [row for row in rows if row.arm == arm]
        # A ratio over requests that ran dense would be recomputation compared with itself.
        reused = mine if all(row.report.arm == "reuse" for row in mine) else []
        ratios = [base[row.number] / row.report.ttft_request_s for row in reused]
        allowed = [1 / (1 - row.report.ledgers.arithmetic.share) for row in reused]
        bounds = [row.report.bounds for row in reused if row.report.bounds is not None]
        out[arm] = {
            "questions": len(mine),
            "right": sum(row.right for row in mine),
            "dense": sum(row.report.arm == "dense" for row in mine),
            "ttft_request_ms": 1000 * statistics.median(row.report.ttft_request_s for row in mine),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_of_flops": statistics.median(allowed) if allowed else None,
            "bounds": asdict(_median(bounds)) if bounds else None,
        }
    return out


def _median(bounds: Sequence[Bounds]) -> Bounds:
    return Bounds(
        statistics.median(one.row_bound for one in bounds), statistics.median(one.head_row_ceiling for one in bounds)
    )


def _show(rows: Sequence[Row], summary: dict[str, Any]) -> None:
    print(f"{'#':>2}  {'arm':<10} {'answer':<16} {'':<5} {'TTFT ms':>8}  {'reused':>11}  {'row bound':>9}  reason")
    for row in rows:
        report = row.report
        why = "" if report.reason is None or row.arm == "recompute" else printable(f"{report.reason}: {report.detail}")
        reused = f"{report.reused_tokens}/{report.prompt_tokens}"
        mark = "right" if row.right else "wrong"
        time = 1000 * report.ttft_request_s
        bound = "" if report.bounds is None else f"{report.bounds.row_bound:.1f}x"
        print(
            f"{row.number + 1:>2}  {row.arm:<10} {printable(row.answer.strip()):<16} {mark:<5} {time:>8.1f}  "
            f"{reused:>11}  {bound:>9}  {why}"
        )
    print()
    for arm, line in summary.items():
        ratio = ""
        if line["ratio"] is not None:
            limits = f"its FLOPs allow {line['ratio_of_flops']:.2f}x; {Bounds(**line['bounds'])}"
            ratio = f"  {line['ratio']:.2f}x faster to the first token ({limits})"
        print(f"{arm:<10} {line['right']}/{line['questions']} right  TTFT {line['ttft_request_ms']:.1f} ms{ratio}")


def _record(row: Row) -> dict[str, Any]:
    return {
        "number": row.number,
        "question": row.question,
        "expected": row.expected,
        "arm": row.arm,
        "answer": row.answer,
        "right": row.right,
        "report": row.report.to_dict(),
    }


def _draw(rows: Sequence[Row], path: Path) -> Path | None:
    """One picture: TTFT of every question and arm; None when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    arms = list(dict.fromkeys(row.arm for row in rows))
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        mine = [row for row in rows if row.arm == arm]
        right = sum(row.right for row in mine)
        positions = [row.number + 1 + (index - (len(arms) - 1) / 2) * width for row in mine]
        heights = [1000 * row.report.ttft_request_s for row in mine]
        bars = axes.bar(positions, heights, width, label=f"{arm}: {right}/{len(mine)} right")
        for bar, row in zip(bars, mine, strict=True):
            if not row.right:
                bar.set_hatch("//")
    axes.set_xlabel("question (hatched: wrong answer)")
    axes.set_ylabel("time to first token, ms")
    axes.set_xticks(sorted({row.number + 1 for row in rows}))
    figure.legend(loc="outside lower center", ncols=len(arms))
    tokens = rows[0].report.prompt_tokens
    axes.set_title(f"The same questions over {tokens} tokens of documents, recomputed and reused")
    figure.savefig(path, dpi=120)
    return path
