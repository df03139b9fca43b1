"""What `tasks/oasis_passkey*.yaml` refer to, and the numbers of a passkey run.

Exact match is whether the first number in the completion is the key. Beside it stands the loss of
the key under the same prompt, and whether each of its tokens is the most likely one, for models
that never answer. Both are split by context length and depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import datasets

from oasis_eval import corpus
from oasis_eval.corpus import encode, head_tokens
from oasis_eval.errors import DataError
from oasis_eval.harness.lm import Completion, PairScore
from oasis_eval.harness.protocols import Details, Protocol, new_tokens, parse_protocol
from oasis_eval.minicorpus.passkey import prompt
from oasis_eval.prepared import PreparedModel
from oasis_eval.record import Metric
from oasis_eval.spec import TaskRef
from oasis_eval.statistics import wilson

_NUMBER = re.compile(r"\d+")


def documents(  # noqa: PLR0913 - lm-eval hands over every key of a task's metadata
    *,
    protocol: str,
    data: str | None = None,
    loaded: corpus.Corpus | None = None,
    tokenizer: Any = None,
    model: str | None = None,
    max_new_tokens: int | None = None,
    **_: object,
) -> dict[str, datasets.Dataset]:
    """Build the prompts: each row at each context length of the protocol, row by row.

    Args:
        protocol: `passkey-N`.
        data: Local file of rows instead of the generated ones.
        loaded: The rows, where they are in memory already.
        tokenizer: Of the model that is asked; None: that of `model`.
        model: What `evaluate` takes, from lm-eval's `--model_args`.
        max_new_tokens: Room for the answer; prompt and answer fit the context together.

    Raises:
        DataError: There is no tokenizer to measure prompts with, a row is none, or a context is
            too short for the question.
    """
    rows = (loaded or corpus.load("passkey", data=data)).rows
    if tokenizer is None:
        tokenizer = _tokenizer_of(model)
    head = len(head_tokens(tokenizer))

    def count(text: str) -> int:
        return head + len(encode(tokenizer, text, special_tokens=False))

    answer_room = new_tokens("passkey") if max_new_tokens is None else max_new_tokens
    found = []
    for row in rows:
        key, depth = row["key"], _depth(row["depth"])
        if not key.isdecimal():
            raise DataError(f"passkey: key {key!r} is no number; expected digits")
        for length in parse_protocol(protocol).lengths:
            made = prompt(row["number"], key, depth, most_tokens=length - answer_room, count=count)
            found.append(
                {
                    "prompt": made.text,
                    "key": key,
                    "depth": depth,
                    "length": length,
                    "number": row["number"],
                    "filler": made.num_filler,
                }
            )
    return {"test": datasets.Dataset.from_list(found)}


def check_positions(prepared: PreparedModel, protocol: Protocol) -> None:
    """Refuse contexts that a model has no positions for; text protocols do so when they cut.

    Raises:
        DataError: The longest context of a passkey protocol is too long.
    """
    positions = prepared.context_length
    if protocol.kind != "passkey" or positions is None or protocol.window is None:
        return
    if protocol.window > positions:
        raise DataError(
            f"{protocol.name}: a context of {protocol.window} tokens, the model has {positions} "
            f"positions; give --window {positions} or less"
        )


def details_of(task: TaskRef, protocol: Protocol, batch_size: int) -> Details:
    """Return what a run decided."""
    return {
        "window": protocol.window,
        "lengths": ", ".join(str(length) for length in protocol.lengths),
        "max_new_tokens": task.max_new_tokens,
        "limit": task.limit,
        "batch_size": batch_size,
    }


def score_key(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Compare the first number of a completion with the key, digit by digit."""
    text = results[0]
    own = text if isinstance(text, Completion) else None
    found = _NUMBER.search(text)
    return {
        "exact_match": float(found is not None and found[0] == doc["key"]),
        "unread": float(found is None),
        "cut": float(own is not None and own.cut),
        "prompt_truncated": float(own is not None and own.prompt_truncated),
    }


def score_likelihood(
    doc: dict[str, Any], results: Sequence[tuple[float, bool]]
) -> dict[str, object]:
    """Return the loss of the key and whether it is what the model would say, token by token."""
    score = results[0]
    if not isinstance(score, PairScore):
        raise DataError("this task needs lm-eval's model type 'oasis'")
    return {
        "answer_nll_per_token": (-score[0], score.num_tokens),
        "greedy_match": float(score[1]),
    }


