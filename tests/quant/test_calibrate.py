"""Static ranges: equal to a naive computation on saved activations, and blind to padding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch, Site, calibrate
from oasis_eval.quant.fake import FakeApplied
from oasis_eval.quant.primitives import Range, make_grid, snap
from oasis_eval.quant.ranges import CLIPPING_RATIOS
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import Calibration, QuantScheme, TensorFormat

PAD = 0
LAYER = "model.layers.1.mlp.down_proj"


def make_format(ranges: str, granularity: str = "tensor", **changes: object) -> TensorFormat:
    fields: dict[str, object] = {"bits": 8, "granularity": granularity, "ranges": ranges}
    if ranges == "percentile":
        fields["percentile"] = 99.0
    return TensorFormat.model_validate(fields | changes)


def texts() -> list[Tensor]:
    """Texts of 3, 60, 17 and 60 tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (length,), generator=generator) for length in (3, 60, 17, 60)]


def batched(sequences: list[Tensor], batch_size: int, side: str) -> list[Batch]:
    """Put texts into batches, padded on one side to the longest of the batch."""
    batches = []
    for start in range(0, len(sequences), batch_size):
        chunk = sequences[start : start + batch_size]
        width = max(len(row) for row in chunk)
        ids_BT = torch.full((len(chunk), width), PAD)
        mask_BT = torch.zeros_like(ids_BT)
        for index, row in enumerate(chunk):
            place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
            ids_BT[index, place] = row
            mask_BT[index, place] = 1
        batches.append(Batch(ids_BT, mask_BT))
    return batches


def saved_inputs(model: LlamaForCausalLM, sequences: list[Tensor]) -> list[Tensor]:
    """Return the layer's inputs [T, K], text by text, unbatched."""
    kept: list[Tensor] = []
    hook = model.get_submodule(LAYER).register_forward_pre_hook(
        lambda _, args: kept.append(args[0][0].clone())
    )
    with torch.no_grad():
        for row in sequences:
            model(input_ids=row[None])
    hook.remove()
    return kept


def naive(inputs: list[Tensor], fmt: TensorFormat) -> tuple[np.ndarray, np.ndarray]:
    """Compute a range from saved activations, in float64."""
    axis = None if fmt.granularity == "tensor" else 0
    arrays = [x.double().numpy() for x in inputs]
    pooled = np.concatenate(arrays)

    def ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.percentile(x, 100 - fmt.percentile, axis=axis)
        return np.atleast_1d(low), np.atleast_1d(np.percentile(x, fmt.percentile, axis=axis))

    if fmt.ranges in ("minmax", "percentile"):
        return ends(pooled)
    if fmt.ranges == "running_minmax":
        low, high = ends(arrays[0])
        for x in arrays[1:]:
            new_low, new_high = ends(x)
            low = fmt.momentum * low + (1 - fmt.momentum) * new_low
            high = fmt.momentum * high + (1 - fmt.momentum) * new_high
        return low, high
    low, high = ends(pooled)
    best = np.full(low.shape, np.inf)
    chosen = np.ones(low.shape)
    x = torch.from_numpy(pooled).float()
    for ratio in CLIPPING_RATIOS:
        span = Range(torch.tensor(low * ratio).float(), torch.tensor(high * ratio).float())
        y = snap(x, make_grid(span, fmt, torch.float32), clip=True)
        error = np.atleast_1d(((y - x).double().numpy() ** 2).sum(axis=axis))
        chosen = np.where(error < best, ratio, chosen)
        best = np.minimum(error, best)
    return low * chosen, high * chosen


FORMATS = [
    make_format(ranges, granularity, symmetric=symmetric)
    for ranges, granularity, symmetric in itertools.product(
        ("minmax", "running_minmax", "percentile", "mse"), ("tensor", "channel"), (True, False)
    )
]
FORMATS.append(make_format("running_minmax", percentile=99.0, momentum=0.5))
FORMATS.append(make_format("running_minmax", "channel", percentile=90.0))
FORMATS.append(make_format("mse", bits=3))


