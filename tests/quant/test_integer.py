"""Layers on integer codes: exact sums, fake quantization's output, NaN, memory, undo, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from oasis_eval.errors import QuantizationError, UnsupportedSchemeError
from oasis_eval.quant import kernels
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.integer_inputs import IntegerInput
from oasis_eval.quant.integer_layers import (
    IntegerLayer,
    accumulate,
    integer_layers,
    prepared_bytes,
)
from oasis_eval.quant.packing import relative_codes
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import QuantScheme
from tests.quant.conftest import build_llama, logits_of

FORMATS = {
    "token": {"granularity": "token", "ranges": "dynamic"},
    "token-asymmetric": {"granularity": "token", "ranges": "dynamic", "symmetric": False},
    "static": {"granularity": "tensor", "ranges": "minmax"},
    "static-asymmetric": {"granularity": "tensor", "ranges": "minmax", "symmetric": False},
    "group": {"granularity": "group", "group_size": 24, "ranges": "dynamic"},
}
WEIGHTS = {
    "channel": {"granularity": "channel"},
    "channel-asymmetric": {"granularity": "channel", "symmetric": False},
    "tensor": {"granularity": "tensor"},
    "group": {"granularity": "group", "group_size": 16},
    "group-asymmetric": {"granularity": "group", "group_size": 20, "symmetric": False},
}
REAL = ("w8a8-real", "w4a4-real", "w4a8-real", "w8a8-static-linear-real", "w4a4-static-linear-real")


def scheme_of(bits: tuple[int, int], weights: str, activations: str, execution: str) -> QuantScheme:
    return QuantScheme.model_validate(
        {
            "name": f"mine-{execution}",
            "backend": "torch" if execution == "real" else "fake",
            "execution": execution,
            "weights": {"bits": bits[0], **WEIGHTS[weights]},
            "activations": {"bits": bits[1], **FORMATS[activations]},
            "calibration": {},
        }
    )


class One(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layer(input_ids)


def make_layer(num_inputs: int, *, bias: bool = True, conv: bool = False) -> nn.Module:
    generator = torch.Generator().manual_seed(num_inputs)
    layer = Conv1D(12, num_inputs) if conv else nn.Linear(num_inputs, 12, bias=bias)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


def both(layer: nn.Module, real: QuantScheme, text: Tensor) -> tuple[One, One]:
    """The same layer under real and fake execution, ranges calibrated on [1, T, K]."""
    fake = real.model_copy(update={"backend": "fake", "execution": "fake"})
    models = One(copy.deepcopy(layer)), One(layer)
    for model, scheme in zip(models, (real, fake), strict=True):
        batch = Batch(text, torch.ones(text.shape[:2], dtype=torch.long))
        quantize_(model, scheme, [batch])
    return models


def layer_of(model: nn.Module) -> IntegerLayer:
    (layer,) = integer_layers(model).values()
    return layer


def quantized_rows(layer: IntegerLayer, x: Tensor) -> IntegerInput:
    assert layer.integer.quantizer is not None
    return layer.integer.quantizer(x, "layer")


def exact_sums(layer: IntegerLayer, rows: IntegerInput, inputs: slice, group: int) -> Tensor:
    """Sums of products in int64."""
    weight_NK = relative_codes(layer.stored, layer.integer.layout)[:, inputs].long()
    codes_MK = rows.codes_MK[:, inputs].long()
    if rows.offset_MG is not None:
        codes_MK -= rows.offset_MG[:, min(group, rows.offset_MG.shape[1] - 1)][:, None].long()
    return codes_MK @ weight_NK.T


def in_float64(fake: One, x_MK: Tensor) -> Tensor:
    """What the fake layer computes, its products summed in float64."""
    layer = fake.layer
    quantizer = layer.quantization.inputs
    weight = layer.weight.detach().double()
    return F.linear(quantizer(x_MK, "layer").double(), weight, layer.bias.detach().double())


def check_layer(
    layer: nn.Module, scheme: QuantScheme, x_MK: Tensor, text: Tensor, *, own_error: bool = True
) -> None:
    """Sums bit-exact against int64; the output within 1e-6 of fake's largest.

    With `own_error` against the fake layer as it is; always against one that sums in float64.
    """
    real, fake = both(layer, scheme, text)
    with torch.no_grad():
        actual, expected = real(x_MK), fake(x_MK)
    integer = layer_of(real)
    rows = quantized_rows(integer, x_MK)
    for stretch in integer.stretches():
        sums = accumulate(stretch, rows)
        assert torch.equal(
            sums.long(), exact_sums(integer, rows, stretch.inputs, stretch.input_group)
        )

    limit = 1e-6 * float(expected.abs().max())
    assert actual.dtype == expected.dtype
    assert float((actual - in_float64(fake, x_MK)).abs().max()) <= limit
    if own_error:
        assert float((actual - expected).abs().max()) <= limit


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (4, 8)], ids=str)
def test_a_layer_is_exact(bits: tuple[int, int], weights: str, activations: str) -> None:
    """Every pair of formats, groups that do not agree and a shorter last one included."""
    x = torch.randn(1, 40, 56, generator=torch.Generator().manual_seed(1))
    x[0, 3] = 0.0
    x[0, 4] = x[0, 4].abs() + 5
    scheme = scheme_of(bits, weights, activations, "real")

    check_layer(make_layer(56), scheme, x[0], x)


@pytest.mark.parametrize("num_inputs", [1, 2, 5, 64, 519, 1041, 4096])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 512])
@pytest.mark.parametrize("name", REAL)
def test_a_layer_is_exact_at_every_size(name: str, num_rows: int, num_inputs: int) -> None:
    """Rows and inputs on both sides of what kernels like."""
    x = torch.randn(1, num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows))

    check_layer(make_layer(num_inputs), resolve(name), x[0], x)


@pytest.mark.parametrize("name", REAL)
def test_saturating_inputs_are_exact(name: str) -> None:
    """All weights and activations of the largest magnitude, of one sign and of both.

    The fake layer's own fp32 sum of 4096 like products is off by 2e-6 here, so it is summed in
    float64.
    """
    num_inputs = 4096
    layer = make_layer(num_inputs)
    layer.weight.data.fill_(3.0)
    layer.weight.data[1] = -3.0
    layer.weight.data[2, ::2] = -3.0
    x = torch.full((1, 4, num_inputs), 2.0)
    x[0, 1] = -2.0
    x[0, 2, 1::2] = -2.0

    check_layer(layer, resolve(name), x[0], x, own_error=False)


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["w8a8-real", "w4a4-real", "w4a16-real"])
def test_transposed_and_bias_free_layers(name: str, bias: bool, conv: bool) -> None:
    """Conv1D keeps its weight as [K, N]; it always has a bias."""
    x = torch.randn(2, 5, 48)
    real, fake = both(make_layer(48, bias=bias, conv=conv), resolve(name), x[:1])
    with torch.no_grad():
        actual, expected = real(x), fake(x)

    assert actual.shape == expected.shape == (2, 5, 12)
    assert float((actual - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    assert torch.equal(layer_of(real).weight, fake.layer.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w8a8-real", "w4a4-real", "w8a8-static-linear-real"])
def test_half_precision_models(name: str, dtype: torch.dtype) -> None:
    """Codes are those of the fake layer; what it rounds on the way is its own error."""
    x = torch.randn(1, 30, 64).to(dtype)
    real, fake = both(make_layer(64).to(dtype), resolve(name), x)
    with torch.no_grad():
        actual, expected = real(x[0]), fake(x[0])
    integer = layer_of(real)
    rows = quantized_rows(integer, x[0])
    exact = exact_sums(integer, rows, slice(0, 64), 0).double()
    exact = exact * rows.scale_MG.double() * integer.stored.scale.double().T
    exact = (exact + integer.bias.detach().double()).to(dtype)

    assert actual.dtype == dtype
    assert torch.equal(integer.weight, fake.layer.weight)
    limit = torch.finfo(dtype).eps * float(exact.abs().max())
    assert float((actual - exact).abs().max()) <= limit
    assert float((actual - expected).float().abs().max()) <= 4 * limit


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_token_is_nan_and_no_other(name: str, value: float) -> None:
    """The same tokens are NaN as in the fake layer; an all-zero token gives the bias."""
    text = torch.randn(1, 6, 40)
    real, fake = both(make_layer(40), resolve(name), text)
    x = text[0].clone()
    x[2, 7] = value
    x[4] = 0.0
    with torch.no_grad():
        actual, expected = real(x), fake(x)

    assert torch.equal(actual.isnan(), expected.isnan())
    assert actual[2].isnan().all()
    assert not actual[[0, 1, 3, 4, 5]].isnan().any()
    assert torch.equal(actual[4], layer_of(real).bias)


def test_no_rows_give_no_rows() -> None:
    """An expert that no token is sent to."""
    real, _ = both(make_layer(40), resolve("w8a8-real"), torch.randn(1, 6, 40))

    assert real(torch.zeros(0, 40)).shape == (0, 12)


@pytest.mark.parametrize(
    "name", [*REAL, "w4a16-real", "w8a16-real", "w4a16-g32-real", "w4a8-g32-real", "w4a4-gptq-real"]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_has_the_codes_of_fake_quantization_and_comes_back(
    kind: str, name: str, ids_BT: Tensor, batches: list[Batch], request: pytest.FixtureRequest
) -> None:
    """Every weight equals its fake one; undoing restores the very parameters, in their order."""
    model: nn.Module = request.getfixturevalue(kind)
    parameters = list(model.named_parameters())
    values = [value.detach().clone() for _, value in parameters]
    kinds = {key: type(module) for key, module in model.named_modules()}
    logits = logits_of(model, ids_BT)
    applied = quantize_(model, resolve(name.removesuffix("-real")), batches, keep_reference=True)
    fake_weights = {
        key: module.weight.detach().clone()
        for key, module in model.named_modules()
        if hasattr(module, "quantization")
    }
    applied.undo()
    applied = quantize_(model, resolve(name), batches, keep_reference=True)
    layers = integer_layers(model)
    assert layers.keys() == fake_weights.keys()
    assert all(torch.equal(layer.weight, fake_weights[key]) for key, layer in layers.items())
    logits_of(model, ids_BT)
    assert applied.verify() == ()
    applied.undo()

    after = list(model.named_parameters())
    assert [key for key, _ in after] == [key for key, _ in parameters]
    assert all(new is old for (_, new), (_, old) in zip(after, parameters, strict=True))
    assert all(torch.equal(new, old) for (_, new), old in zip(after, values, strict=True))
    assert kinds == {key: type(module) for key, module in model.named_modules()}
    assert torch.equal(logits, logits_of(model, ids_BT))


@pytest.mark.parametrize(("name", "share"), [("w8a8-real", 1 / 4), ("w4a4-real", 1 / 8)])
def test_no_floating_point_weight_is_kept(name: str, share: float, ids_BT: Tensor) -> None:
    """Bytes of the layers' parameters and buffers fall to the codes', scales apart."""
    model = build_llama(hidden_size=256, intermediate_size=512)
    linear = {
        key: module.weight.nbytes
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) and key != "lm_head"
    }
    quantize_(model, resolve(name))
    logits_of(model, ids_BT)
    after = {
        key: sum(item.nbytes for item in (*layer.parameters(), *layer.buffers()))
        for key, layer in integer_layers(model).items()
    }

    assert after.keys() == linear.keys()
    for key, before in linear.items():
        assert share * before <= after[key] <= 1.1 * share * before
    assert 0 < prepared_bytes(model) <= sum(linear.values()) / 2
    assert sum(after.values()) + prepared_bytes(model) < 0.8 * sum(linear.values())


def test_a_tied_head_is_quantized_as_a_copy(ids_BT: Tensor) -> None:
    """The embedding keeps its values; without the region the head stays in floating point."""
    for regions, is_covered in ((("linear_inputs", "lm_head"), True), (("linear_inputs",), False)):
        model = build_llama(tie_word_embeddings=True)
        embedding = model.get_input_embeddings().weight
        before = embedding.detach().clone()
        scheme = resolve("w8a8-real").model_copy(update={"name": "mine", "regions": regions})
        quantize_(model, scheme)
        logits_of(model, ids_BT)

        assert ("lm_head" in integer_layers(model)) == is_covered
        assert torch.equal(embedding, before)


def test_the_coverage_says_what_multiplies(llama: LlamaForCausalLM) -> None:
    """Storage and kernel of each quantized layer."""
    applied = quantize_(llama, resolve("w4a4-real"))
    notes = {item.note for item in applied.coverage.modules if item.quantized}
    kernel = kernels.choose(torch.device("cpu"), 7, 7)

    assert notes == {f"int4 storage, int8 GEMM ({kernel.name})"}


def test_layers_share_a_quantized_input(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Query, key and value quantize once, as do gate and up: 4 inputs in each of 2 layers."""
    quantize_(llama, resolve("w8a8-real"))
    quantizers = {layer.integer.quantizer for layer in integer_layers(llama).values()}
    (quantizer,) = quantizers
    calls: list[str] = []

    def counting(x: Tensor, name: str) -> IntegerInput:
        calls.append(name)
        assert quantizer is not None
        return quantizer(x, name)

    for layer in integer_layers(llama).values():
        layer.integer.quantizer = counting
    logits_of(llama, ids_BT)

    assert len(calls) == 8


