"""Where cells go: a checkpoint stays on its node, everyone has something to do, nobody too much."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_eval.sweep.placement import Placement


def test_piles_are_spread_over_nodes_by_what_they_can_carry() -> None:
    """The largest first; a node of two slots gets twice as many cells."""
    placement = Placement([range(8), range(8, 12), range(12, 16), range(16, 20), range(20, 22)])
    placement.settle({"a": 2, "b": 1})

    first = [placement.choose("a"), placement.choose("a"), placement.choose("b")]

    assert first == [0, 2, 1]  # 8, 4 and 4 cells on a; 4 and 2 on b


def test_a_worker_stays_at_its_node_until_there_is_nothing_left() -> None:
    """Then it helps where a worker has most to do."""
    placement = Placement([[0], range(1, 5), range(5, 15)])
    placement.settle({"a": 1, "b": 1})

    assert placement.choose("b") == 1
    placement.leave(1, "b")
    for cell in (1, 2, 3, 4):
        placement.take(cell)
    assert placement.choose("b") == 0
    placement.leave(0, "b")
    placement.take(0)
    assert placement.choose("b") == 2
    for cell in range(5, 15):
        placement.take(cell)
    assert placement.choose("b") is None


def test_workers_of_a_node_take_a_pile_each_while_there_are_enough() -> None:
    """One load a checkpoint; the third shares the larger pile."""
    placement = Placement([range(4), range(4, 10)])
    placement.settle({"a": 3})

    assert [placement.choose("a") for _ in range(3)] == [1, 0, 1]


def test_piles_of_a_dead_node_find_another_home() -> None:
    """Those of living ones stay."""
    placement = Placement([range(4), range(4, 8)])
    placement.settle({"a": 1, "b": 1})
    assert (placement.choose("a"), placement.choose("b")) == (0, 1)
    placement.leave(0, "a")

    placement.settle({"b": 1, "c": 1})

    assert placement.choose("c") == 0


def test_a_cell_that_is_put_back_is_free_again() -> None:
    """And only that one."""
    placement = Placement([range(3)])
    for cell in range(3):
        placement.take(cell)
    placement.put_back(1)

    assert placement.num_free == 1
    assert 1 in placement
    assert 0 not in placement
    assert placement.free_cells(0) == [1]


def test_shares_shrink_with_what_is_left() -> None:
    """Ten cells of one checkpoint and two workers: half of what is left, rounded up."""
    placement = Placement([range(10)])
    shares = []
    while placement.num_free:
        held = 0
        while placement.num_free and placement.may_take(held, 2):
            placement.take(placement.free_cells(0)[0])
            held += 1
        shares.append(held)

    assert shares == [5, 3, 1, 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.randoms())
def test_every_cell_is_done_once_whoever_is_quicker(sizes, num_workers, random) -> None:
    """Workers ask in any order, for one cell after the other, and leave when refused."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    placement = Placement(
        range(start, start + size) for start, size in zip(starts, sizes, strict=True)
    )
    nodes = [f"n{number % 2}" for number in range(num_workers)]
    placement.settle({node: nodes.count(node) for node in nodes})
    at: dict[int, int] = {}
    done: list[int] = []
    for _ in range(10_000):
        if not placement.num_free:
            break
        worker = random.randrange(num_workers)
        pile = at.get(worker)
        if pile is None or not placement.free_cells(pile):
            if pile is not None:
                placement.leave(pile, nodes[worker])
            chosen = placement.choose(nodes[worker])
            assert chosen is not None
            at[worker] = chosen
        cell = placement.free_cells(at[worker])[0]
        assert placement.may_take(0, num_workers)
        placement.take(cell)
        done.append(cell)

    assert sorted(done) == list(range(sum(sizes)))
