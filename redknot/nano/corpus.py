"""The demo's corpus: ``python -m redknot.nano.corpus --out examples/corpus`` writes documents of equal token length."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from redknot.nano.text import make_document
from redknot.nano.worlds import draw_facts

_FACT = re.compile(r"The (\w+) of (\w+ \w+) is (\w+ \d+)\.")


def write_corpus(out: Path, tokenizer: Tokenizer, documents: int, tokens: int, facts: int, seed: int) -> None:
    """Write ``documents`` text files of exactly ``tokens`` tokens with ``facts`` facts each, no key twice."""
    rng = np.random.default_rng(seed)
    everything = draw_facts(rng, "test", documents * facts)
    out.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = make_document(rng, tokenizer, tokens, everything[number * facts : (number + 1) * facts])
        (out / f"document-{number:02d}.txt").write_text(text, encoding="utf-8", newline="\n")


def questions(text: str) -> Sequence[tuple[str, str]]:
    """(question, answer) of every fact that a document states."""
    found = []
    for relation, name, value in _FACT.findall(text):
        stem = f"The {relation} of {name} is"
        found.append((f"\nQuestion: What is the {relation} of {name}?\nAnswer: {stem}", f" {value}."))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/nano/tokenizer.json"))
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--facts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    write_corpus(args.out, tokenizer, args.documents, args.tokens, args.facts, args.seed)


if __name__ == "__main__":
    main()
