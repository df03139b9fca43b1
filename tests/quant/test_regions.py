"""The full graph: which places are quantized, by what, and that nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oasis_eval.errors import QuantizationError, SpecError, UnsupportedSchemeError
from oasis_eval.modeling.experts import separate_
from oasis_eval.modeling.instrumentation import Point, instrumented
from oasis_eval.modeling.variants import build_config, resolve_variant
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.names import FULL_GRAPH
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import QuantScheme, Region
from tests.modeling.naive import NaiveModel
from tests.modeling.plain import PLAIN, build_plain
from tests.modeling.tiny import REPO, new_model, tiny_config, tokens
from tests.quant.conftest import VOCABULARY, build_llama, logits_of, nll_of

POINTS: tuple[Point, ...] = ("attention", "kv_cache", "residual")
EVERYWHERE: tuple[Region, ...] = (
    "attention_scores",
    "attention_probs",
    "attention_context",
    "kv_cache",
    "residual",
)
OURS = ("residual-vanilla", "vanilla", "oasis", "oasis_repo_lowrank", "gated", "outeffhop")


def scheme(
    *regions: Region,
    bits: int = 4,
    weights: int | None = None,
    static: bool = False,
    skip: tuple[str, ...] = (),
    symmetric: bool = True,
    percentile: float = 100.0,
) -> QuantScheme:
    """Return a scheme of regions of its own."""
    ranges: dict[str, object] = {"granularity": "token", "ranges": "dynamic"}
    if static:
        ranges = {"granularity": "tensor", "ranges": "running_minmax", "percentile": percentile}
    return QuantScheme.model_validate(
        {
            "name": "mine",
            "weights": weights and {"bits": weights, "granularity": "channel"},
            "activations": {"bits": bits, "symmetric": symmetric} | ranges,
            "regions": regions,
            "calibration": {},
            "skip": skip,
        }
    )


def full(bits: int, *, static: bool) -> QuantScheme:
    """The full graph, static as the preset, or with a range per token."""
    if static:
        return resolve(f"w{bits}a{bits}-static")
    return scheme(*FULL_GRAPH, bits=bits, weights=bits)


@contextmanager
def quantized(
    model: nn.Module, how: QuantScheme, batches: list[Batch] | None = None
) -> Iterator[FakeApplied]:
    """Put a model under a scheme for the length of the block."""
    with instrumented(model, POINTS) as missing:
        assert not missing
        applied = quantize_(model, how, batches, keep_reference=True)
        assert isinstance(applied, FakeApplied)
        try:
            yield applied
        finally:
            applied.undo()


def ours(case: str) -> nn.Module:
    """Return one of our variants with tiny random weights."""
    if case != "oasis_repo_lowrank":
        return new_model(tiny_config("llama", case))
    return new_model(tiny_config("llama", dataclasses.replace(REPO, depth_router="lowrank_qk")))


# --- an independent full-graph Llama ------------------------------------------------------------


def round_symmetric(x: Tensor, bits: int, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Symmetric quantize-dequantize over `dims`, written out."""
    levels = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dims, keepdim=True) / levels
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.round(x / scale).clamp(-levels, levels) * scale


def round_asymmetric(x: Tensor, bits: int, low: Tensor, high: Tensor) -> Tensor:
    """Asymmetric quantize-dequantize by a fixed range, written out."""
    levels = 2**bits - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / levels
    zero = torch.round(-low / scale).clamp(0, levels)
    return (torch.round(x / scale) + zero).clamp(0, levels).sub(zero) * scale


