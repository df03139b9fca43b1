"""Counting tokens: what is scored, once, given what, and divided by what."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows

from oasis_eval.errors import DataError, OasisError
from oasis_eval.harness.lm import OasisLM
from oasis_eval.harness.protocols import parse_protocol, plan, prefix_token, rolling_windows
from oasis_eval.harness.run import Outcome
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.quant import schemes
from oasis_eval.registry import resolve
from tests import tiny
from tests.harness.conftest import Measure, Piece, load_folder, metric, nll_by_hand

SCHEMES = ("fp32", "w8a8", "w4a4")
TEXT = tiny.prose(700)
DOCUMENTS = [tiny.prose(length, seed=length) for length in (1, 5, 40, 41, 130, 260)]


def _rolled(tokenizer: object, documents: list[str], window: int) -> list[Piece]:
    """Rolling windows as lm-eval cuts them."""
    prefix, _ = prefix_token(tokenizer)
    pieces = []
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False).input_ids  # type: ignore[operator]
        for inputs, targets in get_rolling_token_windows(ids, prefix, window, 1):
            pieces.append(Piece([*inputs, targets[-1]], len(inputs) + 1 - len(targets)))
    return pieces


def _pieces(protocol: str, tokenizer: object, texts: list[str]) -> list[Piece]:
    """Windows of a protocol, written out from its definition."""
    kind, _, size = protocol.rpartition("-")
    window = int(size)
    encoded = [tokenizer(text).input_ids for text in texts]  # type: ignore[operator]
    stream = [token for ids in encoded for token in ids]
    whole = [stream[i : i + window] for i in range(0, len(stream) - window + 1, window)]
    if kind in ("gptq", "qualcomm"):
        return [Piece(ids, 1) for ids in whole]
    if kind == "openattnres":
        chunks = [stream[i : i + window] for i in range(0, len(stream), window)]
        return [Piece(ids, 1) for ids in chunks[:200] if len(ids) > 1]
    if kind == "llamacpp":
        if stream[0] == tokenizer.bos_token_id:  # type: ignore[attr-defined]
            whole = [[stream[0], *ids[1:]] for ids in whole]
        return [Piece(ids, window // 2 + 1) for ids in whole]
    return _rolled(tokenizer, texts, window)


def _check_by_hand(outcome: Outcome, nll: float, count: int) -> None:
    assert metric(outcome, "num_tokens") == count
    assert metric(outcome, "nll_nats") == pytest.approx(nll, rel=5e-5)
    assert metric(outcome, "token_perplexity") == pytest.approx(math.exp(nll / count), rel=5e-5)
    assert sum(row["num_tokens"] for row in outcome.samples) == count  # type: ignore[misc]
    assert sum(row["nll_nats"] for row in outcome.samples) == pytest.approx(nll, rel=5e-5)  # type: ignore[misc]


@pytest.mark.parametrize("starts", [False, True], ids=["no-start", "start"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "protocol",
    [
        "gptq-64",
        "gptq-128",
        "openattnres-64",
        "llamacpp-64",
        "llamacpp-33",
        "qualcomm-50",
        "rolling-word-50",
        "rolling-word-128",
    ],
)
def test_every_protocol_equals_the_loop_by_hand(
    measure: Measure,
    tiny_reference: Reference,
    starting_reference: Reference,
    protocol: str,
    scheme: str,
    starts: bool,
) -> None:
    """Losses and counts are those of one unbatched forward pass per window, summed in float64."""
    reference = starting_reference if starts else tiny_reference
    per_document = protocol.startswith(("rolling", "qualcomm"))
    texts = DOCUMENTS if per_document else [TEXT]

    outcome = measure(reference, texts if per_document else TEXT, protocol, scheme=scheme)

    pieces = _pieces(protocol, reference.tokenizer, texts)
    with prepare(reference, schemes.resolve(scheme), dtype="fp32") as prepared:
        _check_by_hand(outcome, *nll_by_hand(prepared.model, pieces))


@given(length=st.integers(1, 70), window=st.integers(1, 20), prefix=st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_rolling_windows_are_those_of_lm_eval(length: int, window: int, prefix: int) -> None:
    """Inputs, targets and context of every window equal lm-eval's, whatever the lengths."""
    ids = list(range(100, 100 + length))

    ours = [(w.input_ids, w.targets, w.offset) for w in rolling_windows(ids, prefix, window)]

    theirs = get_rolling_token_windows(ids, prefix, window, 1)
    assert ours == [(list(x), list(y), len(x) - len(y)) for x, y in theirs]


