"""`python -m eval.fidelity`: hidden states, logits and likeliest tokens of every arm against recompute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eval.arguments import at_least, guarded, named_checkpoint, plain
from eval.arms import find_arms
from eval.artifacts import targets
from eval.encoder import Encoder
from eval.fidelity.prompts import Draw, corpus_set, load_corpus, nano_sets
from eval.fidelity.work import Line, compare, summary
from eval.items import DataSet
from eval.names import NOISE_FLOOR, QUESTION, RECOMPUTE
from eval.provenance import make_run
from eval.recorder import Recorder
from eval.results import Fidelity
from redknot.cli.common import print_json, settings, table
from redknot.errors import ConfigError
from redknot.model.geometry import load_geometry
from redknot.runtime.loaded import load

FIXED = ("corpus_digest", "tokens", "documents", "question", "seed")


def parser() -> argparse.ArgumentParser:
    text = "Compare arms with recompute inside the model: hidden states behind each layer, logits, likeliest tokens."
    found = argparse.ArgumentParser(prog="python -m eval.fidelity", description=text, allow_abbrev=False)
    add = found.add_argument
    add("--model", default="nano", help="folder of a DeepSeek-V4 checkpoint (default: %(default)s, which comes along)")
    add("--out", type=Path, required=True, help="folder of results.jsonl; what it has already is not done again")
    text = "profiles by name or file, separated by commas (default: %(default)s)"
    add("--arms", default="headsplit,combined,rowsparse,turbo", help=text)
    text = "documents of the prompts: folder or file, as of `redknot build` (default: the tasks of nano's generator)"
    add("--corpus", type=Path, help=text)
    add("--question", default=QUESTION, help="behind the documents of --corpus (default: %(default)r)")
    add("--prompts", type=at_least(1), default=20, help="of each task, or of the corpus (default: %(default)s)")
    add("--tokens", type=at_least(1), default=1024, help="of a prompt; of --corpus at most (default: %(default)s)")
    add("--documents", type=at_least(1), default=4, help="in a prompt; of --corpus at most (default: %(default)s)")
    add("--seed", type=at_least(0), default=1, help="of the prompts (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON document on stdout")
    return found


def run(args: argparse.Namespace) -> int:
    settings()
    checkpoint = named_checkpoint(args.model)
    named = [name for name in args.arms.split(",") if name]
    arms = {name: arm for name, arm in find_arms(named).items() if name != RECOMPUTE or RECOMPUTE in named}
    if NOISE_FLOOR in arms:
        raise ConfigError(f"the name {NOISE_FLOOR!r} is taken; give the profile another one")
    options = {name: plain(value) for name, value in vars(args).items() if name != "json"}
    encoder = Encoder.load(checkpoint)
    sets, profiles = _sets(args, checkpoint, encoder, options), {name: arm.profile for name, arm in arms.items()}
    wanted = targets(load_geometry(checkpoint), profiles.values(), 1)
    recorder = Recorder(args.out, make_run("fidelity", checkpoint, arms, options, engine="embedded", tp=1), FIXED)
    try:
        compare(load(checkpoint).model, profiles, wanted, sets, encoder, recorder)
    finally:
        recorder.close()
    lines = summary([one for one in recorder.records if isinstance(one, Fidelity)])
    if args.json:
        print_json({"results": str(recorder.path), "arms": [asdict(line) for line in lines]})
    else:
        print(_text(lines))
        print(recorder.path)
    return 0


def _sets(
    args: argparse.Namespace, checkpoint: Path, encoder: Encoder, options: dict[str, object]
) -> Sequence[DataSet]:
    """The prompts; notes in the options which corpus they are of."""
    draw = Draw(args.prompts, args.tokens, args.documents, args.seed)
    if args.corpus is None:
        options["corpus_digest"] = ""
        return nano_sets(checkpoint, encoder, draw)
    corpus = load_corpus(args.corpus, encoder)
    for line in corpus.left_out:
        print(f"python -m eval.fidelity: {line}", file=sys.stderr)
    options["corpus_digest"] = corpus.digest
    return [corpus_set(corpus, encoder, draw, args.question)]


def _text(lines: Sequence[Line]) -> str:
    header = ("DATA SET", "ARM", "PROMPTS", "KL", "TOP-1", "ERROR BEHIND LAYER 0", "LARGEST", "AT", "BEHIND THE LAST")
    rows = []
    for one in lines:
        layers, worst = one.layers, one.worst_layer
        errors = (f"{layers[0]:.2g}", f"{layers[worst]:.2g}", worst, f"{layers[-1]:.2g}")
        rows.append((one.dataset, one.arm, one.prompts, f"{one.kl:.2g}", f"{one.top1:.3f}", *errors))
    return table(header, rows, right=range(2, 9))


if __name__ == "__main__":
    sys.exit(guarded(parser(), run))
