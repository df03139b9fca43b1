"""Casting a loaded model is what loading it in that dtype would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from oasis_eval.modeling.experts import separate_
from oasis_eval.pretrained import cast_
from tests.modeling.plain import build_plain, of_family

_FEW = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "deepseek_v3": ("mlp.gate.weight",),  # strict, with a dot
    "gpt_oss": (),  # its norms in fp16 alone
    "hunyuan_v1_moe": ("mlp.gate.wg.weight",),  # made in fp32, and in no list
    "afmoe": ("expert_bias",),
}


def build(family: str) -> Any:
    if family == "hunyuan_v1_moe":
        return of_family(family, head_dim=12, moe_topk=2, **_FEW).eval()
    if family == "afmoe":
        few = {"num_dense_layers": 1, "moe_intermediate_size": 32, "head_dim": 12}
        return of_family(family, **few, **_FEW).eval()
    return build_plain(family)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cast_model_is_the_one_loaded_in_that_dtype(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every dtype and every value, those kept in fp32 included; undone exactly."""
    torch.manual_seed(0)
    build(family).save_pretrained(tmp_path)
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
        for wanted in (torch.float32, dtype)
    ]
    for model in models:
        separate_(model)
    cast, expected = models
    before = tensors(cast)
    undo = cast_(cast, dtype)
    found, wanted = tensors(cast), tensors(expected)
    wide = {name for name, tensor in found.items() if tensor.dtype == torch.float32}

    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for suffix in FAMILIES[family]:
        assert any(name.endswith(suffix) for name in wide)
    if family == "gpt_oss":
        assert any("norm" in name for name in wide) is (dtype == torch.float16)
    undo()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(cast).items())
    assert all(tensor.dtype == torch.float32 for tensor in tensors(cast).values())


def test_a_narrow_model_is_cast_to_another_dtype(tmp_path: Path) -> None:
    """From bf16 to fp16 and fp32: as the bf16 values loaded in that dtype."""
    build("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.float32):
        cast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        expected = tensors(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
        cast_(cast, dtype)
        found = tensors(cast)

        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
        assert all(torch.equal(found[name], expected[name]) for name in expected)
