"""The nano tokenizer: a byte-level vocabulary of 2,048 pieces in which every generator word is one token.

Text is mapped to bytes, split by the usual byte-level pattern and segmented into the fewest pieces (a unigram model
with equal scores); all 256 bytes are pieces, so any text encodes and decodes without loss. Nothing is trained: the file
is a pure function of the word lists. Build it with `python -m redknot.nano.tokenizer --out models/nano`.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from redknot.nano import names

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
# The checkpoint knows no roles: what was said follows one behind the other.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}\n{% endfor %}"
FIRST_WORD_ID = 3 + 256  # specials, then single bytes, then words

# Words of the fixed sentences that are not in another list.
FRAME_PIECES = (
    *("Document", "Question", "Answer", " Document", " Question", " Answer", " What", " is", " the", " of"),
    *(" and", " then", " while", " because", " again"),
)
EXTRA_PIECES = (" about", " own", "er")  # of the generator's sentences too, among those of other text
# Pieces that shorten other English text.
COMMON_WORDS = names.words("""
a an to in it as at be by he she we you they his her its our their your my me him them us for on with from that this
these those was were are been being has have had do does did will would can could should may might must not no yes but
or nor so if than when where which who whom whose what why how all any both each few many most much other such own same
only very too also just now here there up down out off over about into through during before after between against up
until since without within first last next new one two three four five six seven eight nine ten time year day week
month hour minute people way work life world hand part number name place case point water money home house side room
thing make made go went gone come came see saw say said get got give gave think thought know knew use used tell told
ask asked call called try tried leave left put keep let begin began seem help show play run move live believe hold
bring happen write provide sit stand lose pay meet include continue set learn change lead understand watch follow stop
create speak read allow add spend grow offer remember love consider appear buy wait serve die send expect build stay
fall cut reach kill remain good great little high big different large long right important public able
""")
SUFFIXES = names.words("ing tion ment ness able ible ally ence ance ship ward less ious ated ight ould ther ever self")


def _byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


BYTE_CHARS = _byte_alphabet()


def to_vocab(piece: str) -> str:
    """The vocabulary entry of a piece of text, e.g. `" of"` -> `"Ġof"`."""
    return "".join(BYTE_CHARS[byte] for byte in piece.encode())


def generator_pieces() -> list[str]:
    """Every multi-character piece the text generator writes, in vocabulary order."""
    spaced = [
        *names.FIRST_HEADS,
        *names.LAST_HEADS,
        *names.RELATIONS,
        *names.VALUE_WORDS,
        *names.VALUE_NUMBERS,
        *(word for words in names.FILLER_WORDS.values() for word in words),
    ]
    pieces = [
        *FRAME_PIECES,
        *names.FILLER_WORDS["start"],
        *(f" {word}" for word in spaced),
        *names.FIRST_TAILS,
        *names.LAST_TAILS,
    ]
    return list(dict.fromkeys(pieces))


def vocabulary() -> list[str]:
    """All `VOCAB_SIZE` entries by id: specials, bytes, generator pieces, then pieces for other text."""
    letters = "etaoinsrhldcumfpgwybvkxjqz"
    general = [
        *(f" {word}" for word in COMMON_WORDS),
        *SUFFIXES,
        *(f" {letter}" for letter in letters),
        *(f"{number:02d}" for number in range(100)),
        *("".join(pair) for pair in product(letters, letters)),
    ]
    pieces = dict.fromkeys(to_vocab(piece) for piece in [*generator_pieces(), *general])
    single = [BYTE_CHARS[byte] for byte in range(256)]
    return [BOS, EOS, PAD, *single, *pieces][:VOCAB_SIZE]


def build_tokenizer() -> Tokenizer:
    """The tokenizer; `encode` puts BOS in front unless it is called with `add_special_tokens=False`.

    Raises:
        AssertionError: a generator piece is not one token, or a name is not two.
    """
    entries = vocabulary()
    # Longer pieces win ties between segmentations with the same number of pieces.
    scores = [(entry, -1.0 - 1.0 / (10 * len(entry))) for entry in entries]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=PAD_ID, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (BOS, EOS, PAD)])
    _check(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def _check(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    ids = tokenizer.get_vocab()
    for piece in generator_pieces():
        # A second syllable only ever follows a first one.
        if piece in names.FIRST_TAILS or piece in names.LAST_TAILS:
            assert to_vocab(piece) in ids, piece
        else:
            assert tokenizer.encode(piece).ids == [ids[to_vocab(piece)]], piece
    for heads, tails in ((names.FIRST_HEADS, names.FIRST_TAILS), (names.LAST_HEADS, names.LAST_TAILS)):
        for head, tail in product(heads, tails):
            found = tokenizer.encode(f" {head}{tail}").ids
            assert found == [ids[to_vocab(f" {head}")], ids[to_vocab(tail)]], head + tail


def save(out: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line: build the tokenizer files."""
    parser = argparse.ArgumentParser(description="Build the nano tokenizer files.")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json, tokenizer_config.json")
    save(parser.parse_args().out)


if __name__ == "__main__":
    main()
