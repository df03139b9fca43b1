"""Transforms under a whole scheme: effect, composition, notes, undo."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms import transform_
from oasis_eval.quant.transforms.edits import matrix_of
from oasis_eval.quant.weights import decode, encode
from oasis_eval.spec import Gptq, Hadamard, QuantScheme, SmoothQuant
from tests.quant.transforms.models import build, deviation, real_logits, text

FACTOR = 40.0
SCHEMES = (
    "w4a4-smooth",
    "w4a4-rot",
    "w4a4-gptq",
    "w4a4-smooth0.75-rot-gptq",
    "w4a16-g32-gptq",
    "w8a8-static-linear-smooth",
    "w8a8-static-linear-rot",
    "w4a4-g32-rot-gptq",
)
MODELS = ("llama-tied-biased", "gpt2", "gemma3", "llama-oasis", "qwen3-gated")


def _plant_(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Give three channels of every layer's inputs 40 times the size, without another function."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[[3, 17, 30]] *= FACTOR
                for reader in readers:
                    reader.weight[:, [3, 17, 30]] /= FACTOR
            mlp.up_proj.weight[[5, 60, 80]] *= FACTOR
            mlp.down_proj.weight[:, [5, 60, 80]] /= FACTOR
    return model


def _planted() -> LlamaForCausalLM:
    model = build("llama-ungrouped")
    assert isinstance(model, LlamaForCausalLM)
    return _plant_(model)


def _texts() -> list[Batch]:
    return [text(seed=seed, padding=0) for seed in range(4)]


def _error(model: PreTrainedModel, name: str, reference: Tensor) -> float:
    """Return the norm of the change of the logits on other text, relative to theirs."""
    applied = quantize_(model, resolve(name), _texts(), keep_reference=True)
    logits = real_logits(model, text(seed=9))
    applied.undo()
    return float((logits - reference).norm() / reference.norm())


def test_planted_outliers_are_no_obstacle() -> None:
    """Smoothing and rotation take most of the damage back that outlier channels do.

    Errors of the logits, W8A8: 0.34 plain, 0.026 smooth, 0.057 rotated, 0.031 with GPTQ besides;
    W4A4: 1.27, 0.40, 0.67, 0.52.
    """
    model = _planted()
    reference = real_logits(model, text(seed=9))
    assert deviation(real_logits(build("llama-ungrouped"), text(seed=9)), reference) < 1e-5
    for width in ("w8a8", "w4a4"):
        plain = _error(model, width, reference)
        smooth = _error(model, f"{width}-smooth", reference)
        rotated = _error(model, f"{width}-rot", reference)
        fitted = _error(model, f"{width}-rot-gptq", reference)

        assert smooth < 0.5 * plain
        assert rotated < 0.6 * plain
        assert fitted < 0.9 * rotated


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_schemes_act_and_are_undone(name: str, scheme: str) -> None:
    """Every model under every scheme: coverage, an effect, other logits, and back bit for bit."""
    model = build(name)
    before = real_logits(model, text())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kinds = {key: type(module) for key, module in model.named_modules()}
    applied = quantize_(model, resolve(scheme), _texts(), keep_reference=True)
    after = real_logits(model, text())
    applied.verify()

    assert applied.coverage.num_quantized >= 8
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(after, before)
    applied.undo()
    assert torch.equal(real_logits(model, text()), before)
    assert dict(model.named_parameters(remove_duplicate=False)) == parameters
    assert {key: type(module) for key, module in model.named_modules()} == kinds
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_the_order_is_smooth_rotate_round() -> None:
    """The composition is the three steps by hand; GPTQ rounds the rotated weights."""
    scheme = resolve("w4a4-smooth-rot-gptq")
    model, by_hand = build("llama"), build("llama")
    found = transform_(model, scheme, _texts())
    for step in scheme.transforms:
        expected = transform_(by_hand, scheme.model_copy(update={"transforms": (step,)}), _texts())

    assert [step.kind for step in scheme.transforms] == ["smooth", "hadamard", "gptq"]
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(found.codes) == 14
    for name, codes in found.codes.items():
        assert torch.equal(codes.parts[0].codes, expected.codes[name].parts[0].codes)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_hold_the_codes_of_gptq(name: str) -> None:
    """What is in effect is decode(codes), and not what rounding to nearest gives."""
    model, scheme = build(name), resolve("w4a16-gptq")
    codes = transform_(model, scheme, _texts()).codes
    nearest = {
        target.name: decode(encode(matrix_of(target.module).float(), scheme.weights), torch.float32)
        for target in select(model, scheme).targets
    }
    quantize_(model, scheme, _texts())
    modules = dict(model.named_modules())

    assert sorted(codes) == sorted(nearest)
    for key, found in codes.items():
        held = matrix_of(modules[key]).float()
        assert torch.equal(held, decode(found, torch.float32))
        assert not torch.equal(held, nearest[key])


def test_online_rotation_comes_before_the_quantizer() -> None:
    """The layer's quantizer sees one code grid over the rotated input, by hand for one layer."""
    model, scheme = build("llama"), resolve("w16a4-rot")
    transformed = copy.deepcopy(model)
    transform_(transformed, scheme, None)
    quantize_(model, scheme)
    layer, plain = (m.model.layers[0].mlp.down_proj for m in (model, transformed))
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)) * 2
    rotated: list[Tensor] = []
    plain.register_forward_hook(lambda _, args, output: rotated.append(args[0]))
    with torch.no_grad():
        plain(x)
        found = layer(x)
    scale = rotated[0].abs().amax(-1, keepdim=True) / 7
    expected = (torch.round(rotated[0] / scale) * scale) @ plain.weight.T

    assert deviation(rotated[0], x) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_static_ranges_are_those_of_the_rotated_inputs() -> None:
    """Calibration of ranges happens behind the transforms."""
    plain, rotated = _planted(), _planted()
    spans = []
    for model, name in ((plain, "w8a8-static-linear"), (rotated, "w8a8-static-linear-rot")):
        applied = quantize_(model, resolve(name), _texts())
        applied = getattr(applied, "applied", applied)
        assert isinstance(applied, FakeApplied)
        span = applied.ranges["model.layers.0.mlp.down_proj", "input"]
        spans.append(float(span.high - span.low))

    assert spans[1] < 0.5 * spans[0]


