"""`context-N`: the same tokens under every context, and losses by position, checked by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from oasis_eval import corpus
from oasis_eval.diagnostics.measure import measure as diagnose
from oasis_eval.errors import DataError
from oasis_eval.harness.protocols import CONTEXT_UNIT, Window, parse_protocol, plan
from oasis_eval.harness.run import Outcome
from oasis_eval.loading import Reference, prepare
from oasis_eval.positions import last_positions
from oasis_eval.quant import schemes
from oasis_eval.record import read_samples, write_samples
from tests import tiny
from tests.harness.conftest import Measure, Piece, metric, nll_by_hand

TEXT = tiny.prose(400)
VOCABULARY = 256


def windows(
    tokenizer: PreTrainedTokenizerBase, length: int, *, text: str = TEXT, limit: int | None = None
) -> list[Window]:
    protocol = parse_protocol(f"context-{length}")
    found = plan(protocol, [text], tokenizer, context_length=None, limit=limit)
    return found.windows


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("length", [16, 33, 100, 399])
def test_every_token_but_the_first_is_scored_once(length: int, adds_start: bool) -> None:
    """In order, whatever the context; each target follows the inputs before it."""
    tokenizer = tiny.build_tokenizer(adds_start=adds_start)
    ids = corpus.encode(tokenizer, TEXT, special_tokens=False)
    found = windows(tokenizer, length)
    head = [1] if adds_start else []

    assert [token for window in found for token in window.targets] == ids[1:]
    start = 0
    for window in found:
        assert len(window.input_ids) <= length
        assert window.input_ids[: len(head)] == head
        assert window.offset == len(head)
        stop = start + len(window.targets)
        assert window.input_ids[len(head) :] == ids[start:stop]
        start = stop
    assert all(len(window.input_ids) == length for window in found[:-1])


def test_a_limit_below_a_window_is_named() -> None:
    """The text is long enough; a larger limit is what helps."""
    with pytest.raises(DataError, match="context-2048: --limit 1 is 1024 tokens; give one window"):
        windows(tiny.build_tokenizer(), 2048, text=tiny.prose(3000), limit=1)


def test_a_limit_is_the_same_tokens_under_every_context() -> None:
    """It counts units of scored tokens, not windows."""
    tokenizer = tiny.build_tokenizer()
    text = tiny.prose(2 * CONTEXT_UNIT + 300)
    found = {
        length: [
            t for window in windows(tokenizer, length, text=text, limit=2) for t in window.targets
        ]
        for length in (64, 500, 2048)
    }

    assert len(found[64]) == 2 * CONTEXT_UNIT
    assert found[64] == found[500] == found[2048]


def test_a_window_longer_than_the_model_or_the_text_is_refused(
    measure: Measure, tiny_reference: Reference
) -> None:
    """By the protocol's name, with what there is."""
    with pytest.raises(DataError, match="context-256: window of 256 tokens, the model has 128"):
        measure(tiny_reference, TEXT, "context-256", task="text")
    with pytest.raises(DataError, match=r"context-128: the text has 50 tokens, a window needs 129"):
        measure(tiny_reference, TEXT[:50], "context-128", task="text")


def test_perplexity_and_positions_by_hand(measure: Measure, tiny_reference: Reference) -> None:
    """Unbatched passes in float64 give each bucket's loss; buckets add up to the whole."""
    outcome = measure(tiny_reference, TEXT, "context-48", task="text", batch_size=4)
    ids = corpus.encode(tiny_reference.tokenizer, TEXT, special_tokens=False)
    ends = last_positions(48)
    naive: dict[int, list[float]] = {}
    pieces = []
    for start in range(0, len(ids) - 1, 48):
        piece = ids[start : start + 49]
        pieces.append(Piece(piece, 1))
        with torch.no_grad():
            logits = tiny_reference.model(input_ids=torch.tensor([piece])).logits[0].double()
        for at in range(1, len(piece)):
            loss = -float(logits[at - 1].log_softmax(-1)[piece[at]])
            bucket = next(number for number, end in enumerate(ends) if at <= end)
            naive.setdefault(bucket, []).append(loss)
    total, count = nll_by_hand(tiny_reference.model, pieces)

    assert metric(outcome, "num_tokens") == count == len(ids) - 1
    assert metric(outcome, "nll_nats") == pytest.approx(total, rel=1e-6)
    sums: dict[int, tuple[float, int]] = {}
    for row in outcome.samples:
        rows = zip(row["position_last"], row["position_nats"], row["position_tokens"], strict=True)
        for last, nats, tokens in rows:
            bucket = next(number for number, end in enumerate(ends) if last <= end)
            before = sums.get(bucket, (0.0, 0))
            sums[bucket] = (before[0] + nats, before[1] + tokens)
        assert math.fsum(row["position_nats"]) == pytest.approx(row["nll_nats"], rel=1e-12)
        assert sum(row["position_tokens"]) == row["num_tokens"]
    assert sums.keys() == naive.keys()
    for bucket, losses in naive.items():
        assert sums[bucket][1] == len(losses)
        assert sums[bucket][0] == pytest.approx(math.fsum(losses), rel=1e-5)


