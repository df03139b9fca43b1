"""The coverage report: what was used, and its size in storage."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.coverage import weight_bits_stored
from oasis_eval.quant.schemes import resolve
from oasis_eval.record import Coverage, ModuleCoverage
from oasis_eval.spec import QuantScheme, TensorFormat
from tests.quant.conftest import build_llama


def entry(coverage: Coverage, name: str) -> ModuleCoverage:
    return next(item for item in coverage.modules if item.module == name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bits": 8, "granularity": "tensor"}, 8 * 960 + 32),
        ({"bits": 4, "granularity": "channel"}, 4 * 960 + 20 * 32),
        ({"bits": 4, "granularity": "group", "group_size": 32}, 4 * 960 + 40 * 32),
        ({"bits": 4, "granularity": "group", "group_size": 99}, 4 * 960 + 20 * 32),
        ({"bits": 4, "granularity": "channel", "symmetric": False}, 4 * 960 + 20 * 36),
        ({"bits": 3, "granularity": "tensor", "symmetric": False}, 3 * 960 + 40),
        ({"type": "fp8_e4m3", "bits": 8, "granularity": "channel"}, 8 * 960 + 20 * 32),
    ],
)
def test_storage_of_a_weight(fields: dict[str, object], expected: int) -> None:
    """Codes, one fp32 scale each and one zero point each, of a [20, 48] weight."""
    assert weight_bits_stored(20, 48, TensorFormat.model_validate(fields)) == expected


@pytest.mark.parametrize(
    ("name", "bits_per_weight", "extra"), [("mxfp4", 4.25, 0), ("nvfp4", 4.5, 32)]
)
def test_storage_of_small_scales(name: str, bits_per_weight: float, extra: int) -> None:
    """A byte each 32 or 16 weights, and under NVFP4 one fp32 scale; short groups have theirs."""
    fmt = resolve(name).weights
    assert fmt is not None
    groups = {"mxfp4": 2, "nvfp4": 3}[name]

    assert weight_bits_stored(20, 64, fmt) == bits_per_weight * 20 * 64 + extra
    assert weight_bits_stored(20, 33, fmt) == 4 * 20 * 33 + 8 * 20 * groups + extra


def test_effective_bits_count_everything(llama: LlamaForCausalLM) -> None:
    """Norms, head and embedding in fp32, 4-bit codes and fp32 scales: by hand."""
    floats = 2 * 256 * 48 + 5 * 48
    rows = 2 * (48 + 24 + 24 + 48 + 96 + 96 + 48)
    codes = 2 * (48 * 48 * 2 + 24 * 48 * 2 + 3 * 48 * 96)
    size = floats * 32 + codes * 4 + rows * 32
    coverage = quantize_(llama, resolve("w4a4")).coverage

    assert coverage.bytes_before == 4 * (floats + codes)
    assert coverage.bytes_after == size // 8
    assert coverage.effective_weight_bits == pytest.approx(size / (floats + codes))


def test_bytes_are_those_of_the_models_dtype() -> None:
    """A bf16 model starts from two bytes a weight."""
    coverage = quantize_(build_llama().to(torch.bfloat16), resolve("w8a8")).coverage

    assert coverage.bytes_before == 2 * 66288


@pytest.mark.parametrize("size", [32, 64, 128])
def test_group_sizes_really_used(llama: LlamaForCausalLM, size: int) -> None:
    """Rows of 48 and 96: short last groups and groups as wide as the row are reported."""
    coverage = quantize_(llama, resolve(f"w4a4-g{size}")).coverage
    used = {48: min(size, 48), 96: min(size, 96)}
    notes = {
        (32, 48): "last weight group has 16 of 32; last activation group has 16 of 32",
        (64, 96): "last weight group has 32 of 64; last activation group has 32 of 64",
    }
    for name, width in (("mlp.up_proj", 48), ("mlp.down_proj", 96)):
        item = entry(coverage, f"model.layers.0.{name}")

        assert item.weight_group_size == item.activation_group_size == used[width]
        assert item.note == notes.get((size, width))


def test_a_module_reports_bits_and_granularity(llama: LlamaForCausalLM) -> None:
    """What a layer really uses, weights and activations."""
    item = entry(quantize_(llama, resolve("w4a8")).coverage, "model.layers.0.mlp.up_proj")
    expected = ModuleCoverage(
        module="model.layers.0.mlp.up_proj",
        quantized=True,
        weight_bits=4,
        weight_granularity="channel",
        activation_bits=8,
        activation_granularity="token",
        activation_static=False,
    )

    assert item == expected


def test_a_weight_only_scheme_reports_no_activations(llama: LlamaForCausalLM) -> None:
    """Nothing is claimed about activations that stay in floating point."""
    item = entry(quantize_(llama, resolve("w4a16")).coverage, "model.layers.0.mlp.up_proj")

    assert (item.activation_bits, item.activation_granularity, item.activation_static) == (
        None,
    ) * 3


def test_a_tied_head_is_quantized_as_a_copy(gpt2: GPT2LMHeadModel) -> None:
    """The embedding keeps its values, the copy is reported and counted on top."""
    embedding = gpt2.transformer.wte.weight
    before = embedding.detach().clone()
    scheme = QuantScheme.model_validate(
        {
            "name": "mine",
            "weights": {"bits": 8, "granularity": "channel"},
            "regions": ["linear_inputs", "lm_head"],
        }
    )
    without = quantize_(gpt2, resolve("w8a16"), keep_reference=True)
    without.undo()
    applied = quantize_(gpt2, scheme, keep_reference=True)
    item = entry(applied.coverage, "lm_head")
    copy_bytes = weight_bits_stored(256, 48, TensorFormat(bits=8, granularity="channel")) // 8

    assert item.note == "a copy of the weight is quantized; it is tied to a layer that is not"
    assert gpt2.lm_head.weight is not embedding
    assert not torch.equal(gpt2.lm_head.weight, before)
    assert torch.equal(gpt2.transformer.wte.weight, before)
    assert applied.coverage.bytes_after == without.coverage.bytes_after + copy_bytes
    applied.undo()
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight is embedding
