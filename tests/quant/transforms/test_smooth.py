"""Smoothed models compute what they computed before, with the scales of the paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM

from oasis_eval.errors import QuantizationError, UnsupportedSchemeError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms import transform_
from oasis_eval.quant.transforms.edits import Edits, matrix_of
from oasis_eval.quant.transforms.smooth import scales, smooth_
from oasis_eval.spec import QuantScheme, SmoothQuant
from tests.quant.transforms.models import (
    ALL,
    FP32_NORMS,
    SIZES,
    build,
    deviation,
    real_logits,
    text,
    tolerance,
    wide_norms,
)

W8A8 = resolve("w8a8")


def _smooth(
    model: nn.Module, *, alpha: float = 0.5, scheme: QuantScheme = W8A8, batch: Batch | None = None
) -> tuple[Edits, list[str]]:
    edits = Edits()
    ids_BT = torch.arange(8)[None]
    notes = smooth_(
        model,
        SmoothQuant(alpha=alpha),
        select(model, scheme),
        [batch or text()],
        edits,
        run=lambda: model(input_ids=ids_BT, use_cache=False),
    )
    return edits, notes


def _inputs(model: nn.Module, names: list[str], batch: Batch) -> dict[str, Tensor]:
    """Return the largest absolute inputs over real tokens, one by one."""
    seen: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def hook(name: str) -> object:
        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0].detach()

        return modules[name].register_forward_pre_hook(keep)

    handles = [hook(name) for name in names]
    real_logits(model, batch)
    for handle in handles:
        handle.remove()  # type: ignore[attr-defined]
    largest = {}
    for name, x_BTK in seen.items():
        rows = [
            x_BTK[b, t].abs()
            for b in range(x_BTK.shape[0])
            for t in range(x_BTK.shape[1])
            if batch.attention_mask_BT[b, t]
        ]
        largest[name] = torch.stack(rows).amax(0).double()
    return largest


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_smoothing_keeps_the_function_in_fp32(name: str) -> None:
    """To 1e-5 of the largest logit; and undoing it restores every bit and every tie."""
    model = build(name)
    before = real_logits(model, text())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    edits, _ = _smooth(model, alpha=0.75)
    changed = [key for key, p in model.named_parameters() if p is not parameters[key]]
    after = real_logits(model, text())
    edits.undo()

    assert changed
    assert not torch.equal(after, before)
    assert deviation(after, before) < tolerance(name)
    assert dict(model.named_parameters(remove_duplicate=False)) == parameters
    assert torch.equal(real_logits(model, text()), before)


@pytest.mark.parametrize("name", [name for name in ALL if name not in FP32_NORMS])
def test_smoothing_is_exact(name: str) -> None:
    """In float64, to 1e-10 of the largest logit."""
    model = build(name).double()
    with wide_norms():
        before = real_logits(model, text())
        _smooth(model)
        after = real_logits(model, text())

    assert deviation(after, before) < 1e-10


def test_scales_are_the_papers() -> None:
    """Alpha moves the spread: all, half or none of it."""
    x, w = torch.tensor([4.0, 1.0, 100.0]), torch.tensor([1.0, 4.0, 0.25])

    assert scales(x, w, 1.0).tolist() == [4.0, 1.0, 100.0]
    assert scales(x, w, 0.5).tolist() == [2.0, 0.5, 20.0]
    assert scales(x, w, 0.0).tolist() == [1.0, 0.25, 4.0]


def test_empty_and_extreme_channels_have_safe_scales() -> None:
    """Without input or weight the scale is 1; the rest stays within 1e-5 and 1e5."""
    x = torch.tensor([0.0, 3.0, 0.0, 1e-40, 1e38, 1e-44])
    w = torch.tensor([2.0, 0.0, 0.0, 1e38, 1e-40, 1e-44])
    found = scales(x, w, 0.5)

    assert found[:5].tolist() == [1.0, 1.0, 1.0, 1e-5, 1e5]
    assert float(found[5]) == pytest.approx(1.0)


def test_weights_and_gains_follow_the_formula() -> None:
    """By hand for one layer of Llama with grouped heads; padding does not count."""
    model, batch, alpha = build("llama"), text(), 0.7
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    prefix = "model.layers.0."
    names = [prefix + n for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
    largest = _inputs(model, [*names, prefix + "mlp.down_proj"], batch)
    old = {n: matrix_of(m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)}
    gain = layer.input_layernorm.weight.detach().double().clone()
    _smooth(model, alpha=alpha, batch=batch)

    # o_proj has 4 heads of 12 channels, v_proj 2: heads 0, 1 and heads 2, 3 share a scale.
    x_o, w_o = largest[names[1]], old["self_attn.o_proj"].abs().amax(0)
    s_v = torch.empty(24, dtype=torch.float64)
    s_o = torch.empty(48, dtype=torch.float64)
    for head in range(2):
        for channel in range(12):
            inputs = [(2 * head + repeat) * 12 + channel for repeat in range(2)]
            x = max(float(x_o[index]) for index in inputs)
            w = max(float(w_o[index]) for index in inputs)
            s_v[head * 12 + channel] = x**alpha / w ** (1 - alpha)
            s_o[inputs] = s_v[head * 12 + channel]
    new_v = old["self_attn.v_proj"] / s_v[:, None]
    _close(matrix_of(attention.o_proj), old["self_attn.o_proj"] * s_o)
    weights = torch.cat([old["self_attn.q_proj"], old["self_attn.k_proj"], new_v]).abs().amax(0)
    s = largest[names[0]].pow(alpha) / weights.pow(1 - alpha)
    _close(matrix_of(attention.q_proj), old["self_attn.q_proj"] * s)
    _close(matrix_of(attention.v_proj), new_v * s)
    _close(layer.input_layernorm.weight.double(), gain / s)
    s_down = largest[prefix + "mlp.down_proj"].pow(alpha)
    s_down = s_down / old["mlp.down_proj"].abs().amax(0).pow(1 - alpha)
    _close(matrix_of(mlp.down_proj), old["mlp.down_proj"] * s_down)
    new_up = old["mlp.up_proj"] / s_down[:, None]
    both = torch.cat([old["mlp.gate_proj"], new_up]).abs().amax(0)
    s_up = largest[names[2]].pow(alpha) / both.pow(1 - alpha)
    _close(matrix_of(mlp.up_proj), new_up * s_up)
    _close(matrix_of(mlp.gate_proj), old["mlp.gate_proj"] * s_up)


def test_alpha_one_flattens_inputs() -> None:
    """With alpha 1 every channel that a norm feeds is at most 1 on the calibration text."""
    model, batch = build("qwen3"), text()
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    before = _inputs(model, names, batch)
    _smooth(model, alpha=1.0, batch=batch)

    for name, largest in _inputs(model, names, batch).items():
        torch.testing.assert_close(largest, torch.ones_like(largest), rtol=1e-4, atol=0.0)
        assert float(before[name].max() / before[name].min()) > 3


def test_padding_has_no_part() -> None:
    """Other tokens under the mask change no bit."""
    first, second = text(), text()
    second.input_ids_BT[0, :7] = 99
    one, two = build("llama"), build("llama")
    _smooth(one, batch=first)
    _smooth(two, batch=second)

    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gpt2_folds_into_a_part_of_c_attn() -> None:
    """Only the rows of values are divided; what an activation function makes is left alone."""
    model = build("gpt2")
    attention = model.transformer.h[0].attn
    before, bias = matrix_of(attention.c_attn), attention.c_attn.bias.detach().clone()
    _, notes = _smooth(model)
    ratio = matrix_of(attention.c_attn) / before

    # Query rows carry the norm's scales alone, so all of them have the same ratios.
    torch.testing.assert_close(ratio[:96], ratio[:1].expand(96, -1), rtol=1e-4, atol=0.0)
    assert float((ratio[96:] / ratio[:1] - 1).abs().amax(1).min()) > 1e-3
    assert torch.equal(attention.c_attn.bias[:96], bias[:96])
    assert not torch.equal(attention.c_attn.bias[96:], bias[96:])
    assert notes == [
        "SmoothQuant left 2 of 8 quantized layers alone, whose inputs no norm or linear layer can "
        "absorb (c_proj): transformer.h.0.mlp.c_proj, transformer.h.1.mlp.c_proj"
    ]


@pytest.mark.parametrize("name", ["llama-gated", "llama-gated_g1", "gemma3", "qwen3-oasis"])
def test_all_layers_are_smoothed(name: str) -> None:
    """Gates and norms behind sublayers are no obstacle: nothing is left alone."""
    _, notes = _smooth(build(name))

    assert notes == []


def test_norms_behind_values_are_noticed() -> None:
    """A norm between v_proj and o_proj, or before down_proj, keeps the pair as it is."""
    model = build("llama")
    model.model.layers[0].self_attn.v_norm = nn.RMSNorm(12)
    model.model.layers[1].mlp.ffn_sub_norm = nn.RMSNorm(96)
    _, notes = _smooth(model)

    assert notes[0].startswith("SmoothQuant left 2 of 14 quantized layers alone")
    assert "model.layers.0.self_attn.o_proj, model.layers.1.mlp.down_proj" in notes[0]


def test_other_readers_of_a_norm_are_noticed() -> None:
    """Where something that is no linear layer reads a norm too, its gain stays."""
    model = build("llama")
    layer = model.model.layers[0]
    gain = layer.input_layernorm.weight
    layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: (args[0] + 0.0,))
    _, notes = _smooth(model)

    assert layer.input_layernorm.weight is gain
    assert "SmoothQuant left 3 of 14" in notes[0]


def test_shared_weights_are_left_alone() -> None:
    """Two layers with one weight cannot follow two norms."""
    model = build("llama")
    layers = model.model.layers
    layers[1].mlp.gate_proj.weight = layers[0].mlp.gate_proj.weight
    before = real_logits(model, text())
    _, notes = _smooth(model)

    assert "SmoothQuant left 4 of 14" in notes[0]
    assert deviation(real_logits(model, text()), before) < 1e-5


def test_layers_that_stay_are_followed_but_not_asked() -> None:
    """A skipped reader of a norm takes the scales and has no say in them."""
    scheme = W8A8.model_copy(update={"skip": ("*.v_proj",)})
    model = build("llama")
    before = real_logits(model, text())
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:, 3] *= 1000
    before = real_logits(model, text())
    gain = model.model.layers[0].input_layernorm.weight.detach().clone()
    _smooth(model, scheme=scheme)
    moved = (gain / model.model.layers[0].input_layernorm.weight.detach()).abs()

    assert deviation(real_logits(model, text()), before) < 1e-5
    assert float(moved[3] / moved.median()) > 0.2  # with a say, sqrt(1000) smaller


def test_dead_channels_survive() -> None:
    """A channel without input or weight is left at scale 1."""
    model = build("llama")
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.input_layernorm.weight[3] = 0.0
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight[:, 5] = 0.0
    before = real_logits(model, text())
    gain = float(layer.input_layernorm.weight.detach()[5])
    _smooth(model)

    assert deviation(real_logits(model, text()), before) < 1e-5
    assert float(layer.input_layernorm.weight[5]) == pytest.approx(gain)
    assert float(layer.input_layernorm.weight[3]) == 0.0


def test_bf16_gemma_keeps_small_gains() -> None:
    """Gains of 1 + weight are kept in fp32, where 1/50 still has digits."""
    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**(SIZES | {"head_dim": 16}))).eval()
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(model.model.layers[0].self_attn, name).weight.mul_(0.0004)
    model = model.bfloat16()
    before = real_logits(model, text()).float()
    _smooth(model)
    norm = model.model.layers[0].input_layernorm

    assert norm.weight.dtype == torch.float32
    assert float((1 + norm.weight).max()) < 0.05
    assert deviation(real_logits(model, text()).float(), before) < 0.02


def test_text_is_needed_and_must_be_finite() -> None:
    """No text, and text on which the model overflows, are refused; nothing is changed."""
    scheme = resolve("w8a8-smooth")
    model = build("llama")
    for batches in (None, [Batch(torch.ones(1, 4).long(), torch.zeros(1, 4).long())]):
        with pytest.raises(QuantizationError, match="SmoothQuant needs calibration text"):
            transform_(model, scheme, batches)
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = float("inf")
    broken = Batch(torch.full((1, 4), 17), torch.ones(1, 4).long())
    with pytest.raises(QuantizationError, match=r"q_proj: inputs on the calibration text are not"):
        transform_(model, scheme, [broken])


def test_changed_function_is_refused() -> None:
    """A gate that squares what comes out of up_proj is no gated MLP; the check notices."""
    model = build("llama")
    up = model.model.layers[0].mlp.up_proj
    up.register_forward_hook(lambda _, args, output: output.square() * 30)
    parameters = dict(model.named_parameters())
    with pytest.raises(UnsupportedSchemeError, match=r"smooth changes what the model computes by"):
        transform_(model, resolve("w8a8-smooth"), [text()])

    assert dict(model.named_parameters()) == parameters
