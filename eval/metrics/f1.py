"""F1 over words: English after the usual normalisation, Chinese over jieba's words."""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's Chinese punctuation, as first and last characters of ranges. It has 》 and not 《, and no ．: kept so.
_CHINESE = "–— ‘’ ‛‟ …‧ 、〃 》】 〔〟 〰〰 〾〿 ﹏﹏ ！－ ／／ ：＠ ［｀ ｛､"
_CHINESE_PUNCTUATION = _PUNCTUATION | {
    code: None for first, last in _CHINESE.split() for code in range(ord(first), ord(last) + 1)
}


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words of two English texts."""
    return overlap_f1(normalised(prediction).split(), normalised(reference).split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 of the words of two Chinese texts."""
    return overlap_f1(_chinese_words(prediction), _chinese_words(reference))


def normalised(text: str) -> str:
    """Lower case, without punctuation, without the words a, an and the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def overlap_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two bags of words; 0 when they share none, so also when one is empty."""
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def chinese_segments(text: str) -> list[str]:
    """jieba's words of a text, spaces and punctuation among them."""
    return list(_jieba().cut(text, cut_all=False))


def _chinese_words(text: str) -> list[str]:
    """jieba's words in lower case, without punctuation and space; the words that are only that are left out."""
    words = ("".join(word.lower().translate(_CHINESE_PUNCTUATION).split()) for word in chinese_segments(text))
    return [word for word in words if word]


@lru_cache(maxsize=1)
def _jieba():
    """jieba, imported when the first Chinese text comes: its dictionary takes a second."""
    import jieba

    jieba.setLogLevel(logging.WARNING)
    return jieba