class ByHand:
    """A Llama's forward pass with a quantizer at every place, by name.

    It records what passes each place, so that static ranges can be taken from a first run.
    """

    def __init__(self, model: LlamaForCausalLM, bits: int, regions: tuple[Region, ...]) -> None:
        self.model = model
        self.bits = bits
        self.regions = regions
        self.weights: dict[str, Tensor] = {
            name: value.detach() for name, value in model.named_parameters()
        }
        self.ranges: dict[str, tuple[Tensor, Tensor]] | None = None
        self.seen: dict[str, Tensor] = {}
        self.quantizes = True

    def at(self, region: Region, place: str, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Quantize what passes a place."""
        values = x if visible is None else x[visible.expand(x.shape)]
        self.seen[place] = values
        if region not in self.regions or not self.quantizes:
            return x
        if self.ranges is not None and region != "kv_cache":
            return round_asymmetric(x, self.bits, *self.ranges[place])
        if visible is not None:
            x = torch.where(visible, x, torch.zeros_like(x))
        if region == "kv_cache" and self.ranges is not None:
            return self.asymmetric_rows(x)
        return round_symmetric(x, self.bits)

    def asymmetric_rows(self, x: Tensor) -> Tensor:
        return round_asymmetric(x, self.bits, x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))

    def linear(self, name: str, x: Tensor) -> Tensor:
        x = self.at("linear_inputs", f"{name}.in", x)
        return self.at("linear_outputs", f"{name}.out", x @ self.weights[f"{name}.weight"].T)

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return unit * self.weights[f"{name}.weight"]

    def __call__(self, ids_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        x = self.weights["model.embed_tokens.weight"][ids_BT]
        positions = torch.arange(length)[None]
        rotary = self.model.model.rotary_emb(x, position_ids=positions)
        x = self.at("residual", "embedding", x)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        for index in range(self.model.config.num_hidden_layers):
            layer = f"model.layers.{index}"
            normed = self.norm(f"{layer}.input_layernorm", x)
            heads = [
                self.linear(f"{layer}.self_attn.{part}_proj", normed)
                .unflatten(-1, (-1, 12))
                .transpose(1, 2)
                for part in "qkv"
            ]
            query, key = apply_rotary_pos_emb(heads[0], heads[1], *rotary)
            key = self.at("kv_cache", f"{layer}.key", key)
            value = self.at("kv_cache", f"{layer}.value", heads[2])
            key, value = (part.repeat_interleave(2, dim=1) for part in (key, value))
            scores = query @ key.transpose(-1, -2) / 12**0.5
            scores = self.at("attention_scores", f"{layer}.scores", scores, visible)
            probs = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
            probs = self.at("attention_probs", f"{layer}.probs", probs, visible)
            context = (probs @ value).transpose(1, 2).flatten(-2)
            context = self.at("attention_context", f"{layer}.context", context)
            x = x + self.linear(f"{layer}.self_attn.o_proj", context)
            x = self.at("residual", f"{layer}.attention", x)
            normed = self.norm(f"{layer}.post_attention_layernorm", x)
            gate = F.silu(self.linear(f"{layer}.mlp.gate_proj", normed))
            up = self.linear(f"{layer}.mlp.up_proj", normed)
            x = x + self.linear(f"{layer}.mlp.down_proj", gate * up)
            x = self.at("residual", f"{layer}.mlp", x)
        return self.norm("model.norm", x) @ self.weights["lm_head.weight"].T

    def quantize_weights(self, dims: tuple[int, ...]) -> None:
        for name, value in self.weights.items():
            is_embedding = name == "model.embed_tokens.weight"
            if "_proj" in name or (is_embedding and "embedding" in self.regions):
                self.weights[name] = round_symmetric(value, self.bits, dims)

    def calibrate(self, texts: list[Tensor], percentile: float) -> None:
        """Running percentile over the texts, in floating point."""
        self.quantizes = False
        ranges: dict[str, tuple[Tensor, Tensor]] = {}
        for ids in texts:
            self(ids)
            for place, values in self.seen.items():
                flat = values.flatten().double()
                low = torch.quantile(flat, 1 - percentile / 100)
                high = torch.quantile(flat, percentile / 100)
                if place in ranges:
                    low = 0.9 * ranges[place][0] + 0.1 * low
                    high = 0.9 * ranges[place][1] + 0.1 * high
                ranges[place] = (low, high)
        self.ranges = {place: (low.float(), high.float()) for place, (low, high) in ranges.items()}
        self.quantizes = True


def by_hand(
    model: LlamaForCausalLM, how: QuantScheme, ids_BT: Tensor, batches: list[Batch]
) -> Tensor:
    """Return the logits of a scheme on a Llama, computed by hand."""
    assert how.activations is not None
    naive = ByHand(model, how.activations.bits, how.regions)
    if how.is_static:
        naive.calibrate([batch.input_ids_BT for batch in batches], how.activations.percentile)
    if how.weights is not None:
        naive.quantize_weights((-1,) if how.weights.granularity == "channel" else (-2, -1))
    with torch.no_grad():
        return naive(ids_BT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order on every machine: which levels move depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_equal_but_for_flips(actual: Tensor, expected: Tensor, *, share: float = 0.75) -> None:
    """Compare what two orders of summation gave: equal to rounding, but for moved levels.

    A value next to a boundary of levels may fall on either side, and later tokens see the
    difference. A quantizer that is missing or elsewhere changes every token.
    """
    error_BT = (actual - expected).abs().amax(-1) / expected.abs().max()

    assert float(error_BT.median()) < 1e-6
    assert float((error_BT < 1e-5).float().mean()) >= share


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_full_graph_equals_a_computation_by_hand(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], bits: int, static: bool
) -> None:
    """Every region at once, the weights and the static ranges too."""
    how = full(bits, static=static)
    expected = by_hand(llama, how, ids_BT, batches)
    with quantized(llama, how, batches):
        actual = logits_of(llama, ids_BT)

    assert_equal_but_for_flips(actual, expected)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("region", [*EVERYWHERE, "linear_inputs", "linear_outputs"])
def test_a_region_alone_equals_a_computation_by_hand(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], region: Region, static: bool
) -> None:
    """Its own places are quantized and covered, and no others."""
    reference = logits_of(llama, ids_BT)
    how = scheme(region, static=static, symmetric=not static)
    expected = by_hand(llama, how, ids_BT, batches)
    with quantized(llama, how, batches) as applied:
        actual = logits_of(llama, ids_BT)
        assert applied.verify() == ()
    covered = [item for item in applied.coverage.modules if item.quantized]

    assert_equal_but_for_flips(actual, expected, share=0.9)
    assert float((actual - reference).abs().max()) > 1e-2
    if region in EVERYWHERE:
        per_layer = {"kv_cache": 4, "residual": 5}.get(region, 2)
        assert {item.region for item in covered} == {region}
        assert len(covered) == applied.coverage.num_sites == per_layer
        assert applied.coverage.num_quantized == 0
        assert {item.activation_bits for item in covered} == {4}
        assert {item.activation_static for item in covered} == {static and region != "kv_cache"}
        wanted = "tensor" if static and region != "kv_cache" else "token"
        assert {item.activation_granularity for item in covered} == {wanted}
    else:
        assert (len(covered), applied.coverage.num_sites) == (14, 0)


def built(kind: str) -> Any:
    """A model of a family, as it is after loading."""
    model = build_plain(kind) if kind in PLAIN else ours(kind)
    separate_(model)
    return model


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", [*PLAIN, *OURS])
def test_every_family_runs_and_is_restored(
    kind: str, static: bool, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """8 bits hurt less than 4 in the full graph; what is undone is bit for bit what it was."""
    model = built(kind)
    names = [name for name, _ in model.named_modules()]
    kinds = [type(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    reference = logits_of(model, ids_BT)
    errors = {}
    for bits in (8, 4):
        with quantized(model, full(bits, static=static), batches) as applied:
            logits = logits_of(model, ids_BT)
            applied.verify()
        errors[bits] = float((logits - reference).norm() / reference.norm())
        assert torch.equal(logits_of(model, ids_BT), reference)

    assert 0 < errors[8] < errors[4]
    assert names == [name for name, _ in model.named_modules()]
    assert kinds == [type(module) for module in model.modules()]
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_our_plain_wiring_is_the_plain_model(
    ids_BT: Tensor, batches: list[Batch], static: bool
) -> None:
    """The same weights in our decoder without depth and in transformers' Llama: the same logits."""
    plain = build_llama(tie_word_embeddings=False)
    ours_too = new_model(build_config(plain.config, resolve_variant("residual-vanilla")))
    ours_too.load_state_dict(plain.state_dict())
    results = []
    for model in (plain, ours_too):
        with quantized(model, full(8, static=static), batches) as applied:
            results.append(logits_of(model, ids_BT))
            coverage = applied.coverage
    assert_equal_but_for_flips(*results)
    assert set(coverage.absent_regions) == {"attention_gate", "depth_router", "depth_sources"}


# --- depth and gates, against the literal model --------------------------------------------------


def rows(x: Tensor) -> Tensor:
    """4 bits, symmetric, one range a row."""
    return round_symmetric(x, 4)


class NaiveRegions(NaiveModel):
    """The literal decoder with one region quantized."""

    def __init__(self, model: nn.Module, region: Region) -> None:
        super().__init__(model)
        self.region = region
        if region == "depth_query":
            for name in list(self.parameters):
                if name.endswith(".key_norm.weight"):
                    query = name.replace("key_norm.weight", "query")
                    product = self.parameters[query] * self.parameters[name]
                    self.parameters[query] = rows(product)
                    self.parameters[name] = torch.ones_like(product)

    def _read_token(
        self, name: str, values: list[Tensor], psi: list[Tensor], *, is_final: bool
    ) -> Tensor:
        if self.region == "depth_sources":
            values = [rows(value) for value in values]
        if self.region == "depth_router":
            return self._routed(name, values, list(psi))
        return super()._read_token(name, values, psi, is_final=is_final)

    def _routed(self, name: str, values: list[Tensor], psi: list[Tensor]) -> Tensor:
        query = self.parameters[f"{name}.q_proj.weight"] @ rows(values[-1])
        keys = [self.parameters[f"{name}.k_proj.weight"] @ rows(value) for value in values]
        scores = [query @ key / len(key) ** 0.5 for key in keys]
        if self.config.depth_recency == "linear":
            bias = self.parameters[f"{name}.recency_bias"][0]
            scores = [x + bias * i / (len(keys) - 1) for i, x in enumerate(scores)]
        weights, _ = self._depth_weights(name, self._couple(name, scores, psi))
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    def _depth_weights(self, name: str, scores: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        weights, null = super()._depth_weights(name, scores)
        if self.region == "depth_weights":
            weights = list(rows(torch.stack(weights)))
        return weights, null

    def _gate(self, name: str, head: int, row: Tensor) -> Tensor | float:
        if self.region == "attention_gate":
            if self.config.attention_gate == "g1":
                row = rows(row)
            else:
                heads = row.unflatten(-1, (self.config.num_attention_heads, -1))
                row = rows(heads).flatten(-2)
        return super()._gate(name, head, row)


@pytest.mark.parametrize(
    ("case", "region"),
    [
        ("vanilla", "depth_sources"),
        ("oasis", "depth_sources"),
        ("oasis_repo_lowrank", "depth_sources"),
        ("oasis", "depth_weights"),
        ("oasis", "depth_query"),
        ("oasis_repo_lowrank", "depth_router"),
        ("gated", "attention_gate"),
        ("gated_g1", "attention_gate"),
    ],
)
def test_depth_and_gate_regions_equal_the_literal_model(case: str, region: Region) -> None:
    """Quantizing the sources, weights, queries or projections of the literal decoder by hand."""
    model = ours(case)
    model.config.coupling_logit_clamp = None
    ids_BT = tokens(1, 7)
    expected_TV = NaiveRegions(model, region).logits(ids_BT[0]).float()
    plain = logits_of(model, ids_BT)
    with quantized(model, scheme(region)) as applied:
        actual = logits_of(model, ids_BT)
        assert applied.verify() == ()
    regions = {item.region for item in applied.coverage.modules if item.quantized}

    assert regions == {region}
    assert_equal_but_for_flips(actual, expected_TV[None])
    assert float((actual - plain).abs().max()) > 1e-4


SMALL: tuple[Region, ...] = ("attention_gate", "depth_router", "lm_head")


@pytest.mark.parametrize("case", ["gated", "gated_g1", "oasis_repo_lowrank"])
@pytest.mark.parametrize(
    "regions",
    [
        ("linear_inputs", "linear_outputs", *SMALL),
        ("linear_inputs", "linear_outputs"),
        ("linear_inputs", "linear_outputs", "lm_head"),
        ("linear_outputs", *SMALL),
        ("linear_inputs", *SMALL),
        SMALL,
    ],
    ids="+".join,
)
def test_outputs_are_those_of_ordinary_layers_alone(case: str, regions: tuple[Region, ...]) -> None:
    """Layer by layer, by hand: the head, gates and routers are input alone, wherever named."""
    model = ours(case)
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, given: Tensor, output: Tensor) -> None:
        passed[name] = (given.clone(), output.clone())

    with quantized(model, scheme(*regions)):
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda _, args, output, name=name: keep(name, args[0], output)
                )
        logits_of(model, tokens(1, 9))
    checked = {False: 0, True: 0}
    for name, (given, output) in passed.items():
        is_small = "gate" in name.replace("gate_proj", "") or "_res_" in name or name == "lm_head"
        kind = "depth_router" if "_res_" in name else "attention_gate"
        kind = "lm_head" if name == "lm_head" else kind
        has_input = (kind if is_small else "linear_inputs") in regions
        has_output = not is_small and "linear_outputs" in regions
        layer = model.get_submodule(name)
        x = rows(given) if has_input else given
        y = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(rows(y) if has_output else y, output)
        checked[is_small] += 1

    assert checked[False] == 3 * 7
    assert checked[True] > 3


