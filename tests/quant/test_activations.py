"""Sharing of quantized inputs, and ranges over tokens in the running pass."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from oasis_eval.errors import QuantizationError
from oasis_eval.modeling.experts import separate_
from oasis_eval.quant.activations import (
    RowQuantizer,
    SharedInput,
    StaticQuantizer,
    static_quantizer,
)
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.primitives import Range
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import Granularity, QuantScheme, TensorFormat
from tests.modeling.plain import of_family
from tests.quant.conftest import logits_of

TOKEN = TensorFormat(bits=4, granularity="token", ranges="dynamic")
SCHEMES = ["w8a8", "w4a4", "w4a4-g32", "w8a8-static-linear", "w4a4-static-linear"]


class Counting:
    """A quantizer that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._inner = RowQuantizer(TOKEN)

    def __call__(self, x: Tensor, name: str) -> Tensor:
        self.calls += 1
        return self._inner(x, name)


def test_the_same_tensor_is_quantized_once() -> None:
    """The second reader of a tensor gets the very result of the first."""
    shared, quantizer, x = SharedInput(), Counting(), torch.randn(2, 3, 8)
    first = shared.quantize(x, quantizer, "q")
    second = shared.quantize(x, quantizer, "k")

    assert first is second
    assert quantizer.calls == 1


def test_another_tensor_or_quantizer_is_not_shared() -> None:
    """Equal values in another tensor, and another quantizer, are quantized anew."""
    shared, quantizer, other = SharedInput(), Counting(), Counting()
    x = torch.randn(2, 3, 8)
    shared.quantize(x, quantizer, "a")
    shared.quantize(x.clone(), quantizer, "b")
    shared.quantize(x, quantizer, "c")
    shared.quantize(x, other, "d")

    assert (quantizer.calls, other.calls) == (3, 1)


@pytest.mark.parametrize("view", [False, True])
def test_a_modified_tensor_is_quantized_anew(view: bool) -> None:
    """Writing to the tensor, or through a view of it, ends the sharing."""
    shared, quantizer, x = SharedInput(), Counting(), torch.randn(2, 3, 8)
    shared.quantize(x, quantizer, "a")
    (x[0] if view else x).mul_(3)

    assert torch.equal(shared.quantize(x, quantizer, "b"), quantizer(x, "c"))
    assert quantizer.calls == 3


def test_nothing_is_shared_where_writes_cannot_be_seen() -> None:
    """Inference tensors have no version: a write between two layers must not go unnoticed."""
    with torch.inference_mode():
        shared, quantizer, x = SharedInput(), Counting(), torch.randn(2, 3, 8)
        shared.quantize(x, quantizer, "a")
        x.mul_(3)

        assert torch.equal(shared.quantize(x, quantizer, "b"), quantizer(x, "c"))


def test_nothing_outlives_the_input() -> None:
    """The quantized tensor is freed with the input that it was made of."""
    shared, x = SharedInput(), torch.randn(2, 3, 8)
    quantized = weakref.ref(shared.quantize(x, RowQuantizer(TOKEN), "a"))
    assert quantized() is not None
    del x
    gc.collect()

    assert quantized() is None


