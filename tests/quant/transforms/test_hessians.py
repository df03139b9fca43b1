"""GPTQ over whole models: layer after layer, on what quantized layers hand on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms.edits import matrix_of
from oasis_eval.quant.transforms.gptq import quantize_weight
from oasis_eval.quant.transforms.hessians import gptq_codes
from oasis_eval.quant.weights import WeightCodes, decode, encode
from oasis_eval.spec import Gptq, QuantScheme, TensorFormat
from tests.quant.transforms.models import build, real_logits, text

FORMAT = TensorFormat(bits=4, granularity="channel")
W4A16 = resolve("w4a16")
MODELS = ("llama", "qwen3-tied", "gpt2", "gemma3", "llama-oasis", "qwen3-gated", "delta", "reset")


def _codes(
    model: nn.Module, batches: list[Batch], scheme: QuantScheme = W4A16
) -> tuple[dict[str, WeightCodes], list[str]]:
    return gptq_codes(model, Gptq(), FORMAT, select(model, scheme), batches)


def _texts() -> list[Batch]:
    return [text(seed=1), text(seed=2, padding=0)]


def _put(model: nn.Module, codes: dict[str, WeightCodes]) -> None:
    modules = dict(model.named_modules())
    for name, found in codes.items():
        weight = decode(found, torch.float32)
        layer = modules[name]
        is_linear = isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(weight if is_linear else weight.T.contiguous())


def _moments(model: nn.Module, names: list[str], batches: list[Batch]) -> dict[str, Tensor]:
    """Return the sum of x x^T over real tokens, from whole passes of the model."""
    modules = dict(model.named_modules())
    sums: dict[str, Tensor] = {}
    for name in names:
        seen: list[Tensor] = []
        handle = modules[name].register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].detach().double())
        )
        for batch in batches:
            real_BT = batch.attention_mask_BT
            with torch.no_grad():
                model(
                    input_ids=batch.input_ids_BT,
                    attention_mask=real_BT.bool(),
                    position_ids=(real_BT.cumsum(-1) - 1).clamp(min=0),
                    use_cache=False,
                )
        handle.remove()
        rows = [x[batch.attention_mask_BT.bool()] for x, batch in zip(seen, batches, strict=True)]
        sums[name] = torch.cat(rows).T @ torch.cat(rows)
    return sums


@pytest.mark.parametrize("name", MODELS)
def test_layers_see_quantized_predecessors(name: str) -> None:
    """Codes are those of a slow walk that runs the whole model for every decoder layer.

    Hessians differ in the last bits of fp32 products, which moves a code in a thousand.
    """
    model, batches = build(name), _texts()
    found, notes = _codes(model, batches)
    slow = copy.deepcopy(model)
    names = [target.name for target in select(slow, W4A16).targets]
    for index in range(2):
        inside = [key for key in names if f".{index}." in key.split("attn_res", 1)[0]]
        moments = _moments(slow, inside, batches)
        modules = dict(slow.named_modules())
        expected = {
            key: quantize_weight(
                matrix_of(modules[key]).float(), moments[key], FORMAT, Gptq(), name=key
            )
            for key in inside
        }
        for key in inside:
            difference = found[key].parts[0].codes != expected[key].parts[0].codes
            assert float(difference.float().mean()) < 2e-3, key
        # The walk goes on with the codes under test, so that one flip does not breed others.
        _put(slow, {key: found[key] for key in inside})

    assert notes == []
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("name", MODELS)
def test_model_is_left_as_it_was(name: str) -> None:
    """Parameters, hooks, forward methods, training mode."""
    model = build(name).train()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _codes(model, _texts())

    assert dict(model.named_parameters(remove_duplicate=False)) == parameters
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module.training


def test_model_is_left_as_it_was_after_a_failure() -> None:
    """An error in the second decoder layer takes everything back."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    parameters = dict(model.named_parameters())
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.up_proj: the weight holds"):
        _codes(model, _texts())

    assert dict(model.named_parameters()) == parameters
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_closer_than_after_rounding_to_nearest(name: str) -> None:
    """On the calibration text itself, in the whole model."""
    model, batches = build(name), [text(seed=seed, padding=0) for seed in range(8)]
    errors = {}
    reference = torch.cat([real_logits(model, batch) for batch in batches])
    for kind in ("gptq", "nearest"):
        quantized = copy.deepcopy(model)
        codes = _codes(model, batches)[0]
        if kind == "nearest":
            modules = dict(model.named_modules())
            codes = {key: encode(matrix_of(modules[key]).float(), FORMAT) for key in codes}
        _put(quantized, codes)
        logits = torch.cat([real_logits(quantized, batch) for batch in batches])
        errors[kind] = float((logits - reference).square().mean())

    assert errors["gptq"] < 0.9 * errors["nearest"]


