"""Positions within a window, in buckets that are the same for every window.

A position is the number of tokens that a prediction or a query sees, itself included: 1 for the
first. Buckets end at 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: two an octave, so a window of any length
has the buckets of a shorter one and some more.
"""

from __future__ import annotations

from bisect import bisect_left


def last_positions(length: int) -> list[int]:
    """Return the last position of each bucket that positions 1 to `length` fall into."""
    ends = [1, 2, 3]
    while ends[-1] < length:
        ends.append(2 * ends[-2])
    return ends[: bisect_left(ends, length) + 1] if length > 0 else []


def bucket_starts(first: int, last: int) -> list[int]:
    """Return where buckets begin in the row of positions `first` to `last`: indices, from 0 on."""
    inner = [end + 1 for end in last_positions(last) if first <= end < last]
    return [0, *(start - first for start in inner)]
