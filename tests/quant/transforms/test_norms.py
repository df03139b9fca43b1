"""What norms compute and who reads them, found by trying."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from oasis_eval.quant.transforms.edits import Edits
from oasis_eval.quant.transforms.norms import Norm, norm_of, trace_readers
from tests.quant.transforms.models import build

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _norm(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    norm = kind(48)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(48) * 0.5)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "offset", "is_centred"),
    [
        (LlamaRMSNorm, 0.0, False),
        (nn.RMSNorm, 0.0, False),
        (Gemma3RMSNorm, 1.0, False),
        (nn.LayerNorm, 0.0, True),
    ],
)
def test_gains_are_found(
    kind: type[nn.Module], offset: float, is_centred: bool, dtype: torch.dtype
) -> None:
    """Weight or 1 + weight, with the mean or without it, in every dtype."""
    norm = _norm(kind, dtype)
    found = norm_of(norm)

    assert found == Norm(norm, offset, is_centred)
    assert torch.equal(found.gain_D, norm.weight.detach().double() + offset)


class _TanhNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class _Unusable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))


@pytest.mark.parametrize("module", [_TanhNorm(), _Unusable(), nn.Linear(4, 4), nn.ReLU()])
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    """What is not x / rms(x) times a gain is not taken for it."""
    assert norm_of(module) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, nn.LayerNorm])
def test_gains_can_be_set(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """A gain of 1/100 keeps its digits, in a Gemma norm of bf16 too; the bias follows."""
    norm = _norm(kind, dtype)
    x = torch.randn(3, 48).to(dtype)
    edits = Edits()
    before = norm(x).detach()
    found = norm_of(norm)
    assert found is not None
    found.set_gain(found.gain_D / 100, edits)
    after = norm(x).detach()
    edits.undo()

    digits = 0.05 if dtype == torch.bfloat16 else 1e-4
    assert after.dtype == dtype
    assert float((after.double() * 100 - before.double()).abs().max()) < digits
    assert torch.equal(norm(x), before)


def _read(model: PreTrainedModel) -> dict[str, tuple[list[str], set[str]]]:
    found = trace_readers(model, lambda: model(input_ids=torch.arange(8)[None], use_cache=False))
    return {
        norm: ([reader.name.rsplit(".", 1)[-1] for reader in item.linear.values()], item.other)
        for norm, item in found.items()
    }


def test_readers_of_llama() -> None:
    """q, k, v read the first norm, gate and up the second; the head only some tokens."""
    found = _read(build("llama"))

    assert found["model.layers.0.input_layernorm"] == (["q_proj", "k_proj", "v_proj"], set())
    assert found["model.layers.1.post_attention_layernorm"] == (["gate_proj", "up_proj"], set())
    assert found["model.norm"] == ([], {"__getitem__"})


def test_readers_of_gemma() -> None:
    """A norm behind a sublayer has an addition as reader; that of heads a transposition."""
    found = _read(build("gemma3"))

    assert found["model.layers.0.pre_feedforward_layernorm"] == (["gate_proj", "up_proj"], set())
    assert found["model.layers.0.post_attention_layernorm"][0] == []
    assert found["model.layers.0.post_attention_layernorm"][1]
    assert found["model.layers.0.self_attn.q_norm"][1]


def test_readers_of_gpt2() -> None:
    """Conv1D flattens its input first."""
    found = _read(build("gpt2"))

    assert found["transformer.h.0.ln_1"] == (["c_attn"], set())
    assert found["transformer.h.0.ln_2"] == (["c_fc"], set())


def test_readers_of_slices() -> None:
    """Gates of single heads read 12 of 48 channels each."""
    model = build("llama-gated")
    found = trace_readers(model, lambda: model(input_ids=torch.arange(8)[None], use_cache=False))
    readers = found["model.layers.0.input_layernorm"].linear.values()
    slices = [(item.start, item.stop) for item in readers if ".gate." in item.name]

    assert slices == [(0, 12), (12, 24), (24, 36), (36, 48)]
    assert found["model.layers.0.input_layernorm"].other == set()


@pytest.mark.parametrize(
    "act", [lambda x: x + 1.0, lambda x: x @ torch.ones(48, 3), lambda x: x.mul_(2.0)]
)
def test_readers_that_are_no_layers(act: Callable[[Tensor], Tensor]) -> None:
    """Arithmetic, a raw weight and changes in place are seen; a look at the shape is nothing."""
    model = build("llama")
    layer = model.model.layers[0]
    returned: list[Tensor] = []
    layer.input_layernorm.register_forward_hook(lambda _, args, out: returned.append(out))

    def use(module: nn.Module, args: object) -> None:
        assert returned[-1].shape[-1] == returned[-1].size(-1) == 48
        if module is layer.self_attn.q_proj:
            act(returned[-1])

    layer.self_attn.q_proj.register_forward_pre_hook(use)
    layer.self_attn.k_proj.register_forward_pre_hook(use)
    found = _read(model)

    assert found["model.layers.0.input_layernorm"][1]
    assert not found["model.layers.1.input_layernorm"][1]
