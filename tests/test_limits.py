"""Time limits and memory that is not there."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest
import torch

from oasis_eval.errors import SpecError, TimeLimitError
from oasis_eval.limits import is_out_of_memory, time_limit


def test_a_block_that_takes_too_long_is_ended() -> None:
    """With the limit in the message."""
    start = time.monotonic()

    with pytest.raises(TimeLimitError, match=r"time limit of 0\.05 s"), time_limit(0.05):
        time.sleep(30)

    assert time.monotonic() - start < 30


@pytest.mark.parametrize("seconds", [None, 20.0])
def test_a_block_in_time_is_left_alone(seconds: float | None) -> None:
    """And so are the signal's handler and an alarm that was set before."""
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    before = signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        with time_limit(seconds):
            pass
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert 90.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_library_that_swallows_the_exception_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit does not fire once and then never."""
    monkeypatch.setattr("oasis_eval.limits._REPEAT_SECONDS", 0.05)
    start = time.monotonic()

    def swallow() -> None:
        with contextlib.suppress(TimeLimitError):
            time.sleep(30)
        time.sleep(30)

    with pytest.raises(TimeLimitError), time_limit(0.05):
        swallow()

    assert time.monotonic() - start < 30


def test_only_the_main_thread_can_be_limited() -> None:
    """Elsewhere there are no signals."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            with time_limit(1.0):
                pass
        except SpecError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert "main thread" in str(caught[0])


def test_what_is_out_of_memory() -> None:
    """Python's, torch's and the CPU allocator's own; nothing else."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)

    found = [
        is_out_of_memory(error)
        for error in (MemoryError(), torch.OutOfMemoryError("x"), caught.value)
    ]
    assert found == [True] * 3
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