@given(length=st.integers(0, 70), window=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_rolling_without_prefix_scores_every_token_but_the_first(length: int, window: int) -> None:
    """Each token after the first is a target once, in order, and no pass exceeds the window."""
    ids = list(range(100, 100 + length))

    windows = list(rolling_windows(ids, None, window))

    assert [token for item in windows for token in item.targets] == ids[1:]
    assert all(len(item.input_ids) <= window for item in windows)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a16-g32", "bf16"])
@pytest.mark.parametrize("protocol", ["gptq-27", "qualcomm-33", "openattnres-128", "llamacpp-64"])
def test_a_uniform_model_has_its_vocabulary_as_perplexity(
    measure: Measure, uniform_reference: Reference, protocol: str, scheme: str, batch_size: int
) -> None:
    """256 for every windowed protocol, quantization and batch size."""
    texts = DOCUMENTS if protocol.startswith("qualcomm") else TEXT

    outcome = measure(uniform_reference, texts, protocol, scheme=scheme, batch_size=batch_size)

    assert metric(outcome, "token_perplexity") == pytest.approx(256.0, rel=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1000])
def test_a_document_is_divided_by_the_tokens_scored(
    measure: Measure, uniform_reference: Reference, length: int, scheme: str
) -> None:
    """A document shorter, as long as, or longer than the positions: each token counts once."""
    text = tiny.prose(length)

    outcome = measure(uniform_reference, text, "rolling-word", scheme=scheme)

    assert metric(outcome, "num_tokens") == length
    assert metric(outcome, "token_perplexity") == pytest.approx(256.0, rel=1e-6)
    assert metric(outcome, "bits_per_byte") == pytest.approx(8.0, rel=1e-6)
    words = len(text.split())
    assert metric(outcome, "num_words") == words
    assert math.log(metric(outcome, "word_perplexity")) == pytest.approx(
        length / words * math.log(256), rel=1e-6
    )


@pytest.mark.parametrize(
    ("generation", "model_max_length"),
    [({"max_length": 20}, None), (None, 1e30), (None, 16), ({"max_length": 20}, 1e30)],
)
def test_the_window_is_the_models_positions(
    tmp_path: Path,
    measure: Measure,
    generation: dict[str, object] | None,
    model_max_length: float | None,
) -> None:
    """Neither a generation default nor a tokenizer's length is taken for the positions."""
    tokenizer = tiny.build_tokenizer(model_max_length=model_max_length)
    folder = tiny.save(tmp_path / "m", tokenizer=tokenizer, generation=generation)
    reference = load_folder(folder)
    text = tiny.prose(1000)

    outcome = measure(reference, text, "rolling-word")

    assert outcome.protocol.details["window"] == tiny.POSITIONS
    pieces = _rolled(reference.tokenizer, [text], tiny.POSITIONS)
    _check_by_hand(outcome, *nll_by_hand(reference.model, pieces))
    assert metric(outcome, "num_tokens") == 1000


LENGTHS = (3, 7, 20, 21, 60, 61, 90, 120)


