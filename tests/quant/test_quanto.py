"""optimum-quanto: static int8, and int4 weights."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from optimum.quanto import QLinear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from oasis_eval.errors import QuantizationError, UnsupportedSchemeError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.replacement import LibraryApplied
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.quant.transforms.rotation import RotatedInput, Rotation
from oasis_eval.spec import QuantScheme
from tests.quant.conftest import build_llama, logits_of, nll_of
from tests.quant.of_libraries import (
    CHANNEL,
    inputs,
    layers_of,
    needs_compiler,
    one_layer,
    quantize,
)


def test_quanto_int8_is_static_per_tensor(batches: list[Batch]) -> None:
    """Codes of inputs by the calibrated scale, an exact integer product, fp32 scales."""
    applied, linear, layer = one_layer("quanto-w8a8", batches)
    x = inputs()
    scale = layer.input_scale
    codes = (x / scale).round().clamp(-127, 127)
    weight_NK = fake_quantize_weight(linear.weight.detach(), CHANNEL)
    with torch.no_grad():
        found = layer(x)

    assert type(found) is Tensor  # not quantized
    torch.testing.assert_close(applied.library.dequantize(layer), weight_NK)
    torch.testing.assert_close(found, F.linear(codes * scale, weight_NK), rtol=1e-4, atol=1e-4)


def input_scales(applied: LibraryApplied) -> list[float]:
    return [float(layer.input_scale) for layer in applied.layers.values()]


def test_input_scales_are_running_means(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """The first layer's scale is 0.9 of the first sequence's and 0.1 of the second's, by hand."""
    with torch.no_grad():
        embedded = llama.get_input_embeddings()(ids_BT)
        normed = llama.model.layers[0].input_layernorm(embedded)
    first, second = normed.abs().amax((-2, -1)) / 127
    applied = quantize(llama, "quanto-w8a8", batches)

    assert input_scales(applied)[0] == pytest.approx(float(0.9 * first + 0.1 * second), rel=1e-5)
    assert all(scale != 1 for scale in input_scales(applied))


@pytest.mark.parametrize("name", ["quanto-w8a8-rot", "quanto-w8a8-smooth-rot"])
def test_scales_are_of_the_inputs_that_are_quantized(name: str, ids_BT: Tensor) -> None:
    """One sequence: 127 times a scale is the largest input of the layer behind its rotation."""
    model = build_llama(hidden_size=64, intermediate_size=128)
    batches = [Batch(ids_BT[:1], torch.ones_like(ids_BT[:1]))]
    quantize_(model, resolve(name), batches)
    layers = {name: module for name, module in model.named_modules() if type(module) is QLinear}
    entered: dict[str, Tensor] = {}
    rotated = []
    for layer_name, layer in layers.items():
        hooks = [h for h in layer._forward_pre_hooks.values() if isinstance(h, RotatedInput)]
        rotated += [layer_name] * len(hooks)

        def keep(_: nn.Module, args: tuple[Tensor], key: str = layer_name) -> None:
            entered[key] = args[0].detach()

        layer.register_forward_pre_hook(keep, prepend=True)
    logits_of(model, ids_BT[:1])  # what calibration saw: each scale is set before it is used

    assert [key.rsplit(".", 1)[-1] for key in rotated] == 2 * ["o_proj", "down_proj"]
    for key, layer in layers.items():
        x = entered[key][0].double()
        if key in rotated:
            signs = Rotation(x.shape[-1], seed=0)._signs
            x = (x * signs) @ walsh(x.shape[-1]) / x.shape[-1] ** 0.5
        assert float(layer.input_scale) == pytest.approx(float(x.abs().max()) / 127, rel=1e-4)


def walsh(order: int) -> Tensor:
    """Return the Hadamard matrix of a power of two: -1 where indices share an odd number of 1s."""
    entries = [
        [(-1.0) ** (row & column).bit_count() for column in range(order)] for row in range(order)
    ]
    return torch.tensor(entries, dtype=torch.float64)


def test_no_calibration_data_is_an_error(llama: LlamaForCausalLM) -> None:
    """Static ranges without text, or with padding alone, are refused and the model is restored."""
    nothing = [Batch(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))]
    before = layers_of(llama)
    with pytest.raises(QuantizationError, match="need calibration batches"):
        quantize_(llama, resolve("quanto-w8a8"), keep_reference=True)
    with pytest.raises(QuantizationError, match="14 of 14 layers have no input range"):
        quantize_(llama, resolve("quanto-w8a8"), nothing, keep_reference=True)

    assert before == layers_of(llama)


