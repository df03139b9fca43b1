"""Beside the unquantized model: predictions, answers, and only what is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from oasis_eval import measurement, plan
from oasis_eval.errors import DataError, RecordError
from oasis_eval.fidelity import answer_flips
from oasis_eval.harness import run as harness
from oasis_eval.parsing import parse
from oasis_eval.pipeline import Report, evaluate
from oasis_eval.quant import schemes
from oasis_eval.quantized import Plan as QuantizedPlan
from oasis_eval.quantized import quantize
from oasis_eval.record import RunRecord, read_records, read_samples, write_record
from oasis_eval.registry import resolve
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table
from oasis_eval.spec import EvaluationSpec, TableSpec
from tests import tiny


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("baseline") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.prose(200))
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model: Path, out: Path, **changes: object) -> Report:
    settings: dict[str, object] = {
        "models": [str(model)],
        "schemes": ["fp32", "w4a4"],
        "tasks": ["text"],
        "window": 64,
    }
    return evaluate(parse(EvaluationSpec, settings | changes, origin="test"), out, quiet=True)


def values(record: RunRecord) -> dict[str, float]:
    assert record.status == "ok", record.reason
    return {metric.name: metric.value for metric in record.metrics}


def test_predictions_are_compared(model: Path, text: Path, tmp_path: Path) -> None:
    """Under their own protocol; the change of the loss is that of the two records' losses."""
    report = run(model, tmp_path / "runs", data={"text": str(text)}, diagnostics=True)
    plain, quantized = report.records
    before, after = values(plain), values(quantized)

    assert "kl_nats" not in before
    assert after["delta_nll_nats"] == pytest.approx(
        (after["nll_nats"] - before["nll_nats"]) / before["num_tokens"], abs=1e-6
    )
    found = quantized.metric("kl_nats")
    assert found is not None
    assert (found.protocol, found.count) == ("fidelity-64", 3)
    rows = read_samples(tmp_path / "runs", quantized.key)
    total = sum(float(str(row["kl_nats"])) for row in rows)
    assert after["kl_nats"] == pytest.approx(total / (3 * 63))
    for row in rows:
        assert row["fidelity_nll_nats"] == pytest.approx(row["nll_nats"], abs=1e-3)
        assert row["reference_nll_nats"] != row["fidelity_nll_nats"]
    spec = TableSpec(metrics=("token_perplexity", "kl_nats", "same_top1", "delta_nll_nats"))
    shown = render(build_table(report.records, spec), format="markdown")
    for words in ("KL (nats) ↓", "Same top-1 (%) ↑", "Δ NLL (nats) ↓", "unquantized model in fp32"):
        assert words in shown


@pytest.mark.parametrize(
    "protocol", ["rolling-word-48", "qualcomm-48", "openattnres-48", "llamacpp-48"]
)
def test_windows_are_those_of_the_samples(model: Path, tmp_path: Path, protocol: str) -> None:
    """Under every protocol, what is stored of a window stands beside its own loss."""
    path = tmp_path / "wiki.txt"
    path.write_text(f" = One = \n\n{tiny.prose(130)}\n\n = Two = \n\n{tiny.prose(70, seed=1)}\n")
    (record,) = run(
        model,
        tmp_path / "runs",
        tasks=["wikitext2"],
        schemes=["w8a8"],
        protocols=[protocol],
        window=None,
        data={"wikitext2": str(path)},
        diagnostics=True,
    ).records
    rows = read_samples(tmp_path / "runs", record.key)

    assert len(rows) >= 3
    for row in rows:
        assert row["fidelity_nll_nats"] == pytest.approx(row["nll_nats"], abs=1e-3)
        assert row["fidelity_nll_nats"] != row["reference_nll_nats"]
    assert values(record)["kl_nats"] > 0.0


