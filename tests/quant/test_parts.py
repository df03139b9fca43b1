"""A scheme part by part: each part alone is the model quantized by hand, and nothing stays on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from oasis_eval.modeling.instrumentation import instrumented
from oasis_eval.quant import schemes
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.parts import Part, Parts
from oasis_eval.quant.support import indivisible, unsupported
from oasis_eval.spec import QuantScheme
from tests import tiny
from tests.modeling.tiny import new_model, tiny_config, tokens

IDS = tokens(2, 40)


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=IDS, use_cache=False).logits
    return output


def batches() -> list[Batch]:
    ids = tokens(2, 32, seed=7)
    return [Batch(ids, torch.ones_like(ids))]


def by_hand(scheme: QuantScheme, names: Sequence[str], **changes: object) -> Tensor:
    """TINY with all but these layers skipped by the scheme."""
    model = tiny.build_model()
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    skip = tuple(name for name in layers if name not in names)
    chosen = scheme.model_copy(update={"skip": skip, **changes})
    quantize_(model, chosen, batches())
    return logits_of(model)


@pytest.mark.parametrize("name", ["w4a4", "w4a16", "w4a4-g32", "w4a4-static-linear"])
@pytest.mark.parametrize("by", ["layer", "kind"])
def test_a_group_alone_is_the_model_quantized_by_hand(name: str, by: str) -> None:
    """Bit for bit, for every group, and the same for all but one."""
    scheme, model = schemes.resolve(name), tiny.build_model()
    plain = logits_of(model)
    applied = quantize_(model, scheme, batches(), keep_reference=True)
    whole = logits_of(model)
    with Parts(model, applied) as parts:
        groups = parts.groups(by)  # type: ignore[arg-type]
        assert len(groups) == {"layer": 2, "kind": 7}[by]
        for label, group in list(groups.items())[:3]:
            members = list(dict.fromkeys(part.module for part in group))
            others = [part for part in parts.all if part not in group]
            parts.only(group)
            assert torch.equal(logits_of(model), by_hand(scheme, members)), label
            parts.only(others)
            rest = list(dict.fromkeys(part.module for part in others))
            assert torch.equal(logits_of(model), by_hand(scheme, rest)), label
        parts.only(())
        assert torch.equal(logits_of(model), plain)
    assert torch.equal(logits_of(model), whole)
    applied.undo()

    assert torch.equal(logits_of(model), plain)


def test_weights_and_inputs_are_regions() -> None:
    """All weights alone are the scheme without activations, all inputs the one without weights."""
    scheme, model = schemes.resolve("w4a4"), tiny.build_model()
    applied = quantize_(model, scheme, keep_reference=True)
    layers = list(dict.fromkeys(item.module for item in applied.coverage.modules if item.quantized))
    with Parts(model, applied) as parts:
        groups = parts.groups("region")
        parts.only(groups["weights"])
        weights = logits_of(model)
        parts.only(groups["linear_inputs"])
        inputs = logits_of(model)

    assert list(groups) == ["weights", "linear_inputs"]
    assert torch.equal(weights, by_hand(scheme, layers, activations=None))
    assert torch.equal(inputs, by_hand(scheme, layers, weights=None))


def test_every_region_of_the_full_graph() -> None:
    """Each is a part of its own, changes the model alone, and goes without a trace."""
    scheme = schemes.resolve("w4a4-static")
    model = new_model(tiny_config("llama", "oasis"))
    plain = logits_of(model)
    applied = quantize_(model, scheme, batches(), keep_reference=True)
    whole = logits_of(model)
    with Parts(model, applied) as parts:
        groups = parts.groups("region")
        assert {"weights", "linear_inputs", "attention_probs", "depth_sources"} <= set(groups)
        for label, group in groups.items():
            parts.only(group)
            assert not torch.equal(logits_of(model), plain), label
        parts.only(())
        assert torch.equal(logits_of(model), plain)
    assert torch.equal(logits_of(model), whole)
    applied.undo()
    assert torch.equal(logits_of(model), plain)


def test_a_plain_model_with_taps() -> None:
    """Taps that were put in for the scheme are parts, too."""
    scheme = schemes.resolve("w4a4").model_copy(
        update={"name": "kv", "regions": ("linear_inputs", "kv_cache")}
    )
    model = tiny.build_model()
    with instrumented(model, {"kv_cache"}):
        plain = logits_of(model)
        applied = quantize_(model, scheme, keep_reference=True)
        with Parts(model, applied) as parts:
            groups = parts.groups("kind")
            parts.only(groups["kv_cache"])
            assert not torch.equal(logits_of(model), plain)
            assert len(parts.groups("layer")) == 2
        applied.undo()
        assert torch.equal(logits_of(model), plain)


def test_transforms_stay_on() -> None:
    """Rotated, without any part: what the model computes up to rounding."""
    model = tiny.build_model()
    plain = logits_of(model)
    applied = quantize_(model, schemes.resolve("w4a4-rot"), keep_reference=True)
    with Parts(model, applied) as parts:
        parts.only(())
        torch.testing.assert_close(logits_of(model), plain, rtol=1e-3, atol=1e-3)
        assert not torch.equal(logits_of(model), plain)
    applied.undo()

    assert torch.equal(logits_of(model), plain)


@pytest.mark.parametrize(
    ("module", "what", "region", "labels"),
    [
        ("model.layers.3.mlp.up_proj", "weight", "weights", ("model.layers.3", "up_proj")),
        ("lm_head", "input", "lm_head", ("lm_head", "lm_head")),
        ("model.layers.11.taps.probs", "tap", "attention_probs", ("model.layers.11", None)),
        ("transformer.h.0.attn.c_attn", "weight", "weights", ("transformer.h.0", "c_attn")),
        ("model.taps.depth_sources", "tap", "depth_sources", ("model.taps.depth_sources", None)),
    ],
)
def test_labels(module: str, what: str, region: str, labels: tuple[str, str | None]) -> None:
    """Layers by their number, kinds by their own name, places between layers by their region."""
    part = Part(module, what, region)  # type: ignore[arg-type]

    assert part.label("layer") == labels[0]
    assert part.label("kind") == (labels[1] or region)
    assert part.label("region") == region


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp32", "quantizes nothing"),
        ("w4a4-real", "use 'w4a4'"),
        ("llm-int8", "backend 'bitsandbytes'"),
        ("quanto-w8a8", "backend 'quanto'"),
        ("torchao-w8a8", "backend 'torchao'"),
        ("w4a4-gptq", "GPTQ fits every layer"),
    ],
)
def test_what_does_not_come_apart(name: str, words: str) -> None:
    """By name, with the reason."""
    reason = indivisible(schemes.resolve(name))

    assert reason is not None
    assert f"scheme {name!r}" in reason
    assert words in reason


def test_every_other_preset_comes_apart() -> None:
    """Whatever runs as fake execution and is not fitted layer by layer."""
    for name, scheme in schemes.presets().items():
        if scheme.backend == "fake" and "gptq" not in name:
            assert indivisible(scheme) is None
            assert unsupported(scheme) is None
