"""Folders that cannot be written, or not any longer: one line, and what was written stays."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasis_eval.record import read_records
from tests.campaigns.children import start
from tests.campaigns.results import files

SWEEP = ["sweep", "grid.yaml", "--out"]


@pytest.fixture
def small(folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        place.rmdir()
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)
    place.rmdir()


def _stopped(folder: Path, name: str, exitcode: int | None) -> str:
    """Return the one line that a sweep ended with."""
    lines = (folder / f"{name}.err").read_text().splitlines()
    assert exitcode == 2, lines
    (error,) = [line for line in lines if not line.startswith("[")]
    assert error.startswith("error: ")
    return error


@pytest.mark.slow
def test_a_file_system_that_is_full(folder: Path, small: Path) -> None:
    """One line; records stay whole; once there is room the sweep is gone on with."""
    ballast = small / "ballast"
    size = 256 * 1024 - sum(p.stat().st_size for p in (folder / "whole").iterdir()) // 3
    ballast.write_bytes(b"x" * max(4096, size))
    process = start(folder, [*SWEEP, "small/runs"], name="full")
    process.join()

    assert "No space left" in _stopped(folder, "full", process.exitcode)
    kept = list(read_records([small / "runs"]))
    assert 0 < len(kept) < 12
    assert {record.status for record in kept} == {"ok"}
    ballast.unlink()
    again = start(folder, [*SWEEP, "small/runs"], name="again")
    again.join()
    assert again.exitcode == 0, (folder / "again.err").read_text()
    assert files(small / "runs") == files(folder / "whole")


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(folder: Path) -> None:
    """As full a disk as one can be without a file system: the first record does not fit."""
    process = start(folder, [*SWEEP, "limited"], name="limited", most_bytes=1000)
    process.join()

    # Python ignores the signal that comes with this limit; the write fails.
    assert "File too large" in _stopped(folder, "limited", process.exitcode)
    assert not list((folder / "limited").glob("*.json"))
    assert not list((folder / "limited").glob(".*.tmp"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(folder: Path) -> None:
    """One line before anything runs."""
    (folder / "closed").mkdir(mode=0o555)
    process = start(folder, [*SWEEP, "closed"], name="closed")
    process.join()

    assert "Permission denied" in _stopped(folder, "closed", process.exitcode)


@pytest.mark.slow
def test_a_file_system_that_is_read_only(folder: Path, small: Path) -> None:
    """One line before anything runs, though records are there."""
    shutil.copytree(folder / "whole", small / "runs")
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    process = start(folder, [*SWEEP, "small/runs"], name="readonly")
    process.join()

    assert "Read-only file system" in _stopped(folder, "readonly", process.exitcode)
