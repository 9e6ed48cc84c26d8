"""Prompts and arrivals follow from seeds; documents keep their tokens wherever they stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.names import QUESTION
from eval.serving.workload import Generated, Pool, arrivals, read_pool
from redknot.errors import InputError
from redknot.model.geometry import load_geometry
from redknot.model.tokenizer import load_tokenizer
from tests.kit.child import NANO


@pytest.fixture(scope="module")
def pool() -> Pool:
    return read_pool(NANO, Generated(6, 128, 1))


def test_generated_documents(pool):
    assert [len(ids) for ids in pool.documents] == [128] * 6
    assert len(pool.questions) >= 6
    assert read_pool(NANO, Generated(6, 128, 1)).sha256 == pool.sha256
    assert read_pool(NANO, Generated(6, 128, 2)).sha256 != pool.sha256


def test_prompts_follow_from_the_seed(pool):
    first, again, other = pool.prompts(8, 3, [5, 0]), pool.prompts(8, 3, [5, 0]), pool.prompts(8, 3, [5, 1])
    assert [one.sha256 for one in first] == [one.sha256 for one in again]
    assert {one.sha256 for one in first}.isdisjoint(one.sha256 for one in other)
    known = {ids.tobytes() for ids in pool.documents}
    for prompt in first:
        parts = [ids.tobytes() for ids in prompt.documents]
        assert len(set(parts)) == 3
        assert known.issuperset(parts)
        assert prompt.token_ids[0] == pool.before[0]
        assert len(prompt) <= pool.longest(3)


def test_warming_reads_every_document_once(pool):
    prompts = pool.warming(4)
    assert [len(prompt.spans) for prompt in prompts] == [4, 2]
    read = [ids.tobytes() for prompt in prompts for ids in prompt.documents]
    assert read == [ids.tobytes() for ids in pool.documents]


@given(st.integers(1, 200), st.floats(0.01, 1000), st.integers(0, 10**6))
def test_arrivals(count, rate, seed):
    found = arrivals(count, rate, [seed, 0])
    assert len(found) == count
    assert found == sorted(found)
    assert found[0] >= 0
    assert found == arrivals(count, rate, [seed, 0])
    twice = arrivals(count, 2 * rate, [seed, 0])
    np.testing.assert_allclose(np.array(found), 2 * np.array(twice))


def test_arrivals_are_as_many_as_wanted_in_the_long_run():
    gaps = np.diff(arrivals(20_000, 4.0, [0]))
    assert abs(gaps.mean() - 0.25) < 0.01
    assert abs(gaps.std() - 0.25) < 0.01  # of an exponential distribution, both are the same


def test_a_corpus(tmp_path):
    for name, text in (("a", "alpha beta"), ("b", "gamma")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    found = read_pool(NANO, tmp_path)
    tokenizer = load_tokenizer(NANO, load_geometry(NANO))
    assert [ids.tolist() for ids in found.documents] == [
        tokenizer.encode(text).tolist() for text in ("alpha beta", "gamma")
    ]
    assert [ids.tolist() for ids in found.questions] == [tokenizer.encode(QUESTION).tolist()]


def test_refusals(tmp_path):
    with pytest.raises(InputError, match="holds no document"):
        read_pool(NANO, tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    with pytest.raises(InputError, match="cannot be used: "):
        read_pool(NANO, tmp_path)
    with pytest.raises(InputError, match="give longer ones"):
        read_pool(NANO, Generated(2, 10, 0))
