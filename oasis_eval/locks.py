"""One process at a time per cell of a results folder.

A cell's lock is one byte, at an offset made of its key, of the file `.lock` in the folder. The
kernel drops such a lock when its process ends, however it ends: nothing is ever stale, no clock is
asked, and no file per cell is left behind. It is a POSIX record lock because those, unlike `flock`,
are not handed on to forked children, which may outlive the process that they came from.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Protocol

from oasis_eval.errors import OutputError

_NAME = ".lock"
_OFFSET_DIGITS = 15
"""Hex digits of a key that make its offset: 60 bits, within any file's range."""


class Locks(Protocol):
    """Who says which cells are free to be measured."""

    def claim(self, key: str) -> bool:
        """Take a cell; False where another has it."""
        ...

    def take(self, key: str) -> None:
        """Take a cell, once no other has it."""
        ...

    def release(self, key: str) -> None:
        """Let others have the cell."""
        ...

    def close(self) -> None:
        """Let others have every cell."""
        ...


class CellLocks:
    """The cells of a folder that this process works on.

    A process has one of these a folder at a time: closing one drops all its locks on that folder.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder's lock file.

        Raises:
            OutputError: It cannot be made there.
        """
        self._path = folder / _NAME
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be opened ({error.strerror})") from error

    def claim(self, key: str) -> bool:
        """Take a cell's lock; False where another process has it."""
        return self._lock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def take(self, key: str) -> None:
        """Take a cell's lock, once no other process has it."""
        self._lock(key, fcntl.LOCK_EX)

    def release(self, key: str) -> None:
        """Let others have the cell."""
        self._lock(key, fcntl.LOCK_UN)

    def close(self) -> None:
        """Drop every lock."""
        os.close(self._file)

    def _lock(self, key: str, operation: int) -> bool:
        try:
            fcntl.lockf(self._file, operation, 1, int(key[:_OFFSET_DIGITS], 16))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise OutputError(
                f"{self._path}: the file system has no locks ({error.strerror}), without which two "
                "processes would disturb each other; choose --out on another one"
            ) from error
        return True