@pytest.mark.parametrize("padding", ["own", "end", "none"])
def test_batches_and_pad_tokens_change_nothing(
    tmp_path: Path, measure: Measure, padding: tiny.Padding
) -> None:
    """Documents of many lengths: one perplexity and count at any batch size, padding or none."""
    folder = tiny.save(tmp_path / "m", tokenizer=tiny.build_tokenizer(padding=padding))
    reference = load_folder(folder)
    documents = [tiny.prose(length, seed=length) for length in LENGTHS]

    outcomes = [
        measure(reference, documents, "rolling-word", batch_size=size) for size in (1, 3, 8)
    ]

    pieces = [Piece([1, *reference.tokenizer(text).input_ids], 1) for text in documents]
    nll, count = nll_by_hand(reference.model, pieces)
    assert count == sum(LENGTHS)
    for outcome in outcomes:
        _check_by_hand(outcome, nll, count)
        assert [row["num_tokens"] for row in outcome.samples] == list(LENGTHS)


def test_windows_of_one_batch_keep_their_own_losses(
    measure: Measure, tiny_reference: Reference
) -> None:
    """Batching and sorting by length never exchange two windows' values."""
    documents = [tiny.prose(length, seed=length) for length in (60, 3, 60, 90, 3, 60)]

    single = measure(tiny_reference, documents, "rolling-word-50", batch_size=1).samples
    batched = measure(tiny_reference, documents, "rolling-word-50", batch_size=4).samples

    for one, other in zip(single, batched, strict=True):
        assert (one["document"], one["window"]) == (other["document"], other["window"])
        assert one["nll_nats"] == pytest.approx(other["nll_nats"], rel=1e-5)


# --- degenerate documents ---------------------------------------------------------------------

LINES = ["", " ", "\n", "a", "An ordinary line of text."]


def test_lines_without_a_scored_token_count_for_nothing(
    measure: Measure, tiny_reference: Reference
) -> None:
    """They change no number, and their count is reported."""
    with_empty = measure(tiny_reference, LINES, "rolling-word")
    without = measure(tiny_reference, [line for line in LINES if line != ""], "rolling-word")

    assert with_empty.protocol.details["skipped"] == 1
    assert without.protocol.details["skipped"] == 0
    assert any("1 documents" in text for text in with_empty.warnings)
    assert with_empty.metrics == without.metrics


@pytest.mark.parametrize("protocol", ["rolling-word", "qualcomm-8"])
def test_one_token_documents_without_prefix(
    tmp_path: Path, measure: Measure, protocol: str
) -> None:
    """Without start and end token a one-token document has nothing to score, and does not fail."""
    folder = tiny.save(tmp_path / "m", tokenizer=tiny.build_tokenizer(specials="none"))
    reference = load_folder(folder)

    outcome = measure(reference, ["a", "", "b", "abcdefgh", "c"], protocol)

    assert math.isfinite(metric(outcome, "token_perplexity"))
    assert metric(outcome, "num_tokens") == 7


def test_a_corpus_that_yields_no_scored_token_is_an_error(tmp_path: Path, measure: Measure) -> None:
    """Not NaN, 0 or 1, where every document has a single token and nothing comes before it."""
    folder = tiny.save(tmp_path / "m", tokenizer=tiny.build_tokenizer(specials="none"))

    with pytest.raises(DataError, match="no token to score in 3 documents"):
        measure(load_folder(folder), ["a", "b", ""], "rolling-word")


@pytest.mark.parametrize("texts", ["", " ", "\n\n \n", ["", " ", "\n"], []])
def test_a_blank_corpus_is_an_error(
    measure: Measure, tiny_reference: Reference, texts: str | list[str]
) -> None:
    """One line that names the corpus, whatever the form of blankness."""
    with pytest.raises(DataError, match="holds no text"):
        measure(tiny_reference, texts, "rolling-word")


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("gptq-256", "window of 256 tokens, the model has 128 positions"),
        ("rolling-word-129", "window of 129"),
        ("gptq-128", "the text has 100 tokens, a window needs 128"),
        ("qualcomm-128", "the text has 100 tokens, a window needs 128"),
        ("llamacpp-128", "the text has 100 tokens, a window needs 128"),
    ],
)
def test_windows_that_do_not_fit_are_refused(
    measure: Measure, tiny_reference: Reference, protocol: str, message: str
) -> None:
    """A window longer than the positions or the text names both numbers."""
    with pytest.raises(DataError, match=message):
        measure(tiny_reference, tiny.prose(100), protocol)


