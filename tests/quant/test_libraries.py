"""bitsandbytes, optimum-quanto and torchao: what they replace, report, refuse and give back."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from oasis_eval.cells import versions
from oasis_eval.errors import QuantizationError, SpecError, UnsupportedSchemeError
from oasis_eval.quant import bnb, quanto, torchao
from oasis_eval.quant.backends import backend_for, quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.replacement import check_product
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.record import ModuleCoverage
from oasis_eval.spec import QuantScheme
from tests.quant.conftest import build_llama, logits_of, nll_of
from tests.quant.of_libraries import (
    ALL,
    EIGHT,
    SLOW,
    error_of,
    layers_of,
    needs_torchao,
    quantize,
    with_outlier,
)

CELLS: dict[str, str] = {
    "llm-int8": "Linear8bitLt",
    "bnb-w8a8": "Linear8bitLt",
    "nf4": "Linear4bit",
    "fp4": "Linear4bit",
    "quanto-w8a8": "QLinear",
    "quanto-w8a16": "QLinear",
    "torchao-w8a8": "Linear",
    "w8a8": "FakeQuantLinear",
    "w4a4-g32": "FakeQuantLinear",
    "fp8": "FakeQuantLinear",
    "mxfp4": "FakeQuantLinear",
    "nvfp4": "FakeQuantLinear",
}
REFUSED = {
    "bnb-w4a4": "bitsandbytes has no product of 4-bit weights and quantized activations",
    "bnb-w4a8": "bitsandbytes has no product of 4-bit weights and quantized activations",
    "bnb-w8a16": "int8 weights of bitsandbytes go with int8 activations: use 'llm-int8'",
    "bnb-w16a8": "bitsandbytes quantizes activations with int8 weights only",
    "bnb-w4a16": "4-bit weights of bitsandbytes are types nf4 and bnb_fp4, in groups",
    "bnb-w6a6": "bitsandbytes has no 6-bit weights of type int here",
    "bnb-fp8": "bitsandbytes has no 8-bit weights of type fp8_e4m3 here",
    "bnb-w8a8-g128": "int8 weights of bitsandbytes are min-max per output channel",
    "bnb-w8a8-rot-gptq": "GPTQ decides the codes itself, and bitsandbytes takes none",
    "quanto-w4a4": "optimum-quanto has no integer product with 4-bit weights",
    "quanto-w4a8": "optimum-quanto has no integer product with 4-bit weights",
    "quanto-w16a8": "optimum-quanto quantizes activations with int8 weights only",
    "quanto-w6a16": "optimum-quanto has no 6-bit weights of type int here",
    "quanto-w8a4": "optimum-quanto has no 4-bit activations of type int here",
    "quanto-w4a16-g64": "4-bit weights of optimum-quanto are in groups of 128",
    "quanto-w8a16-gptq": "GPTQ decides the codes itself, and optimum-quanto takes none",
    "torchao-w4a4": "torchao has no 4-bit weights of type int here",
    "torchao-w8a16": "this version runs int8 weights with int8 activations of torchao",
    "torchao-w8a8-g32": "int8 weights of torchao are min-max per output channel",
    "torchao-nvfp4": "torchao has no 4-bit weights of type fp4_e2m1 here",
}


@pytest.mark.parametrize("name", [*CELLS, *REFUSED])
def test_every_backend_replaces_what_it_says_or_refuses(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """A cell replaces 14 of 15 layers, all but the head, and reports them; or gives its reason."""
    if name.startswith("torchao") and importlib.util.find_spec("torchao") is None:
        with pytest.raises(UnsupportedSchemeError, match="'torchao' is not installed; run: pip"):
            quantize_(llama, resolve(name), batches)
        return
    names = [n for n, kind in layers_of(llama).items() if kind == "Linear"]
    if name in REFUSED:
        with pytest.raises(UnsupportedSchemeError) as refusal:
            quantize_(llama, resolve(name), batches)

        assert REFUSED[name] in str(refusal.value)
        assert names == [n for n, kind in layers_of(llama).items() if kind == "Linear"]
        return
    applied = quantize_(llama, resolve(name), batches)
    logits_of(llama, ids_BT)
    quantized = [item.module for item in applied.coverage.modules if item.quantized]
    replaced = [n for n, m in llama.named_modules() if type(m).__name__ == CELLS[name]]

    assert quantized == [n for n in names if n != "lm_head"]
    assert (applied.coverage.num_quantized, applied.coverage.num_linear) == (14, 15)
    assert [n for n in replaced if n != "lm_head"] == quantized
    assert type(llama.lm_head) is nn.Linear
    assert applied.verify()[1:] == ()


def test_three_widths_give_three_scores(ids_BT: Tensor, batches: list[Batch]) -> None:
    """fp32, 8-bit and 4-bit differ, and the error of 4 bits is clearly above that of 8."""
    reference = logits_of(build_llama(), ids_BT)
    errors, nlls = {}, {nll_of(build_llama(), ids_BT)}
    for name in ("llm-int8", "nf4", "fp4", "quanto-w8a16", "quanto-w8a8"):
        model = build_llama()
        quantize(model, name, batches)
        errors[name] = error_of(model, reference, ids_BT)
        nlls.add(nll_of(model, ids_BT))

    assert len(nlls) == 6
    assert 0.01 < errors["llm-int8"] < 0.1
    assert 0.01 < errors["quanto-w8a16"] < errors["quanto-w8a8"] < 0.15
    assert min(errors["nf4"], errors["fp4"]) > 4 * errors["llm-int8"]


@pytest.mark.parametrize("name", ALL)
def test_gpt2_is_quantized(
    gpt2: GPT2LMHeadModel, ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """Transposed layers are replaced like others, and their function stays."""
    reference = logits_of(gpt2, ids_BT)
    applied = quantize(gpt2, name, batches)
    error = error_of(gpt2, reference, ids_BT)

    assert (applied.coverage.num_quantized, applied.coverage.num_linear) == (8, 9)
    assert "Conv1D" not in layers_of(gpt2).values()
    assert 0.005 < error < 0.5
    applied.undo()
    assert torch.equal(logits_of(gpt2, ids_BT), reference)


def test_skip_patterns_hold(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """A skipped layer stays a Linear and the report says why; a pattern needs a match."""
    scheme = resolve("nf4").model_copy(update={"name": "mine", "skip": ("*.up_proj",)})
    coverage = quantize_(llama, scheme, keep_reference=True).coverage

    assert type(llama.model.layers[0].mlp.up_proj) is nn.Linear
    assert coverage.num_quantized == 12
    assert sum(item.reason == "skip pattern '*.up_proj'" for item in coverage.modules) == 2
    with pytest.raises(SpecError, match="matches none"):
        quantize_(build_llama(), scheme.model_copy(update={"skip": ("nothing",)}))


@pytest.mark.parametrize("name", ["llm-int8", "nf4", "quanto-w8a8"])
def test_a_tied_head_is_a_copy(ids_BT: Tensor, batches: list[Batch], name: str) -> None:
    """The head of a tied model is quantized beside its embedding, which keeps its values."""
    model = build_llama(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    regions = {"name": "mine", "regions": ("linear_inputs", "lm_head")}
    applied = quantize_(model, resolve(name).model_copy(update=regions), batches)
    head = next(item for item in applied.coverage.modules if item.module == "lm_head")

    assert head.note is not None
    assert head.note.startswith("a copy of the weight is quantized")
    assert applied.coverage.num_quantized == 15
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert math.isfinite(nll_of(model, ids_BT))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llm-int8", 8 * 96 * 48 + 32 * 96),
        ("nf4", 4 * 96 * 48 + 32 * 96 * 48 // 64),
        ("quanto-w8a16", 8 * 96 * 48 + 32 * 96),
        pytest.param("torchao-w8a8", 8 * 96 * 48 + 32 * 96, marks=needs_torchao),
        pytest.param("quanto-w4a16", 4 * 96 * 48 + 2 * 32 * 96, marks=SLOW),
    ],
)
def test_storage_is_counted_from_the_tensors(
    llama: LlamaForCausalLM, batches: list[Batch], name: str, bits: int
) -> None:
    """One layer of [96, 48] by hand: codes, fp32 scales, and the offsets of int4."""
    scheme = resolve(name).model_copy(update={"name": "mine", "skip": ("*self_attn*", "*.1.*")})
    scheme = scheme.model_copy(update={"skip": (*scheme.skip, "*down_proj", "*gate_proj")})
    coverage = quantize_(llama, scheme, batches).coverage
    saved = 8 * (coverage.bytes_before - coverage.bytes_after)

    assert coverage.num_quantized == 1
    assert saved == 32 * 96 * 48 - bits


def test_coverage_of_a_layer(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """What each library's layer is, read from its tensors."""
    name = "model.layers.0.mlp.up_proj"
    expected = {
        "llm-int8": ModuleCoverage(
            module=name,
            quantized=True,
            weight_bits=8,
            weight_granularity="channel",
            activation_bits=8,
            activation_granularity="token",
            activation_static=False,
        ),
        "nf4": ModuleCoverage(
            module=name,
            quantized=True,
            note="blocks of 64 run on over the ends of rows of 48",
            weight_bits=4,
            weight_granularity="group",
            weight_group_size=64,
        ),
        "quanto-w8a8": ModuleCoverage(
            module=name,
            quantized=True,
            weight_bits=8,
            weight_granularity="channel",
            activation_bits=8,
            activation_granularity="tensor",
            activation_static=True,
        ),
    }
    for scheme, item in expected.items():
        applied = quantize(llama, scheme, batches)

        assert item == next(each for each in applied.coverage.modules if each.module == name)
        applied.undo()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_undo_returns_the_model(
    ids_BT: Tensor,
    batches: list[Batch],
    changes: dict[str, object],
    dtype: torch.dtype,
    name: str,
) -> None:
    """Modules, parameters, names and logits are the very same; the dtype stayed in between."""
    model = build_llama(**changes).to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    reference = logits_of(model, ids_BT)
    applied = quantize(model, name, batches)
    quantized = logits_of(model, ids_BT)
    applied.undo()

    assert quantized.dtype == dtype
    assert bool(torch.isfinite(quantized).all())
    assert 0.005 < float((quantized - reference).norm() / reference.norm()) < 0.8
    assert all(module is modules[key] for key, module in model.named_modules())
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert list(values) == list(model.state_dict())
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    assert torch.equal(reference, logits_of(model, ids_BT))
    with pytest.raises(QuantizationError, match="undone already"):
        applied.undo()


