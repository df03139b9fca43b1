"""Sweeps in child processes that start at once: a server has imported everything and forks them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from oasis_eval.cli import main

_LIBRARIES = ("oasis_eval.execution", "oasis_eval.loading", "oasis_eval.sweep.run",
              "lm_eval.evaluator", "lm_eval.tasks", "tests.campaigns.children")  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(_LIBRARIES))


def _command_line(folder: str, arguments: list[str], name: str, most_bytes: int | None) -> None:
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.argv = ["oasis-eval", *arguments]
    main()


def start(
    folder: Path, arguments: list[str], *, name: str = "child", most_bytes: int | None = None
) -> BaseProcess:
    """Start `oasis-eval ARGUMENTS` in a folder; what it says goes to NAME.out and NAME.err there.

    Args:
        folder: Where it runs.
        arguments: Of the command line.
        name: Of the two files.
        most_bytes: Size beyond which it can write no file.
    """
    process = _context.Process(
        target=_command_line, args=(str(folder), arguments, name, most_bytes)
    )
    process.start()
    return process
