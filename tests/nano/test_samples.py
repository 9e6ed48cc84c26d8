"""Samples: of the length asked for, and their answers are what the documents say."""

from __future__ import annotations

import numpy as np
import pytest

from redknot.nano import names
from redknot.nano.samples import make_sample, sample_ids
from redknot.nano.tokenizer import BOS_ID, build_tokenizer
from redknot.nano.worlds import TASKS
from tests.nano.kit import ASKED, facts, nameless, owners, swap_latest, truth

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("n_tokens", "n_documents"), [(256, 2), (1024, 4), (2048, 8), (1500, 5)])
def test_samples_have_the_length_asked_for_and_the_right_answers(
    task: str, split: names.Split, n_tokens: int, n_documents: int
) -> None:
    rng = np.random.default_rng(n_tokens)
    sample = make_sample(rng, TOKENIZER, task, split, n_tokens, n_documents, questions=5)
    assert len(sample.documents) == n_documents
    assert len(sample.questions) == 5 or n_tokens == 256
    assert len({question for question, _ in sample.questions}) == len(sample.questions)
    lengths = []
    text = "".join(sample.documents)
    known = {f"{word} {number}" for word, number in names.values(split)}
    for number, (question, answer) in enumerate(sample.questions):
        bos, *documents, asking, answering = sample_ids(TOKENIZER, sample, number)
        assert bos == [BOS_ID]
        assert len(answering) == (16 if task == "owner" else 3)
        lengths.append(sum(map(len, (bos, *documents, asking))))
        asked = ASKED.fullmatch(question)
        assert asked is not None
        assert answer == f" {truth(text, asked[1])}."
        assert answer.rpartition(" is ")[2].strip(" .") in known
        assert asked[2] == ("owner of " + asked[1].rpartition("owner of ")[2] if task == "owner" else asked[1])
    assert max(lengths) == n_tokens


def test_each_task_asks_what_it_is_about() -> None:
    for seed in range(10):
        texts = {}
        for task in TASKS:
            sample = make_sample(np.random.default_rng(seed), TOKENIZER, task, "test", 1024, 4)
            asked = ASKED.fullmatch(sample.questions[0][0])
            assert asked is not None
            texts[task] = (asked[1], sample.documents)
        key, documents = texts["latest"]
        assert sum(f"The {key} is" in document for document in documents) == 2
        key, documents = texts["single"]
        assert sum(f"The {key} is" in document for document in documents) == 1
        key, documents = texts["owner"]
        owned = [index for index, document in enumerate(documents) if key.partition("owner of ")[2] in owners(document)]
        name = owners("".join(documents))[key.partition("owner of ")[2]]
        told = [index for index, document in enumerate(documents) if any(name == who for _, who in facts(document))]
        assert owned < told
        key, documents = texts["about"]
        relation, _, name = key.partition(" of ")
        fronts = [index for index, document in enumerate(documents) if f"This is about {name}." in document]
        assert all(f"{relation} of {name}" not in document for document in documents)
        assert (relation, "") in nameless(documents[fronts[0] + 1])  # the document alone does not say whose it is


def test_swapping_the_documents_of_latest_swaps_the_answer() -> None:
    sample = make_sample(np.random.default_rng(3), TOKENIZER, "latest", "test", 600, 4)
    swapped = swap_latest(sample)
    assert swapped.questions != sample.questions
    asked = ASKED.fullmatch(swapped.questions[0][0])
    assert asked is not None
    assert swapped.questions[0][1] == f" {truth(''.join(swapped.documents), asked[1])}."
    assert swap_latest(swapped) == sample


def test_samples_are_a_function_of_the_seed() -> None:
    first, again = (make_sample(np.random.default_rng(5), TOKENIZER, "about", "test", 512, 4) for _ in range(2))
    assert first == again