@pytest.mark.parametrize("name", ALL)
def test_biases_are_added(batches: list[Batch], name: str) -> None:
    """A zero input comes out as the bias."""
    model = build_llama(mlp_bias=True)
    bias = nn.init.normal_(model.model.layers[0].mlp.up_proj.bias).detach().clone()
    applied = quantize(model, name, batches)
    with torch.no_grad():
        found = applied.layers["model.layers.0.mlp.up_proj"](torch.zeros(1, 3, 48))

    torch.testing.assert_close(found, bias.expand(1, 3, -1), rtol=1e-3, atol=1e-3)


def test_undo_needs_the_reference(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """Weights that were not kept are freed, and undo says so."""
    kept = llama.model.layers[0].mlp.up_proj
    applied = quantize_(llama, resolve("nf4"), batches)

    assert kept.weight is None
    with pytest.raises(QuantizationError, match="were not kept"):
        applied.undo()


@pytest.mark.parametrize("name", EIGHT)
def test_effects_are_checked(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """Layers that never ran are an error, layers that the model goes around a warning."""
    mlp = llama.model.layers[0].mlp
    applied = quantize(llama, name, batches)
    with pytest.raises(QuantizationError, match="none of 14 quantized layers has run"):
        applied.verify()
    mlp.forward = lambda x: x
    logits_of(llama, ids_BT)

    assert applied.activation_changed
    assert applied.verify()[0] == (
        "3 of 14 quantized layers have not run: model.layers.0.mlp.gate_proj, "
        "model.layers.0.mlp.up_proj, model.layers.0.mlp.down_proj"
    )


def test_activations_left_alone_are_seen(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """If a library stopped quantizing inputs the record would say so, outputs in bf16 or not."""
    applied = quantize(llama, "llm-int8", batches)
    for layer in applied.layers.values():
        weight_NK = applied.library.dequantize(layer)
        layer.forward = lambda x, weight_NK=weight_NK: F.linear(x, weight_NK).bfloat16().float()
    logits_of(llama, ids_BT)

    assert applied.verify()[0] == "no activation was changed by quantization"


def test_weights_that_do_not_change_are_an_error(llama: LlamaForCausalLM) -> None:
    """A weight-only scheme without effect fails and leaves the model alone."""
    codes = torch.tensor([-1.0, 0.0, 1.0])
    with torch.no_grad():
        for module in llama.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(codes[torch.randint(0, 3, module.weight.shape)])
    before = layers_of(llama)

    with pytest.raises(QuantizationError, match="no weight was changed"):
        quantize_(llama, resolve("nf4"), keep_reference=True)
    assert before == layers_of(llama)


def test_non_finite_weights_are_refused(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """The layer is named, and those replaced before it are put back."""
    before = layers_of(llama)
    with torch.no_grad():
        llama.model.layers[1].self_attn.v_proj.weight[2, 3] = math.inf

    for name in ("llm-int8", "nf4", "quanto-w8a16"):
        with pytest.raises(QuantizationError, match=r"v_proj: the weight holds non-finite values"):
            quantize(llama, name, batches)
        assert before == layers_of(llama)


def test_hooks_are_not_lost(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A hook set before is refused, one set afterwards runs."""
    calls: list[str] = []
    handle = llama.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(QuantizationError, match="up_proj: has hooks, which bitsandbytes's layer"):
        quantize_(llama, resolve("nf4"), keep_reference=True)
    handle.remove()
    quantize_(llama, resolve("nf4"))
    llama.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
    logits_of(llama, ids_BT)

    assert calls == ["up"]


def test_layers_of_a_library_are_not_quantized_again(
    llama: LlamaForCausalLM, batches: list[Batch]
) -> None:
    """A second scheme on top is refused."""
    quantize(llama, "nf4", batches)

    with pytest.raises(QuantizationError, match="cannot be quantized"):
        quantize_(llama, resolve("w8a8"))


@pytest.mark.parametrize("name", ALL)
def test_zero_rows_blocks_and_tokens_are_harmless(name: str, ids_BT: Tensor) -> None:
    """A zero weight row, zero blocks and a zero token give finite perplexity and zero weights."""
    model = build_llama(pad_token_id=None)
    ids = ids_BT.clone()
    ids[:, :2] = 0
    up, key = model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn.k_proj
    with torch.no_grad():
        up.weight[7] = 0
        key.weight[:8] = 0
        model.get_input_embeddings().weight[0] = 0
    applied = quantize(model, name, [Batch(ids, torch.ones_like(ids))])
    weights = [
        applied.library.dequantize(applied.layers[layer])
        for layer in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj")
    ]

    assert math.isfinite(nll_of(model, ids))
    assert bool((weights[0][7] == 0).all() and (weights[1][:8] == 0).all())


@pytest.mark.parametrize("name", ALL)
def test_a_zero_head_has_the_vocabulary_as_perplexity(
    ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """An all-zero head is uniform under every scheme."""
    model = build_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    quantize(model, name, batches)

    assert nll_of(model, ids_BT) == pytest.approx(math.log(256), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_rescaled_model_is_the_same_model(
    ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """Query, key and value weights times 2^-12 behind norms times 2^12: perplexity within 1 %."""
    nlls = []
    for k in (0, 12):
        model = build_llama()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.input_layernorm.weight *= 2.0**k
                for part in ("q_proj", "k_proj", "v_proj"):
                    getattr(layer.self_attn, part).weight *= 2.0**-k
        quantize(model, name, batches)
        nlls.append(nll_of(model, ids_BT))

    # With outlier columns the scale of activations matters by design.
    assert nlls[0] == pytest.approx(nlls[1], abs=0.03 if name == "llm-int8" else 0.01)


def test_an_outlier_channel_tells_the_schemes_apart(ids_BT: Tensor, batches: list[Batch]) -> None:
    """Per-tensor inputs suffer most, then per-token ones, outlier columns, weights alone."""
    reference = logits_of(with_outlier(50), ids_BT)
    errors = {}
    for name in ("quanto-w8a8", "bnb-w8a8", "llm-int8", "quanto-w8a16"):
        model = with_outlier(50)
        quantize(model, name, batches)
        errors[name] = error_of(model, reference, ids_BT)

    assert errors["quanto-w8a8"] > 1.5 * errors["bnb-w8a8"]
    assert errors["bnb-w8a8"] > 1.3 * errors["llm-int8"]
    assert errors["llm-int8"] > 1.1 * errors["quanto-w8a16"] > 0.01


@pytest.mark.parametrize("name", ALL)
def test_broken_activations_are_not_hidden(ids_BT: Tensor, batches: list[Batch], name: str) -> None:
    """A token that is NaN stays NaN, or the run ends; it never becomes an ordinary number."""
    model = build_llama()
    quantize(model, name, batches)
    with torch.no_grad():
        model.get_input_embeddings().weight[ids_BT[0, 10], 3] = math.nan
    if name == "quanto-w8a8":
        with pytest.raises(QuantizationError, match="an input is not finite"):
            logits_of(model, ids_BT)
        return

    assert bool(torch.isnan(logits_of(model, ids_BT)[0, 10]).all())


def test_a_wrong_product_is_refused() -> None:
    """Saturation in 16 bits, as some processors' kernels have it, is found."""

    def saturating(first_MK: Tensor, second_NK: Tensor) -> Tensor:
        pairs_MNK = first_MK[:, None].int() * second_NK[None].int()
        halves = pairs_MNK.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return halves.sum(-1)

    with pytest.raises(QuantizationError, match="somebody: its 8-bit integer product is wrong"):
        check_product("somebody", saturating, torch.device("cpu"))


def test_a_product_is_checked_on_the_device_it_is_given() -> None:
    """Codes are there when it is called, and what it returns may be there, too."""
    seen: list[tuple[str, str]] = []

    def product(first_MK: Tensor, second_NK: Tensor) -> Tensor:
        seen.append((first_MK.device.type, second_NK.device.type))
        return torch.zeros(len(first_MK), len(second_NK))

    with pytest.raises(QuantizationError, match="integer product is wrong on device 'meta'"):
        check_product("somebody", product, torch.device("meta"))
    assert seen == [("meta", "meta")]


@pytest.mark.parametrize("name", EIGHT)
def test_products_are_checked_on_the_models_device(
    name: str, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the device: kernels differ from one to the next."""

    class AskedError(Exception):
        pass

    def ask(library: str, product: object, device: torch.device) -> None:
        raise AskedError(device.type)

    for module in (bnb, quanto, torchao):
        monkeypatch.setattr(module, "check_product", ask)
    scheme = resolve(name)
    for device in ("cpu", "meta"):
        backend = backend_for(scheme)
        model = build_llama().to(device)
        with pytest.raises(AskedError, match=device):
            backend.apply_(model, scheme, batches, codes={}, keep_reference=False)


def product_of_bitsandbytes(first_MK: Tensor, second_NK: Tensor) -> Tensor:
    product: Tensor = torch.ops.bitsandbytes.int8_linear_matmul(first_MK, second_NK)
    return product


def product_of_quanto(first_MK: Tensor, second_NK: Tensor) -> Tensor:
    from oasis_eval.quant.quanto import _product

    return _product(first_MK, second_NK)


@pytest.mark.parametrize("product", [product_of_bitsandbytes, product_of_quanto])
def test_products_are_exact_here(
    llama: LlamaForCausalLM, batches: list[Batch], product: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """32 x 1024 by 1024 x 64 over the full range of int8, against int64."""
    generator = torch.Generator().manual_seed(1)
    first_MK = torch.randint(-128, 128, (32, 1024), generator=generator)
    second_NK = torch.randint(-128, 128, (64, 1024), generator=generator)
    quantize(llama, "bnb-w8a8", batches)
    found = product(first_MK.to(torch.int8), second_NK.to(torch.int8))

    assert torch.equal(found.long(), first_MK @ second_NK.T)


def test_schemes_written_out() -> None:
    """Settings that a library does not have are refused one by one, before anything loads."""
    base = resolve("llm-int8").model_dump() | {"name": "mine"}
    cases: list[tuple[dict[str, object], str]] = [
        ({"regions": ["linear_inputs", "linear_outputs"]}, "does not quantize region linear_out"),
        ({"execution": "fake"}, "has execution 'real' only"),
        ({"activations": {"bits": 8, "granularity": "tensor", "ranges": "dynamic"}}, "per token"),
        (
            {"weights": base["weights"] | {"ranges": "mse"}},  # type: ignore[operator]
            "min-max per output channel",
        ),
        ({"weights": base["weights"] | {"symmetric": False}}, "no asymmetric 8-bit weights"),  # type: ignore[operator]
    ]
    for changes, message in cases:
        reason = unsupported(QuantScheme.model_validate(base | changes))

        assert reason is not None
        assert message in reason


def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what to install, without being imported."""

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    reasons = {name: unsupported(resolve(name)) for name in ("nf4", "quanto-w8a8", "torchao-w8a8")}

    assert reasons == {
        "nf4": "scheme 'nf4': package 'bitsandbytes' is not installed; "
        "run: pip install bitsandbytes",
        "quanto-w8a8": "scheme 'quanto-w8a8': package 'optimum-quanto' is not installed; "
        "run: pip install optimum-quanto",
        "torchao-w8a8": "scheme 'torchao-w8a8': package 'torchao' is not installed; "
        "run: pip install 'oasis-eval[torchao]'",
    }


def test_versions_of_a_library_are_in_its_own_keys_only() -> None:
    """Other records' keys do not change with a library that did not run them."""
    assert set(versions("bitsandbytes")) - set(versions()) == {"bitsandbytes"}
    assert set(versions("quanto")) - set(versions()) == {"optimum-quanto"}
    assert set(versions("torchao")) - set(versions()) == {"torchao"}
    assert versions("fake") == versions("torch") == versions()


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *itertools.product(
            ("bnb-w8a8", "llm-int8", "quanto-w8a8"), ("smooth", "rot", "smooth-rot")
        ),
        ("nf4", "rot"),
        ("quanto-w8a16", "rot"),
    ],
)
def test_a_library_runs_a_transformed_model(
    name: str, transform: str, llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """The rotated input reaches the library's layer: logits stay as near as without transforms."""
    plain = logits_of(llama, ids_BT)
    errors = []
    for scheme in (name, f"{name}-{transform}"):
        applied = quantize_(llama, resolve(scheme), batches, keep_reference=True)
        found = logits_of(llama, ids_BT)
        assert not [text for text in applied.verify() if "not run" in text]
        errors.append(float((found - plain).norm() / plain.norm()))
        applied.undo()

    assert torch.equal(logits_of(llama, ids_BT), plain)
    assert 0.001 < errors[1] < 2 * errors[0]
    assert errors[0] != errors[1]
