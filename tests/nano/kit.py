"""What documents of the generator say, read from their text."""

from __future__ import annotations

import re
from dataclasses import replace

from redknot.nano.samples import Sample

FACT = re.compile(r"The (\w+) of (\w+ \w+) is (\w+ \d+)\.")
OWNER = re.compile(r"The owner of (\w+ \w+) is (\w+ \w+)\.")
NAMELESS = re.compile(r"This is about (\w+ \w+)\.|The (\w+) is (\w+ \d+)\.")
ASKED = re.compile(r"\nQuestion: What is the (.+)\?\nAnswer: The (.+) is")


def facts(text: str) -> dict[tuple[str, str], str]:
    """Value of each (relation, name) that the text states in so many words; the last statement holds."""
    return {(relation, name): value for relation, name, value in FACT.findall(text)}


def owners(text: str) -> dict[str, str]:
    """Owner of each place."""
    return dict(OWNER.findall(text))


def nameless(text: str) -> dict[tuple[str, str], str]:
    """Value of each (relation, name) whose name stands in front of it only."""
    found, subject = {}, ""
    for name, relation, value in NAMELESS.findall(text):
        if name:
            subject = name
        else:
            found[relation, subject] = value
    return found


def truth(text: str, asked: str) -> str:
    """What a text says of e.g. "code of Marla Quintel"; KeyError where it says nothing."""
    if asked.startswith("owner of "):
        return owners(text)[asked.removeprefix("owner of ")]
    relation, _, whose = asked.partition(" of ")
    if whose.startswith("the owner of "):
        name = owners(text)[whose.removeprefix("the owner of ")]
        return f"{name}. The {relation} of {name} is {facts(text)[relation, name]}"
    return (nameless(text) | facts(text))[relation, whose]


def swap_latest(sample: Sample) -> Sample:
    """A `latest` sample with the two documents that state the key exchanged, and the answer that then holds."""
    [(question, _)] = sample.questions
    stem = question.rpartition("Answer:")[2]
    early, late = (index for index, text in enumerate(sample.documents) if stem in text)
    documents = list(sample.documents)
    documents[early], documents[late] = documents[late], documents[early]
    answer = documents[late].partition(stem)[2].partition(".")[0] + "."
    return replace(sample, documents=tuple(documents), questions=((question, answer),))