def test_only_what_is_missing_is_measured(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and diagnostics that are there are kept in every bit; the record is one in the end."""
    data = {"text": str(text)}
    scores = run(model, tmp_path / "runs", data=data).records[1]
    samples = read_samples(tmp_path / "runs", scores.key)

    def never(*args: object, **settings: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(harness, "evaluate", never)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_reference_dtype", lambda scheme, dtype: None)
        half = run(model, tmp_path / "runs", data=data, diagnostics=True).records[1]
    monkeypatch.setattr(measurement, "_diagnose", never)
    whole = run(model, tmp_path / "runs", data=data, diagnostics=True).records[1]
    again = run(model, tmp_path / "runs", data=data, diagnostics=True)
    plain = run(model, tmp_path / "runs", data=data)

    assert len({scores.key, half.key, whole.key}) == 3
    assert half.metrics[: len(scores.metrics)] == scores.metrics
    assert whole.metrics[: len(half.metrics)] == half.metrics
    assert whole.layers == half.layers
    assert "kl_nats" in values(whole)
    for row, old in zip(read_samples(tmp_path / "runs", whole.key), samples, strict=True):
        assert row.items() >= old.items()
    assert (again.num_reused, again.num_loads) == (2, 0)
    assert (plain.records, plain.num_reused) == (again.records, 2)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2


def test_the_reference_runs_once_for_all(model: Path, text: Path, tmp_path: Path) -> None:
    """Another scheme, another call, another batch: no file of the first is written again.

    The batch has no part in the comparison, so its numbers are the same in every bit.
    """
    data = {"text": str(text)}
    first = run(model, tmp_path / "one", data=data, diagnostics=True)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    second = run(
        model,
        tmp_path / "two",
        data=data,
        diagnostics=True,
        schemes=["bf16", "w4a4"],
        batch_size=8,
    )

    assert len(stored) == 3
    assert stored == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")
    }
    for name in ("kl_nats", "kl_max_nats", "delta_nll_nats", "same_top1"):
        assert second.records[1].metric(name) == first.records[1].metric(name)
        assert second.records[0].metric(name) != first.records[1].metric(name)


def test_flips_of_answers(model: Path, questions: Path, tmp_path: Path) -> None:
    """Once the unquantized answers are there, in this call or a later one."""
    settings: dict[str, object] = {
        "tasks": ["gsm8k"],
        "protocols": ["gsm8k-0shot"],
        "window": None,
        "data": {"gsm8k": str(questions)},
        "max_new_tokens": 4,
        "diagnostics": True,
    }
    alone = run(model, tmp_path, **settings | {"schemes": ["w4a4", "fp32"]}).records[0]
    report = run(model, tmp_path, **settings)

    assert "flips_right_to_wrong" not in values(alone)
    assert any(text.startswith("answers are not compared") for text in alone.warnings)
    plain, quantized = report.records
    assert values(quantized)["flips_right_to_wrong"] == 0.0
    assert not any(text.startswith("answers are not compared") for text in quantized.warnings)
    assert quantized.key == alone.key
    assert "flips_right_to_wrong" not in values(plain)
    assert run(model, tmp_path, **settings).num_reused == 2


def test_flips_by_hand() -> None:
    """Shares of all questions, by question and not by place."""
    before = [{"question": n, "strict": right} for n, right in enumerate([True, True, True, False])]
    after = [
        {"question": n, "strict": right}
        for n, right in [(3, True), (2, False), (1, False), (0, True)]
    ]
    lost, gained = answer_flips(before, after, task="gsm8k", protocol="gsm8k-5shot")

    assert (lost.name, lost.value, lost.count) == ("flips_right_to_wrong", 0.5, 4)
    assert (gained.name, gained.value) == ("flips_wrong_to_right", 0.25)
    assert lost.stderr == pytest.approx(math.sqrt(0.25 / 3))
    with pytest.raises(DataError, match="same questions"):
        answer_flips(before[:3], after, task="gsm8k", protocol="gsm8k-5shot")


def test_a_quantized_checkpoint_has_no_reference(model: Path, text: Path, tmp_path: Path) -> None:
    """The record says so, and has everything else."""
    scheme = schemes.resolve("w8a8-real")
    quantize(resolve(str(model)), QuantizedPlan(scheme=scheme), out=tmp_path / "made")
    (record,) = run(
        tmp_path / "made",
        tmp_path / "runs",
        data={"text": str(text)},
        schemes=["w8a8-real"],
        diagnostics=True,
    ).records

    assert "kl_nats" not in values(record)
    assert "max_inf_norm_outputs" in values(record)
    assert any("no unquantized model to compare" in text for text in record.warnings)


def test_scores_stay_though_what_comes_besides_fails(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored first; the next run measures what is missing, and one record is left."""
    out = tmp_path / "runs"
    settings = {"data": {"text": str(text)}, "diagnostics": True, "schemes": ["w4a4"]}
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "_diagnose", fail)
        (failed,) = run(model, out, **settings).records
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: no memory for that")
    (scores,) = [item for item in read_records([out]) if item.status == "ok"]
    assert values(scores)["num_tokens"] == 3 * 63
    shown = build_table(list(read_records([out])), TableSpec(metrics=("token_perplexity",)))
    assert shown.cells[0][0].value == pytest.approx(values(scores)["token_perplexity"])

    with monkeypatch.context() as patch:
        patch.setattr(harness, "evaluate", fail)
        (record,) = run(model, out, **settings).records
    assert values(record)["token_perplexity"] == values(scores)["token_perplexity"]
    assert "kl_nats" in values(record)
    assert [item.key for item in read_records([out])] == [record.key]
    assert len(list(out.glob("*.samples.jsonl"))) == 1


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no memory for that")


