"""Several processes on one evaluation: every item once, errors everywhere, the same records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oasis_eval import pipeline, ranks
from oasis_eval.errors import SpecError
from oasis_eval.limits import is_out_of_memory
from oasis_eval.ranks import RankError, Ranks
from oasis_eval.spec import EvaluationSpec

SECONDS = 10.0


def in_group(
    count: int, job: Callable[[Ranks], Any], monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """Run a job as `count` processes would, in threads; return their results or errors."""
    slots: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    here = threading.local()

    def gather(value: object) -> list[Any]:
        slots[here.index] = value
        barrier.wait(SECONDS)
        found = list(slots)
        barrier.wait(SECONDS)
        return found

    monkeypatch.setattr(ranks, "_gather", gather)
    results: list[object] = [None] * count

    def run(index: int) -> None:
        here.index = index
        try:
            results[index] = job(Ranks(index, count))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_items", [0, 1, 2, 7])
def test_every_item_runs_once_and_all_hear_of_it(
    count: int, num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results come in the order of the items, whoever ran them; a bar reaches its end."""
    ran: list[tuple[int, int]] = []
    seen: list[int] = []

    def job(group: Ranks) -> list[int]:
        def run(item: int) -> int:
            ran.append((group.index, item))
            return item * item

        on_done = seen.append if group.is_first else (lambda item: None)
        return group.share(range(num_items), run, on_done=on_done)

    results = in_group(count, job, monkeypatch)

    assert results == [[item * item for item in range(num_items)]] * count
    assert sorted(item for _, item in ran) == list(range(num_items))
    assert {index for index, item in ran} == set(range(min(count, num_items)))
    assert seen == list(range(num_items))


def test_the_first_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only it looks."""
    asked: list[int] = []

    def job(group: Ranks) -> str:
        return group.first(lambda: asked.append(group.index) or f"from {group.index}")

    assert in_group(3, job, monkeypatch) == ["from 0"] * 3
    assert asked == [0]


@pytest.mark.parametrize("place", ["before", "shared", "after", "first"])
def test_an_error_in_one_is_an_error_in_all(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it happens; the group stays in step and goes on with the next block."""
    culprit = 0 if place == "first" else 1

    def fail(group: Ranks, here: str) -> int:
        if group.index == culprit and place == here:
            raise ValueError("broken text")
        return 1

    def job(group: Ranks) -> tuple[str, list[int]]:
        message = "nothing"
        try:
            with group.together():
                fail(group, "before")
                group.first(lambda: fail(group, "first"))
                group.share(range(4), lambda item: fail(group, "shared"))
                fail(group, "after")
        except (ValueError, RankError) as error:
            message = f"{type(error).__name__}: {error}"
        return message, group.share(range(3), lambda item: item)

    results = in_group(2, job, monkeypatch)

    told = f"RankError: process {culprit}: ValueError: broken text"
    expected = [told, told]
    expected[culprit] = "ValueError: broken text"
    assert results == [(message, [0, 1, 2]) for message in expected]


def test_missing_memory_in_one_is_that_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all of them halve the batch."""

    def job(group: Ranks) -> bool:
        def run(item: int) -> int:
            if group.index == 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return item

        try:
            with group.together():
                group.share(range(2), run)
        except Exception as error:
            return is_out_of_memory(error)
        return False

    assert in_group(2, job, monkeypatch) == [True, True]


def test_a_single_process_joins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert ranks.join("cpu").count == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="--device cuda:1 with several processes: expected cuda"):
        ranks.join("cuda:1")


def test_diagnostics_want_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "_current", Ranks(0, 2))
    monkeypatch.setattr(ranks, "join", lambda device: ranks.current())
    spec = EvaluationSpec(
        models=("mini-vanilla",), schemes=("fp32",), tasks=("mini_ppl",), diagnostics=True
    )

    with pytest.raises(SpecError, match="--diagnostics with several processes: expected one"):
        pipeline.evaluate(spec, tmp_path)


TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def call(arguments: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow  # two processes that import torch, and one for comparison
def test_two_processes_make_the_records_of_one(tmp_path: Path) -> None:
    """Byte for byte but for provenance: scores, completions, static ranges, samples."""
    evaluate = ["oasis_eval", "evaluate", "mini-oasis", "--scheme", "fp32,w4a4,w4a4-static"]
    evaluate += ["--task", "mini_ppl,mini_gsm", "--limit", "5", "--batch-size", "2", "--out"]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = call([*evaluate, str(one)])
    assert alone.returncode == 0, alone.stderr
    shared = call([*TORCHRUN, "-m", *evaluate, str(two)])
    assert shared.returncode == 0, shared.stderr

    assert shared.stdout.replace(str(two), str(one)) == alone.stdout
    names = {file.name for file in one.glob("*.json*")}
    assert names == {file.name for file in two.glob("*.json*")}
    assert len(names) == 12
    for name in names:
        expected, found = ((folder / name).read_text() for folder in (one, two))
        if name.endswith(".json"):
            expected, found = json.loads(expected), json.loads(found)
            assert (expected.pop("provenance"), found.pop("provenance"))[1]["num_processes"] == 2
        assert found == expected


@pytest.mark.slow  # two processes that import torch
def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    """By the first process; a failed cell is a record, as in one process."""
    evaluate = [*TORCHRUN, "-m", "oasis_eval", "evaluate", "mini-oasis", "--task", "mini_gsm"]
    out = ["--out", str(tmp_path / "out"), "--limit", "1"]
    wrong = call([*evaluate, "--scheme", "w9z9", *out])
    failed = call([*evaluate, "--scheme", "fp32", "--max-new-tokens", "5000", *out])

    assert wrong.stderr.count("error: unknown scheme 'w9z9'") == 1
    assert failed.stderr.count("5000 new tokens do not fit") == 1
    records = [json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")]
    assert [record["status"] for record in records] == ["failed"]
