"""What a sweep runs, what it keeps, and what stops it."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from oasis_eval import execution, measurement
from oasis_eval.errors import OutputError, RecordError, SpecError, TimeLimitError
from oasis_eval.harness.run import evaluate as harness_evaluate
from oasis_eval.parsing import parse
from oasis_eval.pipeline import evaluate
from oasis_eval.record import RunRecord, read_record, read_records, write_record
from oasis_eval.report.compare import compare
from oasis_eval.spec import EvaluationSpec, SweepSpec
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.run import Plan, dry_run, sweep
from tests import tiny
from tests.sweep.conftest import Grids, furnish, make_grid


def run(grid: SweepSpec, **options: object) -> Ledger:
    return sweep(grid, Plan(Path("runs"), **options), io.StringIO())  # type: ignore[arg-type]


def states(ledger: Ledger) -> list[str]:
    return [entry.state for entry in ledger.entries]


def numbers(record: RunRecord) -> dict[str, float]:
    return {metric.name: metric.value for metric in record.metrics}


def fail_on(monkeypatch: pytest.MonkeyPatch, scheme: str, error: Exception) -> None:
    """Make the measuring of one scheme fail."""

    def measure(prepared, *args, **options):
        if prepared.scheme.name == scheme:
            raise error
        return harness_evaluate(prepared, *args, **options)

    monkeypatch.setattr(measurement.harness, "evaluate", measure)


# --- what runs ----------------------------------------------------------------------------------


def test_a_sweep_is_what_evaluate_makes_with_one_load_a_checkpoint(grid: Grids) -> None:
    """Keys and numbers of every cell are those of `evaluate`."""
    ledger = run(grid(models=["./s{seed}"], seeds=[0, 1]))

    assert states(ledger) == ["ok"] * 8
    assert ledger.num_loads == 2
    for seed in (0, 1):
        spec = parse(
            EvaluationSpec,
            {
                "models": [f"./s{seed}"],
                "schemes": ["fp32", "w8a8"],
                "tasks": ["wikitext2", "bookcorpus"],
                "window": 64,
                "data": {"wikitext2": "wiki.txt", "bookcorpus": "book.txt"},
                "seed": seed,
            },
            origin="test",
        )
        alone = evaluate(spec, Path("alone"), quiet=True).records
        swept = [e.record for e in ledger.entries if e.cell.spec.seed == seed and e.record]
        assert [record.key for record in swept] == [record.key for record in alone]
        assert list(map(numbers, swept)) == list(map(numbers, alone))


def test_a_second_sweep_runs_nothing(grid: Grids) -> None:
    """No load; the records are not touched."""
    run(grid())
    before = {path: path.stat().st_mtime_ns for path in Path("runs").iterdir()}

    again = run(grid())

    assert states(again) == ["ok"] * 4
    assert all(entry.reused for entry in again.entries)
    assert again.num_loads == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs").iterdir()} == before


@pytest.mark.parametrize("days", [-20000, 20000])
def test_a_clock_that_jumps_changes_nothing(
    grid: Grids, home: Path, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a sweep, and between two: same records, sane times, nothing done again."""
    expected = {entry.record.key: numbers(entry.record) for entry in run(grid()).entries}
    shutil.rmtree("runs")
    now, calls = time.time, itertools.count()

    def jumping() -> float:  # forth and back at every other look
        return now() + days * 86400.0 * (next(calls) % 2)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping)
        ledger = run(grid())
    for path in [*Path("runs").iterdir(), home / "wiki.txt", home / "book.txt"]:
        os.utime(path, (now() + days * 86400.0,) * 2)
    again = run(grid())

    found = {entry.record.key: numbers(entry.record) for entry in ledger.entries}
    assert found == expected
    assert all(0.0 < entry.record.provenance.seconds < 600.0 for entry in ledger.entries)
    assert [entry.reused for entry in again.entries] == [True] * 4
    assert again.num_loads == 0


WHOLE: dict[str, list[str]] = {
    "models": ["./s0", "./s1"],
    "schemes": ["fp32", "./mine.yaml"],
}
MINE = "name: mine\nweights: {bits: 8, granularity: channel}\n"


