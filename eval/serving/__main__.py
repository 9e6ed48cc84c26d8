"""`python -m eval.serving`: a server under load, every arm on the same prompts at the same times."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from eval.arguments import (
    EXIT_REJECTED,
    at_least,
    base_parser,
    guarded,
    named_checkpoint,
    plain,
)
from eval.arms import Arm, find_arms
from eval.artifacts import Builder, targets
from eval.engines.server import Server
from eval.engines.sglang import check_server, launch
from eval.engines.wishes import check_servable
from eval.provenance import make_run
from eval.recorder import Recorder
from eval.results import Build
from eval.serving.rounds import Loader, Plan, turns
from eval.serving.summary import as_text, summary
from eval.serving.workload import Generated, Pool, read_pool
from redknot.cli.common import plural, print_json, settings
from redknot.errors import ConfigError
from redknot.model.geometry import load_geometry

TOOL = "serving"
FIXED = ("seed", "requests", "new_tokens", "prompt_documents", "pool_sha256")


def parser() -> argparse.ArgumentParser:
    found = base_parser(TOOL, "Measure a server under requests that arrive at planned times, in every arm.")
    add = found.add_argument
    add("--url", help="a server that runs; without it one is started, and stopped in the end")
    load = found.add_mutually_exclusive_group()
    text = "requests a second that arrive, separated by commas (default: %(default)s)"
    load.add_argument("--levels", default="0.5,1,2,4", metavar="RATE,...", help=text)
    text = "instead: numbers of clients, each of which sends its next request when it has its answer"
    load.add_argument("--concurrency", metavar="CLIENTS,...", help=text)
    add("--requests", type=at_least(1), default=32, help="of a round (default: %(default)s)")
    add("--rounds", type=at_least(1), default=4, help="of each arm and level; more go on (default: %(default)s)")
    add("--new-tokens", type=at_least(1), default=16, help="of every answer, exactly (default: %(default)s)")
    add("--corpus", type=Path, help="folder or file of documents, as redknot build reads them (default: made fresh)")
    add("--documents", type=at_least(1), default=24, help="that are made fresh (default: %(default)s)")
    add("--document-tokens", type=at_least(1), default=512, help="of each of them (default: %(default)s)")
    add("--prompt-documents", type=at_least(1), default=4, help="of a prompt (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="of documents, prompts and arrivals (default: %(default)s)")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 done but some request failed, 2 refused, 130 interrupted."""
    return guarded(parser(), _run, argv)


def _run(args: argparse.Namespace) -> int:
    settings()
    checkpoint, arms = named_checkpoint(args.model), find_arms(name for name in args.arms.split(",") if name)
    check_servable(arms)
    targets(load_geometry(checkpoint), [arm.profile for arm in arms.values()], args.tp)  # refuses what does not fit
    pool = read_pool(checkpoint, args.corpus or Generated(args.documents, args.document_tokens, args.seed))
    plan = _plan(args, pool)
    if args.dry_run:
        _print_plan(args, plan, pool, arms)
        return 0
    options = {name: plain(value) for name, value in vars(args).items() if name not in ("json", "dry_run")}
    options["pool_sha256"] = pool.sha256
    run = make_run(TOOL, checkpoint, arms, options, engine="sglang", tp=args.tp)
    recorder = Recorder(args.out, run, FIXED)
    with closing(recorder):
        _measure(args, plan, pool, arms, checkpoint, recorder)
    return _report(args, plan, recorder)


def _plan(args: argparse.Namespace, pool: Pool) -> Plan:
    documents = args.prompt_documents
    if documents > len(pool.documents):
        raise ConfigError(f"--prompt-documents {documents}: there are {plural(len(pool.documents), 'document')}")
    longest = pool.longest(documents) + args.new_tokens
    if longest > pool.max_positions:
        raise ConfigError(
            f"prompts of {longest} tokens, answers included; the model has {pool.max_positions} positions"
        )
    closed = args.concurrency is not None
    levels = _numbers("--concurrency", args.concurrency, int) if closed else _numbers("--levels", args.levels, float)
    return Plan(
        dataset="generated" if args.corpus is None else args.corpus.resolve().stem,
        loop="closed" if closed else "open",
        levels=levels,
        rounds=args.rounds,
        requests=args.requests,
        documents=documents,
        new_tokens=args.new_tokens,
        seed=args.seed,
    )


