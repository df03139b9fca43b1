"""Which cells go where: the cells of a checkpoint stay on one node, until others are idle.

Nothing here knows of processes or clocks, so that a simulation decides as a sweep does. Cells are
numbers and nodes are names. A pile is what one load serves: the cells of one checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pile:
    """The cells of one checkpoint."""

    free: dict[int, None]
    """Cells that nobody has, in order."""
    home: str | None = None
    """Node that is to do them; others help when they are through with their own."""
    workers: Counter[str] = field(default_factory=Counter)
    """How many work on it, by node."""


class Placement:
    """The piles of a sweep and who has what of them."""

    def __init__(self, piles: Iterable[Sequence[int]]) -> None:
        """Begin with every cell free.

        Args:
            piles: Cells of each checkpoint; a cell is in one of them.
        """
        self._piles = [Pile(dict.fromkeys(cells)) for cells in piles]
        self._pile_of = {cell: pile for pile in self._piles for cell in pile.free}

    def __contains__(self, cell: int) -> bool:
        """Tell whether nobody has a cell."""
        return cell in self._pile_of[cell].free

    @property
    def num_free(self) -> int:
        """How many cells nobody has."""
        return sum(len(pile.free) for pile in self._piles)

    def settle(self, slots: Mapping[str, int]) -> None:
        """Give piles without a living home one: the largest first, to the least laden node.

        Args:
            slots: Nodes that are there, and how many cells each can run at a time.
        """
        homeless = [pile for pile in self._piles if pile.free and pile.home not in slots]
        if not slots or not homeless:
            return
        load = dict.fromkeys(slots, 0)
        for pile in self._piles:
            if pile.home in load:
                load[pile.home] += len(pile.free)
        for pile in sorted(homeless, key=lambda pile: -len(pile.free)):
            size = len(pile.free)
            pile.home = min(slots, key=lambda node: (load[node] + size) / slots[node])
            load[pile.home] += size

    def choose(self, node: str) -> int | None:
        """Return the pile that a worker of a node goes to; None where all cells are taken.

        Piles of the node itself come first, and among those what nobody works on, which saves a
        load; then that whose workers have most to do.
        """
        best = max(
            (at for at, pile in enumerate(self._piles) if pile.free),
            key=lambda at: self._appeal(self._piles[at], node),
            default=None,
        )
        if best is not None:
            self._piles[best].workers[node] += 1
        return best

    def leave(self, pile: int, node: str) -> None:
        """Take a worker off its pile."""
        self._piles[pile].workers[node] -= 1

    def free_cells(self, pile: int) -> list[int]:
        """Return the cells of a pile that nobody has, in order."""
        return list(self._piles[pile].free)

    def may_take(self, num_held: int, num_workers: int) -> bool:
        """Tell whether a worker gets one more cell: up to its share of what is not begun.

        Shares shrink towards the end, so that all end at about the same time.

        Args:
            num_held: Cells that it has and that are not done.
            num_workers: All that are there.
        """
        return num_held < math.ceil((self.num_free + num_held) / max(1, num_workers))

    def take(self, cell: int) -> None:
        """Take a cell off its pile, for good unless it is put back."""
        self._pile_of[cell].free.pop(cell, None)

    def put_back(self, cell: int) -> None:
        """Make a cell free again."""
        self._pile_of[cell].free[cell] = None

    @staticmethod
    def _appeal(pile: Pile, node: str) -> tuple[bool, bool, float]:
        num_workers, is_home = pile.workers.total(), pile.home == node
        return is_home, is_home and not num_workers, len(pile.free) / (1 + num_workers)