@pytest.mark.parametrize("case", ["oasis", "oasis_repo_lowrank"])
def test_queries_and_depth_weights_stay_in_the_full_graph(case: str) -> None:
    """They, the head and norms are not touched; low-rank projections are, but for their output."""
    model = ours(case)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, given: Tensor, output: Tensor) -> None:
        seen[name] = (given, output)

    with quantized(model, full(4, static=False)) as applied:
        for name, module in model.named_modules():
            if name.endswith((".q_proj", "taps.depth_query", "taps.depth_weights")):
                module.register_forward_hook(
                    lambda _, args, output, name=name: keep(name, args[0], output)
                )
        logits_of(model, tokens(1, 9))
        covered = {item.module for item in applied.coverage.modules if item.quantized}
    queries = [pair for name, pair in seen.items() if name.endswith("depth_query")]

    assert queries
    assert all(torch.equal(*pair) for pair in queries)
    assert not any("depth_query" in name or "depth_weights" in name for name in covered)
    assert "lm_head" not in covered
    assert not any("norm" in name for name in covered)
    if case == "oasis_repo_lowrank":
        name = "model.layers.1.attn_res_sa.q_proj"
        assert name in covered
        assert len(seen[name][1][0, 0].unique()) > 15
        assert len(seen["model.layers.1.self_attn.q_proj"][1][0, 0].unique()) <= 15