def samples_of(result: Any, task: TaskRef) -> list[dict[str, object]]:
    """Return one row a prompt, from lm-eval's results of both tasks."""
    asked, answered = f"oasis_{task.name}", f"oasis_{task.name}_answer"
    answers = {
        sample["doc_id"]: sample["filtered_resps"][0] for sample in result["samples"][answered]
    }
    rows: list[dict[str, object]] = []
    for sample in result["samples"][asked]:
        doc, completion = sample["doc"], sample["filtered_resps"][0]
        answer = answers[sample["doc_id"]]
        is_right = bool(sample["exact_match"])
        rows.append(
            {
                "task": task.name,
                "protocol": task.protocol,
                "question": sample["doc_id"],
                "text": f"passkey {doc['number']}, {doc['length']} tokens, depth {doc['depth']:g}",
                "length": doc["length"],
                "depth": doc["depth"],
                "reference": doc["key"],
                "completion": str(completion),
                "strict": is_right,
                "flexible": is_right,
                "unread": bool(sample["unread"]),
                "cut": completion.cut,
                "prompt_tokens": completion.prompt_tokens,
                "prompt_truncated": completion.prompt_truncated,
                "num_tokens": completion.num_tokens,
                "answer_nll_nats": -answer[0],
                "answer_tokens": answer.num_tokens,
                "greedy": bool(answer[1]),
            }
        )
    return rows


def metrics_of(samples: Sequence[dict[str, Any]], task: TaskRef) -> tuple[Metric, ...]:
    """Return shares and losses of all prompts, of each length, each depth, and each of both."""
    groups: dict[str, list[dict[str, Any]]] = {"": list(samples)}
    for row in samples:
        length, depth = f"_{row['length']}", f"_depth_{row['depth']:g}"
        for name in (length, depth, length + depth):
            groups.setdefault(name, []).append(row)
    found: list[Metric] = []
    for suffix, rows in groups.items():
        found += _shares(rows, suffix, task)
    whole = found[0]
    interval = wilson(sum(bool(row["strict"]) for row in samples), len(samples))
    for name, value in (("low", interval.low), ("high", interval.high)):
        found.append(
            whole.model_copy(update={"name": f"exact_match_{name}", "value": value, "stderr": None})
        )
    for name in ("unread", "cut"):
        share = sum(bool(row[name]) for row in samples) / len(samples)
        found.append(whole.model_copy(update={"name": name, "value": share, "stderr": None}))
    return tuple(sorted(found, key=lambda metric: metric.name))


def _shares(rows: Sequence[dict[str, Any]], suffix: str, task: TaskRef) -> list[Metric]:
    n = len(rows)
    found = []
    for name, column in (("exact_match", "strict"), ("greedy_match", "greedy")):
        share = sum(bool(row[column]) for row in rows) / n
        stderr = math.sqrt(share * (1.0 - share) / (n - 1)) if n > 1 else None
        found.append(
            Metric(
                task=task.name,
                name=name + suffix,
                value=share,
                stderr=stderr,
                count=n,
                protocol=task.protocol,
            )
        )
    loss = math.fsum(row["answer_nll_nats"] for row in rows)
    tokens = sum(row["answer_tokens"] for row in rows)
    found.append(
        Metric(
            task=task.name,
            name=f"answer_nll_per_token{suffix}",
            value=loss / tokens,
            count=n,
            protocol=task.protocol,
        )
    )
    return found


def _depth(text: str) -> float:
    try:
        depth = float(text)
    except ValueError:
        depth = math.nan
    if not 0.0 <= depth <= 1.0:
        raise DataError(f"passkey: depth {text!r}; expected a number from 0 to 1")
    return depth


def _tokenizer_of(model: str | None) -> Any:
    """Return the tokenizer of a model that lm-eval's command line names."""
    if model is None:
        raise DataError(
            "passkey: prompts are measured with the model's tokenizer; run it with model type "
            "'oasis', --model_args model=..."
        )
    from oasis_eval import checkpoint, registry
    from oasis_eval.pretrained import load_tokenizer

    return load_tokenizer(checkpoint.locate(registry.resolve(model)))
