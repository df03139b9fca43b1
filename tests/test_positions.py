"""Buckets of positions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from oasis_eval.positions import bucket_starts, last_positions


def test_two_buckets_an_octave() -> None:
    """Ends by hand, the last one at or beyond the length."""
    assert last_positions(0) == []
    assert last_positions(1) == [1]
    assert last_positions(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert last_positions(17) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 9), (2, 100), (3, 3), (7, 65)])
def test_starts_cut_a_row_where_buckets_end(first: int, last: int) -> None:
    """Each piece lies in one bucket, neighbouring pieces in two; nothing is lost."""
    ends = last_positions(1000)

    def bucket(position: int) -> int:
        return next(at for at, end in enumerate(ends) if position <= end)

    row = list(range(first, last + 1))
    starts = bucket_starts(first, last)
    pieces = [row[a:b] for a, b in pairwise([*starts, len(row)])]

    assert [position for piece in pieces for position in piece] == row
    assert all(len({bucket(position) for position in piece}) == 1 for piece in pieces)
    found = [bucket(piece[0]) for piece in pieces]
    assert found == sorted(set(found))