@pytest.mark.parametrize("case", ["oasis", "oasis_repo_lowrank"])
def test_queries_and_depth_weights_by_name_have_static_ranges(
    case: str, batches: list[Batch]
) -> None:
    """An ablation: named, they are quantized; weights of all reads together span at most 1."""
    model = ours(case)
    reference = logits_of(model, tokens(1, 9))
    with quantized(model, scheme("depth_query", "depth_weights", static=True), batches) as applied:
        actual = logits_of(model, tokens(1, 9))
        assert applied.verify() == ()
    spans = {name: span for (name, _), span in applied.ranges.items()}
    weights = [span for name, span in spans.items() if name.endswith("depth_weights")]

    assert len(weights) == len(spans) / 2 == (7 if case == "oasis" else 6)
    assert all(0.2 < float(span.high) <= 1 for span in weights)
    assert not torch.equal(actual, reference)


def test_null_mass_and_psi_follow_the_quantized_scores() -> None:
    """Under the full graph nu is 1 / (1 + sum exp) of the quantized scores, psi its mean."""
    model = ours("oasis_repo")
    scores, nulls, psis = [], [], []
    with quantized(model, full(4, static=False)):
        layer = model.model.layers[1]
        layer.self_attn.taps.scores.register_forward_hook(lambda *call: scores.append(call[2]))
        layer.self_attn.taps.null_mass.register_forward_hook(lambda *call: nulls.append(call[2]))
        layer.attn_res_mlp.taps.depth_psi.register_forward_hook(lambda *call: psis.append(call[2]))
        logits_of(model, tokens(2, 9))
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = 1 / (1 + (scores[0].exp() * visible).sum(-1))

    torch.testing.assert_close(nulls[0], expected)
    torch.testing.assert_close(psis[0][..., -1], expected.mean(1))
    assert all(len(row.unique()) <= 16 for row in scores[0].flatten(0, 2))


