"""Passkey prompts: fixed by their row, one key, as long as asked and no longer."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from oasis_eval.errors import DataError
from oasis_eval.minicorpus import passkey, tokenizer
from oasis_eval.minicorpus.passkey import DEPTHS, Prompt, prompt, rows

ROWS = list(rows(0, 50))


def words(text: str) -> int:
    return len(text.split())


def made(row: dict[str, str], most: int, count: Callable[[str], int] = words) -> Prompt:
    depth = float(row["depth"])
    return prompt(row["number"], row["key"], depth, most_tokens=most, count=count)


def test_rows_are_fixed_by_their_seed() -> None:
    """Fewer are the first of more; another seed has other keys."""
    assert list(rows(0, 7)) == ROWS[:7]
    assert {row["key"] for row in rows(1, 50)}.isdisjoint({ROWS[0]["key"]})
    assert ROWS[:2] == [
        {"number": "0/0", "key": ROWS[0]["key"], "depth": "0"},
        {"number": "0/1", "key": ROWS[1]["key"], "depth": "0.25"},
    ]


def test_keys_are_five_digits_and_differ() -> None:
    """None begins with zero, and each depth has as many."""
    keys = [row["key"] for row in ROWS]

    assert all(re.fullmatch(r"[1-9][0-9]{4}", key) for key in keys)
    assert len(set(keys)) == len(keys)
    for depth in DEPTHS:
        assert sum(row["depth"] == f"{depth:g}" for row in ROWS) == 10


@pytest.mark.parametrize("most", [60, 200, 1000])
def test_the_key_stands_once_where_it_should(most: int) -> None:
    """No other digit is in the text, and the sentences before it are the asked share."""
    for row in ROWS[:10]:
        found = made(row, most)
        before, after = found.text.split(f" The secret number is {row['key']}.")

        assert re.findall(r"\d+", found.text) == [row["key"]]
        assert found.answer == f" {row['key']}"
        place = before.count(". ") + before.endswith(".") - 2  # without the opening's two
        total = found.num_filler
        assert place == round(float(row["depth"]) * total), (row, total)
        assert after.endswith("Answer: The secret number is")


@pytest.mark.parametrize("most", [60, 61, 62, 300, 1001])
@pytest.mark.parametrize("measure", ["words", "mini"])
def test_prompts_fill_the_room_and_do_not_exceed_it(most: int, measure: str) -> None:
    """One more sentence would be too long, whatever counts the tokens."""
    mini = tokenizer.load()

    def tokens(text: str) -> int:
        return 1 + len(mini.encode(text, add_special_tokens=False))

    count = {"words": words, "mini": tokens}[measure]
    most = most * (1 if measure == "words" else 3)
    for row in ROWS[:5]:
        found = made(row, most, count)
        size = count(found.text)

        assert size <= most
        assert size > most - 40, "a sentence has at most 40 tokens"


def test_prompts_are_the_same_every_time() -> None:
    """And those of another row have other filler."""
    assert made(ROWS[3], 200) == made(ROWS[3], 200)
    assert made(ROWS[3], 200).text[200:300] != made(ROWS[8], 200).text[200:300]


def test_a_room_without_room_is_refused() -> None:
    """With how much is needed."""
    with pytest.raises(DataError, match=r"passkey: 20 tokens hold no question .* ask for a longer"):
        made(ROWS[0], 20)


def test_version_is_of_this_text() -> None:
    """Text that changed needs another version; this is that of version 1."""
    import hashlib

    text = "".join(made(row, 150).text for row in ROWS[:5])

    assert passkey.VERSION == 1
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "05a19abb29862768"