def test_layers_without_a_range_are_named(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """A layer that the text never reaches is an error, not a scale of 1."""
    llama.model.layers[0].mlp.forward = lambda x: x

    with pytest.raises(QuantizationError, match=r"3 of 14 layers .*layers\.0\.mlp\.gate_proj"):
        quantize_(llama, resolve("quanto-w8a8"), batches)


def test_calibration_leaves_no_trace(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """Nothing counts as run or changed before the first pass, and training modes are as before."""
    llama.train()
    llama.model.layers[0].eval()
    before = {name for name, module in llama.named_modules() if module.training}
    applied = quantize(llama, "quanto-w8a8", batches)

    assert applied.called == set()
    assert not applied.activation_changed
    assert {name for name, module in llama.named_modules() if module.training} == before


def test_padding_and_batches_do_not_enter(ids_BT: Tensor) -> None:
    """Texts of 3 and 60 tokens: the same scales in one padded batch, either side, and alone."""
    real = [ids_BT[0, :3], ids_BT[1]]
    alone = [Batch(row[None], torch.ones_like(row)[None]) for row in real]
    ways = [alone]
    for side in ("left", "right"):
        ids, mask = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for index, row in enumerate(real):
            place = slice(-len(row), None) if side == "left" else slice(0, len(row))
            ids[index, place], mask[index, place] = row, 1
        ways.append([Batch(ids, mask)])
    scales = []
    for way in ways:
        model = build_llama(pad_token_id=None)
        with torch.no_grad():
            model.get_input_embeddings().weight[0] *= 100
        scales.append(input_scales(quantize(model, "quanto-w8a8", way)))

    assert scales[0] == pytest.approx(scales[1], rel=1e-5)
    assert scales[0] == pytest.approx(scales[2], rel=1e-5)


def test_int4_of_quanto_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named before anything loads."""
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else "/bin/" + name)
    reason = unsupported(resolve("quanto-w4a16"))

    assert reason is not None
    assert reason.endswith("which needs ninja on PATH: install it")


@pytest.mark.slow
@needs_compiler
def test_int4_of_quanto(ids_BT: Tensor, batches: list[Batch]) -> None:
    """Codes 0 to 15 with a floating-point offset; group sizes really used are in the report."""
    model = build_llama(hidden_size=192, intermediate_size=256)
    weight_NK = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    applied = quantize(model, "quanto-w4a16", batches)
    coverage = {item.module: item for item in applied.coverage.modules}
    down = coverage["model.layers.0.mlp.down_proj"]
    up = coverage["model.layers.0.mlp.up_proj"]
    found = applied.library.dequantize(applied.layers[down.module])
    groups = weight_NK.unflatten(-1, (-1, 128))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    expected = ((groups - low) / scale).round().clamp(0, 15) * scale + low

    assert (down.weight_group_size, up.weight_group_size) == (128, 96)
    assert down.note == "codes 0 to 15 and a floating-point offset"
    assert up.note == f"{down.note}; groups of 96, since 128 does not divide 192"
    torch.testing.assert_close(found, expected.flatten(-2), rtol=1e-4, atol=1e-5)
    assert math.isfinite(nll_of(model, ids_BT))


@pytest.mark.slow
@needs_compiler
def test_int4_packed_for_a_kernel(ids_BT: Tensor) -> None:
    """In bf16, groups of 128 are packed: reported and run like others, and not to be stored."""
    model = build_llama(hidden_size=128, intermediate_size=256)
    plain = logits_of(model, ids_BT)
    applied = quantize(model.bfloat16(), "quanto-w4a16", [])
    found = logits_of(model, ids_BT).float()
    layer = applied.layers["model.layers.0.mlp.down_proj"]
    coverage = {item.module: item for item in applied.coverage.modules}

    assert type(layer.weight).__name__ == "TinyGemmWeightQBitsTensor"
    assert coverage["model.layers.0.mlp.down_proj"].weight_group_size == 128
    facts = applied.library.facts("down", layer)
    assert facts.stored_bits == 128 * 256 * 4 + 2 * 16 * 128 * 2  # a scale and an offset a group
    assert 0.2 < float((found - plain).norm() / plain.norm()) < 1
    with pytest.raises(UnsupportedSchemeError, match=r"packed it for a kernel .* another --dtype"):
        applied.stored(model)


def test_outputs_are_refused() -> None:
    """A half of a scheme that the library would leave out is not accepted."""
    regions = {"name": "mine", "regions": ("linear_inputs", "linear_outputs")}
    reason = unsupported(resolve("quanto-w8a8").model_copy(update=regions))

    assert reason == "scheme 'mine': optimum-quanto does not quantize region linear_outputs"


@pytest.mark.parametrize(
    ("scheme", "part", "changes", "text"),
    [
        ("quanto-w8a8", "activations", {"momentum": 0.5}, "momentum 0.9"),
        ("quanto-w8a8", "activations", {"percentile": 99.0}, "running min-max"),
        ("quanto-w8a8", "activations", {"symmetric": False}, "no asymmetric 8-bit activations"),
        ("quanto-w4a16", "weights", {"symmetric": True}, "asymmetric min-max integers"),
        ("quanto-w4a16", "weights", {"ranges": "mse"}, "asymmetric min-max integers"),
        ("quanto-w4a16", "weights", {"group_size": 64}, "in groups of 128"),
        ("nf4", None, {"outlier_threshold": 6.0}, "is for int8 weights"),
        ("quanto-w8a16", None, {"outlier_threshold": 6.0}, "belongs to backend 'bitsandbytes'"),
        ("llm-int8", None, {"transforms": [{"kind": "gptq"}]}, "GPTQ decides the codes itself"),
    ],
)
def test_settings_that_a_library_has_not(
    scheme: str, part: str | None, changes: dict[str, object], text: str
) -> None:
    """Each by itself is refused before anything loads, and never taken for another."""
    content = resolve(scheme).model_dump() | {"name": "mine"}
    settings = changes if part is None else {part: content[part] | changes}
    if "transforms" in changes:
        settings = settings | {"calibration": {}}
    assert unsupported(resolve(scheme)) is None or scheme == "quanto-w4a16"
    reason = unsupported(QuantScheme.model_validate(content | settings))

    assert reason is not None
    assert text in reason
