"""What a cell will take: counted sizes, records before parameters, and what will not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasis_eval.plan import Texts
from oasis_eval.record import Provenance, write_record
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep import estimate
from oasis_eval.sweep.estimate import Estimator
from oasis_eval.sweep.grid import expand
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.run import Plan, estimates
from tests import tiny
from tests.report.samples import record
from tests.sweep.conftest import Grids

NUM_PARAMETERS = sum(item.numel() for item in tiny.build_model().parameters())


def ledger_of(grid: SweepSpec) -> Ledger:
    ledger = Ledger(expand(grid))
    ledger.identify()
    return ledger


def test_parameters_are_counted_from_the_files(grid: Grids, home: Path) -> None:
    """Exactly, whatever the number of shards."""
    tiny.save(home / "sharded", max_shard_size="20KB")

    assert len(list((home / "sharded").glob("*.safetensors"))) > 1
    assert estimate._parameters(home / "sharded") == NUM_PARAMETERS
    assert estimate._parameters(home / "s0") == NUM_PARAMETERS


def test_memory_grows_by_the_second_copy_of_the_weights(grid: Grids) -> None:
    """A scheme keeps the originals; half the bytes in bf16."""
    ledger = ledger_of(grid(schemes=["fp32", "w8a8", "bf16"], tasks=["wikitext2"]))
    found = estimates(ledger, Plan(Path("runs")))
    plain, quantized, half = (found[id(entry)] for entry in ledger.entries)

    assert plain is not None
    assert quantized is not None
    assert half is not None
    assert quantized.num_bytes - plain.num_bytes == 4 * NUM_PARAMETERS
    batch = 64 * 48 * estimate._WIDTHS_PER_TOKEN
    assert plain.num_bytes - half.num_bytes == 2 * (NUM_PARAMETERS + batch)


def test_time_without_records_is_two_operations_a_parameter_and_token(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the speed of this machine; text has four characters a token, a limit cuts it."""
    monkeypatch.setattr(estimate, "_speed", lambda device, dtype: 1e6)
    ledger = ledger_of(grid(schemes=["fp32"], include=[{"limit": 1, "window": 32}]))
    found = [estimates(ledger, Plan(Path("runs")))[id(entry)] for entry in ledger.entries]

    seconds = [item.seconds for item in found if item is not None and item.seconds is not None]
    assert [item.source for item in found if item is not None] == ["parameters"] * 4
    assert seconds == pytest.approx(
        [1.5 + 2 * NUM_PARAMETERS * tokens / 1e6 for tokens in (100, 100, 32, 32)]
    )


@pytest.mark.parametrize(
    ("scheme", "diagnostics", "passes"),
    [("fp32", False, 1.0), ("w8a8", False, 1.3), ("w8a8-static", False, 2.5), ("w8a8", True, 2.6)],
)
def test_what_a_scheme_and_diagnostics_cost_is_in_it(
    grid: Grids, monkeypatch: pytest.MonkeyPatch, scheme: str, diagnostics: bool, passes: float
) -> None:
    """As so many plain passes."""
    monkeypatch.setattr(estimate, "_speed", lambda device, dtype: 1e6)
    ledger = ledger_of(grid(schemes=[scheme], tasks=["wikitext2"], diagnostics=diagnostics))
    found = estimates(ledger, Plan(Path("runs")))[id(ledger.entries[0])]

    assert found is not None
    assert found.seconds == pytest.approx(1.5 + passes * 2 * NUM_PARAMETERS * 100 / 1e6)


def test_records_of_the_checkpoint_come_first(grid: Grids) -> None:
    """Of this task, else of other texts token by token; other checkpoints do not count."""
    ledger = ledger_of(grid(models=["./s0", "./s1"], schemes=["w8a8"]))
    cell = ledger.entries[0].cell
    assert cell.data is not None
    made = record(metrics={"nll_nats": 10.0, "num_tokens": 50.0})
    provenance = Provenance(
        checkpoint_sha256=cell.digest,
        versions={},
        device="cpu",
        dtype="fp32",
        attention=None,
        started=None,
        seconds=7.0,
        num_threads=1,
    )
    task = cell.spec.task
    Path("runs").mkdir()
    write_record(
        Path("runs"),
        made.model_copy(
            update={
                "key": "0" * 64,
                "provenance": provenance,
                "data": cell.data.infos,
                "spec": cell.spec.model_copy(update={"task": task, "dtype": "bf16"}),
            }
        ),
    )
    (Path("runs") / "damaged.json").write_text(f'{{"{cell.digest}"')

    found = [estimates(ledger, Plan(Path("runs")))[id(entry)] for entry in ledger.entries]

    sources = [item.source for item in found if item is not None]
    assert sources == ["records under this scheme", "records of other texts", *["parameters"] * 2]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].seconds == 7.0
    assert found[1].seconds == pytest.approx(7.0 / 50.0 * 100)


def test_what_will_not_fit_is_said_before_it_starts(
    grid: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, shared by processes; a window beyond the positions; a device that is not there."""
    ledger = ledger_of(grid(schemes=["fp32"], tasks=["wikitext2"]))
    cell = ledger.entries[0].cell
    needed = estimate._num_bytes(cell.spec, estimate.Shape(NUM_PARAMETERS, 48, 128))

    def obstacle(processes: int = 1) -> str | None:
        found = Estimator(Path("runs"), [], processes=processes).of(cell)
        assert found is not None
        return found.obstacle

    monkeypatch.setattr(estimate, "free_bytes", lambda device: needed * 3 // 2)
    alone, together = obstacle(), obstacle(2)
    monkeypatch.setattr(estimate, "free_bytes", lambda device: None)
    cell.spec = cell.spec.model_copy(update={"device": "cuda:7"})
    absent = obstacle()
    task = cell.spec.task.model_copy(update={"protocol": "gptq-500"})
    cell.spec = cell.spec.model_copy(update={"task": task})

    assert alone is None
    assert "for each of 2" in str(together)
    assert absent == "device cuda:7 cannot be used here"
    assert obstacle() == "a window of 500 tokens, the model has 128 positions"


def test_a_texts_error_is_no_estimate(grid: Grids) -> None:
    """Nothing is guessed about a cell that cannot run."""
    (cell, *_) = expand(grid(data={"wikitext2": "gone.txt", "bookcorpus": "book.txt"}))
    Texts().give(cell)

    assert Estimator(Path("runs"), [], processes=1).of(cell) is None