def test_what_comes_besides_keeps_who_scored(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit and time are those of the scores; what everything took adds up."""
    out = tmp_path / "runs"
    settings = {"data": {"text": str(text)}, "schemes": ["w4a4"]}
    (plain,) = run(model, out, **settings).records
    assert plain.provenance is not None
    stored = plain.provenance.model_copy(update={"git_commit": "0" * 40, "seconds": 3600.0})
    write_record(out, plain.model_copy(update={"provenance": stored}))
    (full,) = run(model, out, **settings, diagnostics=True).records

    assert full.provenance is not None
    assert full.provenance.git_commit == "0" * 40
    assert full.provenance.started == stored.started
    assert full.provenance.seconds is not None
    assert 3600.0 < full.provenance.seconds < 3700.0


def test_diagnostics_that_need_a_smaller_batch_say_so(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores keep the batch that they ran with."""
    diagnose, batches = measurement._diagnose, []

    def short_of_memory(prepared: object, cell: object, batch_size: int) -> object:
        batches.append(batch_size)
        if batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return diagnose(prepared, cell, batch_size)  # type: ignore[arg-type]

    monkeypatch.setattr(measurement, "_diagnose", short_of_memory)
    (record,) = run(
        model,
        tmp_path / "runs",
        data={"text": str(text)},
        schemes=["fp32"],
        diagnostics=True,
        batch_size=4,
    ).records

    assert batches == [4, 2, 1]
    assert record.status == "ok"
    assert record.protocols[0].details["batch_size"] == 4
    (said,) = [item for item in record.warnings if "out of memory" in item]
    assert said == "out of memory with a batch of 4: diagnostics measured with 1"


def test_of_two_records_of_the_same_scores_the_fuller_counts(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """A run that is killed before it removes the first of them leaves both."""
    out, other = tmp_path / "runs", tmp_path / "other"
    settings = {"data": {"text": str(text)}, "schemes": ["w4a4"]}
    (plain,) = run(model, out, **settings).records
    file = (out / f"{plain.key}.json").read_bytes()
    (full,) = run(model, out, **settings, diagnostics=True).records
    (out / f"{plain.key}.json").write_bytes(file)
    records = list(read_records([out]))
    assert {item.key for item in records} == {plain.key, full.key}

    spec = TableSpec(metrics=("token_perplexity", "kl_nats"))
    table = build_table(records, spec)
    assert table.cells == build_table([full], spec).cells
    # Scores that are not the same are two results, whatever stands beside one of them.
    changed = plain.metrics[0].model_copy(update={"stderr": 12.5})
    metrics = (changed, *plain.metrics[1:])
    write_record(other, plain.model_copy(update={"metrics": metrics}))
    with pytest.raises(RecordError, match="several results"):
        build_table([*read_records([other]), full], TableSpec())
