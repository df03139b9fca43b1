"""Mixtures of experts under schemes: as by hand on the raw tensors, stored, calibrated, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from oasis_eval import load, prepare, resolve_model
from oasis_eval.calibration import batches
from oasis_eval.errors import QuantizationError
from oasis_eval.quant.schemes import resolve
from tests import tiny
from tests.command_line import CommandLine
from tests.modeling.plain import build_plain
from tests.modeling.tiny import tokens

IDS = tokens(2, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of two layers with four experts each; read-only."""
    return tiny.save(tmp_path_factory.mktemp("mixtral") / "model", model=build_plain("mixtral"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Symmetric per output channel, to the nearest, from the definition; [..., N, K]."""
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(-1, keepdim=True) / top
    return (weight / scale).round().clamp(-top - 1, top) * scale


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def test_weights_are_those_of_the_raw_tensors_by_hand(folder: Path) -> None:
    """W4A16: every expert rounded in its tensor, by transformers' own forward pass."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    unquantized = logits(plain)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("_proj.weight") or ".experts." in name:
                parameter.copy_(rounded(parameter, 4))
    reference = load(resolve_model(str(folder)), dtype="fp32")
    with prepare(reference, resolve("w4a16"), dtype="fp32") as prepared:
        found = logits(prepared.model)
        assert prepared.coverage is not None
        assert prepared.coverage.num_quantized == 2 * (4 + 4 * 2)

    scale = float(unquantized.abs().max())
    torch.testing.assert_close(found, logits(plain), rtol=0, atol=1e-5 * scale)
    assert float((found - unquantized).abs().max()) > 1e-2 * scale
    assert torch.equal(logits(reference.model), logits(reference.model))
    torch.testing.assert_close(logits(reference.model), unquantized, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static", "w8a8-rot", "w8a8-smooth", "w8a8-gptq"])
def test_eight_bits_cost_little(folder: Path, scheme: str) -> None:
    """Whatever comes before rounding keeps the function, and everything is taken back."""
    reference = load(resolve_model(str(folder)), dtype="fp32")
    before = logits(reference.model)
    with prepare(reference, resolve(scheme), dtype="fp32") as prepared:
        found = logits(prepared.model)

    # The median: a token whose router decides otherwise differs by much, rightly.
    error = float(((found - before).norm(dim=-1) / before.norm(dim=-1)).median())
    assert 1e-4 < error < (0.2 if "static" in scheme else 0.1)
    assert torch.equal(logits(reference.model), before)


def test_a_static_range_is_that_of_the_rows_an_expert_saw(folder: Path, tmp_path: Path) -> None:
    """Extremes of one expert's inputs over the calibration text, gathered from the raw model."""
    (tmp_path / "minmax.yaml").write_text(
        "name: minmax\nweights: {bits: 8, granularity: tensor}\n"
        "activations: {bits: 8, granularity: tensor, symmetric: false, ranges: minmax}\n"
        "regions: [linear_inputs]\nskip: ['*self_attn*', '*layers.1*']\n"
        "calibration: {corpus: builtin, num_batches: 4, length: 64, seed: 0}\n"
    )
    scheme = resolve(str(tmp_path / "minmax.yaml"))
    reference = load(resolve_model(str(folder)), dtype="fp32")
    assert scheme.calibration is not None
    given = batches(reference.tokenizer, scheme.calibration, None, context_length=128, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows: list[Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden_SD, index_SA, _weights = args
        rows.append(hidden_SD[(index_SA == 2).any(-1)])

    plain.model.layers[0].mlp.experts.register_forward_pre_hook(keep)
    with torch.no_grad():
        for batch in given:
            plain(input_ids=batch.input_ids_BT, use_cache=False)
    seen_ND = torch.cat(rows)
    with prepare(reference, scheme, dtype="fp32") as prepared:
        layer = prepared.model.get_submodule("model.layers.0.mlp.experts.2.gate_up_proj")
        grid = layer.quantization.inputs._grid  # type: ignore[union-attr]

    assert 10 < len(seen_ND) < 4 * 64
    width = float(seen_ND.max().clamp_min(0.0) - seen_ND.min().clamp_max(0.0))
    assert float(grid.scale) == pytest.approx(width / 255.0, rel=1e-5)


def test_an_expert_that_calibration_never_reaches_is_named(tmp_path: Path) -> None:
    """Static ranges are refused; GPTQ says what it rounds instead."""
    model = build_plain("mixtral")
    for layer in model.model.layers:  # one of the first two experts always wins
        layer.mlp.gate.weight.data[1] = -layer.mlp.gate.weight.data[0]
        layer.mlp.gate.weight.data[2:] = 0.0
    model.config.num_experts_per_tok = 1
    tiny.save(tmp_path / "rare", model=model)
    reference = load(resolve_model(str(tmp_path / "rare")), dtype="fp32")
    with (
        pytest.raises(QuantizationError, match=r"experts\.2\.gate_up_proj: saw no token of the"),
        prepare(reference, resolve("w8a8-static-linear"), dtype="fp32"),
    ):
        pass
    with prepare(reference, resolve("w4a4-gptq"), dtype="fp32") as prepared:
        (note,) = (text for text in prepared.warnings if "rounded to nearest" in text)
    assert "(8 layers): rounded to nearest, saw no calibration text" in note
    with prepare(reference, resolve("w4a4"), dtype="fp32") as prepared:
        assert not any("have not run" in text for text in prepared.warnings)


@pytest.mark.parametrize("scheme", ["w4a4-real", "nf4"])
def test_a_quantized_mixture_is_stored_and_read(
    folder: Path, tmp_path: Path, call: CommandLine, scheme: str
) -> None:
    """Codes of every expert come back, and give the same logits bit for bit."""
    out = tmp_path / "stored"
    written = call(["quantize", folder, "--scheme", scheme, "--out", out])
    assert written.status == 0, written.err
    assert "24 of 25 linear layers" in written.out
    reference = load(resolve_model(str(out)), dtype="fp32" if scheme == "w4a4-real" else "bf16")

    assert reference.applied is not None
    assert bool(logits(reference.model).isfinite().all())
