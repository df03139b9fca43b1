"""What ends a cell from outside: a time limit, and memory that is not there."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oasis_eval.errors import SpecError, TimeLimitError

_REPEAT_SECONDS = 5.0
"""A library may swallow the first exception."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""How torch's allocators without an exception class of their own say it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimeLimitError` in the block after `seconds`; None: never.

    The exception comes between two steps of the interpreter, so one operation of torch is finished
    first. It may come anywhere: what the block was changing cannot be trusted afterwards.

    Raises:
        TimeLimitError: The time is over.
        SpecError: The caller is not the main thread, which alone receives signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise SpecError("a time limit per cell needs the main thread; run without one")

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"the time limit of {seconds:g} s for a cell was reached")

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if outer[0]:
            rest = max(outer[0] - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest, outer[1])


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is memory that could not be had, on the CPU or an accelerator."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def free_memory() -> None:
    """Give back what a failed attempt left behind."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