# --- decoding, padding, cache --------------------------------------------------------------------


def decoded(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Return logits of a prompt of 6 tokens and then token by token, with a cache."""
    cache = DynamicCache(config=model.config)
    parts = []
    ends = [6, *range(7, ids_BT.shape[1] + 1)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        mask = None if mask_BT is None else mask_BT[:, :end]
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
        with torch.no_grad():
            output = model(
                input_ids=ids_BT[:, start:end],
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
            )
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "gpt_neox", "oasis", "gated"])
def test_cached_decoding_is_the_full_pass(kind: str, batches: list[Batch]) -> None:
    """With static ranges token by token gives what one pass gives, but for moved levels."""
    model = built(kind)
    ids_BT = tokens(1, 14, seed=3)
    with quantized(model, full(8, static=True), batches):
        whole = logits_of(model, ids_BT)
        steps = decoded(model, ids_BT)

    assert_equal_but_for_flips(steps, whole, share=0.7)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "oasis"])
def test_dynamic_ranges_do_not_see_the_future(kind: str) -> None:
    """A later token changes nothing before it: scores have ranges over visible keys only."""
    model = built(kind)
    ids_BT = tokens(1, 12, seed=3)
    other_BT = ids_BT.clone()
    other_BT[:, 8:] = 77
    with quantized(model, full(4, static=False)):
        first, second = logits_of(model, ids_BT), logits_of(model, other_BT)

    assert torch.equal(first[:, :8], second[:, :8])
    assert not torch.equal(first[:, 8:], second[:, 8:])


@pytest.mark.parametrize("kind", ["llama", "gemma2", "oasis"])
def test_dynamic_ranges_decode_nearly_as_they_score(kind: str) -> None:
    """A moved level moves all later tokens a little; ranges over later keys would move them far."""
    model = built(kind)
    ids_BT = tokens(1, 12, seed=3)
    with quantized(model, full(8, static=False)):
        whole, steps = logits_of(model, ids_BT), decoded(model, ids_BT)
    with quantized(model, full(4, static=False)):
        coarse = logits_of(model, ids_BT)

    assert float((steps - whole).norm()) < 0.1 * float((coarse - whole).norm())


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", "gpt2", "mixtral", "deepseek_v3", "oasis", "oasis_repo_lowrank"]
)
def test_left_padding_and_batch_do_not_matter(kind: str, batches: list[Batch]) -> None:
    """Under static ranges a sequence has the logits it has alone, whoever is beside it."""
    model = built(kind)
    ids_BT = tokens(2, 12, seed=3)
    padded_BT = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids_BT], dim=1)
    padded_BT[1] = tokens(1, 17, seed=4)
    mask_BT = torch.ones_like(padded_BT)
    mask_BT[0, :5] = 0
    with quantized(model, full(8, static=True), batches):
        alone = logits_of(model, ids_BT[:1])
        with torch.no_grad():
            positions = (mask_BT.cumsum(-1) - 1).clamp(min=0)
            together = model(
                input_ids=padded_BT, attention_mask=mask_BT, position_ids=positions, use_cache=False
            ).logits

    assert_equal_but_for_flips(together[:1, 5:], alone, share=0.7)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3", "oasis", "oasis_repo_lowrank"]
)
def test_padding_never_enters_calibration(kind: str, side: str) -> None:
    """Ranges of every region are those of the unpadded text."""
    model = built(kind)
    texts = [tokens(1, 9, seed=3), tokens(1, 14, seed=4)]
    alone = [Batch(text, torch.ones_like(text)) for text in texts]
    ids, mask = torch.full((2, 14), 7), torch.zeros(2, 14, dtype=torch.long)
    for index, text in enumerate(texts):
        length = text.shape[1]
        place = slice(14 - length, None) if side == "left" else slice(0, length)
        ids[index, place], mask[index, place] = text[0], 1
    how = full(8, static=True)
    with quantized(model, how, alone) as applied:
        expected = applied.ranges
    with quantized(model, how, [Batch(ids, mask)]) as applied:
        actual = applied.ranges

    assert {key[0].rsplit(".", 1)[-1] for key in actual} >= {"scores", "probs", "context"}
    for key, span in expected.items():
        torch.testing.assert_close(actual[key], span, rtol=1e-4, atol=1e-5, msg=str(key))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "oasis"])
def test_the_cache_holds_few_levels(kind: str, static: bool, batches: list[Batch]) -> None:
    """Keys and values have at most 16 levels per token and head, and are rounded once."""
    model = built(kind)
    cache = DynamicCache(config=model.config)
    # Alone: quantized outputs of the projections have few levels anyway.
    how = scheme("kv_cache", static=static, symmetric=not static)
    with quantized(model, how, batches):
        with torch.no_grad():
            model(input_ids=tokens(2, 5), cache=cache, use_cache=True)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        with torch.no_grad():
            model(input_ids=tokens(2, 1), cache=cache, use_cache=True)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, : keys.shape[2]], keys)
        assert torch.equal(layer.values[:, :, : values.shape[2]], values)
        for row in torch.cat([keys, values]).flatten(0, 2):
            assert len(row.unique()) <= 16
    assert len(before[0][0].unique()) > 16


# --- weights at both ends, skip patterns, refusals ----------------------------------------------


def test_embedding_and_head_are_quantized_apart_where_tied() -> None:
    """Either end works on a copy, and says so; both ends share one quantized weight."""
    for regions, copies, shared in (
        (("embedding",), {"model.embed_tokens"}, False),
        (("lm_head",), {"lm_head"}, False),
        (("embedding", "lm_head"), set(), True),
    ):
        model = build_llama(tie_word_embeddings=True)
        original = model.lm_head.weight
        with quantized(model, scheme(*regions, weights=4)) as applied:
            table, head = model.model.embed_tokens.weight, model.lm_head.weight
            changed = {"embedding": table is not original, "lm_head": head is not original}
            noted = {item.module for item in applied.coverage.modules if item.note}
            covered = {item.region for item in applied.coverage.modules if item.quantized}
            expected = round_symmetric(original.detach(), 4)
            for region, weight in (("embedding", table), ("lm_head", head)):
                assert changed[region] == (region in regions)
                wanted = expected if region in regions else original
                torch.testing.assert_close(weight, wanted)
            assert (table is head) == shared
        assert noted == copies
        assert covered == set(regions)
        assert model.lm_head.weight is model.model.embed_tokens.weight is original


def test_skip_patterns_name_places_between_layers(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A skipped place stays in floating point and is reported; its region's others do not."""
    how = scheme("attention_scores", "residual", skip=("*.0.self_attn.taps.scores", "*.mlp"))
    with quantized(llama, scheme("attention_scores", skip=("*.0.*.taps.scores",))) as applied:
        logits_of(llama, ids_BT)
        modules = {item.module: item for item in applied.coverage.modules}
    assert not modules["model.layers.0.self_attn.taps.scores"].quantized
    assert "skip pattern" in str(modules["model.layers.0.self_attn.taps.scores"].reason)
    assert modules["model.layers.1.self_attn.taps.scores"].quantized
    with pytest.raises(SpecError, match=r"'\*\.mlp' matches none"), quantized(llama, how):
        pass


def test_a_region_that_cannot_be_reached_is_refused(llama: LlamaForCausalLM) -> None:
    """Without taps nothing is skipped silently, and nothing has changed."""
    with pytest.raises(UnsupportedSchemeError, match=r"region kv_cache .* LlamaForCausalLM"):
        quantize_(llama, scheme("kv_cache", "linear_inputs"))
    assert not any(hasattr(module, "quantization") for module in llama.modules())


def test_a_scheme_of_absent_regions_is_an_error(llama: LlamaForCausalLM) -> None:
    """Depth regions of a model without depth quantize nothing."""
    with pytest.raises(QuantizationError, match="the model has no depth_sources"):
        quantize_(llama, scheme("depth_sources", "attention_gate"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "tensor"}, "dynamic ranges per 'token' or 'group' only, found 'tensor'"),
        (
            {"granularity": "channel", "ranges": "minmax"},
            "static ranges per 'tensor' only, found 'channel'",
        ),
        ({"type": "fp8_e4m3", "bits": 8}, "to integers only, found type fp8_e4m3"),
    ],
)
def test_formats_that_a_region_cannot_have(changes: dict[str, object], message: str) -> None:
    """What would leak or mean nothing is refused before anything loads."""
    fields = scheme("residual").model_dump()
    fields["activations"] = fields["activations"] | changes
    how = QuantScheme.model_validate(fields)

    assert message in str(unsupported(how))


