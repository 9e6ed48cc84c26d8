"""RULER rows in parts, and the two string matches by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.ruler.rows import read_rows
from eval.ruler.score import score, set_score, string_match_all, string_match_part
from redknot.errors import InputError

NEEDLES = [f"One of the special magic numbers for key-{n} is: {1000 + n}." for n in range(12)]
PARTS = {
    "niah": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you.\n",
        "\n".join(NEEDLES),
        "\nWhat is the special magic number for key-3 mentioned in the provided text? The special magic number is",
    ),
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "VAR A = 1\nQuestion: Find all variables that are 1. Answer: A\n\nVAR B = 12345\nVAR C = VAR B",
        "\nQuestion: Find all variables that are assigned the value 12345 in the text above. Answer: they are: ",
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others.\n",
        "1. owl 2. fox 3. owl",
        "\nQuestion: What are the 10 most common words in the above list? Answer: The words are:",
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        "... abc ... abc",
        "\nQuestion: Do not provide any explanation. What are the three words? Answer: The three are:",
    ),
    "qa": (
        "Answer the question based on the given documents. Only give me the answer.\n\n"
        "The following are given documents.\n\n",
        "Document 1:\nA\n\nDocument 2:\nB",
        "\n\nAnswer the question based on the given documents. Only give me the answer.\n\nQuestion: Who? Answer:",
    ),
}


def write(path: Path, **fields: Any) -> Path:
    path.write_text(
        json.dumps({"index": 4, "input": "".join(PARTS["niah"]), "outputs": ["1003"], "length": 99} | fields)
    )
    return path


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_prompt_is_taken_apart_where_its_context_is(tmp_path, name):
    (row,) = read_rows(write(tmp_path / "f.jsonl", input="".join(PARTS[name])))
    assert row.kind.name == name
    assert (row.frame.before, row.frame.context, row.frame.after) == PARTS[name]
    assert (row.index, row.outputs, row.length, row.source) == (4, ("1003",), 99, f"{tmp_path}/f.jsonl:1")


def test_the_beginning_of_the_answer_may_stand_apart(tmp_path):
    before, context, after = PARTS["niah"]
    question, prefix = after.split("?")
    (row,) = read_rows(write(tmp_path / "f.jsonl", input=f"{before}{context}{question}?", answer_prefix=prefix))
    assert row.frame.after == after


class Characters:
    bos_id = None

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_documents_are_whole_lines_or_marked(tmp_path):
    (row,) = read_rows(write(tmp_path / "f.jsonl"))
    prompt = row.prompt(Characters(), 200)
    assert prompt.text == row.frame.text
    assert len(prompt.documents) == 4
    assert all(document.splitlines() == NEEDLES[3 * n : 3 * n + 3] for n, document in enumerate(prompt.documents))
    (row,) = read_rows(write(tmp_path / "f.jsonl", input="".join(PARTS["qa"])))
    assert row.prompt(Characters(), 200).documents == ("Document 1:\nA\n\n", "Document 2:\nB")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": "Tell me."}, "begins and ends as none of RULER's prompts (niah, vt, cwe, fwe, qa): 'Tell me.'"),
        ({"input": PARTS["niah"][0] + PARTS["vt"][2]}, "begins and ends as none of RULER's prompts"),
        ({"outputs": "1003"}, '"outputs" must be a list of at least one text, not a text'),
        ({"index": None}, '"index" must be a whole number of at least 0, not None'),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, fields, message):
    with pytest.raises(InputError) as error:
        list(read_rows(write(tmp_path / "f.jsonl", **fields)))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/f.jsonl:1: ")


def test_string_matches():
    assert string_match_all("it is ABC and 7", ["abc", "7", "8"]) == 2 / 3
    assert string_match_all("1003", ["1003"]) == 1.0
    assert string_match_all("", ["1003"]) == 0.0
    assert string_match_part("it is ABC", ["abc", "8"]) == 1.0
    assert string_match_part("nothing", ["abc", "8"]) == 0.0


def test_needles_are_all_wanted_and_of_a_question_one_answer(tmp_path):
    (niah,) = read_rows(write(tmp_path / "f.jsonl", outputs=["1003", "1004"]))
    (qa,) = read_rows(write(tmp_path / "f.jsonl", outputs=["1003", "1004"], input="".join(PARTS["qa"])))
    assert score(niah, " 1003\x07") == 0.5
    assert score(qa, " 1003\x07") == 1.0
    assert score(qa, "10\x0003") == 0.0  # a control character is a line break, not nothing


def test_two_decimals_at_the_end():
    assert set_score([1.0, 0.0, 0.0]) == 33.33
    with pytest.raises(ValueError, match="without rows"):
        set_score([])
