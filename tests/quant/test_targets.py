"""Which layers a scheme covers, and what is refused instead of being passed through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from oasis_eval.errors import QuantizationError, SpecError
from oasis_eval.modeling.experts import separate_
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.targets import select
from oasis_eval.record import Coverage
from oasis_eval.spec import QuantScheme
from tests.modeling.plain import build_plain, of_family
from tests.quant.conftest import build_llama, logits_of


def scheme_of(**changes: object) -> QuantScheme:
    return resolve("w8a8").model_copy(update={"name": "mine"} | changes)


def quantized(coverage: Coverage) -> list[str]:
    return [item.module for item in coverage.modules if item.quantized]


def reasons(coverage: Coverage) -> dict[str, str | None]:
    return {item.module: item.reason for item in coverage.modules if not item.quantized}


def test_every_linear_but_the_head(llama: LlamaForCausalLM) -> None:
    """14 of 15 linear layers; head and embedding are listed with the reason."""
    coverage = quantize_(llama, resolve("w8a8")).coverage

    assert (coverage.num_quantized, coverage.num_linear) == (14, 15)
    assert len(quantized(coverage)) == 14
    assert reasons(coverage) == {
        "lm_head": "LM head: the region is not in the scheme",
        "model.embed_tokens": "embedding: the region is not in the scheme",
    }


def test_the_head_is_a_region(llama: LlamaForCausalLM) -> None:
    """With `lm_head` all 15 are covered; alone it is the only one, its input quantized."""
    both = select(llama, scheme_of(regions=("linear_inputs", "lm_head")))
    alone = select(llama, scheme_of(regions=("lm_head",)))

    assert len(both.targets) == 15
    assert [target.name for target in alone.targets] == ["lm_head"]


def test_the_head_is_found_by_asking_the_model() -> None:
    """A head under another name is protected, a plain layer called lm_head is not."""
    model = build_llama()
    model.model.layers[0].lm_head = nn.Linear(4, 4)
    names = [target.name for target in select(model, resolve("w8a8")).targets]

    assert "model.layers.0.lm_head" in names
    assert "lm_head" not in names


class Odd(nn.Module):
    """A model that does not say which layer is its head."""

    class config:  # noqa: N801 - as transformers calls it
        vocab_size = 256

    def __init__(self) -> None:
        super().__init__()
        self.blob = nn.ModuleDict({"xyz": nn.Linear(8, 8)})
        self.out = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blob["xyz"](x))


def test_a_head_that_the_model_does_not_name_is_refused() -> None:
    """A layer as wide as the vocabulary is not quantized by mistake."""
    with pytest.raises(QuantizationError, match=r"out: looks like the LM head \(256 outputs\)"):
        quantize_(Odd(), resolve("w8a8"))


def test_layers_are_found_by_type_whatever_their_name() -> None:
    """Projections under unusual names are quantized."""
    model = Odd()
    model.get_output_embeddings = lambda: model.out  # type: ignore[method-assign,assignment]

    assert quantized(quantize_(model, resolve("w8a8")).coverage) == ["blob.xyz"]


def test_gpt2_is_quantized(gpt2: GPT2LMHeadModel, ids_BT: Tensor) -> None:
    """Transposed projections are quantized per output, as the equal Linear would be."""
    layer = gpt2.transformer.h[0].mlp.c_fc
    linear = nn.Linear(48, 192)
    linear.weight.data = layer.weight.data.T.clone()
    linear.bias.data = layer.bias.data.clone()
    holder = nn.Module()
    holder.layer = linear
    before = logits_of(gpt2, ids_BT)
    coverage = quantize_(gpt2, resolve("w4a4-g32")).coverage
    quantize_(holder, resolve("w4a4-g32"))
    x = torch.randn(2, 5, 48)

    assert (coverage.num_quantized, coverage.num_linear) == (8, 9)
    assert torch.equal(layer.weight, linear.weight.T)
    torch.testing.assert_close(layer(x), linear(x))
    assert not torch.equal(before, logits_of(gpt2, ids_BT))


def test_skip_patterns_name_whole_modules(llama: LlamaForCausalLM) -> None:
    """A pattern leaves its layers alone and keeps the head protected."""
    coverage = quantize_(llama, scheme_of(skip=("*.down_proj", "model.layers.0.*"))).coverage
    left = reasons(coverage)

    assert coverage.num_quantized == 6
    assert left["model.layers.1.mlp.down_proj"] == "skip pattern '*.down_proj'"
    assert left["model.layers.0.mlp.up_proj"] == "skip pattern 'model.layers.0.*'"
    assert left["lm_head"] == "LM head: the region is not in the scheme"


@pytest.mark.parametrize("pattern", ["down_proj", "*.DOWN_PROJ", "model.embed_tokens"])
def test_a_pattern_that_matches_nothing_is_an_error(llama: LlamaForCausalLM, pattern: str) -> None:
    """Patterns match whole dotted names of layers, case included."""
    with pytest.raises(SpecError, match=r"matches none of 15 layers.*'model\.layers\.0\.self"):
        quantize_(llama, scheme_of(skip=(pattern,)))


def test_nothing_to_quantize_is_an_error(llama: LlamaForCausalLM) -> None:
    """A scheme that covers no layer fails, and says what happened to them."""
    with pytest.raises(QuantizationError, match=r"none of 15 linear layers .*skip pattern '\*'"):
        quantize_(llama, scheme_of(skip=("*",)))
    with pytest.raises(QuantizationError, match="none of 0 linear layers"):
        quantize_(nn.Sequential(nn.ReLU()), resolve("w8a8"))


def test_layers_of_another_region_are_left_alone(llama: LlamaForCausalLM) -> None:
    """A layer says by an attribute that it belongs to a region of the full graph."""

    class Router(nn.Linear):
        quantization_region = "depth_router"

    llama.model.layers[0].attn_res = Router(48, 4)
    llama.model.layers[0].self_attn.q_proj.quantization_region = "attention_gate"
    left = reasons(quantize_(llama, resolve("w8a8")).coverage)

    assert left["model.layers.0.attn_res"] == (
        "belongs to region depth_router, which the scheme does not name"
    )
    assert left["model.layers.0.self_attn.q_proj"] == (
        "belongs to region attention_gate, which the scheme does not name"
    )


def test_raw_experts_are_refused_by_name() -> None:
    """Expert weights in one tensor are no Linear; they are never passed through silently."""
    with pytest.raises(QuantizationError, match=r"experts\.\w+: a raw 4x\d+x\d+ weight"):
        quantize_(build_plain("mixtral"), resolve("w8a8"))


def test_raw_experts_can_be_skipped_and_count() -> None:
    """Skipped by the user's decision they are listed and weigh on the effective bits."""
    coverage = quantize_(build_plain("mixtral"), scheme_of(skip=("*.experts.*",))).coverage
    left = reasons(coverage)

    assert left["model.layers.0.mlp.experts.down_proj"] == (
        "skip pattern '*.experts.*' (raw weight of 4x48x96)"
    )
    assert "raw weight of 4x48, not a Linear" in left.values()
    assert coverage.effective_weight_bits > 25