def test_openattnres_takes_the_short_tail_and_at_most_200_windows(
    tiny_reference: Reference,
) -> None:
    """The tail of two tokens is a window, one token is not, and the 201st window is dropped."""
    tokenizer = tiny_reference.tokenizer

    def lengths(text: str, window: int = 4) -> list[int]:
        protocol = parse_protocol(f"openattnres-{window}")
        made = plan(protocol, [text], tokenizer, context_length=128)
        return [len(item.input_ids) for item in made.windows]

    assert lengths("abcdef") == [4, 2]
    assert lengths("abcde") == [4]
    assert lengths("abc") == [3]
    assert lengths("a" * 1000) == [4] * 200


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["gptq-64", "openattnres-64", "llamacpp-64", "qualcomm-64"])
def test_a_limit_takes_the_first_windows(
    measure: Measure, tiny_reference: Reference, protocol: str, limit: int
) -> None:
    """The limited run's windows are the first of the whole run's."""
    whole = measure(tiny_reference, TEXT, protocol).samples
    limited = measure(tiny_reference, TEXT, protocol, limit=limit).samples

    assert len(limited) == limit
    assert [row["nll_nats"] for row in limited] == [row["nll_nats"] for row in whole[:limit]]


def test_a_limit_of_a_rolling_protocol_counts_documents(
    measure: Measure, tiny_reference: Reference
) -> None:
    """Two documents, however many windows they have."""
    outcome = measure(tiny_reference, ["ab" * 100, "cd", "ef"], "rolling-word-50", limit=2)

    assert {row["document"] for row in outcome.samples} == {0, 1}
    assert metric(outcome, "num_tokens") == 202


def test_qualcomm_concatenates_per_thousand_documents(tiny_reference: Reference) -> None:
    """A block never spans two groups of documents; each group drops its own remainder."""
    texts = ["abc"] * 1000 + ["defg"] * 2
    made = plan(parse_protocol("qualcomm-7"), texts, tiny_reference.tokenizer, context_length=128)

    assert len(made.windows) == 3000 // 7 + 8 // 7
    d = tiny_reference.tokenizer("d").input_ids
    assert made.windows[-1].input_ids[:1] == d


def test_qualcomm_batch_mean_stands_beside(measure: Measure, tiny_reference: Reference) -> None:
    """The literature's variant is the exponential of the unweighted mean of batch losses."""
    outcome = measure(tiny_reference, DOCUMENTS, "qualcomm-50", batch_size=4)

    means = [row["nll_nats"] / row["num_tokens"] for row in outcome.samples]  # type: ignore[operator]
    batches = [means[i : i + 4] for i in range(0, len(means), 4)]
    expected = math.exp(sum(sum(b) / len(b) for b in batches) / len(batches))
    assert metric(outcome, "token_perplexity_batch_mean") == pytest.approx(expected, rel=1e-9)


def test_the_text_of_llamacpp_is_the_files(measure: Measure, uniform_reference: Reference) -> None:
    """Level-one headings and empty lines reach the model as they are in the file."""
    text = " \n = Title = \n \n Words . \n" * 5

    outcome = measure(uniform_reference, text, "llamacpp-10", task="wikitext2")

    assert metric(outcome, "num_tokens") == len(text) // 10 * 4


