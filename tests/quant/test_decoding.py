"""Decoding with a cache and with left padding, under what leaves activations in floating point.

Rounded activations may fall on another level when a product is summed in another order, and what
follows moves with them; the last test measures how far, on a model small enough to make it rare.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from tests.modeling.tiny import new_model, tiny_config
from tests.quant.conftest import build_llama, logits_of

WEIGHT_ONLY = (
    "w4a16",
    "w3a16-g16",
    "w4a16-rot",
    "w4a16-gptq",
    "w4a16-real",
    "w8a16-real",
    "nf4",
    "fp4",
    "quanto-w8a16",
)
DYNAMIC = ("w8a8", "w4a4", "w8a8-real", "fp8", "mxfp4")


def build(kind: str) -> nn.Module:
    """Return a plain Llama, or one with OASIS routing; every parameter matters."""
    return build_llama() if kind == "llama" else new_model(tiny_config("llama", kind))


def fit(model: nn.Module, batches: list[Batch]) -> list[Batch]:
    """Return batches whose tokens the model's vocabulary has."""
    size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    return [Batch(batch.input_ids_BT % size, batch.attention_mask_BT) for batch in batches]


def decode(model: nn.Module, ids_BT: Tensor, ends: list[int]) -> Tensor:
    """Return logits of a prompt of `ends[0]` tokens and then chunk by chunk, with a cache."""
    cache = DynamicCache(config=model.config)
    parts = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        with torch.no_grad():
            output = model(input_ids=ids_BT[:, start:end], cache=cache, use_cache=True)
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["llama", "oasis"])
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only_schemes_decode_as_they_score(
    name: str, kind: str, batches: list[Batch]
) -> None:
    """A prompt of 1, 17, or 20 and a chunk of 3, then token by token, gives the full pass."""
    model = build(kind)
    batches = fit(model, batches)
    ids_BT = torch.cat([batch.input_ids_BT for batch in batches])
    plain = logits_of(model, ids_BT[:, :24])
    quantize_(model, resolve(name), batches)
    whole = logits_of(model, ids_BT[:, :24])

    assert largest_difference(whole, plain) > 1e-3
    for ends in ([1, *range(2, 25)], [17, *range(18, 25)], [20, 23, 24]):
        assert largest_difference(decode(model, ids_BT[:, :24], ends), whole) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "oasis"])
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only_schemes_ignore_left_padding(
    name: str, kind: str, batches: list[Batch]
) -> None:
    """A padded sequence has the logits that it has alone, whoever is beside it."""
    model = build(kind)
    batches = fit(model, batches)
    ids_BT = torch.cat([batch.input_ids_BT for batch in batches])
    quantize_(model, resolve(name), batches)
    alone = logits_of(model, ids_BT[:1, :12])
    padded_BT = torch.zeros(2, 17, dtype=torch.long)
    padded_BT[0, 5:] = ids_BT[0, :12]
    padded_BT[1] = ids_BT[1, :17]
    mask_BT = (torch.arange(17) >= torch.tensor([[5], [0]])).long()
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        both = model(
            input_ids=padded_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
        ).logits

    assert largest_difference(both[:1, 5:], alone) < 1e-4


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_ranges_decode_alike_but_for_flips(name: str, ids_BT: Tensor) -> None:
    """Nine in ten tokens are equal to 1e-4 of the largest logit; the others moved with a level."""
    model: LlamaForCausalLM = build_llama()
    assert unsupported(resolve(name)) is None
    quantize_(model, resolve(name))
    whole = logits_of(model, ids_BT[:, :24])
    steps = decode(model, ids_BT[:, :24], [6, *range(7, 25)])
    moved = (steps - whole).abs().amax(-1) / whole.abs().max()

    assert float((moved < 1e-4).double().mean()) >= 0.9
