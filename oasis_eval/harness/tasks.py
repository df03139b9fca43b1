"""What the lm-eval task files in `tasks/` refer to: documents in, numbers out.

Document fields: `text` (what a foreign model would be asked to score), `documents` (what ours cuts
into windows), `words` and `bytes` of the original text, and the protocol with its limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import datasets

from oasis_eval import corpus
from oasis_eval.errors import DataError
from oasis_eval.harness.answers import flexible_number, strict_number
from oasis_eval.harness.lm import Completion, PairScore, TextScore
from oasis_eval.harness.protocols import detokenizer, parse_protocol, texts_of
from oasis_eval.record import perplexity

Total = tuple[float, float]
"""Summed loss in nats, and what to divide it by."""


def text_documents(
    *,
    corpus_name: str,
    protocol: str,
    data: str | None = None,
    limit: int | None = None,
    loaded: corpus.Corpus | None = None,
    **_: object,
) -> dict[str, datasets.Dataset]:
    """Build the documents of a perplexity task.

    Args:
        corpus_name: Data set.
        protocol: Named protocol.
        data: Local file instead of the hub.
        limit: Windows to score; per-document protocols are limited by the harness.
        loaded: The corpus, where it is in memory already.
    """
    text = loaded or corpus.load(corpus_name, data=data)
    chosen = parse_protocol(protocol)
    detokenize = detokenizer(text.name) if chosen.per_document else str
    rows = [
        {
            "text": detokenize("".join(texts)) if chosen.per_document else "",
            "documents": [detokenize(item) for item in texts],
            "words": sum(len(re.split(r"\s+", item)) for item in texts),
            "bytes": sum(len(item.encode()) for item in texts),
            "oasis_protocol": protocol,
            "oasis_limit": None if chosen.per_document else limit,
        }
        for texts in texts_of(chosen, text)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def questions(  # noqa: PLR0913 - lm-eval hands over every key of a task's metadata
    *,
    corpus_name: str = "gsm8k",
    data: str | None = None,
    fewshot_data: str | None = None,
    shots: int = 5,
    loaded: corpus.Corpus | None = None,
    loaded_train: corpus.Corpus | None = None,
    **_: object,
) -> dict[str, datasets.Dataset]:
    """Build a task's test questions and, where examples are shown, its training questions.

    Args:
        corpus_name: Data set of `corpus`.
        data: Local file in the place of its test split.
        fewshot_data: Local file in the place of its training split.
        shots: Examples before each question; with none no training split is read.
        loaded: The test split, if it is at hand.
        loaded_train: The training split, if it is.

    Raises:
        DataError: A split cannot be had.
    """
    test = loaded or corpus.load(corpus_name, data=data)
    splits = {"test": datasets.Dataset.from_list(list(test.rows))}
    train = loaded_train
    if train is None and shots > 0:
        train = corpus.load(corpus_name, split="train", data=fewshot_data)
    if train is not None:
        splits["train"] = datasets.Dataset.from_list(list(train.rows))
    else:
        splits["train"] = splits["test"].select([])
    return splits


def score_tokens(doc: dict[str, Any], results: Sequence[float]) -> dict[str, object]:
    """Turn a text's score into token-level metrics."""
    score = _own(results[0])
    return {
        "token_perplexity": (-float(score), score.num_tokens),
        "nll_nats": -float(score),
        "num_tokens": score.num_tokens,
    }


def score_words(doc: dict[str, Any], results: Sequence[float]) -> dict[str, object]:
    """Turn a document's score into word- and byte-level metrics.

    A document without a scored token counts for nothing: neither its words nor its bytes.
    """
    score = _own(results[0])
    loss = -float(score)
    words, size = (doc["words"], doc["bytes"]) if score.num_tokens else (0, 0)
    return {
        "word_perplexity": (loss, words),
        "byte_perplexity": (loss, size),
        "bits_per_byte": (loss, size),
        "token_perplexity": (loss, score.num_tokens),
        "nll_nats": loss,
        "num_tokens": score.num_tokens,
        "num_words": words,
        "num_bytes": size,
        "num_skipped": int(score.num_tokens == 0),
    }


def _own(score: float) -> TextScore:
    if not isinstance(score, TextScore):
        raise DataError(
            "this task needs the windows of lm-eval's model type 'oasis'; another model type "
            "returns a bare sum, which has no token count"
        )
    return score


def score_answer(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Compare a completion with the reference answer, as numbers."""
    text = results[0]
    reference = strict_number(doc["answer"])
    if reference is None:
        raise DataError(f"a reference answer has no number after '####': {doc['answer']!r:.80}")
    strict, flexible = strict_number(text), flexible_number(text)
    own = text if isinstance(text, Completion) else None
    return {
        "pass@1": float(strict == reference),
        "pass@1_flexible": float(flexible == reference),
        "unread": float(strict is None),
        "cut": float(own is not None and own.cut),
        "prompt_truncated": float(own is not None and own.prompt_truncated),
    }


def score_reference(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Total]:
    """Return the loss of the reference answer; it still moves where Pass@1 is at the floor."""
    score = results[0]
    if not isinstance(score, PairScore):
        raise DataError("this task needs lm-eval's model type 'oasis'")
    return {"answer_nll_per_token": (-score[0], score.num_tokens)}


# --- aggregations -----------------------------------------------------------------------------


def total(values: Iterable[float]) -> float:
    """Return the sum."""
    return sum(values)


def total_perplexity(values: Iterable[Total]) -> float:
    """Return exp(summed loss / summed count); infinite instead of an overflow."""
    losses, counts = zip(*values, strict=True)
    return perplexity(sum(losses), sum(counts))


def total_bits(values: Iterable[Total]) -> float:
    """Return the summed loss in bits over the summed count."""
    return total_mean(values) / 0.6931471805599453


def total_mean(values: Iterable[Total]) -> float:
    """Return the summed loss over the summed count; NaN for a count of zero."""
    losses, counts = zip(*values, strict=True)
    return sum(losses) / sum(counts) if sum(counts) else float("nan")
