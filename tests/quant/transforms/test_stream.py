"""Rotated models compute what they computed before, and are taken back bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms import transform_
from oasis_eval.quant.transforms.edits import Edits
from oasis_eval.quant.transforms.stream import rotate_
from oasis_eval.quant.transforms.structure import UnknownStructureError, residual_stream
from oasis_eval.spec import Hadamard
from tests.quant.transforms.models import (
    ALL,
    FP32_NORMS,
    OTHERS,
    PLAIN,
    SIZES,
    STREAMS,
    WIRED,
    build,
    deviation,
    real_logits,
    text,
    tolerance,
    wide_norms,
)

W4A4 = resolve("w4a4")


def _rotate(model: nn.Module, *, seed: int = 0, online: bool = True) -> tuple[Edits, list[str]]:
    edits = Edits()
    spec = Hadamard(seed=seed, online=online)
    return edits, rotate_(model, spec, select(model, W4A4), edits).notes


@pytest.mark.parametrize("name", ALL)
def test_rotation_keeps_the_function_in_fp32(name: str) -> None:
    """To 1e-5 of the largest logit; and undoing it restores every bit and every tie."""
    model = build(name)
    before = real_logits(model, text())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    edits, _ = _rotate(model)
    changed = [key for key, p in model.named_parameters() if p is not parameters[key]]
    after = real_logits(model, text())
    edits.undo()

    assert changed
    assert not torch.equal(after, before)
    assert deviation(after, before) < tolerance(name)
    assert dict(model.named_parameters(remove_duplicate=False)) == parameters
    assert torch.equal(real_logits(model, text()), before)


@pytest.mark.parametrize("name", [name for name in ALL if name not in FP32_NORMS])
def test_rotation_is_exact(name: str) -> None:
    """In float64, to 1e-10 of the largest logit: what is left in fp32 is rounding."""
    model = build(name).double()
    with wide_norms():
        before = real_logits(model, text())
        _rotate(model, seed=1)
        after = real_logits(model, text())

    assert before.dtype == torch.float64
    assert deviation(after, before) < 1e-10


@pytest.mark.parametrize("name", STREAMS)
def test_known_structures_need_two_online_rotations_a_layer(name: str) -> None:
    """Everything else is offline: hooks are on o_proj, down_proj and gates of slices alone."""
    model = build(name)
    residual_stream(model)
    _rotate(model)
    hooked = {
        key.rsplit(".", 1)[-1] for key, module in model.named_modules() if module._forward_pre_hooks
    }

    assert hooked - {"gate"} == {"o_proj", "down_proj"}
    assert ("gate" in hooked) == name.endswith("-gated")


@pytest.mark.parametrize("name", PLAIN | WIRED | {"llama-gated": None, "qwen3-oasis": None})
def test_stream_alone_is_rotated_without_online(name: str) -> None:
    """`online: false` leaves no hook but that of a gate of slices, and the function as it was."""
    model = build(name)
    before = real_logits(model, text())
    _rotate(model, online=False)
    hooked = [key for key, module in model.named_modules() if module._forward_pre_hooks]

    assert all(key.endswith(".gate") for key in hooked)
    assert deviation(real_logits(model, text()), before) < tolerance(name)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma", "llama-oasis", "oasis_repo"])
def test_outliers_of_the_stream_are_spread(name: str) -> None:
    """A channel of the embedding 30 times larger is gone behind the rotation."""
    model = build(name)
    weight = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        weight[:, 5] *= 30
    before = weight.abs().amax(0)
    _rotate(model)
    after = model.get_input_embeddings().weight.abs().amax(0)

    assert float(before.max() / before.median()) > 20
    assert float(after.max() / after.median()) < 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_structures_are_rotated_before_each_layer(name: str) -> None:
    """A note says why; every quantized layer has a hook and the head none."""
    model = build(name)
    _, notes = _rotate(model)
    targets = [target.name for target in select(model, W4A4).targets]
    hooked = [key for key, module in model.named_modules() if module._forward_pre_hooks]

    assert notes[0].startswith("rotated before each quantized layer in the forward pass, since ")
    assert hooked == targets


def test_reasons_name_the_part_without_a_place() -> None:
    """The first parameter or module that does not fit is named."""
    found = {}
    for name in OTHERS:
        with pytest.raises(UnknownStructureError) as caught:
            residual_stream(build(name))
        found[name] = str(caught.value)

    assert "pre_feedforward_layernorm.weight (Gemma3RMSNorm)" in found["gemma3"]
    assert "called 'layers'" in found["gpt2"]
    assert "model.layers.0.self_attn has no linear layer 'q_proj'" in found["phi3"]
    assert "model.layers.0 has no norm 'input_layernorm'" in found["olmo2"]


@pytest.mark.parametrize("name", OTHERS)
def test_unknown_structures_need_online_rotations(name: str) -> None:
    """`online: false` is refused with the reason, before anything is changed."""
    model = build(name)
    parameters = dict(model.named_parameters())
    with pytest.raises(UnsupportedSchemeError, match=r"without online rotations: .*'online: true'"):
        _rotate(model, online=False)

    assert dict(model.named_parameters()) == parameters


def test_extra_norm_is_noticed() -> None:
    """A parameter that no known part owns makes the structure unknown."""
    model = build("llama")
    model.model.layers[1].extra = nn.LayerNorm(48)
    with pytest.raises(UnknownStructureError, match=r"model\.layers\.1\.extra\.weight"):
        residual_stream(model)


def test_layer_norms_are_noticed() -> None:
    """A norm that subtracts the mean does not commute with a rotation."""
    model = build("llama")
    model.model.norm = nn.LayerNorm(48)
    with pytest.raises(UnknownStructureError, match=r"model\.norm \(LayerNorm\) is not x / rms"):
        residual_stream(model)


def test_shared_layers_are_noticed() -> None:
    """One module in two places cannot have two gains folded into it."""
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(UnknownStructureError, match="two places"):
        residual_stream(model)
    before = real_logits(model, text())
    _rotate(model)

    assert deviation(real_logits(model, text()), before) < 1e-5


def test_tied_head_is_rotated_as_a_copy() -> None:
    """The note says so, and undoing ties again."""
    model = build("qwen3-tied")
    edits, notes = _rotate(model)

    assert notes == [
        "the head no longer shares the embedding's weight: both were rotated as copies"
    ]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    edits.undo()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_skipped_layers_are_not_rotated_online() -> None:
    """What stays in floating point is spared the cost."""
    model = build("llama")
    scheme = W4A4.model_copy(update={"skip": ("*.down_proj",)})
    edits = Edits()
    rotate_(model, Hadamard(), select(model, scheme), edits)
    hooked = [key for key, module in model.named_modules() if module._forward_pre_hooks]

    assert hooked == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]


def test_widths_without_a_matrix_are_noted() -> None:
    """Blocks are named; the function is the same."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"intermediate_size": 92}))).eval()
    before = real_logits(model, text())
    _, notes = _rotate(model)

    assert notes == ["width 92 is rotated in 23 blocks of 4"]
    assert deviation(real_logits(model, text()), before) < 1e-5


def test_changed_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that reads its stream in another way than its parts tell is not quantized."""
    model = build("llama")
    parameters = dict(model.named_parameters())
    embed = model.model.embed_tokens
    embed.register_forward_hook(lambda _, args, output: output.abs())
    scheme = W4A4.model_copy(update={"transforms": (Hadamard(),)})
    with pytest.raises(UnsupportedSchemeError, match=r"hadamard changes what .* by \d+\.\d%"):
        transform_(model, scheme, None)

    assert dict(model.named_parameters()) == parameters
    assert not any(module._forward_pre_hooks for module in model.modules())
