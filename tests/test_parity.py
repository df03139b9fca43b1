"""Real against fake execution: what is equal, the floor, what fails, what is printed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_eval import divergence, registry
from oasis_eval.divergence import Difference, OtherOrder, Run, differences, largest
from oasis_eval.errors import CheckpointError, DataError, UnsupportedSchemeError
from oasis_eval.parity import Comparison, Plan, compare, table
from oasis_eval.quant import integer_layers, schemes
from oasis_eval.quantized import Plan as QuantizedPlan
from oasis_eval.quantized import quantize
from tests import tiny
from tests.command_line import CommandLine

SCHEMES = "w8a8-real,w4a4-real,w8a8-static-linear-real,w4a8-g32-real,w4a16-real"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("parity") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(tiny.prose(400))
    return path


def plan_of(names: str, text: Path, **changes: object) -> Plan:
    found = tuple(schemes.resolve(name) for name in names.split(","))
    return Plan(schemes=found, text=text, window=96, num_windows=2, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found(source: Path, text: Path) -> dict[str, Comparison]:
    """Every kind of scheme on TINY."""
    plan = plan_of(SCHEMES, text)
    return {item.scheme: item for item in compare(registry.resolve(str(source)), plan)}


@pytest.mark.parametrize("name", SCHEMES.split(","))
def test_real_execution_is_fake_execution(name: str, found: dict[str, Comparison]) -> None:
    """Exact sums, outputs within 1e-6, end to end within 3 times the floor."""
    comparison = found[name]

    assert comparison.failures == ()
    assert comparison.passes
    assert len(comparison.layers) == 14
    assert all(layer.is_exact for layer in comparison.layers)
    assert all(layer.output_error <= 1e-6 for layer in comparison.layers)
    assert comparison.num_tokens == 2 * 95
    assert 0 < comparison.floor.kl_nats < 0.1
    assert comparison.real_execution.num_bytes < comparison.fake_execution.num_bytes
    assert comparison.fake_execution.tokens_per_second > 0
    assert (comparison.kernel is None) == (name == "w4a16-real")


def test_weight_only_execution_is_equal(found: dict[str, Comparison]) -> None:
    """Dequantized for each product: no difference at all, and the comparison sees none."""
    real = found["w4a16-real"].real

    assert real.flips == 0
    assert real.kl_nats < 1e-12
    assert real.nll_nats < 1e-6


def test_half_precision_has_a_floor_of_its_own(source: Path, text: Path) -> None:
    """In bf16 rounding alone moves more, and the limit on layers is that of bf16."""
    (comparison,) = compare(registry.resolve(str(source)), plan_of("w8a8-real", text, dtype="bf16"))

    assert comparison.passes
    assert comparison.output_limit == 4 * torch.finfo(torch.bfloat16).eps
    assert comparison.floor.kl_nats > 1e-6


# --- what must fail ---------------------------------------------------------------------------


def test_wrong_sums_fail(source: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is off by one in one place is named by layer."""
    exact = integer_layers.accumulate

    def off_by_one(stretch: integer_layers.Stretch, rows: object) -> Tensor:
        sums = exact(stretch, rows)  # type: ignore[arg-type]
        sums[0, 0] += 1
        return sums

    monkeypatch.setattr(integer_layers, "accumulate", off_by_one)
    monkeypatch.setattr("oasis_eval.parity.accumulate", off_by_one)
    (comparison,) = compare(registry.resolve(str(source)), plan_of("w4a4-real", text))

    assert not comparison.passes
    assert comparison.failures[0].startswith("inexact sums in model.layers.0.self_attn.q_proj")


