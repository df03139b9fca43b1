"""bitsandbytes: LLM.int8() and the 4-bit code books, number by number."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.libraries import bitsandbytes as bitsandbytes_cannot
from oasis_eval.quant.primitives import fake_quantize
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.replacement import LibraryApplied
from oasis_eval.quant.schemes import resolve
from tests.quant.conftest import build_llama, logits_of, nll_of
from tests.quant.of_libraries import (
    CHANNEL,
    TOKEN,
    inputs,
    one_layer,
    quantize,
    with_outlier,
)


def test_int8_without_outliers_is_w8a8(batches: list[Batch]) -> None:
    """`bnb-w8a8` is W8A8 per channel and token with everything cast to fp16 first."""
    applied, linear, layer = one_layer("bnb-w8a8", batches)
    weight_NK = fake_quantize_weight(linear.weight.detach().half().float(), CHANNEL)
    x = inputs()
    with torch.no_grad():
        expected = F.linear(fake_quantize(x, TOKEN, (-1,)), weight_NK)
        unquantized = F.linear(x, weight_NK)
        found = layer(x)

    # 127 / max instead of max / 127, and fp16 products: a few codes are one off.
    dequantized = applied.library.dequantize(layer)
    torch.testing.assert_close(dequantized, weight_NK, rtol=0, atol=1e-2)
    half_NK = linear.weight.detach().half().float()
    half_step_N1 = half_NK.abs().amax(-1, keepdim=True) / 127 / 2
    assert bool(((dequantized - half_NK).abs() <= 1.001 * half_step_N1).all())
    assert float((found - expected).norm() / expected.norm()) < 2e-3
    assert float((found - unquantized).norm() / expected.norm()) > 4e-3


def test_outlier_columns_stay_in_floating_point(batches: list[Batch]) -> None:
    """One token at the threshold takes its input column out of the int8 path of all tokens."""
    _, linear, layer = one_layer("llm-int8", batches)
    x = inputs().clamp(-5, 5)
    x[1, 3, 7] = 300.0
    inside = x.clone()
    inside[..., 7] = 0
    weight_NK = fake_quantize_weight(linear.weight.detach().half().float(), CHANNEL)
    with torch.no_grad():
        expected = F.linear(fake_quantize(inside, TOKEN, (-1,)), weight_NK)
        expected += F.linear(x - inside, weight_NK)
        found = layer(x)
        alone = layer(x[:1])

    assert float((found - expected).norm() / expected.norm()) < 2e-3
    assert float((found[:1] - alone).norm() / alone.norm()) > 5e-4


def test_the_threshold_is_the_schemes(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """`outlier_threshold` reaches every layer."""
    scheme = resolve("llm-int8").model_copy(update={"name": "mine", "outlier_threshold": 3.5})
    applied = quantize_(llama, scheme, batches)
    assert isinstance(applied, LibraryApplied)

    assert {layer.state.threshold for layer in applied.layers.values()} == {3.5}


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bit_weights_are_the_nearest_of_the_code_book(
    llama: LlamaForCausalLM, kind: str, block: int
) -> None:
    """Blocks along the flattened weight, scaled by their largest magnitude."""
    from bitsandbytes.functional import get_4bit_type

    book = get_4bit_type(kind, device="cpu").float().sort().values
    linear = llama.model.layers[0].mlp.up_proj
    scheme = resolve(kind)
    assert scheme.weights is not None
    weights = scheme.weights.model_copy(update={"group_size": block})
    applied = quantize_(
        llama, scheme.model_copy(update={"name": "mine", "weights": weights}), keep_reference=True
    )
    assert isinstance(applied, LibraryApplied)
    layer = applied.layers["model.layers.0.mlp.up_proj"]
    blocks = linear.weight.detach().reshape(-1, block)
    scale = blocks.abs().amax(-1, keepdim=True)
    nearest = (blocks / scale)[..., None].sub(book).abs().argmin(-1)
    expected = (book[nearest] * scale).reshape(linear.weight.shape)
    found = applied.library.dequantize(layer)
    x = inputs()

    assert applied.coverage.modules[0].weight_group_size == block
    assert len(book.unique()) >= 15
    assert float((found != expected).float().mean()) < 0.01  # fp32 rounding at the midpoints
    assert float((found - expected).norm() / expected.norm()) < 0.02
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, found), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llm-int8", "bnb-w8a8"])
def test_inputs_beyond_fp16_are_an_error(ids_BT: Tensor, batches: list[Batch], name: str) -> None:
    """Activations that fp16 cannot hold end the run and name the layer; 4-bit weights run."""
    model = with_outlier(1e6)
    quantize(model, name, batches)
    with pytest.raises(QuantizationError, match=r"0\.self_attn\.q_proj: an input of .*fp16"):
        logits_of(model, ids_BT)
    other = with_outlier(1e6)
    quantize(other, "nf4", batches)

    assert math.isfinite(nll_of(other, ids_BT))


def test_weights_that_fp16_cannot_hold_are_an_error(batches: list[Batch]) -> None:
    """Too large, or so small that 8 bits are not left."""
    for factor, message in ((1e6, "is beyond fp16"), (1e-7, "48 of 48 weight rows are too small")):
        model = build_llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(factor)
        with pytest.raises(QuantizationError, match=message):
            quantize(model, "llm-int8", batches)


def test_training_mode_is_refused(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """In training mode bitsandbytes leaves activations alone on the CPU."""
    quantize_(llama, resolve("llm-int8"))
    llama.train()

    with pytest.raises(QuantizationError, match="in training mode"):
        logits_of(llama, ids_BT)


def test_scores_under_outlier_columns_depend_on_the_batch(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """The record says so, and only where there is a threshold."""
    warnings = {}
    for name in ("llm-int8", "bnb-w8a8"):
        applied = quantize(llama, name, batches)
        logits_of(llama, ids_BT)
        warnings[name] = applied.verify()
        applied.undo()

    assert warnings["bnb-w8a8"] == ()
    assert "scores depend on which tokens share a forward pass" in warnings["llm-int8"][0]


def test_the_cast_to_fp16_is_not_announced(
    llama: LlamaForCausalLM, ids_BT: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning a layer and pass is dropped; others of that logger are not."""
    quantize_(llama, resolve("llm-int8"))
    with caplog.at_level(logging.WARNING):
        logits_of(llama, ids_BT)
        logging.getLogger("bitsandbytes.autograd._functions").warning("something else")

    assert [record.message for record in caplog.records] == ["something else"]


def test_blocks_of_bitsandbytes() -> None:
    """Block sizes that it has, and one that it has not."""
    nf4 = resolve("nf4")
    assert nf4.weights is not None
    for size, fits in ((32, True), (64, True), (4096, True), (48, False)):
        weights = nf4.weights.model_copy(update={"group_size": size})

        assert (bitsandbytes_cannot(nf4.model_copy(update={"weights": weights})) is None) == fits
