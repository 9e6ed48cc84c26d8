"""nanoqa: contexts as clusters, exact answers, draws that go on where fewer ended."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from eval.encoder import Encoder
from eval.nanoqa.items import Draw, Generator
from redknot.errors import ConfigError, InputError
from redknot.nano.worlds import TASKS

DRAW = Draw(contexts=2, questions=3, tokens=(500, 580), documents=(2, 2), seed=1)


@pytest.fixture(scope="module")
def encoder(checkpoint):
    return Encoder.load(checkpoint)


@pytest.fixture(scope="module")
def generator(checkpoint, encoder):
    return Generator(checkpoint, encoder)


@pytest.mark.parametrize("task", TASKS)
def test_questions_of_a_context_share_their_documents(generator, encoder, task):
    items = list(generator.dataset(task, DRAW).items())
    assert [(item.cluster, item.id) for item in items] == [(str(c), f"{c}/{q}") for c in range(2) for q in range(3)]
    for cluster in "01":
        documents = {encoder.encode(item).documents[0].tobytes() for item in items if item.cluster == cluster}
        assert len(documents) == 1
    for item in items:
        prompt = encoder.encode(item)
        assert 450 < len(prompt) <= 580
        assert len(prompt.spans) == 2
        assert prompt.spans[-1][1] < len(prompt)
        assert item.dataset == task


def test_an_answer_is_right_when_it_is_the_reference_to_the_letter(generator, encoder):
    for task in TASKS:
        item = next(generator.dataset(task, DRAW).items())
        (reference,) = item.references
        ids = encoder.tokenizer.encode(reference if reference.startswith(" ") else f" {reference}")
        assert item.max_new_tokens == len(ids)
        assert item.score(encoder.tokenizer.decode(ids)) == 1.0
        assert item.score(reference) == 1.0
        assert item.score(reference.removesuffix(".")) == 0.0
        assert item.score(reference + " ") == 0.0


def test_more_contexts_begin_with_the_fewer_and_seeds_differ(generator):
    def parts(draw):
        return [item.parts for item in generator.dataset("single", draw).items()]

    few = parts(DRAW)
    assert parts(replace(DRAW, contexts=3))[: len(few)] == few
    assert parts(DRAW) == few
    assert parts(replace(DRAW, seed=2)) != few


def test_timing_has_a_prompt_of_each_length(generator, encoder):
    found = list(generator.timing((200, 300), 3, 1).items())
    assert [item.id for item in found] == ["200/0", "300/0"]
    assert [len(encoder.encode(item)) for item in found] == [200, 300]
    assert {item.dataset for item in found} == {"timing"}


def test_what_cannot_be_drawn_is_refused_at_the_start(generator):
    with pytest.raises(ConfigError, match="nanoqa has no task 'twice'; it has single"):
        generator.dataset("twice", DRAW)
    with pytest.raises(InputError, match=r"40 tokens, 2 documents: .*; give other --tokens or --documents"):
        generator.dataset("single", replace(DRAW, tokens=(40, 50)))
    with pytest.raises(InputError, match="593 tokens: the model has room for prompts of 584"):
        generator.dataset("single", replace(DRAW, tokens=(593, 600)))
    with pytest.raises(InputError, match="needs two documents or more"):
        generator.dataset("latest", replace(DRAW, documents=(1, 1)))


def test_another_tokenizer_is_refused(checkpoint, tmp_path):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = [[f"x{n}", score] for n, (_, score) in enumerate(content["model"]["vocab"])]
    content["added_tokens"] = []
    content["post_processor"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="this tokenizer is not nano's"):
        Generator(other, Encoder.load(checkpoint))
