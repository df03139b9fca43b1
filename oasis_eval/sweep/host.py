"""The end of a sweep on a node of a cluster: it keeps one process that runs cells.

A host only carries lines between the sweep and its process (`oasis_eval.sweep.remote`), so it is
small, never dies of a model, and can say how its process did.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from oasis_eval.sweep import child
from oasis_eval.sweep.lastwords import last_words

_PATIENCE_SECONDS = 5.0
"""After which a host answers, though there is nothing to say: it can be told something then."""


class Host:
    """Runs one process at a time; every call is answered soon."""

    def __init__(self, folder: str, num_threads: int) -> None:
        """Begin without a process.

        Args:
            folder: Where the sweep was started; paths are relative to it.
            num_threads: Of the process.
        """
        self._folder = folder
        self._num_threads = num_threads
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def objection(self, versions: Mapping[str, str]) -> str | None:
        """Return why this node would not make the numbers of the sweep; None: it would.

        Args:
            versions: Of libraries, where the sweep was started.
        """
        for name, wanted in versions.items():
            try:
                found = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found = "none"
            if found != wanted:
                return f"it has {name} {found}, the sweep was started with {wanted}"
        if not os.path.isdir(self._folder):
            return f"it has no folder {self._folder}, where the sweep was started"
        return None

    def hear(self, lines: Sequence[str], *, stop: bool = False) -> list[str]:
        """Pass lines on to the process, and return what it says.

        Args:
            lines: Work or answers, one line of JSON each.
            stop: Whether to kill the process instead, which is stuck.

        Returns:
            Events, one line of JSON each, as soon as there is one; none after some seconds. The
            last of a process that ended is `ended`; the next work starts another one.
        """
        if stop and self._process is not None:
            self._process.kill()
        elif lines:
            self._pass_on(lines)
        found: list[str] = []
        try:
            line = self._lines.get(timeout=_PATIENCE_SECONDS)
            while line is not None:
                found.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return found
        return [*found, self._ended()]

    def _pass_on(self, lines: Sequence[str]) -> None:
        process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died, as will be heard
            process.stdin.writelines(f"{line}\n" for line in lines)
            process.stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._lines = queue.Queue()
        self._process = subprocess.Popen(  # noqa: S603 - our own command, without a shell
            child.command("oasis_eval.sweep.remote"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            cwd=self._folder,
            env={**os.environ, **child.threads(self._num_threads)},
        )
        threading.Thread(target=_listen, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def _ended(self) -> str:
        assert self._process is not None
        assert self._errors is not None
        status = self._process.wait()
        how = last_words(status, self._errors)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what could not be written to it any more
                pipe.close()  # type: ignore[union-attr]  # they are pipes
        self._process = self._errors = None
        return json.dumps({"kind": "ended", "cells": [], "reason": how, "status": status})


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
