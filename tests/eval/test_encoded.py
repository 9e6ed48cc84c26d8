"""Prompts as ids: parts joined, documents where they stand, and hashes that tell any two apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eval.encoded import encoded, prompt_sha256

PARTS = st.lists(st.tuples(st.lists(st.integers(0, 2000), max_size=6), st.booleans()), max_size=6)


@given(PARTS)
def test_parts_are_joined_and_documents_stand_where_they_stood(parts):
    prompt = encoded(parts)
    assert prompt.token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert [ids.tolist() for ids in prompt.documents] == [ids for ids, is_document in parts if is_document and ids]
    assert len(prompt) == len(prompt.token_ids)


@given(PARTS, PARTS)
def test_equal_hashes_are_equal_prompts(one, other):
    a, b = encoded(one), encoded(other)
    same = a.token_ids.tolist() == b.token_ids.tolist() and a.spans == b.spans
    assert (a.sha256 == b.sha256) == same


def test_a_hash_is_of_ids_and_spans_in_any_form():
    assert prompt_sha256([1, 2, 3], [(1, 2)]) == prompt_sha256(np.array([1, 2, 3], np.int32), ((1, 2),))
    assert prompt_sha256([1, 2], [(3, 4)]) != prompt_sha256([1, 2, 3, 4], [])
    assert encoded([]).token_ids.tolist() == []