def test_positions_count_start_tokens(measure: Measure, starting_reference: Reference) -> None:
    """What is predicted first has seen the start token and one more."""
    outcome = measure(starting_reference, TEXT, "context-32", task="text")
    (first, *_) = outcome.samples

    assert first["position_last"] == [2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert first["position_tokens"] == [1, 1, 1, 2, 2, 4, 4, 8, 8]
    (info,) = [outcome.protocol]
    assert info.details["prefix"] == "start tokens head every window"


@pytest.mark.parametrize("length", [16, 128])
def test_an_all_zero_head_has_the_vocabularys_perplexity(
    measure: Measure, uniform_reference: Reference, length: int
) -> None:
    """At every position, whatever the context and the scheme."""
    outcome = measure(uniform_reference, TEXT, f"context-{length}", task="text", scheme="w4a4")

    assert metric(outcome, "token_perplexity") == pytest.approx(VOCABULARY, rel=1e-6)
    for row in outcome.samples:
        for nats, tokens in zip(row["position_nats"], row["position_tokens"], strict=True):
            assert nats / tokens == pytest.approx(math.log(VOCABULARY), rel=1e-6)


def test_sums_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    """Inside of lists, too, in a file that every strict parser reads."""
    write_samples(tmp_path, "k", [{"position_nats": [1.0, math.nan, math.inf, -math.inf]}])
    (row,) = read_samples(tmp_path, "k")

    assert row["position_nats"] == [1.0, "NaN", "Infinity", "-Infinity"]


def test_masses_by_position_are_means_over_heads_and_queries(tiny_reference: Reference) -> None:
    """A loop over the model's own eager maps gives the same sink mass in each bucket."""
    ids = corpus.encode(tiny_reference.tokenizer, TEXT, special_tokens=False)
    sequences = [ids[start : start + 60] for start in (0, 60, 120)]
    with prepare(tiny_reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        found = diagnose(prepared, sequences, batch_size=2, by_position=True)
        plain = diagnose(prepared, sequences, batch_size=2)
    model = tiny.build_model()
    model.set_attn_implementation("eager")
    naive: dict[tuple[int, int], list[float]] = {}
    for sequence in sequences:
        with torch.no_grad():
            maps = model(input_ids=torch.tensor([sequence]), output_attentions=True).attentions
        for layer, probs in enumerate(maps):
            for query in range(60):
                end = next(last for last in last_positions(60) if query + 1 <= last)
                values = probs[0, :, query, 0].tolist()
                naive.setdefault((layer, end), []).extend(values)
    values = {(item.module, item.name): item.value for item in found.layers}
    for (layer, end), masses in naive.items():
        for name in ("sink_mass", "sink_mass_renormalised"):
            value = values[f"model.layers.{layer}.self_attn", f"position.{end}.{name}"]
            assert value == pytest.approx(sum(masses) / len(masses), rel=1e-5)
        assert values[f"model.layers.{layer}.self_attn", f"position.{end}.null_mass"] == 0.0
    assert plain.metrics == found.metrics
    assert not any(item.name.startswith("position.") for item in plain.layers)


def test_a_record_has_its_details(measure: Measure, tiny_reference: Reference) -> None:
    """Window, tail and how many tokens were scored."""
    outcome: Outcome = measure(tiny_reference, TEXT, "context-64", task="text")

    assert outcome.protocol.name == "context-64"
    assert {"window": 64, "tail": "included", "scored": 399}.items() <= (
        outcome.protocol.details.items()
    )
    lengths = [row["num_tokens"] for row in outcome.samples]
    assert lengths == [64] * 6 + [15]
    assert all(a >= b for a, b in pairwise(lengths))
