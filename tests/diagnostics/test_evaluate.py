"""`evaluate --diagnostics`: numbers in the record, the same scores, keys of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oasis_eval import corpus, registry
from oasis_eval.errors import SpecError
from oasis_eval.harness.run import TaskData, evaluate, input_windows
from oasis_eval.harness.scoring import Scorer
from oasis_eval.loading import load, prepare
from oasis_eval.parsing import parse
from oasis_eval.pipeline import Report
from oasis_eval.pipeline import evaluate as run_pipeline
from oasis_eval.quant import schemes
from oasis_eval.record import read_records
from oasis_eval.report.numbers import KNOWN_METRICS
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table
from oasis_eval.spec import EvaluationSpec, TableSpec, TaskRef
from tests import tiny
from tests.modeling.tiny import new_model, tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OASIS on TINY; read-only."""
    folder = tmp_path_factory.mktemp("evaluate") / "oasis"
    return tiny.save(folder, model=new_model(tiny_config("llama", "oasis")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(f" = One = \n\n{tiny.prose(150)}\n\n = Two = \n\n{tiny.prose(90, seed=1)}\n")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


def run(model: Path, text: Path, out: Path, **changes: object) -> Report:
    settings: dict[str, object] = {
        "models": [str(model)],
        "schemes": ["fp32", "w4a4"],
        "tasks": ["wikitext2"],
        "window": 64,
        "data": {"wikitext2": str(text)},
    }
    spec = parse(EvaluationSpec, settings | changes, origin="test")
    return run_pipeline(spec, out, quiet=True)


def test_records_carry_diagnostics(model: Path, text: Path, tmp_path: Path) -> None:
    """Scores stay bit for bit; the record has metrics, layers and a protocol of their own."""
    plain = run(model, text, tmp_path / "plain").records
    full = run(model, text, tmp_path / "full", diagnostics=True).records

    for one, other in zip(plain, full, strict=True):
        assert other.status == "ok", other.reason
        assert one.key != other.key
        scores = {item.name: item.value for item in one.metrics}
        both = {item.name: item.value for item in other.metrics}
        assert scores.items() <= both.items()
        expected = ["gptq-64", "diagnostics-64", "fidelity-64"]
        assert [item.name for item in other.protocols] == expected[: 2 + (other is full[1])]
        found = [item for item in other.metrics if item.protocol == "diagnostics-64"]
        assert {item.name for item in found} <= KNOWN_METRICS
        assert all(math.isfinite(item.value) for item in found)
        assert {"avg_kurtosis_linear_inputs", "sink_rate", "depth_entropy"} <= both.keys()
        assert any(item.name == "depth.beta" for item in other.layers)
        assert not one.layers
    assert full[0].metric("avg_kurtosis_outputs") != full[1].metric("avg_kurtosis_outputs")


def test_finished_cells_are_reused(model: Path, text: Path, tmp_path: Path) -> None:
    """A repeat runs nothing."""
    first = run(model, text, tmp_path, diagnostics=True, schemes=["fp32"])
    again = run(model, text, tmp_path, diagnostics=True, schemes=["fp32"])

    assert (again.num_loads, again.num_reused) == (0, 1)
    assert again.records == first.records


def test_a_record_with_diagnostics_stands_for_both(model: Path, text: Path, tmp_path: Path) -> None:
    """It takes the place of the plain record, and answers when that is asked for again."""
    run(model, text, tmp_path, schemes=["fp32"])
    full = run(model, text, tmp_path, schemes=["fp32"], diagnostics=True)
    plain = run(model, text, tmp_path, schemes=["fp32"])

    assert full.num_reused == 0
    assert (plain.num_loads, plain.num_reused) == (0, 1)
    assert plain.records == full.records
    assert list(read_records([tmp_path])) == full.records
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        f"{full.records[0].key}.samples.jsonl"
    ]


def test_tables_show_them(model: Path, text: Path, tmp_path: Path) -> None:
    """Any of the numbers can be a column, with header and direction."""
    records = run(model, text, tmp_path, diagnostics=True).records
    spec = TableSpec(
        metrics=("token_perplexity", "max_inf_norm_outputs", "sink_rate", "depth_entropy")
    )
    shown = render(build_table(records, spec), format="markdown")

    for words in ("Max. infinity norm, outputs ↓", "Sink rate (%) ↓", "Depth entropy / log S"):
        assert words in shown
    assert "diagnostics-64" in shown


def test_questions_alone_have_no_windows(model: Path, tmp_path: Path) -> None:
    """Asked for on questions only, diagnostics are refused in one line."""
    with pytest.raises(SpecError, match="windows of perplexity tasks"):
        run(
            model,
            tmp_path,
            tmp_path,
            tasks=["gsm8k"],
            schemes=["w4a4"],
            data={},
            diagnostics=True,
        )


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize(
    "protocol", ["gptq-64", "rolling-word-64", "qualcomm-64", "openattnres-64", "llamacpp-64"]
)
def test_windows_are_those_that_are_scored(
    model: Path, text: Path, protocol: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under every protocol, diagnostics read what the scores were computed from."""
    scored: list[list[int]] = []
    original = Scorer.score

    def score(self: Scorer, windows, **settings):  # type: ignore[no-untyped-def]
        scored.extend(window.input_ids for window in windows)
        return original(self, windows, **settings)

    monkeypatch.setattr(Scorer, "score", score)
    data = TaskData((corpus.load("wikitext2", data=str(text)),))
    task = TaskRef(name="wikitext2", protocol=protocol, data=str(text), limit=limit)
    reference = load(registry.resolve(str(model)), dtype="fp32")
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        evaluate(prepared, task, data, batch_size=1, quiet=True)
        windows = input_windows(prepared, task, data)

    assert sorted(windows) == sorted(scored)
