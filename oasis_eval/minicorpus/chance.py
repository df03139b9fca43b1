"""Seeded draws and splits that are the same on every machine and in every Python.

Only `Random.random` is used, the one method whose sequence Python promises to keep.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_BUCKETS = 16
_NUM_TEST = 2
_NUM_VALIDATION = 1

T = TypeVar("T")


class Chance:
    """A stream of draws fixed by a text."""

    __slots__ = ("random",)

    def __init__(self, seed: str) -> None:
        """Start the stream.

        Args:
            seed: Any text; another text is another stream.
        """
        digest = hashlib.sha256(seed.encode()).digest()
        self.random = random.Random(int.from_bytes(digest[:16], "big")).random  # noqa: S311 - no secret

    def below(self, count: int) -> int:
        """Return a whole number from 0 to `count` - 1."""
        return int(self.random() * count)

    def between(self, first: int, last: int) -> int:
        """Return a whole number from `first` to `last`, both included."""
        return first + int(self.random() * (last - first + 1))

    def pick(self, items: Sequence[T]) -> T:
        """Return one of `items`."""
        return items[int(self.random() * len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of `items`, in random order."""
        rest = list(items)
        return [rest.pop(int(self.random() * len(rest))) for _ in range(count)]


def split_of(text: str) -> Split:
    """Return the split that a piece of text belongs to: two in sixteen test, one validation.

    Args:
        text: What must not occur in two splits.
    """
    bucket = hashlib.sha256(text.encode()).digest()[0] % _BUCKETS
    if bucket < _NUM_TEST:
        return "test"
    return "validation" if bucket < _NUM_TEST + _NUM_VALIDATION else "train"
