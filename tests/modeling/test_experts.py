"""Experts as layers of their own: the same numbers, the same memory, every token's row known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from oasis_eval.modeling.experts import separate_
from oasis_eval.quant.padding import PaddingContext, Tokens
from tests.modeling.plain import build_plain, of_family
from tests.modeling.tiny import tokens

_FEW = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "gpt_oss": {},  # transposed, with biases, gate and up interleaved
    "granitemoe": {},
    "phimoe": {},
    "minimax_m2": {},
    "flex_olmo": {},
    "hunyuan_v1_moe": {"head_dim": 12},
    "glm4_moe": {**_FEW, "moe_intermediate_size": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "nemotron_h": {},  # without a gate
}


def build(family: str, **changes: Any) -> Any:
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss") and not changes:
        return build_plain(family)
    torch.manual_seed(0)
    few = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return of_family(family, **few, **FAMILIES[family], **changes).eval()


def logits(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    return output


def raw(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 3 and "conv" not in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_separation_changes_no_number(family: str) -> None:
    """One expert at a time is what transformers' own forward pass computes."""
    model = build(family)
    before = raw(model)
    ids_BT, mask_BT = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask_BT[0, :6] = 0
    expected = logits(model, ids_BT), logits(model, ids_BT, mask_BT)
    count = separate_(model)

    assert before
    assert count == sum("down_proj" in name and "bias" not in name for name in before)
    assert not raw(model)
    for wanted, found in zip(
        expected, (logits(model, ids_BT), logits(model, ids_BT, mask_BT)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert separate_(model) == 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weights_are_views(family: str) -> None:
    """Expert n is part n of the tensor, in its memory."""
    model = build(family)
    before = raw(model)
    separate_(model)
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        stacked = before[f"model.layers.0.mlp.experts.{name}"]
        for number in range(len(stacked)):
            layer = getattr(experts.get_submodule(str(number)), name)
            part = stacked[number].T if family == "gpt_oss" else stacked[number]
            assert type(layer) is nn.Linear
            assert torch.equal(layer.weight, part)
            assert layer.weight.data_ptr() == stacked[number].data_ptr()
            assert (layer.in_features, layer.out_features) == (part.shape[1], part.shape[0])


def test_a_quantized_expert_by_hand() -> None:
    """Output of a mixture whose weights were rounded, from the tensors and a literal loop."""
    model = build("mixtral")
    block = model.model.layers[1].mlp
    up, down = (
        block.experts._parameters[n].detach().clone() for n in ("gate_up_proj", "down_proj")
    )
    separate_(model)
    hidden_SD = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    index_SA = torch.tensor([[0, 1], [1, 2], [3, 0]]).repeat(3, 1)
    share_SA = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for layer in block.experts.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(layer.weight.round(decimals=1))
        found = block.experts(hidden_SD, index_SA, share_SA)
    expected = torch.zeros(9, 48)
    for token in range(9):
        for place in range(2):
            number = int(index_SA[token, place])
            gate, value = linear(hidden_SD[token], up[number].round(decimals=1)).chunk(2)
            inner = nn.functional.silu(gate) * value
            output = linear(inner, down[number].round(decimals=1))
            expected[token] += share_SA[token, place] * output

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_of_experts_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """16-bit outputs, sums in float64 by hand, rounded once; in fp32 as ever, to the bit."""
    torch.manual_seed(0)
    model = of_family("mixtral", num_local_experts=8, num_experts_per_tok=8).eval().to(dtype)
    separate_(model)
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(1)
    hidden_SD = torch.randn(64, 48, generator=generator).to(dtype)
    index_SA = torch.stack([torch.randperm(8, generator=generator) for _ in range(64)])
    share_SA = torch.rand(64, 8, generator=generator).to(dtype)
    total = torch.zeros(64, 48, dtype=torch.float32 if dtype == torch.float32 else torch.float64)
    with torch.no_grad():
        found = experts(hidden_SD, index_SA, share_SA)
        for number in range(8):
            expert = experts.get_submodule(str(number))
            gate, value = expert.gate_up_proj(hidden_SD).chunk(2, dim=-1)
            output = expert.down_proj(nn.functional.silu(gate) * value)
            share_S = (share_SA * (index_SA == number)).sum(1).to(total)
            total += output.to(total) * share_S[:, None]

    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-7)
    else:
        assert float((found == total.to(dtype)).float().mean()) > 0.999


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    """Its experts stay in one tensor, and its output is its own."""
    model = build("mixtral")
    kind = type(model.model.layers[0].mlp.experts)

    class Doubled(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2.0 * super().forward(*args, **kwargs)

    model.model.layers[0].mlp.experts.__class__ = Doubled
    expected, before = logits(model, tokens(1, 12)), list(model.state_dict())

    assert separate_(model) == 1
    found, scale = logits(model, tokens(1, 12)), float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * scale)
    names = [name for name in before if "layers.0" in name]
    assert [name for name in model.state_dict() if "layers.0" in name] == names
    assert type(model.model.layers[0].mlp.experts) is Doubled


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_the_tokens_that_the_router_sent(padded: bool) -> None:
    """Scattered by `token_rows`, an expert's inputs are the block's own hidden states."""
    model = build("qwen3_moe")
    separate_(model)
    experts = model.model.layers[0].mlp.experts
    seen: list[Tensor] = []
    calls: dict[str, tuple[Tensor, tuple[Tensor, int]]] = {}
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for name, layer in experts.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith("gate_up_proj"):
            layer.register_forward_pre_hook(
                lambda module, args, name=name: calls.update({name: (args[0], module.token_rows)})
            )
    mask_BT = torch.ones(2, 7, dtype=torch.bool)
    mask_BT[1, :3] = not padded
    logits(model, tokens(2, 7), mask_BT.long())
    context = PaddingContext()
    context.enter(Tokens(2, 7, mask_BT if padded else None))
    (hidden_SD,) = seen
    count_BT = torch.zeros(2, 7)
    for name, (rows_RD, token_rows) in calls.items():
        view_BTD, there_BT = context.sequences(rows_RD, name, token_rows)
        assert there_BT is not None
        whole_BTD = hidden_SD.reshape(2, 7, -1)
        assert torch.equal(view_BTD[there_BT], whole_BTD[there_BT])
        assert not (there_BT & ~mask_BT).any()
        count_BT += there_BT

    assert torch.equal(count_BT, 2.0 * mask_BT)  # two experts a real token