def test_wrong_scales_fail_end_to_end(
    source: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one percent in activation scales is far above the floor."""
    from oasis_eval.quant import integer_inputs

    right = integer_inputs.RowCodes.__call__

    def wrong(self: object, x: Tensor, name: str) -> integer_inputs.IntegerInput:
        rows = right(self, x, name)  # type: ignore[arg-type]
        return rows._replace(scale_MG=rows.scale_MG * 1.01)

    monkeypatch.setattr(integer_inputs.RowCodes, "__call__", wrong)
    (comparison,) = compare(registry.resolve(str(source)), plan_of("w8a8-real", text))

    assert all(layer.is_exact for layer in comparison.layers)
    assert any(failure.startswith("output of") for failure in comparison.failures)
    assert any(failure.startswith("KL") for failure in comparison.failures)
    assert comparison.num_orders == 15


def comparison_with(found: dict[str, Comparison], **real: object) -> Comparison:
    base = found["w8a8-real"]
    floor = Difference(1e-6, 1e-3, 0, 1e-2, 1e-4)
    changed = dataclasses.replace(floor, **real)  # type: ignore[arg-type]
    return dataclasses.replace(base, floor=floor, real=changed)


@pytest.mark.parametrize(
    ("real", "message"),
    [
        ({"kl_nats": 3.1e-6}, "KL 3.1e-06 is above 3 x floor = 3e-06"),
        ({"nll_nats": 3.1e-3}, "loss of a token"),
        ({"flips": 4}, "top-1 flips 4 is above 3 x floor = 3"),
        ({"kl_nats": math.nan}, "KL nan"),
        ({"nll_nats": math.inf}, "loss of a token inf"),
    ],
)
def test_three_times_the_floor_is_the_limit(
    real: dict[str, object], message: str, found: dict[str, Comparison]
) -> None:
    """A NaN is no pass."""
    assert comparison_with(found, kl_nats=2.9e-6, nll_nats=2.9e-3, flips=3).passes
    (failure,) = comparison_with(found, **real).failures

    assert failure.startswith(message)


# --- the arithmetic of differences ------------------------------------------------------------


class _Given:
    """Stands in for a run with logits that are given."""

    def __init__(self, logits_TV: Tensor) -> None:
        self._logits_TV = logits_TV

    def start(self, window: list[int]) -> None:
        """Nothing to run."""

    def logits(self, rows: slice) -> Tensor:
        return self._logits_TV[rows]


@pytest.mark.parametrize("scale", [1e-5, 0.1, 3.0])
def test_differences_by_hand(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL, losses, flips and the largest logit against torch's own in float64, tiles of 3 rows."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(10, 50, generator=generator, dtype=torch.float64)
    other = base + scale * torch.randn(10, 50, generator=generator, dtype=torch.float64)
    window = torch.randint(0, 50, (10,), generator=generator).tolist()
    monkeypatch.setattr(divergence, "_TILE_ELEMENTS", 150)
    (found,) = differences([_Given(base), _Given(other)], [window])  # type: ignore[list-item]
    left, right = base[:9].log_softmax(-1), other[:9].log_softmax(-1)
    targets = torch.tensor(window[1:])
    kl = F.kl_div(right, left, log_target=True, reduction="batchmean")
    change = F.nll_loss(right, targets, reduction="none") - F.nll_loss(
        left, targets, reduction="none"
    )

    assert found.kl_nats == pytest.approx(float(kl), rel=1e-4, abs=1e-15)
    assert found.nll_nats == pytest.approx(float(change.abs().mean()), rel=1e-6)
    assert found.mean_nll_nats == pytest.approx(float(change.mean()), rel=1e-6)
    assert found.flips == int((left.argmax(-1) != right.argmax(-1)).sum())
    assert found.logit == pytest.approx(
        float((other - base)[:9].abs().max() / base[:9].abs().max()), rel=1e-9
    )


def test_nan_logits_are_not_lost() -> None:
    """Neither in means nor in the largest."""
    base = torch.randn(4, 8, dtype=torch.float64)
    other = base.clone()
    other[1, 2] = math.nan
    (found,) = differences([_Given(base), _Given(other)], [[1, 2, 3, 4]])  # type: ignore[list-item]

    assert math.isnan(found.kl_nats)
    assert math.isnan(found.nll_nats)
    assert math.isnan(found.logit)


def test_another_order_is_the_same_sum() -> None:
    """Equal in exact arithmetic, not in every bit of fp32; a single input cannot be cut."""
    x, weight, bias = torch.randn(5, 300), torch.randn(7, 300), torch.randn(7)
    plain = F.linear(x, weight, bias)
    with OtherOrder(1 / 3):
        cut = F.linear(x, weight, bias)
        transposed = torch.addmm(bias, x, weight.T)
        single = F.linear(x[:, :1], weight[:, :1])
        whole = F.linear(torch.ones(2, 8), torch.ones(3, 8))

    torch.testing.assert_close(cut, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(transposed, plain, rtol=1e-4, atol=1e-4)
    assert not torch.equal(cut, plain)
    assert torch.equal(single, F.linear(x[:, :1], weight[:, :1]))
    assert torch.equal(whole, torch.full((2, 3), 8.0))


def test_logits_are_those_of_the_model() -> None:
    """Tile by tile through the head, as one pass gives them."""
    model = tiny.build_model()
    run = Run(model, "cpu")
    window = list(range(3, 40))
    run.start(window)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([window])).logits[0]
        tiles = torch.cat([run.logits(slice(0, 9)), run.logits(slice(9, 37))])

    torch.testing.assert_close(tiles, whole)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert run.execution().num_bytes == held


def test_the_floor_is_the_largest() -> None:
    """Of each kind, whichever order it comes from."""
    floors = [Difference(1.0, 5.0, 2, 0.1, -3.0), Difference(2.0, 4.0, 1, 0.2, 1.0)]

    assert largest(floors) == Difference(2.0, 5.0, 2, 0.2, -3.0)


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w8a8", "runs on backend 'fake'"),
        ("fp32", "runs on backend 'none'"),
        ("w6a6-real", "weights of 6 bits"),
    ],
)
def test_schemes_without_integers_are_refused(name: str, text: str, source: Path) -> None:
    """Before anything loads."""
    found: Iterator[Comparison] = compare(
        registry.resolve(str(source)), Plan(schemes=(schemes.resolve(name),))
    )
    with pytest.raises(UnsupportedSchemeError, match=text):
        next(found)


def test_a_quantized_checkpoint_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    """It has no fake twin."""
    scheme = schemes.resolve("w8a8-real")
    quantize(registry.resolve(str(source)), QuantizedPlan(scheme=scheme), out=tmp_path / "made")
    found = compare(registry.resolve(str(tmp_path / "made")), plan_of("w8a8-real", text))
    with pytest.raises(CheckpointError, match="parity needs the one that it was made from"):
        next(found)


def test_a_text_that_fills_no_window_is_refused(source: Path, tmp_path: Path) -> None:
    """It says how many tokens there are."""
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(DataError, match="9 tokens"):
        next(compare(registry.resolve(str(source)), plan_of("w8a8-real", short)))


def test_the_table(found: dict[str, Comparison]) -> None:
    """A block for each scheme, with its verdict and reasons."""
    failing = comparison_with(found, kl_nats=1.0)
    lines = table([found["w4a4-real"], failing])

    assert lines[0].startswith("w4a4-real passes: fp32, 190 tokens of text.txt, oneDNN")
    assert "14 of 14 with exact sums" in lines[1]
    assert any(line.startswith("w8a8-real FAILS") for line in lines)
    assert lines[-1] == "  KL 1 is above 3 x floor = 3e-06"
    assert max(map(len, lines)) <= 110


def test_the_command(
    source: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 and JSON if all pass, 1 if one does not, 2 for a mistake."""
    call = CommandLine(monkeypatch, capsys)
    options = ["--text", text, "--window", 96, "--limit", 1]
    result = call(["parity", source, "--scheme", "w8a8-real,w4a16-real", *options, "--json"])
    assert result.status == 0
    first, second = (json.loads(line) for line in result.out.splitlines())
    assert (first["scheme"], second["scheme"]) == ("w8a8-real", "w4a16-real")
    assert first["passes"] is True
    assert first["floor"]["kl_nats"] > 0
    assert len(first["layers"]) == 14
    monkeypatch.setattr("oasis_eval.parity.FACTOR", -1.0)
    failed = call(["parity", source, "--scheme", "w8a8-real", *options])
    assert failed.status == 1
    assert "w8a8-real FAILS" in failed.out
    wrong = call(["parity", source, "--limit", 0])
    assert wrong.status == 2
    assert "--limit 0: expected 1 or more" in wrong.err
