"""Whole models under fake quantization: effect, refusals, undo, degenerate weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.primitives import fake_quantize
from oasis_eval.quant.ranges import fake_quantize_weight
from oasis_eval.quant.schemes import presets, resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import QuantScheme, TensorFormat
from tests.quant.conftest import VOCABULARY, build_llama, logits_of, nll_of

QUANTIZING = [
    name
    for name, scheme in presets().items()
    if scheme.backend == "fake"
    and unsupported(scheme) is None
    and "residual" not in scheme.regions  # needs taps, see test_regions
]


def test_three_widths_are_three_models(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Full precision, 8 and 4 bits differ, and 4 bits are much further off than 8."""
    reference = logits_of(llama, ids_BT)
    nlls, errors = {nll_of(llama, ids_BT)}, {}
    for name in ("w8a8", "w4a4"):
        applied = quantize_(llama, resolve(name), keep_reference=True)
        errors[name] = float((logits_of(llama, ids_BT) - reference).norm() / reference.norm())
        nlls.add(nll_of(llama, ids_BT))
        assert applied.verify() == ()
        applied.undo()

    assert len(nlls) == 3
    assert errors["w4a4"] > 5 * errors["w8a8"] > 0


def test_gpt2_widths_are_different_models(gpt2: GPT2LMHeadModel, ids_BT: Tensor) -> None:
    """The same for a model without any Linear but its head."""
    nlls = {nll_of(gpt2, ids_BT)}
    for name in ("w8a8", "w4a4", "w8a16"):
        applied = quantize_(gpt2, resolve(name), keep_reference=True)
        nlls.add(nll_of(gpt2, ids_BT))
        applied.undo()

    assert len(nlls) == 4


def test_both_halves_of_a_scheme_act(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """W8A8, W8A16 and W16A8 are three models, with a hidden channel 50 times larger too."""
    with torch.no_grad():
        llama.model.layers[0].input_layernorm.weight[3] *= 50
    results = {nll_of(llama, ids_BT)}
    for name in ("w8a8", "w8a16", "w16a8"):
        applied = quantize_(llama, resolve(name), keep_reference=True)
        results.add(nll_of(llama, ids_BT))
        applied.undo()

    assert len(results) == 4


def test_every_static_scale_is_calibrated(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """No layer keeps a scale of 1 or a range that is not its own."""
    applied = quantize_(llama, resolve("w8a8-static-linear"), batches)
    assert isinstance(applied, FakeApplied)
    widths = {key: float(span.high - span.low) for key, span in applied.ranges.items()}

    assert len(widths) == 14
    assert all(width > 0 and width != 255.0 for width in widths.values())
    # Query, key and value share one input, as do gate and up: 4 inputs in each of 2 layers.
    assert len(set(widths.values())) == 8


def reference_block_output(model: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """Compute the first MLP under W4A8 by hand from the original weights."""
    mlp = model.model.layers[0].mlp
    weights, inputs = TensorFormat(bits=4, granularity="channel"), resolve("w4a8").activations
    assert inputs is not None

    def linear(x: Tensor, layer: nn.Linear) -> Tensor:
        return (
            fake_quantize(x, inputs, (-1,)) @ fake_quantize_weight(layer.weight.detach(), weights).T
        )

    gate = nn.functional.silu(linear(hidden, mlp.gate_proj))
    return linear(gate * linear(hidden, mlp.up_proj), mlp.down_proj)


def test_a_block_equals_a_computation_by_hand(llama: LlamaForCausalLM) -> None:
    """Quantized inputs times quantized weights, nothing else."""
    hidden = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3))
    expected = reference_block_output(llama, hidden)
    quantize_(llama, resolve("w4a8"))
    with torch.no_grad():
        actual = llama.model.layers[0].mlp(hidden)

    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("ranges", ["dynamic", "minmax"])
def test_outputs_can_be_quantized(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], ranges: str
) -> None:
    """With `linear_outputs` alone the input is left and at most 2^b levels leave the layer."""
    scheme = QuantScheme.model_validate(
        {
            "name": "mine",
            "activations": {"bits": 3, "granularity": "tensor", "ranges": ranges},
            "regions": ["linear_outputs"],
            "calibration": {},
        }
    )
    applied = quantize_(llama, scheme, batches)
    seen: list[tuple[Tensor, Tensor]] = []
    llama.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _, args, output: seen.append((args[0], output))
    )
    logits_of(llama, ids_BT[:1])
    ((given, output),) = seen

    assert len(output.unique()) <= 7
    assert len(given.unique()) > 100
    assert applied.verify() == ()