def test_places_that_have_not_run_are_told(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Before a pass nothing has run, which is an error; a place that is gone around, a warning."""
    with quantized(llama, scheme("attention_scores", "residual")) as applied:
        with pytest.raises(QuantizationError, match="none of 7 quantized layers and regions"):
            applied.verify()
        last = llama.model.layers[1]
        last.forward = lambda hidden_states, **_: hidden_states
        logits_of(llama, ids_BT)
        del last.forward
        warnings = applied.verify()

    assert warnings == (
        "3 of 7 quantized layers and regions have not run: model.layers.1.self_attn.taps.scores, "
        "model.layers.1.taps.residual_attention, model.layers.1.taps.residual_mlp",
    )


def test_a_quantized_place_is_not_quantized_again(llama: LlamaForCausalLM) -> None:
    """A second scheme on top of the first is refused, and the first stays in effect."""
    with quantized(llama, scheme("residual")):
        with pytest.raises(QuantizationError, match="a FakeQuantTap and no plain tap; undo"):
            quantize_(llama, scheme("residual"))
        assert len([m for m in llama.modules() if type(m).__name__ == "FakeQuantTap"]) == 5


def test_two_schemes_in_turn(llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]) -> None:
    """The second is what it is on a fresh model."""
    fresh = copy.deepcopy(llama)
    with quantized(llama, full(4, static=False)):
        logits_of(llama, ids_BT)
    with quantized(llama, resolve("w8a8-static"), batches):
        after = logits_of(llama, ids_BT)
    with quantized(fresh, resolve("w8a8-static"), batches):
        expected = logits_of(fresh, ids_BT)

    assert torch.equal(after, expected)


def test_hidden_keys_do_not_break_a_pass(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Groups of channels run in every region, and a token of padding alone gives numbers."""
    how = scheme(*FULL_GRAPH, bits=4, weights=4)
    fields = how.model_dump()
    fields["activations"] |= {"granularity": "group", "group_size": 16}
    mask = torch.ones_like(ids_BT)
    mask[0, :7] = 0
    with quantized(llama, QuantScheme.model_validate(fields)) as applied:
        logits = logits_of(llama, ids_BT, mask)
        sizes = {
            item.region: item.activation_group_size
            for item in applied.coverage.modules
            if item.quantized
        }

    assert bool(torch.isfinite(logits[mask.bool()]).all())
    assert (sizes["residual"], sizes["attention_context"], sizes["attention_scores"]) == (
        16,
        16,
        None,
    )


def test_a_zero_head_has_the_vocabulary_as_perplexity(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch]
) -> None:
    """An all-zero head is uniform in the full graph too."""
    with torch.no_grad():
        llama.lm_head.weight.zero_()
    with quantized(llama, resolve("w4a4-static"), batches):
        assert nll_of(llama, ids_BT) == pytest.approx(
            torch.tensor(VOCABULARY).log().item(), rel=1e-6
        )