def _numbers(option: str, given: str, of: Callable[[str], float]) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(of(one) for one in given.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < one < math.inf for one in found):
        raise ConfigError(f"{option} {given}: give numbers above 0, separated by commas")
    return found


def _measure(
    args: argparse.Namespace, plan: Plan, pool: Pool, arms: Mapping[str, Arm], checkpoint: Path, recorder: Recorder
) -> None:
    """Run what is left, against the server at --url or one that is started for it."""
    left = turns(plan, list(arms), recorder)
    if not left:
        return
    store = args.store if args.store is not None else args.out / "store"
    with ExitStack() as opened:
        url = args.url
        if url is None:
            url = opened.enter_context(launch(checkpoint, store, arms, args.tp)).url
        server = opened.enter_context(closing(Server(url)))
        digest, version = check_server(server, checkpoint, arms, args.tp)
        recorder.served_by({"sglang": version})
        _build(plan, pool, arms, checkpoint, store, args.tp, recorder)
        loader = Loader(server, arms, digest, pool, plan, recorder)
        loader.warm_up(list(dict.fromkeys(turn.arm for turn in left)))
        loader.run(left)


def _build(
    plan: Plan, pool: Pool, arms: Mapping[str, Arm], checkpoint: Path, store: Path, tp: int, recorder: Recorder
) -> None:
    wanted = targets(load_geometry(checkpoint), [arm.profile for arm in arms.values()], tp)
    built = Builder(checkpoint, store, wanted).build(plan.dataset, pool.documents)
    if built.documents:
        recorder.add(
            Build(
                run=recorder.run.run,
                dataset=plan.dataset,
                documents=built.documents,
                tokens=built.tokens,
                found=built.found,
                seconds=built.seconds,
                bytes=built.nbytes,
            )
        )


def _print_plan(args: argparse.Namespace, plan: Plan, pool: Pool, arms: Mapping[str, Arm]) -> None:
    requests = plan.requests * plan.rounds * len(plan.levels) * len(arms)
    seconds = None
    if plan.loop == "open":
        ends = (plan.arrivals(level, number)[-1] for level in plan.levels for number in range(plan.rounds))
        seconds = len(arms) * sum(ends)
    longest = pool.longest(plan.documents)
    if args.json:
        found = {"arms": list(arms), "levels": plan.levels, "rounds": plan.rounds, "requests": requests}
        print_json(found | {"longest_prompt": longest, "documents": len(pool.documents), "least_seconds": seconds})
        return
    print(f"arms: {', '.join(arms)}")
    print(f"{plural(len(pool.documents), 'document')}, prompts of up to {longest} tokens, {plan.new_tokens} new tokens")
    kind = "clients" if plan.loop == "closed" else "requests a second"
    levels = ", ".join(f"{level:g}" for level in plan.levels)
    takes = "" if seconds is None else f"; the last of all rounds arrive within {seconds:.0f} s"
    print(f"{levels} {kind}: {plural(plan.rounds, 'round')} each, {plural(requests, 'request')} in all{takes}")


def _report(args: argparse.Namespace, plan: Plan, recorder: Recorder) -> int:
    lines = summary(recorder.records, plan.dataset, plan.loop)
    failed = sum(line.found.errors for line in lines)
    if args.json:
        found = {"results": str(recorder.path), "failed": failed, "loop": plan.loop}
        print_json(found | {"levels": [line.to_dict() for line in lines]})
    else:
        print(as_text(lines))
        print(recorder.path)
    if failed:
        print(f"{plural(failed, 'request')} failed; {recorder.path} has the reasons", file=sys.stderr)
    return EXIT_REJECTED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