def test_casting_a_model_leaves_scales_alone(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Codes would mean other numbers with rounded scales."""
    quantize_(llama, resolve("w4a4-real"))
    before = {key: layer.stored for key, layer in integer_layers(llama).items()}
    llama.to(torch.bfloat16)

    for key, layer in integer_layers(llama).items():
        assert torch.equal(layer.stored.scale, before[key].scale)
        assert layer.weight.dtype == torch.bfloat16
    assert logits_of(llama, ids_BT).dtype == torch.bfloat16


def test_a_copy_computes_alike(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """What kernels prepared is made anew."""
    quantize_(llama, resolve("w8a8-real"))
    logits = logits_of(llama, ids_BT)

    assert torch.equal(logits_of(copy.deepcopy(llama), ids_BT), logits)


def test_weight_only_is_fake_bit_for_bit(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Dequantizing for each product is the same arithmetic."""
    applied = quantize_(llama, resolve("w4a16-g32"), keep_reference=True)
    expected = logits_of(llama, ids_BT)
    applied.undo()
    quantize_(llama, resolve("w4a16-g32-real"))

    assert torch.equal(logits_of(llama, ids_BT), expected)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"regions": ["linear_inputs", "linear_outputs"]}, "region linear_outputs has no integer"),
        ({"regions": ["kv_cache"]}, "region kv_cache has no integer"),
        ({"weights": {"bits": 6, "granularity": "channel"}}, "weights of 6 bits"),
        ({"weights": None}, "leaves them alone"),
        ({"weights": {"type": "fp8_e4m3", "bits": 8, "granularity": "channel"}}, "type fp8_e4m3"),
        (
            {"activations": {"bits": 8, "granularity": "tensor", "ranges": "dynamic"}},
            "dynamic ranges are per token",
        ),
        (
            {"activations": {"bits": 8, "granularity": "channel", "ranges": "minmax"}},
            "a scale per input channel",
        ),
        ({"execution": "fake"}, "execution 'real' only"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_loads(
    changes: dict[str, object], text: str, llama: LlamaForCausalLM
) -> None:
    """One line, with the scheme's name."""
    base = resolve("w8a8-real").model_dump() | {"name": "mine", "calibration": {}}
    scheme = QuantScheme.model_validate(base | changes)
    reason = unsupported(scheme)

    assert reason is not None
    assert reason.startswith("scheme 'mine': ")
    assert text in reason
    with pytest.raises(UnsupportedSchemeError, match=text):
        quantize_(llama, scheme)


def test_quantizing_twice_is_refused(llama: LlamaForCausalLM) -> None:
    """Codes are not weights."""
    quantize_(llama, resolve("w8a8-real"))
    with pytest.raises(QuantizationError, match=r"q_proj: cannot be quantized"):
        quantize_(llama, resolve("w8a8-real"))


def test_generation_runs(gpt2: GPT2LMHeadModel) -> None:
    """One row at a time through the cache."""
    quantize_(gpt2, resolve("w4a4-real"))
    ids = torch.tensor([[5, 6, 7]])
    out = gpt2.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)

    assert out.shape[1] <= 7


def test_the_layer_by_hand() -> None:
    """Two inputs, two outputs, worked out on paper."""
    layer = nn.Linear(2, 2)
    layer.weight.data = torch.tensor([[7.0, -3.5], [2.0, 2.0]])
    layer.bias.data = torch.tensor([1.0, 0.0])
    model = One(layer)
    quantize_(model, resolve("w4a4-real"))
    # Scales 1 and 2/7: codes [7, -4] (ties to even) and [7, 7]; the token [14, 6]: scale 2, [7, 3].
    expected = torch.tensor([[(49 - 12) * 2 * 1.0 + 1.0, (49 + 21) * 2 * (2 / 7)]])

    torch.testing.assert_close(model(torch.tensor([[14.0, 6.0]])), expected)
    assert not torch.allclose(F.linear(torch.tensor([[14.0, 6.0]]), torch.zeros(2, 2)), expected)