@pytest.fixture(scope="module")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of WHOLE, which are the same wherever its files lie; read-only."""
    folder = tmp_path_factory.mktemp("finished")
    furnish(folder, models)
    (folder / "mine.yaml").write_text(MINE)
    with contextlib.chdir(folder):
        run(make_grid(**WHOLE))
    return folder / "runs"


@pytest.mark.parametrize("changed", ["nothing", "checkpoint", "scheme", "protocol", "data", "grid"])
def test_what_changed_is_another_cell_and_the_rest_is_kept(
    grid: Grids, home: Path, models: Path, finished: Path, changed: str
) -> None:
    """By content: only what a change concerns runs again."""
    mine = home / "mine.yaml"
    mine.write_text(MINE)
    (home / "s1").unlink()
    shutil.copytree(models / "s1", home / "s1")
    shutil.copytree(finished, home / "runs")
    whole = dict(WHOLE)
    if changed == "checkpoint":
        tiny.save(home / "s1", model=tiny.build_model(seed=5))
    elif changed == "scheme":
        mine.write_text("name: mine\nweights: {bits: 7, granularity: channel}\n")
    elif changed == "data":
        (home / "book.txt").write_text(tiny.prose(400, seed=8))
    elif changed == "grid":
        whole["schemes"] = [*whole["schemes"], "w4a4"]
    changes = {"window": 32} if changed == "protocol" else {}

    again = run(grid(**whole, **changes))

    fresh = {(e.cell.spec.model, e.cell.spec.scheme.name, e.cell.spec.task.name)
             for e in again.entries if not e.reused}  # fmt: skip
    everything = {(m, s, t) for m in whole["models"] for s in ("fp32", "mine", "w4a4")
                  for t in ("wikitext2", "bookcorpus")}  # fmt: skip
    expected = {
        "nothing": set(),
        "checkpoint": {cell for cell in everything if cell[0] == "./s1" and cell[1] != "w4a4"},
        "scheme": {cell for cell in everything if cell[1] == "mine"},
        "protocol": {cell for cell in everything if cell[1] != "w4a4"},
        "data": {cell for cell in everything if cell[2] == "bookcorpus" and cell[1] != "w4a4"},
        "grid": {cell for cell in everything if cell[1] == "w4a4"},
    }[changed]
    assert fresh == expected
    assert {entry.state for entry in again.entries} == {"ok"}


# --- failures -----------------------------------------------------------------------------------


def test_a_failed_cell_keeps_its_traceback_and_the_others_go_on(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run again only where that is asked for."""
    with monkeypatch.context() as patch:
        fail_on(patch, "fp32", ZeroDivisionError("by zero"))
        first = run(grid())

    again = run(grid())
    retried = run(grid(), retry_failed=True)

    assert states(first) == states(again) == ["failed", "failed", "ok", "ok"]
    assert first.entries[0].reason == "ZeroDivisionError: by zero"
    record = first.entries[0].record
    assert record is not None
    assert "by zero" in str(record.traceback)
    assert again.num_loads == 0
    assert states(retried) == ["ok"] * 4
    assert [entry.reused for entry in retried.entries] == [False, False, True, True]


def test_a_checkpoint_that_cannot_be_loaded_fails_its_cells_only(grid: Grids, home: Path) -> None:
    """One error for all of them, and no record."""
    shutil.copytree(home / "s1", home / "bad")
    shard = next((home / "bad").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])

    ledger = run(grid(models=["./bad", "./s0"]))

    assert states(ledger) == ["lost"] * 4 + ["ok"] * 4
    (error,) = ledger.errors
    assert shard.name in str(error)
    assert len(list(Path("runs").glob("*.json"))) == 4


def test_a_damaged_record_is_named_and_the_others_go_on(grid: Grids) -> None:
    """It is neither taken for a result nor computed over."""
    first = run(grid())
    record = first.entries[1].record
    assert record is not None
    path = Path("runs") / f"{record.key}.json"
    path.write_text("{")

    again = run(grid(schemes=["fp32", "w8a8", "w4a4"]))

    assert states(again) == ["ok", "lost", "ok", "ok", "ok", "ok"]
    assert path.name in str(again.errors[0])
    assert path.read_text() == "{"