def test_no_tensor_is_held_after_a_pass(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """After a forward pass no quantized activation is left in memory."""
    applied = quantize_(llama, resolve("w8a8"))
    assert isinstance(applied, FakeApplied)
    logits_of(llama, ids_BT)
    gc.collect()

    assert applied.session.shared is not None
    assert applied.session.shared._quantized is None


@pytest.mark.parametrize("name", SCHEMES)
def test_sharing_changes_no_logit(
    llama: LlamaForCausalLM, ids_BT: Tensor, batches: list[Batch], name: str
) -> None:
    """With and without sharing, and under inference mode, logits are the same bit for bit."""
    applied = quantize_(llama, resolve(name), batches)
    assert isinstance(applied, FakeApplied)
    expected = logits_of(llama, ids_BT)
    with torch.inference_mode():
        inference = llama(input_ids=ids_BT).logits.clone()
    applied.session.shared = None

    assert torch.equal(expected, inference)
    assert torch.equal(expected, logits_of(llama, ids_BT))


@pytest.mark.parametrize("name", SCHEMES)
def test_query_key_value_and_gate_up_share(
    llama: LlamaForCausalLM,
    ids_BT: Tensor,
    batches: list[Batch],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven layers of a block quantize four inputs, dynamic or static."""
    quantize_(llama, resolve(name), batches)
    calls = []
    for kind in (RowQuantizer, StaticQuantizer):

        def counted(
            self: object, x: Tensor, layer: str, inner: Callable[..., Tensor] = kind.__call__
        ) -> Tensor:
            calls.append(layer)
            return inner(self, x, layer)

        monkeypatch.setattr(kind, "__call__", counted)
    logits_of(llama, ids_BT)

    assert [call.rsplit(".", 1)[1] for call in calls] == [
        "q_proj",
        "o_proj",
        "gate_proj",
        "down_proj",
    ] * 2


def test_a_quantized_model_can_be_copied(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A deep copy computes the same."""
    quantize_(llama, resolve("w4a4"))

    assert torch.equal(logits_of(llama, ids_BT), logits_of(copy.deepcopy(llama), ids_BT))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_static_ranges_do_not_hide_a_broken_token(width: int, symmetric: bool, bad: float) -> None:
    """Infinity is not clipped to the range: the token becomes NaN, its neighbours do not."""
    fmt = TensorFormat(
        bits=8, granularity="tensor" if width == 1 else "channel", symmetric=symmetric
    )
    span = Range(torch.full((width,), -1.0), torch.full((width,), 2.0))
    quantizer = static_quantizer(fmt, span, dtype=torch.float32, device=torch.device("cpu"))
    y = quantizer(torch.tensor([[0.5, bad, 1.0], [0.5, 90.0, 1.0]]), "layer")

    assert torch.isnan(y).any(dim=-1).tolist() == [True, False]
    assert float(y[1].max()) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [0.0, math.nan, -math.inf])
def test_static_ranges_in_place_are_the_same(
    bad: float, symmetric: bool, dtype: torch.dtype
) -> None:
    """Writing over the input gives the bits that a new tensor has; a finite sum is no condition."""
    fmt = TensorFormat(bits=4, granularity="tensor", symmetric=symmetric)
    span = Range(torch.tensor([-1.0]), torch.tensor([2.0]))
    quantizer = static_quantizer(fmt, span, dtype=dtype, device=torch.device("cpu"))
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 2, 3] = bad
    for largest in (1.0, 3e38):
        x[0, 0, :2] = largest
        expected = quantizer(x, "layer")
        written = x.clone()
        actual = quantizer.quantize_(written, "layer")

        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.dtype == dtype
        assert (actual.data_ptr() == written.data_ptr()) == (dtype == torch.float32)
        assert int(torch.isnan(actual).sum()) == (7 if bad else 0)


def scheme_of(
    granularity: Granularity, *, symmetric: bool = True, **changes: object
) -> QuantScheme:
    activations = TensorFormat(
        bits=8, granularity=granularity, symmetric=symmetric, ranges="dynamic"
    )
    fields: dict[str, object] = {"name": "mine", "activations": activations}
    return QuantScheme.model_validate(fields | changes)


def padded(ids_BT: Tensor, pads: int, side: str) -> tuple[Tensor, Tensor]:
    """Give the first row `pads` tokens of padding; the second stays whole."""
    length = ids_BT.shape[1] - pads
    ids, mask = torch.zeros_like(ids_BT), torch.ones_like(ids_BT)
    ids[1] = ids_BT[1]
    place = slice(pads, None) if side == "left" else slice(0, length)
    ids[0, place] = ids_BT[0, :length]
    mask[0] = 0
    mask[0, place] = 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_padding_and_other_rows_never_enter_a_range(
    llama: LlamaForCausalLM, ids_BT: Tensor, granularity: Granularity, symmetric: bool, side: str
) -> None:
    """A row in a padded batch is, layer by layer, quantized as it is alone."""
    with torch.no_grad():
        llama.get_input_embeddings().weight[0] = 100.0
    quantize_(llama, scheme_of(granularity, symmetric=symmetric))
    ids, mask = padded(ids_BT, 40, side)
    first = slice(40, None) if side == "left" else slice(0, 20)
    alone = logits_of(llama, ids_BT[:1, :20])
    together = logits_of(llama, ids, mask)

    # Rounding flips are possible, a foreign range is not: it would move everything.
    close = (together[:1, first] - alone).abs() < 1e-3 * alone.abs().max()
    assert float(close.float().mean()) > 0.99
    close = (together[1:] - logits_of(llama, ids_BT[1:])).abs() < 1e-3 * alone.abs().max()
    assert float(close.float().mean()) > 0.99