@pytest.mark.parametrize("name", QUANTIZING)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_undo_is_bit_exact(
    kind: str, name: str, ids_BT: Tensor, batches: list[Batch], request: pytest.FixtureRequest
) -> None:
    """Parameters are the very objects of before, with their values, names, classes and hooks."""
    model: nn.Module = request.getfixturevalue(kind)
    parameters = dict(model.named_parameters())
    values = {key: value.detach().clone() for key, value in parameters.items()}
    kinds = {key: type(module) for key, module in model.named_modules()}
    logits = logits_of(model, ids_BT)
    applied = quantize_(model, resolve(name), batches, keep_reference=True)
    assert set(model.state_dict()) >= set(parameters)
    logits_of(model, ids_BT)
    applied.undo()

    assert all(value is parameters[key] for key, value in model.named_parameters())
    assert all(torch.equal(value, values[key]) for key, value in model.named_parameters())
    assert kinds == {key: type(module) for key, module in model.named_modules()}
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits, logits_of(model, ids_BT))


def test_undo_twice_is_refused(llama: LlamaForCausalLM) -> None:
    """A second undo would undo somebody else's scheme."""
    applied = quantize_(llama, resolve("w8a8"), keep_reference=True)
    applied.undo()

    with pytest.raises(QuantizationError, match="undone already"):
        applied.undo()


def test_without_a_reference_weights_are_freed(llama: LlamaForCausalLM) -> None:
    """Nothing holds the original weights, and undo says that they are gone."""
    pointer = llama.model.layers[0].mlp.up_proj.weight.data_ptr()
    applied = quantize_(llama, resolve("w8a8"))
    assert isinstance(applied, FakeApplied)

    assert all(original.weight is None for original in applied.originals)
    assert llama.model.layers[0].mlp.up_proj.weight.data_ptr() != pointer
    with pytest.raises(QuantizationError, match="original weights were not kept"):
        applied.undo()


