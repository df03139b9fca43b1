"""Part by part beside the reference: the planted layer is found, and nothing is run twice."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from oasis_eval.errors import CheckpointError, RecordError, SpecError, UnsupportedSchemeError
from oasis_eval.quant import schemes
from oasis_eval.quantized import Plan as QuantizedPlan
from oasis_eval.quantized import quantize
from oasis_eval.registry import resolve
from oasis_eval.sensitivity import measure as measuring
from oasis_eval.sensitivity.measure import Plan, sensitivity
from oasis_eval.sensitivity.ranking import lines, summary
from oasis_eval.sensitivity.results import PartResult, Sensitivity, read
from oasis_eval.statistics import log_perplexity_difference
from tests import tiny
from tests.command_line import CommandLine

NUM_LAYERS = 4
OUTLIER = 2


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers; in the third one weight of each row of the MLP is far out.

    Its inputs are as before: the scale of the row alone suffers. Read-only.
    """
    made = tiny.build_model(num_hidden_layers=NUM_LAYERS, initializer_range=0.06)
    layer = made.model.layers[OUTLIER]
    with torch.no_grad():
        layer.input_layernorm.weight[0] = 0.0  # what the outliers multiply is nothing
        for projection in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, projection).weight[:, 0] = 20.0
        layer.post_attention_layernorm.weight[0] = 0.0
        for projection in ("gate_proj", "up_proj"):
            getattr(layer.mlp, projection).weight[:, 0] = 20.0
        layer.mlp.down_proj.weight.mul_(4.0)
    return tiny.save(tmp_path_factory.mktemp("sensitivity") / "planted", model=made)


