"""What runs, what is kept, and what a failure leaves behind."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaModel

from oasis_eval import execution, measurement, pipeline
from oasis_eval.errors import (
    CheckpointError,
    OasisError,
    RecordError,
    SpecError,
    UnknownNameError,
    UnsupportedSchemeError,
)
from oasis_eval.loading import load, prepare
from oasis_eval.parsing import parse
from oasis_eval.pipeline import Report, evaluate
from oasis_eval.quant import schemes
from oasis_eval.record import RunRecord, read_record, read_records, read_samples
from oasis_eval.registry import resolve
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import EvaluationSpec
from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("pipeline") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.prose(400))
    return path


class Call(NamedTuple):
    """One call of `evaluate` with what it cost."""

    report: Report
    num_forward: int

    @property
    def perplexities(self) -> list[float]:
        return [_value(record, "token_perplexity") for record in self.report.records]


def _value(record: RunRecord, name: str) -> float:
    found = record.metric(name)
    assert found is not None, record.reason
    return found.value


class Runner:
    """Calls `evaluate` on one output folder and counts the forward passes of Llama backbones."""

    def __init__(self, model: Path, text: Path, out: Path) -> None:
        self.model, self.text, self.out = model, text, out
        self._calls = 0

    def count(self, module: nn.Module, args: object, output: object) -> None:
        self._calls += isinstance(module, LlamaModel)

    def __call__(self, **changes: object) -> Call:
        settings: dict[str, object] = {
            "models": [str(self.model)],
            "schemes": ["fp32"],
            "tasks": ["wikitext2"],
            "window": 64,
            "data": {"wikitext2": str(self.text)},
        }
        before = self._calls
        spec = parse(EvaluationSpec, settings | changes, origin="test")
        report = evaluate(spec, self.out, quiet=True)
        return Call(report, self._calls - before)


@pytest.fixture
def run(model: Path, text: Path, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(model, text, tmp_path / "runs")
    handle = nn.modules.module.register_module_forward_hook(runner.count)
    yield runner
    handle.remove()


# --- what a result depends on -------------------------------------------------------------------


def test_another_model_is_never_given_a_stored_result(run: Runner, tmp_path: Path) -> None:
    """Schemes, seeds and overwritten weights give five numbers; only exact repeats run nothing."""
    run.model = tiny.save(tmp_path / "seed0")
    other = tiny.save(tmp_path / "seed1", model=tiny.build_model(seed=1))
    first = [run(schemes=[name]) for name in ("fp32", "w8a8", "w4a4")]
    second = run(models=[str(other)])
    repeats = [run(schemes=[name]) for name in ("fp32", "w8a8", "w4a4")]
    tiny.save(run.model, model=tiny.build_model(seed=2))
    overwritten = run()

    calls = [*first, second, overwritten]
    assert len({call.perplexities[0] for call in calls}) == 5
    assert all(call.num_forward > 0 for call in calls)
    assert [call.num_forward for call in repeats] == [0, 0, 0]
    assert [call.report.num_reused for call in repeats] == [1, 1, 1]
    assert [call.perplexities for call in repeats] == [call.perplexities for call in first]
    assert all(call.report.num_loads == 0 for call in repeats)


@pytest.mark.parametrize(
    "changes",
    [
        {"schemes": ["bf16"]},
        {"schemes": ["w8a8"], "dtype": "bf16"},
        {"window": 32},
        {"batch_size": 2},
        {"seed": 1},
        {"limit": 2},
        {"protocols": ["openattnres-64"]},
        {"protocols": ["rolling-word"]},
        {"tasks": ["bookcorpus"]},
    ],
    ids="-".join,
)
def test_every_setting_that_matters_makes_another_cell(
    run: Runner, changes: dict[str, object]
) -> None:
    """And the earlier cells stay as they are."""
    base = {"data": {"wikitext2": str(run.text), "bookcorpus": str(run.text)}}
    scheme = {"schemes": ["w8a8"]} if "dtype" in changes else {}
    run(**base, **scheme)

    changed = run(**(base | changes))

    assert changed.num_forward > 0
    assert changed.report.num_reused == 0
    assert len(list(run.out.glob("*.json"))) == 2
    assert run(**(base | changes)).num_forward == 0


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_the_other_files_of_a_checkpoint_matter_too(run: Runner, tmp_path: Path, file: str) -> None:
    """The tokenizer or the end tokens: a prefix token changes numbers as weights do."""
    run.model = tiny.save(tmp_path / "m")
    run()
    path = run.model / file
    path.write_text(path.read_text() + " ")

    assert run().num_forward > 0


def test_the_content_of_the_data_matters_and_not_its_place(run: Runner, tmp_path: Path) -> None:
    """Another text under the old name is another cell, the old text under a new name is not."""
    run()
    moved = tmp_path / "moved.txt"
    moved.write_text(run.text.read_text())
    again = run(data={"wikitext2": str(moved)})
    run.text.write_text(tiny.prose(400, seed=9))

    changed = run()

    assert again.num_forward == 0
    assert changed.num_forward > 0


def test_the_calibration_text_matters(run: Runner, tmp_path: Path) -> None:
    """Static ranges of another text are another cell."""
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text(tiny.prose(9000, seed=1))
    other.write_text(tiny.prose(9000, seed=2))
    calls = [
        run(
            schemes=["w8a8-static-linear"],
            data={"wikitext2": str(run.text), "calibration": str(path)},
        )
        for path in (one, other, one)
    ]

    assert [call.num_forward > 0 for call in calls] == [True, True, False]
    assert calls[0].perplexities != calls[1].perplexities


def test_calibrating_on_the_scored_text_is_a_warning(run: Runner) -> None:
    """It is stored with the result."""
    run.text.write_text(tiny.prose(9000))
    data = {"wikitext2": str(run.text), "calibration": str(run.text)}

    (record,) = run(schemes=["w8a8-static-linear"], data=data, limit=2).report.records

    assert any("read the same text" in warning for warning in record.warnings)


def test_a_folder_has_one_key_however_it_is_named(
    run: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Absolute, relative, with a slash at the end, or through a link."""
    run()
    link = tmp_path / "link"
    link.symlink_to(run.model)
    monkeypatch.chdir(run.model.parent)

    for name in ("./tiny", "tiny", "tiny/", f"{run.model}/", str(link), f"{run.model}/../tiny"):
        call = run(models=[name])
        assert (call.num_forward, call.report.num_reused) == (0, 1), name


