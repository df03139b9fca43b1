"""One evaluation in several processes, as `torchrun` or `accelerate launch` start them.

All of them load, quantize and plan alike; each runs a share of the batches and hears the results of
the others, so that every number comes from the batches of a single process. The first process
alone reads and writes records, holds locks and speaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from oasis_eval.errors import OasisError, SpecError
from oasis_eval.limits import is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

_PATIENCE = timedelta(days=7)
"""A process may wait for the first one, which may wait for another evaluation's lock."""


class RankError(OasisError):
    """Another process of the group failed."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other processes."""

    index: int
    text: str
    is_out_of_memory: bool

    def as_error(self) -> Exception:
        if self.is_out_of_memory:
            return MemoryError(f"process {self.index}: {self.text}")
        return RankError(f"process {self.index}: {self.text}")


class Ranks:
    """The processes that share an evaluation; alone unless `join` found a group."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index = index
        self.count = count
        self._told: BaseException | None = None
        """Error that the others know of."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the records."""
        return self.index == 0

    def share(
        self,
        items: Sequence[Item],
        run: Callable[[Item], Result],
        *,
        on_done: Callable[[Item], object] = lambda item: None,
    ) -> list[Result]:
        """Run every item in one of the processes; all of them get all results, in order.

        Args:
            items: The same in every process.
            run: What to do with one of them.
            on_done: Called with each item, when it or its neighbour of the same turn is done.
        """
        if self.count == 1:
            results = []
            for item in items:
                results.append(run(item))
                on_done(item)
            return results
        mine: list[tuple[int, Result]] = []
        with self.together():
            for turn in range(0, len(items), self.count):
                at = turn + self.index
                if at < len(items):
                    mine.append((at, run(items[at])))
                for item in items[turn : turn + self.count]:
                    on_done(item)
            found = dict(pair for share in self._exchange(mine) for pair in share)
        return [found[at] for at in range(len(items))]

    def first(self, decide: Callable[[], Result]) -> Result:
        """Let the first process decide for all."""
        if self.count == 1:
            return decide()
        with self.together():
            answer: Result = self._exchange(decide() if self.is_first else None)[0]
        return answer

    @contextmanager
    def together(self) -> Iterator[None]:
        """End the block in every process with an error where it does in one.

        Raises:
            RankError: Another process failed.
            MemoryError: Another process had not enough memory.
        """
        if self.count == 1:
            yield
            return
        try:
            yield
        except Exception as error:  # whatever it is: the others would wait for this process
            if self._told is not error:
                self._tell(error)
            raise
        self._exchange(None)

    def _tell(self, error: Exception) -> None:
        self._told = error
        text = " ".join(f"{type(error).__name__}: {error}".split())
        _gather(_Failure(self.index, text, is_out_of_memory(error)))

    def _exchange(self, value: Any) -> list[Any]:
        """Give a value to every process and get theirs, in order; raise what one of them told."""
        values = _gather(value)
        failure = next((item for item in values if isinstance(item, _Failure)), None)
        if failure is not None:
            self._told = failure.as_error()
            raise self._told
        return values


def _gather(value: object) -> list[Any]:
    from accelerate.utils import gather_object

    found: list[Any] = gather_object([value])
    return found


_current = Ranks()


def current() -> Ranks:
    """Return the group that this process belongs to, perhaps with itself alone."""
    return _current


def join(device: str) -> Ranks:
    """Join the group that a launcher started this process for, if one did.

    Args:
        device: What the evaluation runs on; `cuda` becomes the GPU of each process's own.

    Raises:
        SpecError: The device is one in particular.
    """
    global _current  # noqa: PLW0603 - a process belongs to one group for life
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or _current.count > 1:
        return _current
    if ":" in device:
        raise SpecError(
            f"--device {device} with several processes: expected {device.partition(':')[0]}, of "
            "which each process takes its own"
        )
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu", timeout=_PATIENCE)
    _current = Ranks(state.process_index, state.num_processes)
    return _current
