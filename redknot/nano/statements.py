"""What nano's documents state and what may be asked about it, as token ids of the nano tokenizer.

- ``Fact``: "The code of Marla Quintel is amber 157."
- ``Owner``: "The owner of old harbour is Marla Quintel."
- ``Subject``: "This is about Marla Quintel.", whose ``Unnamed`` facts follow: "The code is amber 157."
- ``Indirect``, asked only: the code of the owner of old harbour, answered in two steps: who that is, and their code.

A question repeats the words of the (first) statement that answers it up to "is". Text is assembled from ids (every word
is one token, a name is two), and the ids equal what the tokenizer returns for the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer

from redknot.nano import names
from redknot.nano.tokenizer import EXTRA_PIECES, generator_pieces, to_vocab

Pair = tuple[str, str]  # two syllables of a name, the word and number of a value, the two words of a place


class Fact(NamedTuple):
    """One value of a person; names are (head, tail) syllables, the value is (word, number)."""

    relation: str
    first: Pair
    last: Pair
    value: Pair

    @property
    def name(self) -> str:
        """First and last name as written."""
        return f"{''.join(self.first)} {''.join(self.last)}"


class Owner(NamedTuple):
    """To whom a place (adjective, noun) belongs."""

    place: Pair
    first: Pair
    last: Pair


class Subject(NamedTuple):
    """Whom the unnamed facts behind it are about, until the next subject."""

    first: Pair
    last: Pair


class Unnamed(NamedTuple):
    """A value of the subject that was named last."""

    relation: str
    value: Pair


class Indirect(NamedTuple):
    """A value of the owner of a place."""

    place: Pair
    fact: Fact

    @property
    def owner(self) -> Owner:
        """The statement in another document that leads to the fact."""
        return Owner(self.place, self.fact.first, self.fact.last)


Statement = Fact | Owner | Subject | Unnamed
Question = Fact | Owner | Indirect


class Lexicon:
    """Token ids of the generator's pieces, and the filler templates as tuples of candidate ids per slot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.get_vocab()
        self.ids = {piece: vocab[to_vocab(piece)] for piece in [*generator_pieces(), *EXTRA_PIECES, *":?.\n"]}
        self.pieces = {index: piece for piece, index in self.ids.items()}
        self.slots = {kind: tuple(self.ids[f" {w}"] for w in words) for kind, words in names.FILLER_WORDS.items()}
        self.unspaced = {self.ids[f" {word}"]: self.ids[word] for word in names.FILLER_WORDS["start"]}
        self.templates: dict[int, list[list[tuple[int, ...]]]] = {}
        for words in names.FILLER_TEMPLATES:
            template = [self.slots.get(word) or (self.ids["." if word == "." else f" {word}"],) for word in words]
            self.templates.setdefault(len(words), []).append(template)

    def text(self, ids: Sequence[int]) -> str:
        """The text of generator ids."""
        return "".join(self.pieces[index] for index in ids)

    def statement(self, said: Statement) -> list[int]:
        """Ids of a sentence, with the space before it."""
        match said:
            case Subject():
                return [*self._words("This", "is", "about"), *self._name(said), self.ids["."]]
            case Unnamed():
                return [*self._words("The", said.relation, "is"), *self._value(said)]
            case _:
                return [*self.stem(said), *self.answer(said)]

    def key(self, asked: Question) -> list[int]:
        """Ids of what is asked for, e.g. " code of Marla Quintel"."""
        match asked:
            case Fact():
                return [*self._words(asked.relation, "of"), *self._name(asked)]
            case Owner():
                return self._owner(asked)
            case Indirect():
                return [*self._words(asked.fact.relation, "of", "the"), *self._owner(asked.owner)]

    def stem(self, asked: Fact | Owner) -> list[int]:
        """Ids of " The <key> is"."""
        return [*self._words("The"), *self.key(asked), *self._words("is")]

    def answer(self, asked: Question) -> list[int]:
        """Ids of " <word> <number>." [3], of the name and the full stop [5], or of both steps [16]."""
        match asked:
            case Owner():
                return [*self._name(asked), self.ids["."]]
            case Indirect():
                return [*self.answer(asked.owner), *self.stem(asked.fact), *self.answer(asked.fact)]
            case _:
                return self._value(asked)

    def question(self, asked: Question) -> list[int]:
        """Ids of "\\nQuestion: What is the <key>?\\nAnswer: The <key> is", the key of the first step."""
        ids = self.ids
        ask = [ids["\n"], ids["Question"], ids[":"], *self._words("What", "is", "the"), *self.key(asked), ids["?"]]
        return [
            *ask,
            ids["\n"],
            ids["Answer"],
            ids[":"],
            *self.stem(asked.owner if isinstance(asked, Indirect) else asked),
        ]

    def _words(self, *words: str) -> list[int]:
        return [self.ids[f" {word}"] for word in words]

    def _name(self, whose: Fact | Owner | Subject) -> list[int]:
        (first, first_tail), (last, last_tail) = whose.first, whose.last
        return [self.ids[f" {first}"], self.ids[first_tail], self.ids[f" {last}"], self.ids[last_tail]]

    def _owner(self, of: Owner) -> list[int]:
        return [*self._words("own"), self.ids["er"], *self._words("of", *of.place)]

    def _value(self, of: Fact | Unnamed) -> list[int]:
        return [*self._words(*of.value), self.ids["."]]


@lru_cache(maxsize=4)
def lexicon(tokenizer: Tokenizer) -> Lexicon:
    """The lexicon of a tokenizer object, made once."""
    return Lexicon(tokenizer)