def test_a_seed_is_one_key_whoever_says_it(run: Runner, tmp_path: Path) -> None:
    """The card or the call; another seed is another run."""
    card = {"family": "llama", "label": "tiny", "source": {"kind": "dir", "path": str(run.model)}}
    for name, more in (("plain", {}), ("seeded", {"seed": 3})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"name": "m", **card, **more}))
    run(models=[str(tmp_path / "plain.yaml")], seed=3)

    seeded = run(models=[str(tmp_path / "seeded.yaml")])
    assert (seeded.report.num_reused, seeded.report.records[0].spec.seed) == (1, 3)
    assert run(models=[str(tmp_path / "plain.yaml")]).report.num_reused == 0


# --- several schemes, one load ------------------------------------------------------------------


def test_schemes_share_one_load_and_do_not_touch_each_other(run: Runner, tmp_path: Path) -> None:
    """Any order of schemes gives each the number that it has alone."""
    names = ["w4a4", "fp32", "bf16", "w8a8", "w4a16"]

    together = run(schemes=names)

    run.out = tmp_path / "alone"
    alone = [run(schemes=[name]).perplexities[0] for name in names]
    assert together.report.num_loads == 1
    assert together.perplexities == alone
    assert len(set(alone)) == 5


@pytest.mark.parametrize("scheme", ["w8a8", "w4a4", "w4a16", "bf16", "fp16", "w8a8-static-linear"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_reference_comes_back_bit_for_bit(model: Path, scheme: str, dtype: str) -> None:
    """Parameters, buffers, classes and hooks of the model are as they were."""
    reference = load(resolve(str(model)), dtype="fp32")
    state = {name: value.clone() for name, value in reference.model.state_dict().items()}
    buffers = {name: value.clone() for name, value in reference.model.named_buffers()}
    ids = {name: id(value) for name, value in reference.model.named_parameters()}
    kinds = [type(module) for module in reference.model.modules()]
    chosen = schemes.resolve(scheme)

    with prepare(reference, chosen, dtype=dtype) as prepared:  # type: ignore[arg-type]
        inside = prepared.model.state_dict()
        assert any(not torch.equal(value, inside[name]) for name, value in state.items())

    after = reference.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert all(value.dtype == after[name].dtype for name, value in state.items())
    assert all(torch.equal(v, buffers[n]) for n, v in reference.model.named_buffers())
    assert {name: id(value) for name, value in reference.model.named_parameters()} == ids
    assert [type(module) for module in reference.model.modules()] == kinds
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in reference.model.modules()
    )


def test_the_reference_comes_back_after_an_error(model: Path) -> None:
    """A task that fails leaves the next scheme an unquantized model."""
    reference = load(resolve(str(model)), dtype="fp32")
    state = {name: value.clone() for name, value in reference.model.state_dict().items()}

    with (
        pytest.raises(ZeroDivisionError),
        prepare(reference, schemes.resolve("w4a4"), dtype="bf16"),
    ):
        raise ZeroDivisionError

    assert all(torch.equal(v, state[n]) for n, v in reference.model.state_dict().items())


def test_casting_equals_loading_in_that_dtype(model: Path) -> None:
    """`bf16` from an fp32 reference is the model that `from_pretrained` gives in bf16."""
    ids = torch.arange(3, 60)[None]
    direct = load(resolve(str(model)), dtype="bf16").model
    reference = load(resolve(str(model)), dtype="fp32")

    with (
        torch.inference_mode(),
        prepare(reference, schemes.resolve("bf16"), dtype="fp32") as prepared,
    ):
        assert torch.equal(prepared.model(input_ids=ids).logits, direct(input_ids=ids).logits)


# --- records ------------------------------------------------------------------------------------


def _strictly(text: str) -> object:
    def refuse(token: str) -> None:
        raise AssertionError(f"bare {token}")

    return json.loads(text, parse_constant=refuse)


def test_an_infinite_perplexity_is_a_result(run: Runner, tmp_path: Path) -> None:
    """The loss stands beside it, the second task runs, and every file parses strictly."""
    broken = tiny.scale_head_(tiny.build_model(), 1e5)
    run.model = tiny.save(tmp_path / "broken", model=broken)
    data = {"wikitext2": str(run.text), "bookcorpus": str(run.text)}

    call = run(schemes=["w4a4", "fp32"], tasks=["wikitext2", "bookcorpus"], data=data)

    assert call.report.is_complete
    assert call.perplexities == [math.inf] * 4
    for record in call.report.records:
        mean = _value(record, "nll_nats") / _value(record, "num_tokens")
        assert 709.8 < mean < math.inf
        stored = run.out / f"{record.key}.json"
        assert '"Infinity"' in stored.read_text()
        _strictly(stored.read_text())
        assert read_record(stored) == record
        for line in (run.out / f"{record.key}.samples.jsonl").read_text().splitlines():
            _strictly(line)
    assert run(schemes=["w4a4", "fp32"], data=data).num_forward == 0


def test_nan_is_a_result_too(run: Runner, tmp_path: Path) -> None:
    """A model that computes NaN is recorded as such, never as an ordinary number."""
    broken = tiny.build_model()
    with torch.no_grad():
        broken.lm_head.weight[7, 7] = math.nan
    run.model = tiny.save(tmp_path / "nan", model=broken)

    (record,) = run().report.records

    assert record.status == "ok"
    assert math.isnan(_value(record, "token_perplexity"))
    _strictly((run.out / f"{record.key}.json").read_text())


@pytest.mark.parametrize("form", ["terminal", "csv", "latex", "markdown"])
def test_an_infinite_perplexity_has_its_mark_in_tables(
    run: Runner, tmp_path: Path, form: str
) -> None:
    """No format shows it as a number or drops it."""
    broken = tiny.scale_head_(tiny.build_model(), 1e5)
    run.model = tiny.save(tmp_path / "broken", model=broken)
    run(schemes=["w4a4"])

    built = build_table(list(read_records([run.out])), load_spec("results"))
    shown = render(built, format=form)  # type: ignore[arg-type]

    assert any(mark in shown for mark in ("inf", "∞", r"\infty"))
    assert "nan" not in shown.lower()


def test_records_come_in_order_though_some_are_stored(run: Runner, tmp_path: Path) -> None:
    """Models, schemes, tasks, protocols: as asked, whichever of them had been run before."""
    other = tiny.save(tmp_path / "other", model=tiny.build_model(seed=1))
    data = {"wikitext2": str(run.text), "bookcorpus": str(run.text)}
    run(schemes=["w8a8"], data=data)

    call = run(
        models=[str(other), str(run.model)],
        schemes=["w4a4", "w8a8"],
        tasks=["bookcorpus", "wikitext2"],
        protocols=["rolling-word", "gptq-64"],
        window=None,
        data=data,
    )

    found = [
        (r.spec.model, r.spec.scheme.name, r.spec.task.name, r.spec.task.protocol)
        for r in call.report.records
    ]
    assert found == [
        (name, scheme, task, protocol)
        for name in (str(other), str(run.model))
        for scheme in ("w4a4", "w8a8")
        for task in ("bookcorpus", "wikitext2")
        for protocol in ("rolling-word", "gptq-64")
    ]
    assert call.report.num_reused == 1


def test_samples_stand_beside_the_record_and_add_up(run: Runner) -> None:
    """Their sum is the metric, exactly."""
    (record,) = run().report.records

    rows = read_samples(run.out, record.key)

    assert len(rows) == 400 // 64
    assert sum(row["nll_nats"] for row in rows) == _value(record, "nll_nats")  # type: ignore[misc]


def test_what_was_measured_on_what_is_in_the_record(run: Runner) -> None:
    """Text, checkpoint, versions, coverage and protocol."""
    (record,) = run(schemes=["w8a8"]).report.records

    assert record.data[0].origin == str(run.text)
    assert len(record.data[0].sha256) == 64
    assert record.coverage is not None
    assert (record.coverage.num_quantized, record.coverage.num_linear) == (14, 15)
    assert record.protocols[0].name == "gptq-64"
    assert record.provenance is not None
    assert record.provenance.versions["torch"].startswith(torch.__version__.split("+")[0])


# --- failures -----------------------------------------------------------------------------------


def test_a_cell_that_fails_leaves_a_record_and_the_others_run(run: Runner) -> None:
    """A text too short for one protocol does not stop the other; the failure is tried again."""
    run.text.write_text(tiny.prose(100))
    protocols = ["gptq-128", "rolling-word", "gptq-64"]

    call = run(schemes=["fp32", "w8a8"], protocols=protocols, window=None)

    status = [record.status for record in call.report.records]
    assert status == ["failed", "ok", "ok"] * 2
    assert "needs 128" in str(call.report.records[0].reason)
    assert call.report.records[0].traceback is None
    assert not call.report.is_complete
    assert call.report.num_loads == 1
    stored = sorted(record.status for record in read_records([run.out]))
    assert stored == sorted(status)
    again = run(schemes=["fp32", "w8a8"], protocols=protocols, window=None)
    assert [record.status for record in again.report.records] == status
    assert again.report.num_reused == 4


def test_a_scheme_that_fails_leaves_records_and_the_others_run(run: Runner, tmp_path: Path) -> None:
    """Weights that cannot be quantized fail that scheme's cells only."""
    broken = tiny.build_model()
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[3, 3] = math.inf
    run.model = tiny.save(tmp_path / "inf", model=broken)

    call = run(schemes=["fp32", "w8a8", "bf16"])

    assert [record.status for record in call.report.records] == ["ok", "failed", "ok"]
    assert "up_proj" in str(call.report.records[1].reason)


def test_a_scheme_that_this_model_has_no_place_for_is_unsupported(
    run: Runner, tmp_path: Path
) -> None:
    """Known only when the model is there; said as what was refused before is, and tried again."""
    run.model = tiny.save(tmp_path / "persimmon", model=tiny.persimmon())

    call = run(schemes=["fp32", "w8a8-static", "w8a8"])

    assert [record.status for record in call.report.records] == ["ok", "unsupported", "ok"]
    assert "region residual cannot be quantized" in str(call.report.records[1].reason)
    assert not call.report.is_complete
    assert sorted(record.status for record in read_records([run.out])) == [
        "ok",
        "ok",
        "unsupported",
    ]
    assert run(schemes=["fp32", "w8a8-static", "w8a8"]).report.num_reused == 2


@pytest.mark.parametrize("name", ["gone.txt", "blank.txt", "bad.jsonl"])
def test_data_that_cannot_be_read_fails_its_task_only(
    run: Runner, tmp_path: Path, name: str
) -> None:
    """The other task runs; when the data can be read the failed record goes."""
    path = tmp_path / name
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bad.jsonl").write_text("{")
    tasks = ["bookcorpus", "wikitext2"]
    data = {"wikitext2": str(run.text), "bookcorpus": str(path)}

    call = run(tasks=tasks, data=data)

    assert [record.status for record in call.report.records] == ["failed", "ok"]
    assert name in str(call.report.records[0].reason)
    assert [r.status for r in run(tasks=tasks, data=data).report.records] == ["failed", "ok"]
    repaired = run(tasks=tasks, data=data | {"bookcorpus": str(run.text)})
    assert repaired.report.is_complete
    assert [record.status for record in read_records([run.out])] == ["ok", "ok"]


def test_a_set_that_is_not_to_be_had_fails_its_task_only(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other task runs; the record names the way out, and goes once that is taken."""

    def load_dataset(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found wiki40b.py")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = {"wikitext2": str(run.text)}

    call = run(tasks=["wiki40b", "wikitext2"], data=data)

    assert [record.status for record in call.report.records] == ["failed", "ok"]
    reason = str(call.report.records[0].reason)
    assert "google/wiki40b" in reason
    assert "no longer supported" in reason
    assert "--data wiki40b=FILE" in reason
    mended = run(tasks=["wiki40b", "wikitext2"], data=data | {"wiki40b": str(run.text)})
    assert mended.report.is_complete
    assert [record.status for record in read_records([run.out])] == ["ok", "ok"]


def test_calibration_that_cannot_be_read_fails_static_schemes_only(
    run: Runner, tmp_path: Path
) -> None:
    """And leaves nothing behind once it can."""
    names = ["w8a8-static-linear", "w8a8"]
    data = {"wikitext2": str(run.text)}

    call = run(schemes=names, data=data | {"calibration": str(tmp_path / "gone.txt")})

    assert [record.status for record in call.report.records] == ["failed", "ok"]
    text = tmp_path / "long.txt"
    text.write_text(tiny.prose(9000))
    assert run(schemes=names, data=data | {"calibration": str(text)}).report.is_complete
    assert [record.status for record in read_records([run.out])] == ["ok", "ok"]


def test_calibration_text_that_is_too_short_is_named(run: Runner) -> None:
    """With the numbers and the option that mends it."""
    data = {"wikitext2": str(run.text), "calibration": str(run.text)}

    (record,) = run(schemes=["w8a8-static-linear"], data=data).report.records

    assert record.status == "failed"
    assert "calibration needs 4 sequences of 128 tokens" in str(record.reason)


def test_an_unexpected_error_keeps_its_traceback(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the program is a failed cell too, and can be looked into."""

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(measurement.harness, "evaluate", fail)

    call = run(schemes=["fp32", "w8a8"])

    assert [record.status for record in call.report.records] == ["failed", "failed"]
    assert call.report.records[0].reason == "ZeroDivisionError: by zero"
    assert "Traceback" in str(call.report.records[0].traceback)
    monkeypatch.undo()
    assert run(schemes=["fp32", "w8a8"]).report.is_complete
    assert [record.status for record in read_records([run.out])] == ["ok", "ok"]


def test_a_checkpoint_that_cannot_be_loaded_leaves_no_record(run: Runner, tmp_path: Path) -> None:
    """Its error is reported and the other models run."""
    bad = tmp_path / "bad"
    shutil.copytree(run.model, bad)
    shard = next(bad.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])

    call = run(models=[str(bad), str(run.model)])

    assert [str(record.spec.model) for record in call.report.records] == [str(run.model)]
    (error,) = call.report.errors
    assert shard.name in str(error)
    assert not call.report.is_complete
    assert len(list(run.out.glob("*.json"))) == 1


def test_a_backend_that_cannot_is_a_record_without_loading(run: Runner) -> None:
    """`unsupported` with the reason; the other schemes run, and it is not asked again."""
    call = run(schemes=["bnb-w4a4", "fp32"])
    again = run(schemes=["bnb-w4a4"])

    assert [record.status for record in call.report.records] == ["unsupported", "ok"]
    assert "bitsandbytes" in str(call.report.records[0].reason)
    assert (again.num_forward, again.report.num_loads, again.report.num_reused) == (0, 0, 1)


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number is stored under the content of other weights."""
    run.model = tiny.save(tmp_path / "m")
    digest = execution.checkpoint.digest

    def digest_then_change(path: Path) -> str:
        found = digest(path)
        tiny.save(run.model, model=tiny.build_model(seed=5))
        return found

    monkeypatch.setattr(execution.checkpoint, "digest", digest_then_change)

    call = run()

    assert "changed while they were read" in str(call.report.errors[0])
    assert not list(run.out.glob("*.json"))


# --- refused before anything runs -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"schemes": ["w8a8-foo"]}, UnknownNameError, "unknown scheme 'w8a8-foo'"),
        ({"schemes": ["w9a9"]}, UnsupportedSchemeError, "2 to 8 bits"),
        ({"schemes": ["fp32", "w8a16-static"]}, UnsupportedSchemeError, "use 'w8a16'"),
        ({"tasks": ["wikitext"]}, UnknownNameError, "did you mean wikitext2"),
        ({"protocols": ["gptq"]}, UnknownNameError, "unknown protocol 'gptq'"),
        ({"protocols": ["gptq-1"]}, SpecError, "a window of 1 tokens scores nothing"),
        ({"protocols": ["llamacpp-3"]}, SpecError, "scores nothing"),
        ({"protocols": ["gsm8k-5shot"]}, SpecError, "fits none of the tasks wikitext2"),
        ({"models": ["no-such-card"]}, UnknownNameError, "unknown model"),
        ({"models": ["./gone"]}, CheckpointError, "no such folder or file"),
        ({"models": []}, SpecError, "models"),
        ({"data": {"wikitext": "x"}}, UnknownNameError, "--data key"),
        ({"limit": 0}, SpecError, "limit"),
        ({"limit": -1}, SpecError, "limit"),
        ({"window": 1}, SpecError, "window"),
        ({"batch_size": 0}, SpecError, "batch_size"),
        ({"dtype": "fp8"}, SpecError, "dtype"),
        ({"device": "tpu"}, SpecError, "device"),
        ({"limits": 3}, SpecError, r"unknown key 'limits' \(did you mean 'limit'\?\)"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_runs(
    run: Runner, changes: dict[str, object], kind: type[OasisError], message: str
) -> None:
    """One line; no record and no forward pass."""
    with pytest.raises(kind, match=message) as caught:
        run(**changes)

    assert "\n" not in str(caught.value)
    assert not list(run.out.glob("*.json")) if run.out.exists() else True


def test_an_output_folder_that_cannot_be_is_refused(run: Runner, tmp_path: Path) -> None:
    """Before anything runs."""
    run.out = tmp_path / "file"
    run.out.write_text("")

    with pytest.raises(RecordError, match="choose another folder with --out"):
        run()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"key": "x"}', "\xff"])
def test_a_damaged_record_is_never_taken_for_a_result(run: Runner, content: str) -> None:
    """The file is named; nothing is computed over it in silence."""
    (record,) = run().report.records
    path = run.out / f"{record.key}.json"
    path.write_text(content)

    call = run()

    assert str(path) in str(call.report.errors[0])
    assert not call.report.is_complete


def test_leftovers_of_a_killed_writer_are_no_records(run: Runner) -> None:
    """Temporary files are neither read nor in the way."""
    (record,) = run().report.records
    (run.out / f".{record.key}.json.abc.tmp").write_text("{")

    assert len(list(read_records([run.out]))) == 1
    assert run().report.num_reused == 1


def test_two_processes_may_share_a_folder(run: Runner, tmp_path: Path) -> None:
    """The check that a folder can be written is not disturbed by another one."""
    errors: list[Exception] = []

    def check() -> None:
        try:
            for _ in range(200):
                pipeline.check_folder(tmp_path / "shared")
        except OasisError as error:
            errors.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert list((tmp_path / "shared").iterdir()) == []


def test_one_scheme_under_two_spellings_is_one_cell(run: Runner) -> None:
    """Names are taken without regard to case."""
    call = run(schemes=["w8a8", "W8A8"])

    assert [record.spec.scheme.name for record in call.report.records] == ["w8a8"]
