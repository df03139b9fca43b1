"""Passkey retrieval: one number in a long text, asked for at its end.

The one idea: everything but the length is fixed by a row (its number, key and depth), and the
length is whatever the tokenizer at hand makes of it: filler is added sentence by sentence for as
long as the prompt fits. The filler is the corpus's own stories without their digits, so the key's
digits stand nowhere else.

The task was introduced by Mohtashami and Jaggi, "Landmark Attention", 2023; text and layout are
our own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count as count_from
from itertools import islice
from typing import NamedTuple

from oasis_eval.errors import DataError
from oasis_eval.minicorpus.chance import Chance
from oasis_eval.minicorpus.stories import story

VERSION = 1
"""Raised when the generated text changes, which changes every number that comes of it."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the key stands: 0 before all filler, 1 behind it."""
NUM_DIGITS = 5
_OPENING = "There is a secret number in this text. Remember it."
_KEY = "The secret number is {}."
_QUESTION = "\n\nQuestion: What is the secret number in the text?\nAnswer: The secret number is"


class Prompt(NamedTuple):
    """A text that ends right before the key."""

    text: str
    answer: str
    """What follows, with the space before it."""
    num_filler: int
    """Sentences of filler."""


def rows(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yield rows: `number`, `key` and `depth`, as text; the depths take turns.

    Args:
        seed: Another seed is other keys and other filler.
        count: How many.
    """
    seen: set[str] = set()
    for number in range(count):
        chance = Chance(f"passkey/{VERSION}/{seed}/{number}/key")
        while True:
            key = "".join(str(chance.below(10)) for _ in range(NUM_DIGITS))
            if key[0] != "0" and key not in seen:  # a leading zero might get lost
                break
        seen.add(key)
        depth = DEPTHS[number % len(DEPTHS)]
        yield {"number": f"{seed}/{number}", "key": key, "depth": f"{depth:g}"}


def prompt(
    number: str, key: str, depth: float, *, most_tokens: int, count: Callable[[str], int]
) -> Prompt:
    """Return the longest prompt of a row that fits.

    Args:
        number: Of the row; fixes the filler.
        key: Digits to hide.
        depth: 0 to 1.
        most_tokens: Tokens that it may have.
        count: Counts the tokens of a text, special ones included.

    Raises:
        DataError: Not even the question and one sentence of filler fit.
    """

    def text_of(filler: list[str]) -> str:
        place = round(depth * len(filler))
        sentences = [_OPENING, *filler[:place], _KEY.format(key), *filler[place:]]
        return " ".join(sentences) + _QUESTION

    sentences: list[str] = []
    stream = _filler(number)
    least, most = 0, 1
    while True:  # double until too long
        sentences += islice(stream, most - len(sentences))
        if count(text_of(sentences[:most])) > most_tokens:
            break
        least, most = most, 2 * most
    while most - least > 1:  # then halve what is uncertain
        middle = (least + most) // 2
        fits = count(text_of(sentences[:middle])) <= most_tokens
        least, most = (middle, most) if fits else (least, middle)
    if least == 0:
        raise DataError(
            f"passkey: {most_tokens} tokens hold no question with one sentence before it, which "
            f"takes {count(text_of(sentences[:1]))}; ask for a longer context"
        )
    return Prompt(text_of(sentences[:least]), f" {key}", least)


def _filler(number: str) -> Iterator[str]:
    """Yield sentences without end and without a digit."""
    for at in count_from():
        text = story(Chance(f"passkey/{VERSION}/{number}/filler/{at}"), "test")
        for sentence in re.split(r"(?<=\.) ", text):
            if not any(char.isdigit() for char in sentence):
                yield sentence
