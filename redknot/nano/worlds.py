"""Worlds: what the documents of a request state, and which questions that answers. One function a task.

- ``single``: every key is stated once.
- ``latest``: the keys asked for are stated in two documents with different values; the later document holds.
- ``owner``: two hops; one document names the owner of a place, a later one a value of that person. Both are answered.
- ``about``: a document ends by saying whom the text behind it is about; the next one begins with values without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from redknot.nano import names
from redknot.nano.names import Split
from redknot.nano.statements import Fact, Indirect, Owner, Question, Statement, Subject, Unnamed

UNNAMED_MOST = 3  # values without a name in one document


@dataclass(frozen=True)
class World:
    """The statements of each document, the questions that make the task, and others that hold too."""

    documents: list[list[Statement]]
    asked: list[Question]
    besides: list[Question]


def draw_facts(rng: Generator, split: Split, n_facts: int, sibling_share: float = 0.0) -> list[Fact]:
    """Facts with distinct keys; names are distinct too, except for a `sibling_share` of repeated ones."""
    firsts, lasts, values = names.first_names(split), names.last_names(split), names.values(split)
    facts: list[Fact] = []
    used: set[tuple[tuple[str, str], tuple[str, str]]] = set()
    sibling = (rng.random(n_facts) < sibling_share).tolist()
    while len(facts) < n_facts:
        first, last = firsts[rng.integers(len(firsts))], lasts[rng.integers(len(lasts))]
        value = values[rng.integers(len(values))]
        relation = int(rng.integers(len(names.RELATIONS)))
        if sibling[len(facts)] and facts and not sibling[len(facts) - 1]:
            other = names.RELATIONS.index(facts[-1].relation) + 1 + relation % (len(names.RELATIONS) - 1)
            facts.append(facts[-1]._replace(relation=names.RELATIONS[other % len(names.RELATIONS)], value=value))
        elif (first, last) not in used:
            used.add((first, last))
            facts.append(Fact(names.RELATIONS[relation], first, last, value))
    return facts


def restate(rng: Generator, split: Split, fact: Fact) -> Fact:
    """The same key with another value."""
    values = names.values(split)
    value = fact.value
    while value == fact.value:
        value = values[rng.integers(len(values))]
    return fact._replace(value=value)


def place(
    rng: Generator,
    n_documents: int,
    capacity: int,
    singles: Sequence[Statement],
    pairs: Sequence[tuple[Statement, Statement]] = (),
    near_share: float = 0.0,
) -> list[list[Statement]]:
    """Statements per document, shuffled, at most `capacity` each; the second of a pair is in a later document.

    A `near_share` of the pairs is in neighbouring documents, as long as there are such with room: told apart only by
    what stood before, since their distances from a question are nearly the same.
    """
    placed: list[list[Statement]] = [[] for _ in range(n_documents)]
    for left, pair in zip(range(len(pairs) - 1, -1, -1), pairs, strict=True):
        # The emptiest documents first, so that no pair is left with a single open document.
        order = sorted(rng.permutation(n_documents).tolist(), key=lambda index: len(placed[index]))
        if near_share and rng.random() < near_share:
            order = _neighbours(rng, [capacity - len(said) for said in placed], left) or order
        for said, index in zip(pair, sorted(order[:2]), strict=True):
            placed[index].append(said)
    room = [index for index in range(n_documents) for _ in range(capacity - len(placed[index]))]
    for single, index in zip(singles, rng.permutation(room)[: len(singles)].tolist(), strict=True):
        placed[index].append(single)
    return [[said[i] for i in rng.permutation(len(said))] for said in placed]


def _neighbours(rng: Generator, room: Sequence[int], left: int) -> list[int]:
    """Two neighbouring documents for one pair that leave room for `left` more pairs, empty if there are none."""
    for first in rng.permutation(len(room) - 1).tolist():
        after = [count - (index in (first, first + 1)) for index, count in enumerate(room)]
        if min(after) >= 0 and sum(min(count, left) for count in after) >= 2 * left:
            return [first, first + 1]
    return []


# (rng, split, documents, statements a document, questions wanted) -> World
Task = Callable[[Generator, Split, int, int, int], World]
TASKS: dict[str, Task] = {}


def task(name: str) -> Callable[[Task], Task]:
    """Register a task under `name`."""

    def register(function: Task) -> Task:
        TASKS[name] = function
        return function

    return register


@task("single")
def _single(rng: Generator, split: Split, n_documents: int, capacity: int, questions: int) -> World:
    facts = draw_facts(rng, split, n_documents * capacity)
    return World(place(rng, n_documents, capacity, facts), list(facts[:questions]), list(facts[questions:]))


@task("latest")
def _latest(rng: Generator, split: Split, n_documents: int, capacity: int, questions: int) -> World:
    n_pairs = _pairs("latest", n_documents, capacity, questions)
    facts = draw_facts(rng, split, n_documents * capacity - n_pairs)
    pairs = [(restate(rng, split, fact), fact) for fact in facts[:n_pairs]]
    return World(
        place(rng, n_documents, capacity, facts[n_pairs:], pairs), list(facts[:n_pairs]), list(facts[n_pairs:])
    )


@task("owner")
def _owner(rng: Generator, split: Split, n_documents: int, capacity: int, questions: int) -> World:
    n_pairs = _pairs("owner", n_documents, capacity, questions)
    facts = draw_facts(rng, split, n_documents * capacity - n_pairs)
    places = names.places(split)
    chosen = [places[index] for index in rng.choice(len(places), n_pairs, replace=False).tolist()]
    pairs = [(Owner(where, fact.first, fact.last), fact) for where, fact in zip(chosen, facts, strict=False)]
    return World(
        place(rng, n_documents, capacity, facts[n_pairs:], pairs),
        [Indirect(owner.place, fact) for owner, fact in pairs],
        [*(owner for owner, _ in pairs), *facts],
    )


@task("about")
def _about(rng: Generator, split: Split, n_documents: int, capacity: int, questions: int) -> World:
    if n_documents < 2:
        raise ValueError("the task 'about' needs two documents or more")
    n_subjects = n_documents // 2
    each = min(max(1, -(-questions // n_subjects)), capacity, UNNAMED_MOST)
    people = draw_facts(rng, split, n_documents * capacity - n_subjects * each)
    subjects, singles = people[:n_subjects], people[n_subjects:]
    documents = place(rng, n_documents, capacity - each, singles[: n_documents * (capacity - each)])
    asked: list[Question] = []
    for number, person in enumerate(subjects):
        values = names.values(split)
        relations = rng.permutation(len(names.RELATIONS))[:each].tolist()
        facts = [
            person._replace(relation=names.RELATIONS[index], value=values[rng.integers(len(values))])
            for index in relations
        ]
        front, body = documents[2 * number], documents[2 * number + 1]
        front.append(Subject(person.first, person.last))
        body[:0] = [Unnamed(fact.relation, fact.value) for fact in facts]
        asked += facts
    order = rng.permutation(len(asked)).tolist()
    stated = [said for document in documents for said in document if isinstance(said, Fact)]
    return World(documents, [asked[index] for index in order], list(stated))


def _pairs(name: str, n_documents: int, capacity: int, questions: int) -> int:
    """How many pairs of statements in two documents there is room for, at most as many as are asked about."""
    if n_documents < 2:
        raise ValueError(f"the task {name!r} needs two documents or more")
    return min(questions, n_documents * capacity // 2)
