"""The words of the generated corpus: few enough to be a small tokenizer's whole vocabulary."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """Someone, and the pronoun that stands for them."""

    name: str
    subject: str
    """`He` or `She`, as it begins a sentence."""


_WOMEN = ("Anna", "Clara", "Dora", "Eva", "Ida", "Lucy", "Maria", "Nora")
_MEN = ("Ben", "Carl", "David", "Frank", "Hugo", "Leo", "Max", "Tom")
PEOPLE = (
    *(Person(name, "She") for name in _WOMEN),
    *(Person(name, "He") for name in _MEN),
)
THINGS = (
    *("ball", "book", "bottle", "box", "coat", "cup", "hat", "key"),
    *("knife", "lamp", "letter", "map", "ring", "rope", "spoon", "watch"),
)
COLOURS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
PLACES = (
    *("attic", "barn", "cellar", "garden", "hall", "kitchen"),
    *("library", "office", "school", "shop", "station", "stable"),
)
COUNTED = (
    *("apples", "beads", "cards", "coins", "eggs", "marbles", "nuts", "pears"),
    *("pens", "shells", "stamps", "stones"),
)
HOLDERS = ("bags", "boxes", "jars", "rows")
WEATHER = ("cold", "dark", "quiet", "rainy", "sunny", "warm", "windy")
MOODS = ("calm", "cross", "glad", "hungry", "proud", "sad", "tired", "worried")