def test_the_stderr_of_llamacpp_is_over_tokens(measure: Measure, tiny_reference: Reference) -> None:
    """As llama.cpp prints it: perplexity times the standard error of the mean token loss."""
    outcome = measure(tiny_reference, TEXT, "llamacpp-64")

    ids = tiny_reference.tokenizer(TEXT).input_ids
    losses = []
    for start in range(0, len(ids) - 63, 64):
        window = torch.tensor(ids[start : start + 64])
        with torch.no_grad():
            log_p = tiny_reference.model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        losses.append(-log_p[32:63].gather(-1, window[33:, None])[:, 0])
    loss = torch.cat(losses)
    expected = loss.mean().exp() * (loss.var(correction=0) / (len(loss) - 1)).sqrt()
    found = next(item for item in outcome.metrics if item.name == "token_perplexity")
    assert found.stderr == pytest.approx(float(expected), rel=1e-4)


# --- the prefix token -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specials", "name", "prefix", "length"),
    [
        (*choice, length)
        for choice in (("start+end", "bos", [1]), ("end", "eos", [2]), ("none", "none", []))
        for length in (1, 2, 50, 300)
        if (choice[0], length) != ("none", 1)  # nothing to score
    ],
)
def test_a_document_is_conditioned_on_start_else_end_else_nothing(
    tmp_path: Path,
    measure: Measure,
    specials: tiny.Specials,
    name: str,
    prefix: list[int],
    length: int,
) -> None:
    """Equal to the loss by hand with that prefix; the choice is in the result."""
    model = tiny.build_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[2] *= 50
    folder = tiny.save(
        tmp_path / "m", model=model, tokenizer=tiny.build_tokenizer(specials=specials)
    )
    reference = load_folder(folder)
    text = tiny.prose(length)

    outcome = measure(reference, text, "rolling-word")

    ids = [*prefix, *reference.tokenizer(text).input_ids]
    pieces, at = [], 1
    while at < len(ids):
        end = min(at + 128, len(ids)) if at > 1 else min(129, len(ids))
        start = max(0, end - 129)
        pieces.append(Piece(ids[start:end], at - start))
        at = end
    _check_by_hand(outcome, *nll_by_hand(reference.model, pieces))
    assert outcome.protocol.details["prefix"] == name


@pytest.mark.parametrize("specials", ["start+end", "end", "none"])
def test_any_lm_eval_task_gets_the_same_prefix(
    tmp_path: Path, measure: Measure, specials: tiny.Specials
) -> None:
    """A bare rolling request, as a stock task makes it, has the score of our own task."""
    folder = tiny.save(tmp_path / "m", tokenizer=tiny.build_tokenizer(specials=specials))
    reference = load_folder(folder)

    outcome = measure(reference, TEXT, "rolling-word")
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        request = Instance("loglikelihood_rolling", {"page": TEXT}, (TEXT,), 0)
        (score,) = OasisLM(prepared, quiet=True).loglikelihood_rolling([request])

    assert -score == pytest.approx(metric(outcome, "nll_nats"), rel=1e-9)


def test_the_head_of_a_stream_is_the_tokenizers_own(
    measure: Measure, tiny_reference: Reference, starting_reference: Reference
) -> None:
    """`gptq` adds no start token of its own, keeps the tokenizer's, once, and says which."""
    plain = measure(tiny_reference, TEXT, "gptq-64")
    starting = measure(starting_reference, TEXT, "gptq-64")

    assert plain.protocol.details["prefix"] == "none"
    assert starting.protocol.details["prefix"] == "bos"
    assert metric(plain, "nll_nats") != pytest.approx(metric(starting, "nll_nats"), rel=1e-6)


def test_positions_can_come_from_the_card(tmp_path: Path, measure: Measure) -> None:
    """A card's context length is the default window."""
    folder = tiny.save(tmp_path / "m")
    card = resolve(str(folder)).model_copy(update={"context_length": 40})
    reference = load(card, dtype="fp32")

    outcome = measure(reference, TEXT, "rolling-word")

    assert outcome.protocol.details["window"] == 40
    with pytest.raises(OasisError, match="40"):
        measure(reference, TEXT, "gptq-64")
