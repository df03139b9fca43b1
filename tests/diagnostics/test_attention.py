"""Attention statistics against loops over whole maps in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, Qwen3Config

from oasis_eval.diagnostics.attention import AttentionCall, HeadStatistics, HeadSums
from oasis_eval.diagnostics.observation import observe
from oasis_eval.modeling.interface import register
from oasis_eval.modeling.normalizers import Normalizer, normalize
from tests import tiny
from tests.diagnostics.naive import gap, head_statistics
from tests.modeling.tiny import tokens

NORMALIZERS = (
    Normalizer("softmax"),
    Normalizer("softmax1"),
    Normalizer("clipped_softmax", gamma=-0.03),
    Normalizer("sparsemax"),
    Normalizer("entmax15"),
    Normalizer("softpick"),
    Normalizer("sink"),
)
HEADS = 4


def check(
    result: HeadStatistics, probs_HTS: Tensor, visible_TS: Tensor, null_HT: Tensor | None
) -> None:
    for head in range(probs_HTS.shape[0]):
        null = None if null_HT is None else null_HT[head]
        expected = head_statistics(probs_HTS[head], visible_TS, null)
        for name, value in vars(expected).items():
            actual = float(getattr(result, name)[head])

            assert actual == pytest.approx(value, rel=2e-6, abs=3e-7, nan_ok=True), name


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda n: n.kind)
@pytest.mark.parametrize("length", [1, 37, 150])
def test_statistics_of_a_call(normalizer: Normalizer, length: int) -> None:
    """Every statistic equals the loop over the explicit map, grouped heads included."""
    generator = torch.Generator().manual_seed(length)
    query = 2 * torch.randn(1, HEADS, length, 8, generator=generator)
    key = torch.randn(1, 2, length, 8, generator=generator)
    logit = torch.linspace(-1, 2, HEADS) if normalizer.kind == "sink" else None
    sums = HeadSums()
    sums.add(AttentionCall(query, key, normalizer, 0.4, null_logit=logit), None)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    scores = 0.4 * query[0].double() @ key[0].repeat_interleave(2, 0).double().transpose(-1, -2)
    wide_logit = None if logit is None else logit[:, None].double()
    probs, null = normalize(scores, visible, normalizer, null_logit=wide_logit)
    result = sums.result()

    check(result, probs, visible, null)
    for head in range(HEADS):
        largest = float(scores[head][visible].max())
        assert float(result.max_logit[head]) == pytest.approx(largest, rel=1e-6)
        expected = gap(scores[head], visible)
        assert float(result.logit_gap[head]) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    short = torch.stack([probs[:, t, 0] for t in range(min(64, length))]).mean(dim=0)
    torch.testing.assert_close(result.sink_mass_64, short, rtol=2e-6, atol=1e-7)


def build(kind: str) -> torch.nn.Module:
    shape: dict[str, object] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 256,
        "head_dim": 12,
    }
    torch.manual_seed(1)
    config = {
        "llama": lambda: tiny.build_model().config,
        "qwen3": lambda: Qwen3Config(**shape),
        "gemma3": lambda: Gemma3TextConfig(
            **shape,
            sliding_window=10,
            layer_types=["sliding_attention", "full_attention"],
            initializer_range=0.3,
        ),
        "gpt2": lambda: GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=256),
    }[kind]()
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_public_models(kind: str, implementation: str) -> None:
    """What is seen of a model on the interface is its own eager map, sliding windows included."""
    model = build(kind)
    ids = tokens(1, 40)
    with torch.no_grad():
        maps = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    with observe(model) as observation:
        observation.run(ids)

    assert len(observation.heads) == 2
    for sums, probs in zip(observation.heads.values(), maps, strict=True):
        visible = torch.ones(40, 40, dtype=torch.bool).tril()
        is_sliding = kind == "gemma3" and sums is next(iter(observation.heads.values()))
        if is_sliding:
            visible &= ~visible.tril(-10)
        result = sums.result()
        check(result, probs[0], visible, None)
        assert result.sink_query_share == pytest.approx(10 / 40 if is_sliding else 1.0)


@pytest.mark.parametrize("kind", ["softmax1", "softpick", "sparsemax"])
def test_registered_normalizers(kind: str) -> None:
    """A public model under one of our normalizers is measured under that normalizer."""
    register()
    model = build("llama")
    model.set_attn_implementation(kind)
    ids = tokens(1, 30)
    with observe(model) as observation:
        observation.run(ids)
    with torch.no_grad():
        maps = model(input_ids=ids, output_attentions=True).attentions
    visible = torch.ones(30, 30, dtype=torch.bool).tril()
    for sums, probs in zip(observation.heads.values(), maps, strict=True):
        null = 1 - probs[0].double().sum(dim=-1)

        check(sums.result(), probs[0], visible, null)


def test_a_head_that_sinks() -> None:
    """A key that all queries favour takes the mass and pushes the gap up."""
    query = torch.ones(1, 1, 100, 4)
    key = torch.zeros(1, 1, 100, 4)
    key[:, :, 0] = 5.0
    sums = HeadSums()
    sums.add(AttentionCall(query, key, Normalizer("softmax"), 1.0), None)
    result = sums.result()

    assert float(result.sink_mass[0]) > 0.99
    assert float(result.max_logit[0]) == pytest.approx(20.0)
    assert float(result.logit_gap[0]) == pytest.approx(20.0 * 15 / 16, rel=1e-6)


def test_a_row_without_mass() -> None:
    """Rows that softpick leaves empty have null mass 1 and enter no distance."""
    query, key = torch.ones(1, 1, 6, 2), -torch.ones(1, 1, 6, 2)
    sums = HeadSums()
    sums.add(AttentionCall(query, key, Normalizer("softpick"), 1.0), None)
    result = sums.result()

    assert float(result.null_mass[0]) == 1.0
    assert (float(result.sink_mass[0]), float(result.sink_mass_renormalised[0])) == (0.0, 0.0)
    assert math.isnan(float(result.mean_distance[0]))