def test_each_layer_computes_twice_and_the_head_never() -> None:
    """Two batches: a layer runs before and after its turn on each; what is behind it does not."""
    model = build("llama")
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.act_fn") or name == "lm_head":
            module.register_forward_hook(
                lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1})
            )
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layer.mlp.register_forward_hook(
            lambda *_, name=f"layer {index}": counts.update({name: counts.get(name, 0) + 1})
        )
    _codes(model, _texts())

    assert counts["layer 0"] == counts["layer 1"] == 4
    assert "lm_head" not in counts


def test_padding_has_no_part() -> None:
    """Other tokens under the mask change no code."""
    first, second = text(), text()
    second.input_ids_BT[0, :7] = 99
    one, two = (_codes(build("llama"), [batch])[0] for batch in (first, second))

    for name, codes in one.items():
        assert torch.equal(codes.parts[0].codes, two[name].parts[0].codes), name


def test_head_comes_last() -> None:
    """A head in the scheme is fitted to what all quantized layers hand on."""
    scheme = W4A16.model_copy(update={"regions": ("linear_inputs", "lm_head")})
    model, batches = build("llama"), _texts()
    found, _ = _codes(model, batches, scheme)
    _put(model, {name: codes for name, codes in found.items() if name != "lm_head"})
    moments = _moments(model, ["lm_head"], batches)["lm_head"]
    expected = quantize_weight(model.lm_head.weight, moments, FORMAT, Gptq(), name="lm_head")
    difference = found["lm_head"].parts[0].codes != expected.parts[0].codes

    assert float(difference.float().mean()) < 2e-3


def test_shared_weights_round_to_nearest() -> None:
    """One weight cannot be fitted to two inputs; the note names its layers."""
    model = build("llama")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    found, notes = _codes(model, _texts())

    assert notes == [
        "rounded to nearest, for sharing a weight: model.layers.0.mlp.up_proj, "
        "model.layers.1.mlp.up_proj"
    ]
    assert "model.layers.0.mlp.up_proj" not in found
    assert len(found) == 12


def test_tied_ends_round_to_nearest() -> None:
    """A head whose weight is also quantized as the embedding's is not fitted."""
    scheme = W4A16.model_copy(update={"regions": ("linear_inputs", "lm_head", "embedding")})
    found, notes = _codes(build("qwen3-tied"), _texts(), scheme)

    assert notes == ["rounded to nearest, for sharing a weight: lm_head, model.embed_tokens"]
    assert "lm_head" not in found


def test_idle_layers_round_to_nearest() -> None:
    """A layer that no token reaches is named."""
    model = build("llama")
    model.model.layers[1].idle = nn.Linear(48, 48)
    found, notes = _codes(model, _texts())

    assert notes == ["model.layers.1.idle: rounded to nearest, saw no calibration text"]
    assert len(found) == 14


def test_text_is_needed() -> None:
    """No batches, and nothing but padding."""
    nothing = Batch(torch.ones(1, 4).long(), torch.zeros(1, 4).long())
    for batches in ([], [nothing]):
        with pytest.raises(QuantizationError, match="GPTQ needs calibration text"):
            _codes(build("llama"), batches)
