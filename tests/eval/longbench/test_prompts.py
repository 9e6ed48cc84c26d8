"""From rows to prompts, with a checkpoint's tokenizer: first cut, then split, nothing lost on the way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.longbench.prompts import build
from eval.longbench.rows import Row, read_rows
from eval.longbench.tasks import task
from redknot.model.geometry import load_geometry
from redknot.model.tokenizer import Tokenizer
from redknot.nano.tokenizer import build_tokenizer
from tests.kit.corpus import ROOT
from tests.kit.longbench import write

DOCUMENT_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer(), load_geometry(ROOT / "models" / "nano"), "")


def row_of(name: str, context: str, question: str = "What is it?") -> Row:
    return Row(task(name), "0", "en", question, context, ("it",), (), 1, "f:1")


def test_a_prompt_that_fits_is_split_at_its_markers(tmp_path, tokenizer):
    (row,) = read_rows(write(tmp_path / "f.jsonl"))
    built = build(row, tokenizer, 4096, DOCUMENT_TOKENS)
    assert not built.cut
    assert built.prompt.text == row.frame.text
    assert [document.split("\n")[1] for document in built.prompt.documents] == ["Liora", "Tamsin"]
    assert built.prompt.before.endswith("The following are given passages.\n")
    assert built.prompt.after.endswith("Question: What colour is the lamp of Liora?\nAnswer:")


def test_the_middle_is_cut_before_the_split(tokenizer):
    passages = [f"Passage {n}:\nThe number of house {n} is known to the people of the place.\n" for n in range(1, 21)]
    row = row_of("2wikimqa", "".join(passages))
    ids = tokenizer.encode(row.frame.text)
    limit = 300
    built = build(row, tokenizer, limit, DOCUMENT_TOKENS)
    assert built.cut
    assert built.prompt.text == tokenizer.decode(ids[: limit // 2 - 1]) + tokenizer.decode(ids[-(limit // 2) :])
    documents = built.prompt.documents
    assert (documents[0], documents[-1]) == (passages[0], passages[-1])
    broken = [document for document in documents if document not in passages]
    assert 1 <= len(broken) <= 2
    assert len(documents) < len(passages)


@given(
    st.sampled_from(["narrativeqa", "hotpotqa", "vcsum", "trec", "lcc", "repobench-p"]),
    st.text(st.sampled_from("ab .。\né日") | st.characters(codec="utf-8"), min_size=1, max_size=300),
    st.integers(2, 200),
)
def test_what_goes_in_comes_out(tokenizer, name, context, limit):
    row = row_of(name, context)
    built = build(row, tokenizer, limit, DOCUMENT_TOKENS)
    assert "".join(text for text, _ in built.prompt.parts) == built.prompt.text
    if not built.cut:
        assert built.prompt.text == row.frame.text
        assert "".join(built.prompt.documents) == context
    assert all(len(tokenizer.encode(document)) <= DOCUMENT_TOKENS for document in built.prompt.documents)


def test_rows_survive_the_way_through_a_file(tmp_path, tokenizer):
    context = "各位代表：\r\n\r\n现在\u2028报告 NEWLINE_CHAR\x00 \N{GRINNING FACE} "
    path = write(tmp_path / "f.jsonl", {"dataset": "vcsum", "context": context, "language": "zh"})
    assert json.loads(path.read_text(encoding="utf-8").split("\n")[0])["context"] == context
    (row,) = read_rows(path)
    assert "".join(build(row, tokenizer, 4096, 4).prompt.documents) == context
