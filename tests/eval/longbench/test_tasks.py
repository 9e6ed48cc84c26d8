"""The table against what LongBench publishes."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from eval.longbench.score import METRICS
from eval.longbench.tasks import task, tasks
from redknot.errors import InputError


def digest(values: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def test_templates_and_caps_are_the_published_ones():
    """Of the benchmark's dataset2prompt.json and dataset2maxlen.json, each dumped with sorted keys."""
    templates = {name: task.template for name, task in tasks().items()}
    caps = {name: task.max_new_tokens for name, task in tasks().items()}
    assert digest(templates) == "bb89f011861ff65f8534f366632b99cc9d5681ae983c50f2537230faae16613f"
    assert digest(caps) == "39a79d9491ead3dc8bcea6dbd8b963b29248eb4c344dde1e176b0a58b4e758a9"


def test_the_rules_per_set():
    table = tasks().values()
    assert len(tasks()) == 21
    assert {t.name for t in table if not t.chat} == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {t.name for t in table if t.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {t.name for t in table if t.stop_at_newline} == {"samsum"}
    assert {t.name for t in table if t.longbench_e} == set(
        "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count"
        " passage_retrieval_en lcc repobench-p".split()
    )
    assert {t.name for t in table if t.language == "zh"} == set(
        "multifieldqa_zh dureader vcsum lsht passage_retrieval_zh".split()
    )
    assert {t.name for t in table if t.language == "code"} == {"lcc", "repobench-p"}


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("qa_f1", "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa"),
        ("qa_f1_zh", "multifieldqa_zh"),
        ("rouge_l", "gov_report qmsum multi_news samsum"),
        ("rouge_l_zh", "dureader vcsum"),
        ("classification", "trec lsht"),
        ("retrieval", "passage_retrieval_en"),
        ("retrieval_zh", "passage_retrieval_zh"),
        ("count", "passage_count"),
        ("code_similarity", "lcc repobench-p"),
    ],
)
def test_the_metric_of_each_set(metric, names):
    assert {t.name for t in tasks().values() if t.metric == metric} == set(names.split())
    assert metric in METRICS


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hotpotqa", "Passage 1:\nA\n\nPassage 12:\nB Passage 3: C", 2),
        ("passage_count", "Paragraph 1: A\n\nParagraph 2: B", 2),
        ("passage_retrieval_zh", "段落1：甲\n段落2：乙", 2),
        ("dureader", "文章1\n标题：甲\n文章22\n标题：乙文章3", 2),
    ],
)
def test_markers(name, text, found):
    assert len(re.findall(task(name).marker, text, re.MULTILINE)) == found


def test_names_are_exact_and_longbench_e_lacks_some():
    assert task("hotpotqa").file_stem(longbench_e=True) == "hotpotqa_e"
    assert task("musique").file_stem() == "musique"
    with pytest.raises(InputError, match="LongBench-E has no musique; it has qasper"):
        task("musique").file_stem(longbench_e=True)
    with pytest.raises(InputError, match="no set 'hotpot'; it has narrativeqa"):
        task("hotpot")
