"""Every way of running a model gives the same logits: cached, padded, batched, generated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from oasis_eval.modeling.decoder import OasisForCausalLM
from oasis_eval.modeling.variants import VARIANT_NAMES
from tests.modeling.tiny import BACKBONES, CASES, QUICK_CASES, new_model, shared_model, tiny_config
from tests.modeling.tiny import tokens as random_tokens

TOLERANCE = 1e-4
NUM_TOKENS = 40
SCHEDULES = {
    "1 then single steps": [1] * NUM_TOKENS,
    "17 then single steps": [17] + [1] * (NUM_TOKENS - 17),
    "20 then a chunk of 20": [20, 20],
}
every_case = pytest.mark.parametrize("case", CASES)
both_backbones = pytest.mark.parametrize("backbone", BACKBONES)


def model_of(backbone: str, case: str) -> OasisForCausalLM:
    """The shared model of a case, in the precision in which two paths can be compared.

    Sparsemax passes differences on undamped: float32 rounding alone moves these logits by 1e-4.
    """
    model = shared_model(backbone, case)
    return copy.deepcopy(model).double() if "sparsemax" in case else model


MODELS = [f"{case}/llama" for case in QUICK_CASES]
MODELS += [f"{case}/qwen3" for case in QUICK_CASES if case in VARIANT_NAMES]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> OasisForCausalLM:
    """A shared model of each case; of those without a name on one backbone only."""
    case, backbone = request.param.split("/")
    return model_of(backbone, case)


def full_pass(model: OasisForCausalLM, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits


def in_pieces(
    model: OasisForCausalLM, ids: Tensor, pieces: list[int], mask: Tensor | None = None
) -> Tensor:
    """Logits of the whole sequence, fed piece by piece through a cache."""
    cache = DynamicCache(config=model.config)
    logits, start = [], 0
    with torch.no_grad():
        for length in pieces:
            end = start + length
            seen = None if mask is None else mask[:, :end]
            logits.append(model(ids[:, start:end], attention_mask=seen, cache=cache).logits)
            start = end
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cached_pass_equals_full_pass(model: OasisForCausalLM, schedule: str) -> None:
    """The cache holds all that decoding needs, whatever the pieces."""
    ids = random_tokens(1, NUM_TOKENS)

    cached = in_pieces(model, ids, SCHEDULES[schedule])

    torch.testing.assert_close(cached, full_pass(model, ids), rtol=0, atol=TOLERANCE)


def test_cached_pass_equals_full_pass_with_left_padding(model: OasisForCausalLM) -> None:
    """The same for a batch of two, one of them padded on the left."""
    ids, mask = padded_pair("left", lengths=(24, 31))

    for pieces in ([17] + [1] * 14, [20, 11]):
        cached = in_pieces(model, ids, pieces, mask)
        expected = full_pass(model, ids, mask)
        torch.testing.assert_close(
            cached[mask.bool()], expected[mask.bool()], rtol=0, atol=TOLERANCE
        )


def padded_pair(side: str, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Make two sequences padded to the longer one, and their mask."""
    longest = max(lengths)
    ids = torch.zeros(2, longest, dtype=torch.long)
    mask = torch.zeros(2, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        ids[row, place] = random_tokens(length, seed=row)
        mask[row, place] = 1
    return ids, mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: OasisForCausalLM, side: str, implementation: str) -> None:
    """Sequences of 3 and 9 tokens in one batch have the logits they have alone."""
    ids, mask = padded_pair(side, lengths=(3, 9))
    model.set_attn_implementation(implementation)

    batched = full_pass(model, ids, mask)

    model.set_attn_implementation("sdpa")
    assert batched.isfinite().all()
    for row in range(2):
        real = mask[row].bool()
        alone = full_pass(model, ids[row : row + 1, real])[0]
        torch.testing.assert_close(batched[row, real], alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", QUICK_CASES)
def test_padding_is_finite_in_bfloat16(case: str, side: str) -> None:
    """Rows without a visible key make no NaN in bf16 either."""
    model = new_model(tiny_config("llama", case)).bfloat16()
    ids, mask = padded_pair(side, lengths=(3, 9))

    assert full_pass(model, ids, mask).isfinite().all()


def test_batch_size_changes_nothing(model: OasisForCausalLM) -> None:
    """Logits of a sequence do not depend on its neighbours."""
    ids = random_tokens(4, 12)

    together = full_pass(model, ids)

    alone = torch.cat([full_pass(model, row.unsqueeze(0)) for row in ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


def test_later_tokens_change_nothing(model: OasisForCausalLM) -> None:
    """Causality: psi and depth weights are per token, never averaged over the sequence."""
    ids = random_tokens(1, 12)
    changed = ids.clone()
    changed[:, 7:] = random_tokens(1, 5, seed=1)

    torch.testing.assert_close(
        full_pass(model, ids)[:, :7], full_pass(model, changed)[:, :7], rtol=0, atol=1e-5
    )


def greedy(model: OasisForCausalLM, ids: Tensor, **options: object) -> Tensor:
    values = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None} | options
    with torch.no_grad():
        return model.generate(ids, **values)


@pytest.mark.parametrize("case", ["vanilla", "oasis", "oasis_repo", "delta"])
def test_generation_is_the_same_with_and_without_cache(case: str) -> None:
    """Thirty greedy tokens."""
    model = model_of("qwen3", case)
    ids = random_tokens(1, 10)

    assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))


