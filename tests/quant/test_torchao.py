"""torchao: dynamic int8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.schemes import resolve
from tests.quant.conftest import build_llama, logits_of
from tests.quant.of_libraries import (
    error_of,
    inputs,
    needs_torchao,
    one_layer,
    quantize,
    with_outlier,
)


@needs_torchao
def test_torchao_replaces_the_weight(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """Its layers are plain Linears; their weights are not."""
    quantize_(llama, resolve("torchao-w8a8"), batches)
    kinds = {type(layer.mlp.up_proj.weight).__name__ for layer in llama.model.layers}

    assert kinds == {"Int8Tensor"}


@needs_torchao
def test_torchao_is_w8a8_with_256_levels(batches: list[Batch]) -> None:
    """Scales are max|x| / 127.5 and codes -128 to 127, for weights and tokens."""

    def nearest(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return (x / scale).round().clamp(-128, 127) * scale

    applied, linear, layer = one_layer("torchao-w8a8", batches)
    weight_NK = nearest(linear.weight.detach())
    x = inputs()
    with torch.no_grad():
        found = layer(x)
        expected = F.linear(nearest(x), weight_NK)

    # A row's largest value lies at the tie of 127 and 128, and may go either way.
    differ = applied.library.dequantize(layer) - weight_NK
    assert float((differ.abs() > 1e-6).float().mean()) < 0.005
    assert float((found - expected).norm() / expected.norm()) < 2e-3


@needs_torchao
def test_torchao_with_an_outlier_channel(ids_BT: Tensor, batches: list[Batch]) -> None:
    """About the error of our own per-token W8A8."""
    reference = logits_of(with_outlier(50), ids_BT)
    errors = []
    for name in ("torchao-w8a8", "w8a8"):
        model = with_outlier(50)
        quantize_(model, resolve(name), batches)
        errors.append(error_of(model, reference, ids_BT))

    assert errors[0] == pytest.approx(errors[1], rel=0.3)


@needs_torchao
def test_weights_below_torchaos_smallest_scale_are_an_error(batches: list[Batch]) -> None:
    """Rows that would be flattened by the floor under its scales."""
    model = build_llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3].mul_(1e-6)

    with pytest.raises(QuantizationError, match="q_proj: 1 of 48 weight rows need a scale below"):
        quantize(model, "torchao-w8a8", batches)