def name_of(fmt: TensorFormat) -> str:
    symmetry = "symmetric" if fmt.symmetric else "asymmetric"
    return f"{fmt.ranges}-{fmt.granularity}-{symmetry}-{fmt.percentile:g}-{fmt.bits}"


@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_range_equals_a_computation_on_saved_activations(
    llama: LlamaForCausalLM, fmt: TensorFormat
) -> None:
    """Every estimator, from batches of two with padding, equals numpy on what was saved."""
    site = Site(LAYER, llama.get_submodule(LAYER), "input")
    span = calibrate(llama, [site], fmt, batched(texts(), 2, "right"))[LAYER, "input"]
    low, high = naive(saved_inputs(llama, texts()), fmt)

    np.testing.assert_allclose(span.low.numpy(), low, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(span.high.numpy(), high, rtol=1e-4, atol=1e-6)


def all_sites(model: nn.Module) -> list[Site]:
    names = ("q_proj", "down_proj", "c_attn", "c_proj")
    return [
        Site(name, module, side)
        for name, module in model.named_modules()
        if name.endswith(names)
        for side in ("input", "output")
    ]


def assert_equal_everywhere(model: nn.Module, fmt: TensorFormat, sequences: list[Tensor]) -> None:
    """Compare the ranges of every site over batch sizes and padding sides."""
    sites = all_sites(model)
    reference = calibrate(model, sites, fmt, batched(sequences, 1, "right"))
    for size, side in itertools.product((2, 4), ("left", "right")):
        other = calibrate(model, sites, fmt, batched(sequences, size, side))
        for key, span in reference.items():
            width = (span.high - span.low).abs().max().item()
            torch.testing.assert_close(other[key].low, span.low, rtol=1e-5, atol=1e-5 * width)
            torch.testing.assert_close(other[key].high, span.high, rtol=1e-5, atol=1e-5 * width)


@pytest.mark.parametrize("ranges", ["minmax", "running_minmax", "percentile"])
def test_padding_never_enters_a_range(llama: LlamaForCausalLM, ranges: str) -> None:
    """Batch size and padding side change no range, though padding is 100 times larger."""
    with torch.no_grad():
        llama.get_input_embeddings().weight[PAD] = 100.0

    assert_equal_everywhere(llama, make_format(ranges), texts())


def test_padding_never_enters_a_range_with_learned_positions(gpt2: GPT2LMHeadModel) -> None:
    """The same where left padding would shift learned positions."""
    with torch.no_grad():
        gpt2.get_input_embeddings().weight[PAD] *= 100

    assert_equal_everywhere(gpt2, make_format("running_minmax"), texts())


@pytest.mark.parametrize("name", ["w8a8-static-linear", "w4a4-static-linear"])
def test_a_static_preset_ignores_padding(llama: LlamaForCausalLM, name: str) -> None:
    """The scales of a preset are equal to 1e-5 between calibration batches of 1 and 2."""
    ranges = []
    for size in (1, 2):
        applied = quantize_(
            llama, resolve(name), batched(texts()[:2], size, "left"), keep_reference=True
        )
        assert isinstance(applied, FakeApplied)
        ranges.append(applied.ranges)
        applied.undo()

    for key, first in ranges[0].items():
        torch.testing.assert_close(
            first.high - first.low, (ranges[1][key].high - ranges[1][key].low)
        )


def test_a_fully_padded_sequence_is_left_out(llama: LlamaForCausalLM) -> None:
    """A row without a real token changes nothing."""
    site = Site(LAYER, llama.get_submodule(LAYER), "input")
    fmt = make_format("running_minmax")
    row = texts()[1]
    both = Batch(torch.stack([row, row]), torch.stack([torch.ones(60), torch.zeros(60)]).long())
    expected = calibrate(llama, [site], fmt, batched([row], 1, "left"))
    actual = calibrate(llama, [site], fmt, [both])

    torch.testing.assert_close(actual[LAYER, "input"], expected[LAYER, "input"])


class Flattened(nn.Module):
    """A language model that flattens batch and time before its layers, one called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 8)
        self.first = nn.Linear(8, 8)
        self.idle = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids).flatten(0, 1)
        return self.first(self.first(hidden)).unflatten(0, input_ids.shape)


def test_flattened_inputs_are_told_apart() -> None:
    """[B * T, K] inputs and layers that run twice have ranges without padding and batch too."""
    model = Flattened()
    with torch.no_grad():
        model.embedding.weight[PAD] = 100.0
    sites = [Site("first", model.first, "input")]
    for ranges in ("minmax", "running_minmax", "percentile"):
        spans = [
            calibrate(model, sites, make_format(ranges), batched(texts(), size, "left"))
            for size in (1, 2)
        ]

        torch.testing.assert_close(spans[0]["first", "input"], spans[1]["first", "input"])
        assert float(spans[0]["first", "input"].high) < 10


def test_a_layer_without_text_has_no_range() -> None:
    """A layer that never ran is named; its scale does not stay at some default."""
    model = Flattened()
    scheme = resolve("w8a8-static-linear")

    with pytest.raises(QuantizationError, match="idle: saw no token of the calibration text"):
        quantize_(model, scheme, batched(texts(), 1, "left"))


class Routed(Flattened):
    """A language model that sends every other token to its layer."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.first(self.embedding(input_ids).flatten(0, 1)[::2])


def test_rows_that_are_no_known_tokens_are_refused() -> None:
    """A layer that sees a selection of tokens cannot leave padding out, and says so."""
    model = Routed()
    sites = [Site("first", model.first, "input")]

    with pytest.raises(QuantizationError, match=r"first: input of shape \(30, 8\) does not show"):
        calibrate(model, sites, make_format("minmax"), batched(texts()[1:2], 1, "left"))


def test_non_finite_activations_are_refused(llama: LlamaForCausalLM) -> None:
    """A range with NaN in it is an error that names the layer."""
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    site = Site(LAYER, llama.get_submodule(LAYER), "input")

    with pytest.raises(QuantizationError, match=rf"{LAYER}: activations .* are not finite"):
        calibrate(llama, [site], make_format("minmax"), batched(texts(), 1, "left"))


@pytest.mark.parametrize(
    "batches", [None, [], [Batch(torch.zeros(1, 4).long(), torch.zeros(1, 4))]]
)
def test_static_ranges_need_text(llama: LlamaForCausalLM, batches: list[Batch] | None) -> None:
    """No calibration text, or text of nothing but padding, is an error."""
    with pytest.raises(QuantizationError, match="calibration"):
        quantize_(llama, resolve("w8a8-static-linear"), batches)


def test_calibration_leaves_the_model_as_it_was(
    llama: LlamaForCausalLM, batches: list[Batch]
) -> None:
    """Hooks are removed and the training mode, with its dropout, comes back."""
    llama.train()
    site = Site(LAYER, llama.get_submodule(LAYER), "input")
    calibrate(llama, [site], make_format("mse"), batches)

    assert all(module.training for module in llama.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in llama.modules())


def test_output_ranges_are_those_of_the_outputs(
    llama: LlamaForCausalLM, batches: list[Batch]
) -> None:
    """Output sites observe what leaves the layer, the head's as well."""
    sites = [Site("lm_head", llama.lm_head, "output")]
    span = calibrate(llama, sites, make_format("minmax"), batches)["lm_head", "output"]
    with torch.no_grad():
        logits = torch.cat([llama(input_ids=batch.input_ids_BT).logits for batch in batches])

    torch.testing.assert_close(span.high[0], logits.max())
    torch.testing.assert_close(span.low[0], logits.min())


def test_percentile_ranges_clip(llama: LlamaForCausalLM, batches: list[Batch]) -> None:
    """A scheme with percentile ranges differs from one with the extremes."""
    spans = {}
    for ranges in ("minmax", "percentile"):
        scheme = QuantScheme(
            name="mine", activations=make_format(ranges), calibration=Calibration()
        )
        applied = quantize_(llama, scheme, batches, keep_reference=True)
        assert isinstance(applied, FakeApplied)
        spans[ranges] = applied.ranges[LAYER, "input"]
        applied.undo()

    assert float(spans["percentile"].high) < float(spans["minmax"].high)