def test_a_cell_that_takes_too_long_fails_and_the_model_is_loaded_again(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was being changed when time ran out is not trusted; the next numbers are right."""

    armed: list[float] = []

    def measure(prepared, task, *args, **options):
        armed.append(signal.getitimer(signal.ITIMER_REAL)[0])
        if (prepared.scheme.name, task.name) == ("w8a8", "wikitext2"):
            prepared.model.lm_head.weight.data.zero_()
            raise TimeLimitError("the time limit of 5000 s for a cell was reached")
        return harness_evaluate(prepared, task, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measurement.harness, "evaluate", measure)
        ledger = run(grid(schemes=["fp32", "w8a8", "bf16"]), cell_seconds=5000)

    assert all(4000 < seconds <= 5000 for seconds in armed)
    assert states(ledger) == ["ok", "ok", "failed", "ok", "ok", "ok"]
    assert "time limit of 5000 s" in str(ledger.entries[2].reason)
    assert ledger.num_loads == 2
    alone = sweep(grid(schemes=["w8a8", "bf16"]), Plan(Path("alone")), io.StringIO())
    for one, other in ((3, 1), (4, 2), (5, 3)):
        swept, again = ledger.entries[one].record, alone.entries[other].record
        assert swept is not None
        assert again is not None
        assert numbers(swept) == numbers(again)


# --- memory -------------------------------------------------------------------------------------


def limit_batch(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let memory run out for batches above `most`; return the batches that were tried."""
    tried: list[int] = []

    def measure(*args, batch_size: int, **options):
        tried.append(batch_size)
        if batch_size > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return harness_evaluate(*args, batch_size=batch_size, **options)

    monkeypatch.setattr(measurement.harness, "evaluate", measure)
    return tried


def test_out_of_memory_halves_the_batch_and_says_so(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that ran is in the record; its numbers are those of that batch."""
    with monkeypatch.context() as patch:
        tried = limit_batch(patch, 2)
        ledger = run(grid(schemes=["w8a8"], tasks=["wikitext2"], batch_size=8))

    record = ledger.entries[0].record
    assert record is not None
    assert tried == [8, 4, 2]
    assert record.protocols[0].details["batch_size"] == 2
    assert any("batch of 8: measured with 2" in text for text in record.warnings)
    asked = sweep(
        grid(schemes=["w8a8"], tasks=["wikitext2"], batch_size=2), Plan(Path("two")), io.StringIO()
    )
    assert asked.entries[0].record is not None
    assert numbers(record) == numbers(asked.entries[0].record)


def test_a_comparison_says_that_batches_differ(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused where it matters (dynamic ranges), else said, though the same batch was asked for."""
    tasks = ["wikitext2"]
    run(grid(schemes=["fp32", "w8a8"], tasks=tasks, batch_size=4))
    limit_batch(monkeypatch, 2)
    for scheme in ("fp32", "w8a8"):
        folder = Path(scheme)
        sweep(grid(schemes=[scheme], tasks=tasks, batch_size=4), Plan(folder), io.StringIO())
        record = next(read_records([folder]))  # under another key, as of another machine
        for suffix in (".json", ".samples.jsonl"):
            old = folder / f"{record.key}{suffix}"
            old.rename(folder / f"{'0' * 64}{suffix}")
        (folder / f"{'0' * 64}.json").unlink()
        write_record(folder, record.model_copy(update={"key": "0" * 64}))

    where = {"scheme": ("fp32",)}
    (found,) = compare(Path("runs"), Path("fp32"), where_first=where, where_second={}).differences
    with pytest.raises(RecordError, match=r"batch_size is 4 in A .* and 2 in B"):
        compare(Path("runs"), Path("w8a8"), where_first={"scheme": ("w8a8",)}, where_second={})

    assert any("batch_size 4 in A, 2 in B" in note for note in found.notes)


def test_memory_that_does_not_suffice_for_one_sequence_fails_the_cell(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the traceback; the others are tried."""
    tried = limit_batch(monkeypatch, 0)

    ledger = run(grid(batch_size=2, schemes=["fp32"]))

    assert tried == [2, 1, 2, 1]
    assert states(ledger) == ["failed", "failed"]
    assert "OutOfMemoryError" in str(ledger.entries[0].reason)


# --- the folder ---------------------------------------------------------------------------------


def test_leftovers_of_a_killed_process_are_removed(grid: Grids) -> None:
    """Only what such a process was writing."""
    ledger = run(grid())
    record = ledger.entries[0].record
    assert record is not None
    leftover = Path("runs") / f".{record.key}.json.abc.tmp"
    leftover.write_text("{")
    other = Path("runs") / ".mine.tmp"
    other.write_text("")

    run(grid())

    assert not leftover.exists()
    assert other.exists()


def test_a_folder_that_fills_up_ends_the_sweep(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing further is computed that could not be kept; what was written stays."""
    written = []

    def write(folder: Path, record: RunRecord) -> Path:
        if len(written) == 2:
            raise OutputError("runs: cannot be written (No space left on device)")
        written.append(record.key)
        return write_record(folder, record)

    monkeypatch.setattr(execution, "write_record", write)

    with pytest.raises(OutputError, match="No space left"):
        run(grid(models=["./s0", "./s1"]))

    assert [read_record(path).status for path in Path("runs").glob("*.json")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("options", "message"), [({"jobs": 0}, "--jobs 0"), ({"cell_seconds": 0.0}, "--cell-timeout 0")]
)
def test_options_that_make_no_sense(grid: Grids, options: dict[str, object], message: str) -> None:
    """Named, before anything runs."""
    with pytest.raises(SpecError, match=message):
        run(grid(), **options)


# --- dry runs -----------------------------------------------------------------------------------


def test_a_dry_run_says_what_is_done_and_runs_nothing(grid: Grids, home: Path) -> None:
    """Done, to run, not runnable; with time and memory of what is to run."""
    run(grid(schemes=["fp32"]))
    before = sorted(Path("runs").iterdir())

    ledger, found = dry_run(
        grid(
            schemes=["fp32", "w8a8", "bnb-w4a4"],
            include=[{"tasks": ["text"], "schemes": ["fp32"], "data": {"text": "gone.txt"}}],
        ),
        Plan(Path("runs")),
    )

    assert states(ledger) == ["ok", "ok", "open", "open", "unsupported", "unsupported", "failed"]
    for entry in ledger.open:
        estimate = found[id(entry)]
        assert estimate is not None
        assert estimate.source == "records under other schemes"
        assert estimate.seconds is not None
        assert estimate.obstacle is None
    assert sorted(Path("runs").iterdir()) == before


def test_a_dry_run_makes_no_folder(grid: Grids) -> None:
    """It asks for nothing and leaves nothing."""
    dry_run(grid(), Plan(Path("new")))

    assert not Path("new").exists()