def test_rotated_inputs_are_shared() -> None:
    """Where q, k and v are rotated one by one, they still rotate and quantize one tensor once."""
    model = build("gemma3")
    quantize_(model, resolve("w4a4-rot"))
    attention = model.model.layers[0].self_attn
    seen: list[Tensor] = []
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        layer.register_forward_hook(lambda _, args, output: seen.append(args[0]))
    real_logits(model, text())

    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_notes_reach_the_warnings() -> None:
    """`verify` tells what the transforms did in another way than their name says."""
    model = build("qwen3-tied")
    applied = quantize_(model, resolve("w4a4-smooth-rot"), _texts(), keep_reference=True)
    real_logits(model, text())
    warnings = applied.verify()

    assert len(warnings) == 2
    assert warnings[0].startswith("the head no longer shares the embedding's weight")
    assert "takes SmoothQuant back there" in warnings[1]
    applied.undo()
    other = build("gemma3")
    applied = quantize_(other, resolve("w4a4-smooth-rot"), _texts())
    real_logits(other, text())
    assert [note[:43] for note in applied.verify()] == [
        "rotated before each quantized layer in the "
    ]


def test_originals_are_freed_where_nothing_is_undone() -> None:
    """Without keep_reference no second copy of the weights stays, and undo says so."""
    model = build("llama")
    originals = [weakref.ref(p) for p in model.model.layers.parameters()]
    applied = quantize_(model, resolve("w4a4-smooth-rot-gptq"), _texts())
    gc.collect()
    alive = [reference for reference in originals if reference() is not None]

    assert len(alive) == 0
    with pytest.raises(QuantizationError, match="not kept"):
        applied.undo()


