"""A sweep on the nodes of a cluster.

Every node gets as many hosts as it has room for, each of which keeps one process with one
checkpoint loaded. A process asks for each cell before it begins, so that a slow one is never given
more than it does, and sends the record when it is done. The sweep's own machine alone decides,
locks and writes. What a dead node was at is given to another; nothing else is lost with it.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from oasis_eval.cells import Cell, versions
from oasis_eval.errors import OasisError, RecordError
from oasis_eval.execution import Observer, Runner, by_model
from oasis_eval.parsing import explain
from oasis_eval.record import RunRecord
from oasis_eval.sweep.cluster import Cluster, ClusterError, LostError
from oasis_eval.sweep.deaths import MOST_DEATHS, Deaths, WorkerError
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.placement import Placement
from oasis_eval.sweep.request import Answer, CellRequest, Event, Share
from oasis_eval.sweep.supplies import supplies
from oasis_eval.sweep.worker import OUTPUT_STATUS

_LOOK_SECONDS = 2.0
"""How often nodes are counted."""
_REFUSALS_SHOWN = 3


@dataclass(slots=True, eq=False)
class _Hand:
    """A host on a node and what it was last heard to do."""

    host: object
    node: str
    call: object | None
    """What it was asked last; None: it has nothing to do."""
    is_ready: bool = False
    pile: int | None = None
    share: list[int] = field(default_factory=list)
    """Cells that it was told of."""
    held: set[int] = field(default_factory=set)
    """Cells that it was granted and that are not done."""
    outbox: list[str] = field(default_factory=list)
    cell: Cell | None = None
    is_loading: bool = False
    since: float = 0.0
    is_overdue: bool = False


class Crew:
    """Runs the open cells of a ledger on the nodes of a cluster."""

    def __init__(
        self, ledger: Ledger, observer: Observer, runner: Runner, out: Path, cluster: Cluster
    ) -> None:
        """Begin without anyone.

        Args:
            ledger: Of the sweep.
            observer: Is told what happens.
            runner: Of this process: its locks, and its folder.
            out: That folder.
            cluster: Where cells run.
        """
        self._ledger = ledger
        self._observer = observer
        self._runner = runner
        self._out = out
        self._cluster = cluster
        self._hands: list[_Hand] = []
        self._refused: dict[str, str] = {}
        self._num_losses = 0
        self._last_look = -1e9
        self._cells: Sequence[Cell] = ()
        self._placement = Placement([])

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for hand in list(self._hands):
            self._dismiss(hand)

    def run(self, cell_seconds: float | None) -> None:
        """Run until no cell is open.

        Args:
            cell_seconds: Most seconds that a cell may take.

        Raises:
            OutputError: A result cannot be written.
            ClusterError: No node can be used.
            WorkerError: Processes die without running anything.
        """
        deaths = Deaths(self._ledger, self._runner, cell_seconds)
        while self._ledger.open:
            while any(hand.pile is not None for hand in self._hands):  # on their way to be told
                self._turn(deaths, cell_seconds)
            self._cells = [entry.cell for entry in self._ledger.open]
            index = {id(cell): at for at, cell in enumerate(self._cells)}
            self._placement = Placement(
                [index[id(cell)] for cell in group] for group in by_model(self._cells)
            )
            self._last_look = -1e9
            while self._placement.num_free or any(hand.held for hand in self._hands):
                self._turn(deaths, cell_seconds)
            if self._ledger.open:  # what is left is in the hands of other sweeps
                self._runner.wait(self._ledger.open[0].cell)
                self._ledger.look_up(self._out, retry_failed=False)

    # --- hands ------------------------------------------------------------------------------

    def _turn(self, deaths: Deaths, cell_seconds: float | None) -> None:
        """Give work to who has none, and hear one of those that have."""
        if time.monotonic() - self._last_look > _LOOK_SECONDS:
            self._last_look = time.monotonic()
            self._staff()
        for hand in self._hands:
            if hand.call is None:
                self._assign(hand, cell_seconds)
        calls = {hand.call: hand for hand in self._hands if hand.call is not None}
        if not calls:
            time.sleep(0.1)  # until a node is there to replace the last one
            return
        for call in self._cluster.wait(list(calls)):
            self._step(calls[call], deaths)

    def _staff(self) -> None:
        """Have hosts on every node, as many as it has room for and there are cells."""
        room = self._cluster.room()
        slots = {node: number for node, number in room.items() if node not in self._refused}
        if not slots and not self._hands:
            raise self._no_node()
        self._placement.settle(slots)
        there = Counter(hand.node for hand in self._hands)
        num_open = self._placement.num_free + sum(len(hand.held) for hand in self._hands)
        for level in range(max(slots.values(), default=0)):  # all nodes alike, not one after one
            for node, number in slots.items():
                if there[node] <= level < number and len(self._hands) < num_open:
                    self._hands.append(self._hire(node))

    def _hire(self, node: str) -> _Hand:
        host = self._cluster.hire(node)
        wanted = {**versions(), "oasis_eval": importlib.metadata.version("oasis-eval")}
        return _Hand(host, node, self._cluster.objection(host, wanted))

    def _assign(self, hand: _Hand, cell_seconds: float | None) -> None:
        pile = self._placement.choose(hand.node)
        if pile is None:
            return
        hand.pile = pile
        hand.share = self._placement.free_cells(pile)
        cells = [self._cells[at] for at in hand.share]
        share = Share(
            cell_seconds=cell_seconds,
            num_threads=self._cluster.num_threads,
            requests=tuple(map(CellRequest.of, cells)),
            keys=tuple(cell.key for cell in cells),
        )
        hand.call = self._cluster.hear(hand.host, [share.model_dump_json()], stop=False)

    def _step(self, hand: _Hand, deaths: Deaths) -> None:
        """Hear what a host has to say, and answer."""
        try:
            value = self._cluster.answer(hand.call)
        except LostError as error:
            self._lose(hand, error, deaths)
            return
        if not hand.is_ready:
            hand.is_ready, hand.call = True, None
            if value is not None:
                self._refuse(hand.node, value)
            return
        for line in value:
            self._hear(hand, Event.model_validate_json(line), deaths)
        if hand not in self._hands:
            return
        hand.call = None
        if hand.pile is not None:
            hand.is_overdue = hand.is_overdue or deaths.is_overdue(hand)
            hand.call = self._cluster.hear(hand.host, hand.outbox, stop=hand.is_overdue)
            hand.outbox = []

    def _lose(self, hand: _Hand, error: LostError, deaths: Deaths) -> None:
        """See to what a host leaves that is not there any more."""
        if error.at_birth:
            self._refuse(hand.node, str(error))
            return
        how = f"its worker on node {self._cluster.name(hand.node)} was lost ({error})"
        self._dismiss(hand)
        self._bury(hand, how, deaths)
        self._last_look = -1e9

    def _bury(self, hand: _Hand, how: str, deaths: Deaths) -> None:
        deaths.bury(hand, how)
        self._release(hand)
        for at, cell in enumerate(self._cells):
            if not self._ledger.entry(cell).is_open:
                self._placement.take(at)
        self._num_losses += 1
        if self._num_losses > MOST_DEATHS * max(2, len(self._hands)):
            raise WorkerError(f"no cell can be run: {how}")

    def _refuse(self, node: str, reason: str) -> None:
        """Do without a node."""
        if node not in self._refused:
            self._refused[node] = f"node {self._cluster.name(node)} is not used: {reason}"
            self._ledger.errors.append(ClusterError(self._refused[node]))
        for hand in [hand for hand in self._hands if hand.node == node]:
            self._dismiss(hand)
            self._release(hand)
        self._last_look = -1e9

    def _dismiss(self, hand: _Hand) -> None:
        self._hands.remove(hand)
        self._cluster.dismiss(hand.host)

    def _release(self, hand: _Hand) -> None:
        """Take a hand off its pile, and make free what it holds."""
        if hand.pile is not None:
            self._placement.leave(hand.pile, hand.node)
        for at in sorted(hand.held):
            entry = self._ledger.entry(self._cells[at])
            self._runner.let_go(entry.cell)
            if entry.is_open:
                entry.state = "open"
                self._placement.put_back(at)
        hand.pile, hand.cell, hand.outbox = None, None, []
        hand.held.clear()

    def _no_node(self) -> OasisError:
        if self._refused:
            shown = "; ".join(list(self._refused.values())[:_REFUSALS_SHOWN])
            return ClusterError(f"no node of the cluster can be used: {shown}")
        return self._cluster.no_room()

    # --- what a process says ----------------------------------------------------------------

    def _hear(self, hand: _Hand, event: Event, deaths: Deaths) -> None:
        which = [hand.share[at] for at in event.cells]
        cells = [self._cells[at] for at in which]
        beginnings = {
            "loading": self._observer.loading,
            "preparing": self._observer.preparing,
            "started": self._observer.started,
        }
        if event.kind == "claim":
            granted = self._grant(hand, which[0])
            files = supplies(self._out, cells[0]) if granted else {}
            hand.outbox.append(Answer(granted=granted, files=files).model_dump_json())
        elif event.kind in beginnings:
            hand.cell, hand.is_loading = cells[0], event.kind == "loading"
            hand.since = time.monotonic()
            beginnings[event.kind](cells[0])
        elif event.kind == "finished":
            self._finish(hand, which[0], event)
        elif event.kind == "lost":
            self._give_up(hand, which, RecordError(event.reason))
        elif event.kind == "done":
            self._release(hand)
        elif event.kind == "refused" or event.status == OUTPUT_STATUS:
            self._refuse(hand.node, event.reason)
        else:
            self._bury(hand, event.reason, deaths)
            hand.is_overdue = False

    def _grant(self, hand: _Hand, at: int) -> bool:
        """Give a hand a cell, unless another has it or the hand has its share."""
        if at in hand.held:
            return True
        if at not in self._placement or not self._placement.may_take(
            len(hand.held), len(self._hands)
        ):
            return False
        self._placement.take(at)
        if not self._runner.reserve(self._cells[at]):  # another sweep has it or has done it
            return False
        hand.held.add(at)
        return True

    def _finish(self, hand: _Hand, at: int, event: Event) -> None:
        cell = self._cells[at]
        if hand.cell is cell:
            hand.cell = None
        if at not in hand.held and not (at in self._placement and self._reserve(at)):
            return
        try:
            record = RunRecord.model_validate_json(event.record)
        except ValidationError as error:
            self._give_up(
                hand, [at], RecordError(f"a node sent no record: {explain(error, RunRecord)}")
            )
            return
        if record.key != cell.key:
            self._give_up(hand, [at], RecordError(f"a node sent the record {record.key}"))
            return
        samples = [json.loads(line) for line in event.samples.split("\n") if line]
        self._runner.keep(cell, record, samples)
        hand.held.discard(at)
        self._num_losses = 0

    def _reserve(self, at: int) -> bool:
        self._placement.take(at)
        return self._runner.reserve(self._cells[at])

    def _give_up(self, hand: _Hand, which: Sequence[int], error: OasisError) -> None:
        """Note cells that can have no record, but for those that others are at."""
        mine = [at for at in which if at in hand.held or at in self._placement]
        for at in mine:
            self._placement.take(at)
            self._runner.let_go(self._cells[at])
            hand.held.discard(at)
        hand.cell = None
        if mine:
            self._observer.lost([self._cells[at] for at in mine], error)
        self._num_losses = 0
