"""Word lists of the nano text generator, and the split of names and values.

Every list item is one token of the nano tokenizer (with a leading space, except the second syllables). A first or last
name is two syllables; train and test names are disjoint as whole names but share all their syllables. A value is a word
and a number; train and test values are disjoint as pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Literal

Split = Literal["train", "test"]

TRAIN_SHARE = 0.6


def words(text: str) -> tuple[str, ...]:
    """The words of a list written as text."""
    return tuple(text.split())


FIRST_HEADS = words("""
    Mar Jol Tes Bren Cal Dor Fen Gil Hal Ist Jas Kel Lor Mis Nel Orl Pel Ros Sil Tam Urs Val Wil Yas Zel Bel Cor Dal
    Edr Fal Gar Hes Jun Kir Lin Mer Nor Osk Per Ral Sor Tob Ulm Ver Wes Yor Zan Bas Cas Dim Ern Flo Gus Hed Jer Kas Lud
    Mat Nad Otl
""")
FIRST_TAILS = words("""
    la na ric da lo nia vin ka ma rin do bert sie ta len go mina gar ra dra mo ny phe lia ton va tha ko ser wyn za ro
    dell fa mund ba ley nor ga cie ven pa ja dan sa tine bel mir wa lin del fred ya sto ria zel nus rick bo
""")
LAST_HEADS = words("""
    Quin Hark Thor Pem Wex Bal Carm Drum Elk Farn Grim Hol Ing Jenk Kest Lang Mold Nash Oak Prat Rud Stan Trev Und Vick
    Whit Yard Zim Ash Brom Crow Dent Emb Fitz Glen Hask Irv Jar Knox Lam Mort Nev Old Penn Red Sutt Tar Upt Vaug Wark
    Yel Ald Black Cray Dun Eas Frob Good Hudd Lind
""")
LAST_TAILS = words("""
    tel ford ley ham ton by wick stead more son well man ings den worth combe ridge sley mont ler shaw thorpe croft
    bury gate hurst dale wood field pole ker land ster ney vale low side mere brook cott ling row burn ness pool kin
    try grove sey lock mar tree wall hill ment stone beck rop quist holm
""")
RELATIONS = ("code", "badge", "locker", "ticket", "parcel", "signal")

VALUE_WORDS = words("""
    amber crimson violet indigo scarlet ivory jade coral ruby emerald sapphire topaz opal pearl onyx garnet quartz
    copper bronze cobalt nickel zinc iron steel chrome platinum maroon navy teal olive lilac mauve khaki beige tan cyan
    magenta turquoise ochre russet falcon eagle sparrow heron osprey raven robin finch magpie pelican puffin swan goose
    duck penguin parrot canary owl hawk crane tiger lion panther leopard cheetah jaguar lynx wolf fox badger otter
    beaver weasel ferret rabbit hare squirrel hedgehog moose elk bison buffalo camel llama zebra giraffe rhino hippo
    elephant monkey gorilla lemur koala panda kangaroo dolphin whale walrus turtle tortoise lizard gecko cobra python
    viper salmon trout pike perch carp tuna shark maple cedar birch willow aspen poplar walnut hazel elder rowan laurel
    holly ivy fern moss clover thistle nettle daisy tulip orchid lotus poppy jasmine lavender rosemary thyme basil sage
    mint saffron ginger pepper nutmeg clove vanilla cocoa almond cashew mango papaya banana cherry plum apricot lemon
    fig pear