@pytest.mark.parametrize("everywhere", [False, True], ids=["routed", "all tokens to two experts"])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_ranges_over_tokens_of_experts_by_hand(
    ids_BT: Tensor, granularity: Granularity, everywhere: bool
) -> None:
    """An expert's rows of one sequence share a range; other sequences and padding are not in it."""
    torch.manual_seed(0)
    number = 2 if everywhere else 4  # each token has two, in an order of its own
    model = of_family("mixtral", num_local_experts=number, num_experts_per_tok=2).eval()
    separate_(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 100.0
    quantize_(model, scheme_of(granularity))
    calls: list[tuple[str, nn.Linear, Tensor, Tensor, Tensor]] = []

    def keep(name: str, layer: Any, x: Tensor, y: Tensor) -> None:
        calls.append((name, layer, layer.token_rows[0], x, y))

    for name, module in model.named_modules():
        if ".experts." in name and isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, output, name=name: keep(name, module, args[0], output)
            )
    ids, mask = padded(ids_BT, 40, "left")
    logits_of(model, ids, mask)
    counts = [len(rows) for _, _, rows, _, _ in calls]

    assert (set(counts) == {ids.numel()}) is everywhere
    for _, layer, rows, x, y in calls:
        by_hand = x.clone()
        for sequence in range(len(ids)):
            own = rows // ids.shape[1] == sequence
            real = own & mask.flatten()[rows].bool()
            dims = (0, 1) if granularity == "tensor" else (0,)
            peak = x[real].abs().amax(dims) if bool(real.any()) else torch.zeros(())
            scale = peak.clamp_min(1e-30) / 127
            by_hand[own] = (x[own] / scale).round().clamp(-127, 127) * scale
        real = mask.flatten()[rows].bool()
        expected = torch.nn.functional.linear(by_hand, layer.weight)
        torch.testing.assert_close(y[real], expected[real])


def test_a_range_over_tokens_needs_the_models_forward_pass(llama: LlamaForCausalLM) -> None:
    """A layer called by itself cannot know its padding, and says so; per token it need not."""
    applied = quantize_(llama, scheme_of("tensor"), keep_reference=True)
    layer = llama.model.layers[0].mlp.down_proj
    with pytest.raises(QuantizationError, match=r"layers\.0\.mlp\.down_proj: called outside"):
        layer(torch.randn(2, 3, 96))
    applied.undo()
    quantize_(llama, scheme_of("token"))

    assert layer(torch.randn(2, 3, 96)).shape == (2, 3, 48)


def test_ranges_over_tokens_work_from_the_body_too(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Calling the body and then the head, as tiled scoring does, gives the same logits."""
    quantize_(llama, scheme_of("tensor"))
    with torch.no_grad():
        hidden = llama.model(input_ids=ids_BT).last_hidden_state

        assert torch.equal(logits_of(llama, ids_BT), llama.lm_head(hidden))


def test_generation_with_a_cache_and_padding(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """Ranges over tokens follow the mask while the cache grows."""
    quantize_(llama, scheme_of("tensor", regions=["linear_inputs", "linear_outputs"]))
    ids, mask = padded(ids_BT[:, :20], 8, "left")
    out = llama.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=True
    )

    assert out.shape[0] == 2
    assert out.shape[1] > 20


def test_a_foreign_mask_is_refused(llama: LlamaForCausalLM, ids_BT: Tensor) -> None:
    """A mask that does not say which token is padding cannot be left out of a range."""
    quantize_(llama, scheme_of("tensor"))
    mask = torch.zeros(2, 1, 60, 60)

    with pytest.raises(QuantizationError, match=r"attention_mask is not \[sequences, tokens\]"):
        logits_of(llama, ids_BT, mask)
