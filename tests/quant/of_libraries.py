"""What the tests of bitsandbytes, optimum-quanto and torchao have in common."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.replacement import LibraryApplied
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import TensorFormat
from tests.quant.conftest import build_llama, logits_of

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
needs_compiler = pytest.mark.skipif(
    shutil.which("ninja") is None or shutil.which("g++") is None,
    reason="ninja or g++ is not on PATH",
)
SLOW = [pytest.mark.slow, needs_compiler]  # compiles C++ for minutes at first use

EIGHT = ["llm-int8", "bnb-w8a8", "quanto-w8a8", pytest.param("torchao-w8a8", marks=needs_torchao)]
WEIGHTS_ONLY = ["nf4", "fp4", "quanto-w8a16", pytest.param("quanto-w4a16", marks=SLOW)]
ALL = [*EIGHT, *WEIGHTS_ONLY]

TOKEN = TensorFormat(bits=8, granularity="token", ranges="dynamic")
CHANNEL = TensorFormat(bits=8, granularity="channel")


def layers_of(model: nn.Module) -> dict[str, str]:
    """Return the class of every module that a Linear may have become, by name."""
    known = ("Linear", "Linear8bitLt", "Linear4bit", "QLinear", "Conv1D")
    found = {name: type(module).__name__ for name, module in model.named_modules()}
    return {name: kind for name, kind in found.items() if kind in known}


def quantize(model: nn.Module, name: str, batches: list[Batch]) -> LibraryApplied:
    """Quantize by name and keep the reference."""
    applied = quantize_(model, resolve(name), batches, keep_reference=True)
    assert isinstance(applied, LibraryApplied)
    return applied


def error_of(model: nn.Module, reference: Tensor, ids_BT: Tensor) -> float:
    """Return the relative error of the logits."""
    return float((logits_of(model, ids_BT) - reference).norm() / reference.norm())


def one_layer(name: str, batches: list[Batch]) -> tuple[LibraryApplied, nn.Linear, nn.Module]:
    """Return a scheme in effect, one Linear as it was, and what it has become."""
    model = build_llama()
    applied = quantize(model, name, batches)
    layer = applied.layers["model.layers.0.mlp.up_proj"]
    return applied, build_llama().model.layers[0].mlp.up_proj, layer


def inputs() -> Tensor:
    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(0))
    return x.half().float()


def with_outlier(factor: float) -> LlamaForCausalLM:
    """Return the model with one channel of every norm times `factor`."""
    model = build_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] *= factor
            layer.post_attention_layernorm.weight[5] *= factor
    return model