def test_failure_of_the_backend_takes_transforms_back() -> None:
    """A scheme that changes nothing in the end leaves the model as it was."""
    model = build("llama")
    with torch.no_grad():
        for target in select(model, resolve("w4a16")).targets:
            target.module.weight.zero_()
    parameters = dict(model.named_parameters())
    with pytest.raises(QuantizationError, match="no weight was changed"):
        quantize_(model, resolve("w4a16-rot"), keep_reference=True)

    assert dict(model.named_parameters()) == parameters
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_transforms_are_supported_by_fake() -> None:
    """Before anything is loaded nothing speaks against them."""
    for name in (*SCHEMES, "fp8-smooth-rot", "mxfp4-rot-gptq", "nvfp4-gptq"):
        assert unsupported(resolve(name)) is None


@pytest.mark.parametrize("name", ["fp8-smooth", "mxfp4-rot-gptq", "nvfp4-gptq"])
def test_transforms_before_float_formats(name: str) -> None:
    """Float formats take rotated weights and codes as integers do."""
    model = build("llama")
    before = real_logits(model, text())
    applied = quantize_(model, resolve(name), _texts(), keep_reference=True)
    after = real_logits(model, text())
    applied.undo()

    assert 0 < deviation(after, before) < 1.0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_real_execution_takes_transforms(name: str) -> None:
    """Integer codes behind online rotations and from GPTQ compute what fake quantization does."""
    logits = []
    for scheme in ("w4a4-smooth-rot-gptq", "w4a4-smooth-rot-gptq-real"):
        model = build(name)
        quantize_(model, resolve(scheme), _texts())
        logits.append(real_logits(model, text(padding=0)))

    assert deviation(logits[1], logits[0]) < 1e-3


@pytest.mark.parametrize("name", ["oasis_repo", "qwen3-gated"])
def test_full_graph_takes_transforms(name: str) -> None:
    """Router and gate projections are smoothed, rotated and fitted like others, where covered."""
    model, scheme = build(name), resolve("w8a8-static-smooth-rot-gptq")
    before = real_logits(model, text())
    names = {target.name for target in select(model, scheme).targets}
    found = transform_(model, scheme, _texts())

    assert len(names) == 22
    assert set(found.codes) == names
    assert deviation(real_logits(model, text()), before) < 1e-5
    found.undo()
    applied = quantize_(model, scheme, _texts(), keep_reference=True)
    assert 0 < deviation(real_logits(model, text()), before) < 1.0
    applied.undo()
    assert torch.equal(real_logits(model, text()), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_transformed(dtype: torch.dtype) -> None:
    """The function stays up to the rounding of 16 bits, and the dtype everywhere."""
    scheme = QuantScheme(
        **resolve("w8a8-smooth-rot").model_dump(exclude={"transforms", "name"}),
        name="both",
        transforms=(SmoothQuant(), Hadamard(), Gptq()),
    )
    for name in ("llama", "gemma3", "llama-oasis"):
        model = build(name).to(dtype)
        before = real_logits(model, text())
        transform_(model, scheme, _texts())
        after = real_logits(model, text())

        assert after.dtype == dtype
        assert deviation(after.float(), before.float()) < 0.1


def test_generation_with_a_cache_equals_the_full_pass() -> None:
    """Online rotations act token by token."""
    model = build("llama-gated")
    transform_(model, resolve("w4a4-rot"), None)
    ids_BT = text(padding=0).input_ids_BT[:, :12]
    with torch.no_grad():
        full = model(input_ids=ids_BT).logits
        first = model(input_ids=ids_BT[:, :7], use_cache=True)
        rest = model(input_ids=ids_BT[:, 7:], past_key_values=first.past_key_values).logits

    torch.testing.assert_close(rest, full[:, 7:], rtol=1e-4, atol=1e-5)


def test_no_transforms_do_nothing() -> None:
    """A scheme without transforms neither runs the model nor changes it."""
    model = build("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    parameters = dict(model.named_parameters())
    transformed = transform_(model, resolve("w4a4"), None)

    assert dict(model.named_parameters()) == parameters
    assert not transformed.codes
    assert not transformed.notes
