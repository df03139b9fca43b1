"""Draws and splits: the same everywhere, in range, in the shares stated."""

from __future__ import annotations

from collections import Counter

from oasis_eval.minicorpus.chance import SPLITS, Chance, split_of

FIRST = ("0", "24", "16")
"""The smallest number whose digits are of each split."""


def test_a_seed_fixes_the_draws_in_every_python() -> None:
    """Numbers noted once: SHA-256 of the seed into the Mersenne Twister, whose `random` is kept."""
    chance = Chance("seed")

    assert [chance.below(1000) for _ in range(5)] == [566, 785, 828, 866, 750]
    assert [split_of(text) for text in FIRST] == [*SPLITS]


def test_draws_stay_in_range_and_reach_all_of_it() -> None:
    """Both ends of `between`, none twice in `some`, and `some` leaves its source alone."""
    chance, items = Chance("range"), ("a", "b", "c")

    assert {chance.between(3, 5) for _ in range(200)} == {3, 4, 5}
    assert {chance.below(2) for _ in range(200)} == {0, 1}
    assert {chance.pick(items) for _ in range(200)} == set(items)
    assert {tuple(sorted(chance.some(items, 3))) for _ in range(20)} == {items}
    assert len({tuple(chance.some(items, 2)) for _ in range(200)}) == 6


def test_splits_have_their_shares() -> None:
    """Two, one and thirteen of sixteen, within four standard errors of 16000 draws."""
    found = Counter(split_of(str(number)) for number in range(16_000))

    assert set(found) == set(SPLITS)
    assert abs(found["test"] - 2000) < 170
    assert abs(found["validation"] - 1000) < 130