@pytest.mark.parametrize("case", ["vanilla", "oasis", "oasis_repo", "residual-vanilla"])
def test_generation_is_the_same_with_a_static_cache(case: str) -> None:
    """Thirty greedy tokens, padded on the left."""
    model = model_of("llama", case)
    ids, mask = padded_pair("left", lengths=(3, 9))

    static = greedy(model, ids, attention_mask=mask, cache_implementation="static")

    assert torch.equal(static, greedy(model, ids, attention_mask=mask))


@both_backbones
def test_static_cache_prefill_does_not_see_unwritten_keys(backbone: str) -> None:
    """A static cache is longer than what was written; causal must not count from its end."""
    model = model_of(backbone, "oasis")
    ids = random_tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=64)

    with torch.no_grad():
        first = model(ids[:, :8], cache=cache).logits
        second = model(ids[:, 8:], cache=cache).logits

    torch.testing.assert_close(
        torch.cat((first, second), dim=1), full_pass(model, ids), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("case", QUICK_CASES)
def test_generation_is_the_same_with_left_padding(case: str) -> None:
    """Greedy tokens of the shorter sequence of a batch equal those of the sequence alone."""
    model = model_of("llama", case)
    ids, mask = padded_pair("left", lengths=(3, 9))

    together = greedy(model, ids, attention_mask=mask, max_new_tokens=8)

    alone = greedy(model, ids[:1, 6:], max_new_tokens=8)
    assert torch.equal(together[0, 9:], alone[0, 3:])


@pytest.mark.slow
@every_case
def test_every_case_generates_the_same_with_and_without_cache(case: str) -> None:
    """Thirty greedy tokens."""
    model = model_of("llama", case)
    ids = random_tokens(1, 10)

    assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))


@pytest.mark.parametrize("case", ["vanilla", "oasis", "oasis_repo", "gated_g1"])
def test_beams_of_one_sequence_and_of_a_batch_agree(case: str) -> None:
    """Beam search reorders the cache; depth state needs none."""
    model = model_of("llama", case)
    ids = random_tokens(2, 6)

    together = greedy(model, ids, num_beams=3, max_new_tokens=8)

    for row in range(2):
        alone = greedy(model, ids[row : row + 1], num_beams=3, max_new_tokens=8)
        assert torch.equal(together[row], alone[0])


def test_generation_passes_depth_weights_on() -> None:
    """`generate` accepts the switches of the forward pass."""
    model = model_of("llama", "oasis")

    result = greedy(model, random_tokens(1, 4), max_new_tokens=2, output_depth_weights=True)

    assert result.shape == (1, 6)


@pytest.mark.slow
@every_case
@both_backbones
def test_every_case_cached(case: str, backbone: str) -> None:
    """All names, the residual ones too, decode what they score."""
    model = model_of(backbone, case)
    ids = random_tokens(2, NUM_TOKENS)

    for pieces in SCHEDULES.values():
        cached = in_pieces(model, ids, pieces)
        torch.testing.assert_close(cached, full_pass(model, ids), rtol=0, atol=TOLERANCE)


def test_sliding_window_layers() -> None:
    """Qwen3 with sliding attention: cached equals full beyond the window, padded too."""
    model = new_model(
        tiny_config(
            "qwen3", "oasis", use_sliding_window=True, sliding_window=6, max_window_layers=1
        )
    )
    ids, mask = padded_pair("left", lengths=(12, 20))

    cached = in_pieces(model, ids, [9] + [1] * 11, mask)

    expected = full_pass(model, ids, mask)
    torch.testing.assert_close(cached[mask.bool()], expected[mask.bool()], rtol=0, atol=TOLERANCE)
