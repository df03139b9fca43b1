"""One process at a time a cell, whatever becomes of that process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasis_eval.errors import OutputError
from oasis_eval.locks import CellLocks

KEY, OTHER = "a" * 64, "b" * 64
_HOLD = """
import sys, time
from pathlib import Path
from oasis_eval.locks import CellLocks
locks = CellLocks(Path(sys.argv[1]))
print(locks.claim(sys.argv[2]), flush=True)
sys.stdin.readline()
locks.release(sys.argv[2])
print("released", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of KEY."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path), KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_a_cell_that_another_process_has_is_not_to_be_had(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """Other cells are; once it is released this one is, too."""
    locks = CellLocks(tmp_path)
    before = locks.claim(KEY), locks.claim(OTHER)
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    holder.stdout.readline()

    after = locks.claim(KEY)
    locks.close()

    assert (*before, after) == (False, True, True)


def test_a_lock_ends_with_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """Killed without a chance to clean up: whoever waits gets the cell."""
    locks = CellLocks(tmp_path)
    assert not locks.claim(KEY)
    holder.send_signal(signal.SIGKILL)

    start = time.monotonic()
    locks.take(KEY)
    locks.close()

    assert time.monotonic() - start < 60


def test_locks_leave_one_file(tmp_path: Path) -> None:
    """However many cells a folder has; and it holds nothing."""
    locks = CellLocks(tmp_path)
    for number in range(100):
        locks.claim(f"{number:064x}")
    locks.close()

    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(".lock", 0)]


def test_a_folder_that_cannot_hold_a_lock_is_named(tmp_path: Path) -> None:
    """One line."""
    with pytest.raises(OutputError, match=r"gone.*cannot be opened"):
        CellLocks(tmp_path / "gone")
