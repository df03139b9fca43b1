"""A sweep that is killed again and again, and two sweeps at once, end as one that is left alone."""

from __future__ import annotations

import logging
import os
import random
import time
from pathlib import Path

import pytest

from tests.campaigns.children import start
from tests.campaigns.results import files, table

NUM_KILLS = int(os.environ.get("OASIS_EVAL_KILLS", "12"))
SWEEP = ["sweep", "grid.yaml", "--out"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_the_records_are_those_of_a_whole_run(folder: Path) -> None:
    """SIGKILL at NUM_KILLS moments, each anywhere in what is left of the sweep."""
    chance = random.Random(0)
    start_time = time.monotonic()
    process = start(folder, [*SWEEP, "timed"], name="timed")
    process.join()
    whole_seconds = time.monotonic() - start_time
    num_kills = num_sweeps = 0
    while num_kills < NUM_KILLS:
        out = f"killed{num_sweeps}"
        num_sweeps += 1
        while True:
            process = start(folder, [*SWEEP, out], name=out)
            # Beyond the end now and then: some sweeps are to finish.
            process.join(chance.uniform(0.0, whole_seconds / 2))
            if process.exitcode is not None or num_kills == NUM_KILLS:
                process.join()
                break
            process.kill()
            process.join()
            num_kills += 1

        assert process.exitcode == 0, (folder / f"{out}.err").read_text()
        assert files(folder / out) == files(folder / "whole")
        assert table(folder / out) == table(folder / "whole")
    figures = (num_kills, num_sweeps, whole_seconds)
    logging.getLogger(__name__).info("%d kills in %d sweeps; a whole one takes %.1f s", *figures)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_two_sweeps_share_a_folder(folder: Path, number: int) -> None:
    """Each cell is measured once, by one of them; both end with every cell."""
    out = f"shared{number}"
    both = [start(folder, [*SWEEP, out], name=f"{out}-{which}") for which in "xy"]
    for process in both:
        process.join()

    said = [(folder / f"{out}-{which}.err").read_text() for which in "xy"]
    assert [process.exitcode for process in both] == [0, 0], said
    assert files(folder / out) == files(folder / "whole")
    measured = [
        line.split("] ")[1].split(":")[0]
        for text in said
        for line in text.splitlines()
        if ": ok, " in line
    ]
    assert len(measured) == len(set(measured)) == 12


@pytest.mark.slow
def test_a_sweep_goes_on_where_another_is_killed(folder: Path) -> None:
    """What it had begun is done by the other, which was waiting for it or was not there yet."""
    first = start(folder, [*SWEEP, "widowed"], name="widowed-x")
    second = start(folder, [*SWEEP, "widowed"], name="widowed-y")
    while not list((folder / "widowed").glob("*.json")):
        assert first.exitcode is None
        time.sleep(0.01)
    first.kill()
    for process in (first, second):
        process.join()

    assert second.exitcode == 0, (folder / "widowed-y.err").read_text()
    assert files(folder / "widowed") == files(folder / "whole")
