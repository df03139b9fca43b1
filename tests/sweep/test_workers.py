"""Several processes: the same records, each checkpoint in one of them, and none that outlives."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oasis_eval.plan import Texts
from oasis_eval.record import RunRecord, read_records
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep.deaths import WorkerError
from oasis_eval.sweep.grid import expand
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.request import CellRequest
from oasis_eval.sweep.run import Plan, sweep
from oasis_eval.sweep.workers import _event, _firsts
from tests.sweep.conftest import Grids, content

_HARMFUL = """
import os, signal
from oasis_eval.harness import run
original = run.evaluate

def evaluate(prepared, task, data, **options):
    marker = os.environ.get("HARM_ONCE")
    if prepared.scheme.name == "w8a8" and task.name == "wikitext2":
        if marker is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return original(prepared, task, data, **options)

run.evaluate = evaluate
"""


def run(grid: SweepSpec, out: str, **options: object) -> Ledger:
    return sweep(grid, Plan(Path(out), **options), io.StringIO())  # type: ignore[arg-type]


def test_each_process_begins_with_a_checkpoint_of_its_own(grid: Grids) -> None:
    """While there are enough; else they share the cells of one."""
    cells = expand(grid(models=["./s0", "./s1"]))

    assert _firsts(cells, 1) == [0]
    assert _firsts(cells, 2) == [0, 4]
    assert _firsts(cells, 3) == [0, 2, 5]
    assert _firsts(cells[:2], 8) == [0, 1]


@pytest.mark.slow
def test_processes_make_the_records_that_one_makes(grid: Grids) -> None:
    """A load a checkpoint, one more where a process helps the other; one thread each, as here."""
    whole = grid(models=["./s0", "./s1"], include=[{"schemes": ["bnb-w4a4"]}])
    together, alone = run(whole, "together", jobs=2), run(whole, "alone")

    assert [e.state for e in together.entries] == [e.state for e in alone.entries]
    assert together.num_loads in (2, 3)
    assert content("together") == content("alone")


@pytest.fixture
def harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes processes die while they measure one scheme on one text."""
    folder = tmp_path / "harm"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_HARMFUL)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root]))
    return folder


def test_a_package_in_the_current_folder_is_not_taken_for_ours(grid: Grids, home: Path) -> None:
    """Processes are of the package that started them; nothing that lies around runs."""
    (home / "oasis_eval").mkdir()
    (home / "oasis_eval" / "__init__.py").write_text("open('ran', 'w'); print('hello')")

    ledger = run(grid(tasks=["wikitext2"], schemes=["fp32"]), "runs", jobs=1)

    assert [entry.state for entry in ledger.entries] == ["ok"]
    assert not (home / "ran").exists()


def test_what_is_no_event_is_an_error_of_one_line() -> None:
    with pytest.raises(WorkerError, match="wrote what is no event: 'hello"):
        _event("hello\n")


@pytest.mark.slow
def test_a_cell_that_kills_its_process_fails_and_the_others_go_on(grid: Grids, harm: Path) -> None:
    """It is tried twice; its record says how the process ended."""
    ledger = run(grid(), "runs", jobs=1)

    assert [entry.state for entry in ledger.entries] == ["ok", "ok", "failed", "ok"]
    reason = str(ledger.entries[2].reason)
    assert "signal 9" in reason
    assert "twice" in reason
    assert {record.status for record in read_records([Path("runs")])} == {"ok", "failed"}


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(
    grid: Grids, harm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cell is not at fault."""
    monkeypatch.setenv("HARM_ONCE", str(harm / "marker"))

    ledger = run(grid(), "runs", jobs=1)

    assert [entry.state for entry in ledger.entries] == ["ok"] * 4


@pytest.mark.slow
def test_processes_end_with_the_sweep_that_started_them(grid: Grids, home: Path) -> None:
    """Though it is killed and can tell them nothing."""
    (home / "g.json").write_text(
        grid(schemes=["fp32", "w8a8", "w4a4", "w8a8-g16"]).model_dump_json()
    )
    script = (
        "import sys, pathlib; from oasis_eval.spec import SweepSpec; "
        "from oasis_eval.sweep.run import *; "
        "grid = SweepSpec.model_validate_json(pathlib.Path('g.json').read_text()); "
        "sweep(grid, Plan(pathlib.Path('runs'), jobs=2), sys.stderr)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(Path("runs").glob("*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()

    assert len(workers) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert all(isinstance(record, RunRecord) for record in read_records([Path("runs")]))


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    names = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in found}
    return [child for child in found if b"oasis_eval.sweep.worker" in names[child]]


def test_what_a_worker_is_told_makes_the_same_cells(grid: Grids, home: Path) -> None:
    """Same keys, through JSON, with every file that stands in for another."""
    questions = [{"question": f"{n} and 2?", "answer": f"#### {n + 2}"} for n in range(8)]
    (home / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    files = {"wikitext2": "wiki.txt", "gsm8k": "q.jsonl", "gsm8k:train": "q.jsonl"}
    ledger = Ledger(
        expand(
            grid(
                schemes=["fp32", "w8a8-static-linear", "bnb-w4a4"],
                tasks=["wikitext2", "gsm8k"],
                data={**files, "calibration": "book.txt"},
                diagnostics=True,
            )
        )
    )
    ledger.identify()
    texts = Texts()
    for entry in ledger.entries:
        text = json.dumps(CellRequest.of(entry.cell).model_dump(mode="json"))
        again = CellRequest.model_validate_json(text).cell(texts)

        assert entry.cell.problem is None
        assert again == entry.cell
        assert again.key == entry.cell.key
