"""LongBench rows as items: the ids fit the limit, whatever the parts take more than the whole text."""

from __future__ import annotations

import pytest

from eval.encoder import Encoder
from eval.longbench.items import dataset
from eval.longbench.tasks import task
from redknot.errors import InputError
from tests.kit.corpus import MAX_POSITIONS, document
from tests.kit.longbench import write


@pytest.fixture
def encoder(checkpoint):
    return Encoder.load(checkpoint)


def items(tmp_path, encoder, name="hotpotqa", e=False, limit=None, document_tokens=40, **row):
    write(tmp_path / f"{task(name).file_stem(e)}.jsonl", {"dataset": name, **row})
    return list(dataset(tmp_path, task(name), e, encoder, limit, document_tokens).items())


def test_a_short_row_is_whole(tmp_path, encoder):
    (item,) = items(tmp_path, encoder)
    assert not item.cut
    assert item.score("green") == 1.0
    assert (item.dataset, item.id, item.group, item.max_new_tokens) == ("hotpotqa", "0f1e", "", 32)
    assert [is_document for _, is_document in item.parts] == [False, True, True, False]


@pytest.mark.parametrize("limit", [*range(130, 150), None])
def test_the_ids_fit(tmp_path, encoder, limit):
    context = "".join(f"{document(30, seed)} x{seed}\n" for seed in range(30))
    (item,) = items(tmp_path, encoder, limit=limit, context=context)
    most = MAX_POSITIONS - item.max_new_tokens if limit is None else limit
    assert item.cut
    assert most - 60 < len(encoder.encode(item)) <= most


def test_a_row_that_fits_whole_and_not_in_parts_is_cut(tmp_path, encoder):
    context = "".join(f"{document(30, seed)} x{seed}\n" for seed in range(3))
    (item,) = items(tmp_path, encoder, context=context)
    limit = len(encoder.encode(item)) - 1
    (cut,) = items(tmp_path, encoder, context=context, limit=limit)
    assert cut.cut
    assert len(encoder.encode(cut)) <= limit


def test_of_longbench_e_the_bucket_is_kept(tmp_path, encoder):
    (item,) = items(tmp_path, encoder, e=True, length=5000)
    assert (item.dataset, item.group) == ("hotpotqa_e", "4-8k")


def test_a_limit_that_leaves_nothing_is_refused(tmp_path, encoder):
    with pytest.raises(InputError, match="two halves"):
        items(tmp_path, encoder, limit=1)