def test_hooks_stay_on_their_layers(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A hook set before the scheme sees the quantized layer and survives undo."""
    calls: list[str] = []
    llama.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
    applied = quantize_(llama, resolve("w8a8"), keep_reference=True)
    logits_of(llama, ids_BT)
    applied.undo()
    logits_of(llama, ids_BT)

    assert calls == ["up", "up"]


def test_state_dict_keeps_its_names(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """Quantized layers add no entry and drop none."""
    names = list(llama.state_dict())
    quantize_(llama, resolve("w4a4-static-linear"), batches)

    assert names == list(llama.state_dict())


def on_the_grid(model: LlamaForCausalLM) -> None:
    """Make every weight one that 8 bits per channel represent exactly."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                codes = torch.randint(-127, 128, module.weight.shape).float()
                codes[:, 0] = 127
                module.weight.copy_(codes / 512)


def test_weights_that_do_not_change_are_an_error(llama: LlamaForCausalLM) -> None:
    """A weight-only scheme without effect fails and leaves the model alone."""
    on_the_grid(llama)

    with pytest.raises(QuantizationError, match="no weight was changed"):
        quantize_(llama, resolve("w8a16"))
    assert not any(hasattr(module, "quantization") for module in llama.modules())


def test_half_of_a_scheme_without_effect_is_a_warning(
    llama: LlamaForCausalLM, ids_BT: Tensor
) -> None:
    """Activations that change keep a scheme alive; the idle half is said."""
    on_the_grid(llama)
    applied = quantize_(llama, resolve("w8a8"))
    logits_of(llama, ids_BT)

    assert applied.verify() == ("no weight was changed by quantization",)


def test_verify_needs_an_effect(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Layers that never ran, and activations that never changed, are errors."""
    applied = quantize_(llama, resolve("w16a8"), keep_reference=True)
    with pytest.raises(QuantizationError, match="none of 14 quantized layers has run"):
        applied.verify()
    with torch.no_grad():
        llama.get_input_embeddings().weight.zero_()
    logits_of(llama, ids_BT)
    with pytest.raises(QuantizationError, match="no weight and no activation was changed"):
        applied.verify()


def test_layers_that_the_model_goes_around_are_told(
    llama: LlamaForCausalLM, ids_BT: Tensor
) -> None:
    """A layer whose weight is used without calling it has unquantized inputs: a warning."""
    mlp = llama.model.layers[0].mlp
    mlp.forward = lambda x: nn.functional.linear(x, mlp.down_proj.weight[:, :48])
    applied = quantize_(llama, resolve("w8a8"))
    logits_of(llama, ids_BT)

    assert applied.verify() == (
        "3 of 14 quantized layers have not run: model.layers.0.mlp.gate_proj, "
        "model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj",
    )


def test_non_finite_weights_are_refused(llama: LlamaForCausalLM) -> None:
    """A weight with NaN or infinity is named; its row would be lost."""
    with torch.no_grad():
        llama.model.layers[1].self_attn.v_proj.weight[2, 3] = math.inf

    with pytest.raises(QuantizationError, match=r"v_proj: the weight holds non-finite values"):
        quantize_(llama, resolve("w8a8"))


FORMATS = [
    (weights, activations, symmetric, bits)
    for (weights, activations), symmetric, bits in itertools.product(
        [
            ("tensor", "tensor"),
            ("channel", "token"),
            ("channel", "channel"),
            ("group", "group"),
            ("tensor", "static"),
        ],
        (True, False),
        (8, 4),
    )
]


def scheme_of(weights: str, activations: str, symmetric: bool, bits: int) -> QuantScheme:
    def fmt(granularity: str, ranges: str) -> dict[str, object]:
        group = 16 if granularity == "group" else None
        fields = {"bits": bits, "granularity": granularity, "ranges": ranges}
        return fields | {"group_size": group, "symmetric": symmetric}

    static = activations == "static"
    return QuantScheme.model_validate(
        {
            "name": "mine",
            "weights": fmt(weights, "minmax"),
            "activations": fmt(
                "tensor" if static else activations, "minmax" if static else "dynamic"
            ),
            "calibration": {},
        }
    )


@pytest.mark.parametrize(("weights", "activations", "symmetric", "bits"), FORMATS)
def test_zero_rows_blocks_and_tokens_are_harmless(
    ids_BT: Tensor, weights: str, activations: str, symmetric: bool, bits: int
) -> None:
    """A zero weight row, a zero block of 16 inputs and a zero token give finite perplexity."""
    model = build_llama(pad_token_id=None)
    ids = ids_BT.clone()
    ids[:, :2] = 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[7] = 0
        model.model.layers[1].self_attn.q_proj.weight[3, 16:32] = 0
        model.get_input_embeddings().weight[0] = 0
    batches = [Batch(ids, torch.ones_like(ids))]
    quantize_(model, scheme_of(weights, activations, symmetric, bits), batches)

    assert math.isfinite(nll_of(model, ids))
    assert bool((model.model.layers[0].mlp.up_proj.weight[7] == 0).all())
    assert bool((model.model.layers[1].self_attn.q_proj.weight[3, 16:32] == 0).all())


def rescaled(dtype: torch.dtype, k: int) -> LlamaForCausalLM:
    """Return the model with query, key and value weights times 2^-k, the norm before times 2^k."""
    model = build_llama().to(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight *= 2.0**k
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight *= 2.0**-k
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["w4a4", "w8a8", "w4a4-g32"])
def test_a_rescaled_model_is_the_same_model(ids_BT: Tensor, name: str, dtype: torch.dtype) -> None:
    """Moving a power of two from weights to the norm before them changes nothing at low bits."""
    nlls = []
    for k in (0, 12):
        model = rescaled(dtype, k)
        quantize_(model, resolve(name))
        nlls.append(nll_of(model, ids_BT))

    assert nlls[0] == pytest.approx(nlls[1], rel=1e-6)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_widths_that_a_group_does_not_divide(
    llama: LlamaForCausalLM, ids_BT: Tensor, size: int
) -> None:
    """Groups of 32, 64 and 128 on rows of 48 and 96 run, and a group as wide as the row is one."""
    quantize_(llama, resolve(f"w4a4-g{size}"))
    grouped = nll_of(llama, ids_BT)
    other = build_llama()
    quantize_(other, resolve("w4a4"))

    assert math.isfinite(grouped)
    assert (grouped == nll_of(other, ids_BT)) == (size == 128)


@pytest.mark.parametrize("name", QUANTIZING)
def test_a_zero_head_has_the_vocabulary_as_perplexity(
    ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """An all-zero head is uniform under every scheme."""
    model = build_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    quantize_(model, resolve(name), batches)

    assert nll_of(model, ids_BT) == pytest.approx(math.log(VOCABULARY), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["w8a8", "w4a4-g32", "w8a8-static-linear"])
def test_the_models_dtype_stays(
    ids_BT: Tensor, batches: list[Batch], name: str, dtype: torch.dtype
) -> None:
    """Weights and logits keep the compute dtype."""
    model = build_llama().to(dtype)
    quantize_(model, resolve(name), batches)

    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert logits_of(model, ids_BT).dtype == dtype
    assert bool(torch.isfinite(logits_of(model, ids_BT)).all())


def test_batch_and_padding_side_change_no_token(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Under per-token ranges a row in a padded batch differs from itself alone by flips only."""
    quantize_(llama, resolve("w8a8"))
    alone = logits_of(llama, ids_BT[:1, :20])
    for side in ("left", "right"):
        ids, mask = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        place = slice(40, None) if side == "left" else slice(0, 20)
        ids[0, place], mask[0, place] = ids_BT[0, :20], 1
        ids[1], mask[1] = ids_BT[1], 1
        together = logits_of(llama, ids, mask)[:1, place]

        assert float(((together - alone).abs() < 1e-3 * alone.abs().max()).float().mean()) > 0.99


def test_gradients_stop_at_quantized_inputs(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A pass with gradients switched on runs; rounding hands none back."""
    quantize_(llama, resolve("w8a8"))
    logits = llama(input_ids=ids_BT).logits

    assert bool(torch.isfinite(logits).all())