""")
VALUE_NUMBERS = tuple(str(number) for number in range(100, 260))

FILLER = {
    "start": "The This That One Every Our Her His My Each Another Some",
    "adjective": """
    old young small large quiet busy bright pale tall short heavy light narrow wide warm cold cool dry wet clean dusty
    soft hard new plain simple gentle kind proud clever careful happy tired hungry sleepy early late local foreign round
    square smooth rough broken empty full open wooden rusty golden silver grey brown white black blue green yellow fresh
    sweet bitter loud calm lonely friendly famous hidden distant nearby ancient modern curious patient honest brave
    gloomy sunny windy misty rainy""",
    "person": """
    baker sailor farmer teacher doctor nurse painter miller butcher tailor singer dancer writer driver pilot captain
    porter gardener hunter shepherd weaver potter carpenter mason plumber clerk judge lawyer banker merchant trader
    waiter cook servant soldier guard student pupil child boy girl woman man neighbour stranger traveller visitor guest
    cousin uncle aunt brother sister father mother grandmother widow poet actor""",
    "thing": """
    basket bottle bucket barrel box bag rope ladder hammer nail saw knife spoon plate cup bowl kettle lamp candle mirror
    clock watch ring coat hat scarf glove boot shirt blanket pillow chair table bench shelf drawer door window curtain
    carpet picture book letter map pencil notebook newspaper coin purse wallet umbrella bicycle cart wagon wheel engine
    boat oar sail anchor net hook crate bell drum flute violin guitar piano bread cheese butter apple onion potato
    cabbage pie cake soup stew honey sugar flour salt tea coffee milk""",
    "place": """
    harbour market station bridge river lake garden orchard meadow valley forest village town square church tower castle
    museum library school hospital theatre hotel inn bakery mill barn stable cottage kitchen cellar attic hall corridor
    stairs gate fence wall road street lane path corner fountain statue park beach shore cliff cave island canal ferry
    pier warehouse factory workshop office bank shop stall cafe quarry chapel yard""",
    "went": """
    waited stood sat slept rested worked walked ran danced sang laughed smiled whispered shouted talked listened stayed
    paused stopped hurried wandered lingered returned arrived appeared vanished knelt leaned fell turned jumped swam
    fished played read dreamed cried hummed nodded waved""",
    "did": """
    found lost carried moved lifted dropped cleaned painted repaired sold bought borrowed brought took kept hid opened
    closed filled emptied washed polished wrapped packed pushed pulled counted noticed admired forgot remembered wanted
    needed liked loved chose ordered saved shared broke mended weighed measured""",
    "how": """
    quietly slowly quickly gently calmly happily sadly proudly politely patiently carefully nervously gladly eagerly
    lazily bravely kindly softly loudly often sometimes again alone together today yesterday tonight twice once outside
    inside upstairs downstairs""",
    "where": "near behind beside beyond inside outside under above past towards across opposite",
    "weather": "rain wind fog snow storm mist frost thunder sunshine hail breeze drizzle",
    "blew": "drifted settled passed lifted cleared rolled spread faded gathered continued",
}
FILLER_WORDS = {kind: words(text) for kind, text in FILLER.items()}

# A word that names a class of FILLER_WORDS is a slot, any other word stands for itself; every word is one token.
FILLER_TEMPLATES = tuple(
    f"{line} .".split()
    for line in """
start adjective person went how
start person did the thing
start weather blew how again
start person did the adjective thing
start person went where the place
start weather blew where the place
start adjective person did the adjective thing
start person went how where the place
start adjective weather blew where the place
start adjective person went where the place
start person did the thing where the place
start adjective person went where the adjective place
start person went and then did the thing
start weather blew how where the adjective place
start adjective person did the thing where the place
start person did the adjective thing where the place
start adjective person went how where the adjective place
start adjective person did the adjective thing where the place
start person went where the place and did the thing
start adjective person did the adjective thing where the adjective place
start person did the thing and the adjective person went how
start weather blew where the place while the person went how
start adjective person did the thing and the adjective person went how
start person went where the place while the person did the thing
start adjective person went where the place while the person did the thing
start adjective weather blew where the place while the adjective person went how
start person did the adjective thing because the adjective weather blew how again
""".strip().splitlines()
)


def _ranked(items: Iterable[str], salt: str) -> list[str]:
    """`items` in the order of their salted SHA-256, which does not depend on library versions."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{salt}:{item}".encode()).digest())


def _part(items: list[str], split: Split) -> list[str]:
    n_train = int(len(items) * TRAIN_SHARE)
    return items[:n_train] if split == "train" else items[n_train:]


@cache
def first_names(split: Split) -> tuple[tuple[str, str], ...]:
    """First names of a split, as (head, tail) syllables."""
    return _names(FIRST_HEADS, FIRST_TAILS, "first", split)


@cache
def last_names(split: Split) -> tuple[tuple[str, str], ...]:
    """Last names of a split, as (head, tail) syllables."""
    return _names(LAST_HEADS, LAST_TAILS, "last", split)


def _names(heads: tuple[str, ...], tails: tuple[str, ...], salt: str, split: Split) -> tuple[tuple[str, str], ...]:
    pairs = _ranked((f"{head} {tail}" for head in heads for tail in tails), salt)
    return tuple((head, tail) for head, tail in (pair.split() for pair in _part(pairs, split)))


@cache
def values(split: Split) -> tuple[tuple[str, str], ...]:
    """Values of a split, as (word, number)."""
    pairs = _ranked((f"{word} {number}" for word in VALUE_WORDS for number in VALUE_NUMBERS), "value")
    return tuple((word, number) for word, number in (pair.split() for pair in _part(pairs, split)))


@cache
def places(split: Split) -> tuple[tuple[str, str], ...]:
    """Places of a split that somebody owns, as (adjective, noun)."""
    words = FILLER_WORDS["adjective"], FILLER_WORDS["place"]
    pairs = _ranked((f"{adjective} {place}" for adjective in words[0] for place in words[1]), "place")
    return tuple((adjective, place) for adjective, place in (pair.split() for pair in _part(pairs, split)))