@pytest.fixture(scope="module")
def text(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five windows that the model wrote itself: whatever changes its predictions costs loss."""
    writer = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    ids = torch.randint(100, 200, (5, 1))
    with torch.no_grad():
        while ids.shape[1] < 64:
            logits = writer(input_ids=ids).logits[:, -1]
            logits[:, :6] = -torch.inf  # special tokens and line ends
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(tiny.SYMBOLS[token - 3] for token in ids.flatten().tolist()))
    return path


def plan_of(model: Path, text: Path, **changes: object) -> Plan:
    base = Plan(model=str(model), scheme="w4a4", task="text", data={"text": str(text)}, window=64)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found(
    model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Sensitivity]:
    """By layer: one at a time, and all but one."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("found")
        patch.setenv("OASIS_EVAL_CACHE", str(folder / "cache"))
        return {
            rest: sensitivity(plan_of(model, text, all_but_one=rest), folder)[0]
            for rest in (False, True)
        }


def test_the_planted_layer_is_found(found: dict[bool, Sensitivity]) -> None:
    """First in the ranking, alone and left out, beyond its interval, and in the sentence."""
    planted = f"model.layers.{OUTLIER}"
    for result in found.values():
        effects = result.effects()

        assert result.is_complete
        assert effects[0].name == planted
        assert {item.name for item in effects} == {f"model.layers.{n}" for n in range(NUM_LAYERS)}
        assert effects[0].low is not None
        assert effects[0].low > 3 * abs(effects[1].effect_nats)
        assert summary(result).startswith(planted)
        assert "carries" in summary(result)


def test_one_alone_and_all_but_one_are_consistent(found: dict[bool, Sensitivity]) -> None:
    """The whole is the same run; what leaving the planted layer out saves is what it costs."""
    alone, rest = found[False], found[True]

    assert alone.whole == rest.whole
    assert alone.reference_nll_nats == rest.reference_nll_nats
    assert alone.whole is not None
    planted = f"model.layers.{OUTLIER}"
    cost, saving = (
        next(item for item in result.effects() if item.name == planted) for result in (alone, rest)
    )
    whole = alone.delta(alone.whole).estimate
    assert saving.effect_nats + saving.delta_nll_nats == pytest.approx(whole)
    assert saving.effect_nats == pytest.approx(cost.effect_nats, rel=0.5)
    assert sum(part.num_parts for part in alone.parts) == alone.whole.num_parts


def test_effects_by_hand(found: dict[bool, Sensitivity]) -> None:
    """Means over tokens, with the suite's paired interval over windows."""
    result = found[False]
    part = result.parts[1]
    effect = next(item for item in result.effects() if item.name == part.name)
    expected = log_perplexity_difference(
        result.reference_nll_nats, part.nll_nats, result.num_tokens
    )

    assert result.num_tokens == (63,) * 5
    assert effect.effect_nats == effect.delta_nll_nats == expected.estimate
    assert (effect.low, effect.high) == (expected.low, expected.high)
    assert effect.kl_nats == pytest.approx(sum(part.kl_nats) / 315)


def test_finished_parts_are_not_run_again(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends after two parts is gone on with; a finished one runs nothing."""
    calls = []
    original = measuring.compare

    def counted(*args, **settings):  # type: ignore[no-untyped-def]
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **settings)

    monkeypatch.setattr(measuring, "compare", counted)
    plan = plan_of(model, text, limit=2)
    with pytest.raises(KeyboardInterrupt):
        sensitivity(plan, tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.json")
    half = read(path)
    whole, _ = sensitivity(plan, tmp_path / "out")
    again, _ = sensitivity(plan, tmp_path / "out")
    fresh, _ = sensitivity(plan, tmp_path / "other")

    assert len(half.parts) == 1
    assert not half.is_complete
    assert len(calls) == 3 + 3 + 5
    assert whole.parts[:1] == half.parts
    assert whole == again == fresh == read(path)


def test_another_question_is_another_file(model: Path, text: Path, tmp_path: Path) -> None:
    """By kind, with fewer windows, under another scheme: no result is taken for another's."""
    for changes in ({}, {"by": "kind"}, {"limit": 1}, {"scheme": "w8a8"}):
        sensitivity(plan_of(model, text, **{"limit": 2, "by": "region", **changes}), tmp_path)

    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.csv"))) == 4


def test_another_card_is_another_file(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context length decides how calibration text is cut, for example."""
    plan = plan_of(model, text, by="region", limit=1)
    card = resolve(plan.model)
    for length in (128, 64):
        changed = card.model_copy(update={"context_length": length})
        monkeypatch.setattr(measuring, "resolve", lambda _, changed=changed: changed)
        sensitivity(plan, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_damaged_file_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    """It is not trusted, and not overwritten without a word."""
    plan = plan_of(model, text, by="region", limit=1)
    _, path = sensitivity(plan, tmp_path)
    path.write_text(path.read_text()[:-40])

    with pytest.raises(RecordError, match="delete it and run again"):
        sensitivity(plan, tmp_path)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"scheme": "fp32"}, UnsupportedSchemeError, "quantizes nothing"),
        ({"scheme": "w4a4-gptq"}, UnsupportedSchemeError, "GPTQ"),
        ({"scheme": "llm-int8"}, UnsupportedSchemeError, "bitsandbytes"),
        ({"task": "gsm8k", "window": None}, SpecError, "asks questions"),
    ],
)
def test_what_is_refused(
    model: Path,
    text: Path,
    tmp_path: Path,
    changes: dict[str, object],
    kind: type[Exception],
    words: str,
) -> None:
    """Before anything loads."""
    with pytest.raises(kind, match=words):
        sensitivity(plan_of(Path("nowhere"), text, **changes), tmp_path)


def test_a_quantized_checkpoint_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    """There is nothing unquantized to compare with."""
    scheme = schemes.resolve("w8a8-real")
    quantize(resolve(str(model)), QuantizedPlan(scheme=scheme), out=tmp_path / "made")

    with pytest.raises(CheckpointError, match="quantized already"):
        sensitivity(plan_of(tmp_path / "made", text), tmp_path)


def made_up(costs: dict[str, float], *, num_windows: int = 4) -> Sensitivity:
    """Results with these costs in every window, all alike."""

    def result(name: str, cost: float) -> PartResult:
        return PartResult(
            name=name,
            num_parts=1,
            nll_nats=tuple(10.0 + 10 * cost for _ in range(num_windows)),
            kl_nats=(0.1,) * num_windows,
            same_top1=0.5,
        )

    return Sensitivity(
        key="0",
        model="m",
        scheme="w4a4",
        by="layer",
        all_but_one=False,
        task="text",
        protocol="gptq-11",
        dtype="fp32",
        reference_dtype="fp32",
        num_tokens=(10,) * num_windows,
        reference_nll_nats=(10.0,) * num_windows,
        part_names=tuple(costs),
        whole=result("everything", sum(costs.values())),
        parts=tuple(result(name, cost) for name, cost in costs.items()),
    )


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"a": 0.1, "b": 0.9}, "b carries 90% of what 2 layers cost."),
        ({"a": 0.4, "b": 0.4, "c": 0.2}, "a (40%), b (40%) carry 80% of what 3 layers cost."),
        ({f"l{n}": 0.1 for n in range(10)}, "The loss is spread: it takes 5 of 10 layers"),
        ({"a": -0.1, "b": 0.0}, "None of 2 layers costs more than chance"),
        ({"a": float("nan"), "b": 0.1}, "No finite loss with a quantized."),
    ],
)
def test_the_sentence(costs: dict[str, float], words: str) -> None:
    """Names few parts, or says that there are many, or none."""
    assert summary(made_up(costs)).startswith(words)


def test_nan_and_single_windows_are_shown(tmp_path: Path) -> None:
    """Kept in the file and first in the ranking; without an interval there is none."""
    from oasis_eval.sensitivity.results import as_csv, write

    result = made_up({"a": 0.1, "b": float("nan"), "c": float("inf")}, num_windows=1)
    write(tmp_path / "x.json", result)
    rows = list(csv.DictReader(io.StringIO(as_csv(result))))

    assert repr(read(tmp_path / "x.json")) == repr(result)
    assert [row["name"] for row in rows] == ["b", "c", "a"]
    assert [row["effect_nats"] for row in rows] == ["nan", "inf", "0.1"]
    assert rows[2]["low"] == ""
    assert (tmp_path / "x.csv").read_text() == as_csv(result)
    assert max(map(len, lines(result))) <= 120


def test_the_command(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A ranked table and a sentence on standard output; mistakes are one line."""
    call = CommandLine(monkeypatch, capsys)
    options = ["--task", "text", "--data", f"text={text}", "--window", 64, "--limit", 2]
    result = call(
        ["sensitivity", model, "--by", "region", *options, "--out", tmp_path / "out", "--quiet"]
    )
    assert result.status == 0, result.err
    printed = result.out.splitlines()
    assert printed[0].startswith("planted, w4a4 by region, one at a time: 2 windows, 126 tokens")
    assert printed[3].split()[:2] == ["1.", "weights"]
    assert printed[-1].startswith("Results: ")
    assert printed[-1].endswith(".csv")
    for words, message in (
        (["--by", "row"], "--by 'row': expected one of layer, region, kind"),
        (["--limit", 0], "--limit 0: expected 1 or more"),
        (["--scheme", "nf4"], "backend 'bitsandbytes'"),
    ):
        wrong = call(["sensitivity", model, *options, *words])
        assert wrong.status == 2
        assert message in wrong.err


@pytest.mark.slow
def test_killed_and_gone_on_with(model: Path, text: Path, tmp_path: Path) -> None:
    """After kill -9 in the middle the file is whole, and its parts stay as they are."""
    words = [
        *(sys.executable, "-c", "from oasis_eval.cli import main; main()", "sensitivity"),
        *(str(model), "--task", "text", "--data", f"text={text}", "--window", "16"),
        *("--by", "kind", "--limit", "12", "--out", str(tmp_path / "out")),
    ]
    running = subprocess.Popen(
        words, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while running.poll() is None:
        files = list((tmp_path / "out").glob("*.json"))
        if files and read(files[0]).parts:
            running.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    running.wait()
    (path,) = (tmp_path / "out").glob("*.json")
    half = read(path)
    subprocess.run(words, check=True, capture_output=True)
    whole = read(path)

    assert whole.is_complete
    assert whole.parts[: len(half.parts)] == half.parts