def dbrx() -> Any:
    """A model whose experts are raw matrices of two dimensions."""
    feed_forward = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}
    return of_family(
        "dbrx",
        d_model=48,
        n_heads=4,
        n_layers=2,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config=feed_forward,
    )


@pytest.mark.parametrize("name", ["w4a4", "w4a4-static", "w16a4", "w4a4-real", "nf4"])
def test_experts_in_matrices_are_refused_by_name(name: str) -> None:
    """DBRX keeps all experts' rows in one matrix; the router beside them tells what it is."""
    model = dbrx()
    separate_(model)
    with pytest.raises(QuantizationError, match=r"experts\.mlp\.w1: a raw 128x48 weight"):
        select(model, resolve(name))

    mine = resolve("w4a4").model_copy(update={"name": "mine", "skip": ("*.experts.*",)})
    names = [target.name for target in select(model, mine).targets]
    assert len(names) == 2 * 2
    assert not any("router" in name for name in names)


def test_many_raw_weights_are_not_left_out_silently(llama: LlamaForCausalLM) -> None:
    """A matrix of a quarter of all linear layers is nobody's decision; positions are small."""
    elements = sum(m.weight.numel() for m in llama.modules() if isinstance(m, nn.Linear))
    llama.model.positions = nn.Parameter(torch.zeros(elements // 4 // 48, 48))
    select(llama, resolve("w8a8"))
    llama.model.blob = nn.Parameter(torch.zeros(2, 48))
    with pytest.raises(QuantizationError, match=r"positions and 1 more raw weights .* 25% as many"):
        select(llama, resolve("w8a8"))

    assert len(select(llama, scheme_of(skip=("model.positions",))).targets) == 14


ROUTERS = {
    "phimoe": ["router"],
    "hunyuan_v1_moe": ["gate.wg"],
    "afmoe": ["router.gate"],
    "zaya": [
        f"gate.{part}"
        for part in ("down_proj", *(f"router_mlp.{x}" for x in ("fc1", "fc2", "out_proj")))
    ],
}


@pytest.mark.parametrize("family", ROUTERS)
def test_a_router_of_linears_is_left_alone_like_the_others(family: str) -> None:
    """Known by the class that the model declares, not by its name; experts are quantized."""
    changes: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "hunyuan_v1_moe":
        changes |= {"head_dim": 12, "moe_topk": 2}
    if family == "zaya":
        changes |= {"num_experts_per_tok": 1, "router_hidden_size": 16}
    if family == "afmoe":
        changes |= {"num_dense_layers": 1, "moe_intermediate_size": 32, "head_dim": 12}
    model = of_family(family, **changes)
    separate_(model)
    reason = "router of experts, or a part of one"
    for regions in ((), ("linear_inputs", "linear_outputs", "attention_gate", "lm_head")):
        selection = select(model, resolve("w8a8").model_copy(update={"regions": regions}))
        left = [item.name for item in selection.skipped if item.reason == reason]
        names = [target.name for target in selection.targets]
        last = {name.rpartition(".mlp.")[2] for name in left}

        assert last == set(ROUTERS[family])
        assert not set(left) & set(names)
        assert sum(".experts." in name for name in names) > 0


def test_a_mixture_that_is_declared_as_a_whole_is_no_router() -> None:
    """Doge's router logits come from the module that has the dense projections, too."""
    model = of_family("doge", is_moe=True, num_experts=16, num_experts_per_tok=2)
    names = [target.name.rpartition(".")[2] for target in select(model, resolve("w8a8")).targets]

    assert names.count("down_proj") == 2


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_the_gate_of_a_shared_expert_is_a_gate(family: str) -> None:
    """Like other gates it is quantized where that region is named, as in the full graph."""
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = of_family(family, shared_expert_intermediate_size=32, **settings)
    separate_(model)
    gate = "model.layers.0.mlp.shared_expert_gate"
    plain = select(model, resolve("w8a8"))
    named = select(
        model, resolve("w8a8").model_copy(update={"regions": ("linear_inputs", "attention_gate")})
    )
    reasons = {item.name: item.reason for item in plain.skipped}

    assert reasons[gate] == "belongs to region attention_gate, which the scheme does not name"
    assert {t.name: t.region for t in named.targets}[gate] == "attention_gate"
    assert len(named.targets) == len(plain.targets) + 2


def test_a_layer_that_computes_something_else_is_refused(llama: LlamaForCausalLM) -> None:
    """A subclass with its own forward pass, or a replaced one, would not be what is quantized."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    projection = llama.model.layers[0].mlp.up_proj
    projection.forward = projection.forward
    with pytest.raises(QuantizationError, match=r"up_proj: .*forward pass was replaced"):
        quantize_(llama, resolve("w8a8"))
    llama.model.layers[0].mlp.up_proj = Scaled(48, 96)
    with pytest.raises(QuantizationError, match=r"up_proj: .*a Scaled with a forward pass"):
        quantize_(llama, resolve("w8a8"))

    assert quantize_(llama, scheme_of(skip=("*.0.mlp.up_proj",))).coverage.num_quantized == 13


def test_a_quantized_model_is_not_quantized_again(llama: LlamaForCausalLM) -> None:
    """A second scheme on top of the first is refused."""
    quantize_(llama, resolve("w8a8"))

    with pytest.raises(QuantizationError, match="quantized already"):
        quantize_(llama, resolve("w4a4"))


def test_a_shared_layer_is_quantized_once(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """One module under two names, and one weight in two modules, stay shared."""
    first, second = llama.model.layers
    second.mlp.up_proj = first.mlp.up_proj
    second.mlp.down_proj.weight = first.mlp.down_proj.weight
    original = first.mlp.down_proj.weight
    applied = quantize_(llama, resolve("w4a4"), keep_reference=True)
    logits_of(llama, ids_BT)

    assert applied.coverage.num_linear == 14
    assert second.mlp.down_proj.weight is first.mlp.down_proj.weight
    applied.undo()
    assert second.mlp.down_proj.weight is first.mlp.down_proj.weight is original
