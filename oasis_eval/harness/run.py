"""One task on one prepared model, through lm-eval, as metrics and per-sample values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from oasis_eval import corpus
from oasis_eval.errors import DataError, SpecError, UnknownNameError
from oasis_eval.harness.answers import FILTERS
from oasis_eval.harness.protocols import (
    TASKS,
    Details,
    Protocol,
    Window,
    detokenizer,
    fits,
    parse_protocol,
    plan,
    texts_of,
)
from oasis_eval.harness.scoring import WindowScore
from oasis_eval.paths import data_folder
from oasis_eval.prepared import PreparedModel
from oasis_eval.record import DataInfo, Metric, ProtocolInfo
from oasis_eval.spec import TaskRef

FEWSHOT_SEED = 1234
"""lm-eval's own default, so that its prompts are ours."""


@dataclass(frozen=True, slots=True)
class TaskData:
    """The texts of one task, read once for all models and schemes."""

    corpora: tuple[corpus.Corpus, ...]
    """The scored text first; for questions with examples, the training questions second."""

    @property
    def infos(self) -> tuple[DataInfo, ...]:
        """What a record stores about them."""
        return tuple(item.info for item in self.corpora)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one task gave."""

    metrics: tuple[Metric, ...]
    protocol: ProtocolInfo
    samples: list[dict[str, object]]
    warnings: tuple[str, ...]


def protocols_for(task: str, protocols: Sequence[Protocol]) -> list[Protocol]:
    """Return which of the given protocols apply to a task; its default where none does.

    Raises:
        UnknownNameError: No such task.
    """
    if task not in TASKS:
        raise UnknownNameError("task", task, TASKS)
    chosen = [item for item in protocols if fits(item, task)]
    return chosen or [parse_protocol(TASKS[task])]


def load_data(task: TaskRef, *, fewshot: str | None) -> TaskData:
    """Read a task's texts.

    Args:
        task: What is asked for; its `data` may name a local file.
        fewshot: Local file of training questions that stands in for the data set's own.

    Raises:
        DataError: They cannot be had.
    """
    text = corpus.load(task.name, data=task.data)
    shots = parse_protocol(task.protocol).shots
    if shots == 0:
        return TaskData((text,))
    train = corpus.load(task.name, split="train", data=fewshot)
    if len(train.rows) < shots:
        raise SpecError(f"{task.protocol}: {train.origin} has {len(train.rows)} questions")
    return TaskData((text, train))


def evaluate(
    prepared: PreparedModel, task: TaskRef, data: TaskData, *, batch_size: int, quiet: bool
) -> Outcome:
    """Run one task.

    Args:
        prepared: Model under its scheme.
        task: What to run.
        data: Its texts, from `load_data`.
        batch_size: Sequences of one forward pass.
        quiet: Whether to hide progress bars.

    Raises:
        DataError: The text is too short for the protocol, has nothing to score, or the window is
            too long for the model.
        SpecError: The generation budget does not fit the model.
    """
    from lm_eval.evaluator import evaluate as lm_evaluate
    from lm_eval.tasks import TaskManager

    from oasis_eval.harness import passkey
    from oasis_eval.harness.lm import OasisLM

    protocol = parse_protocol(task.protocol)
    metadata = {
        "protocol": task.protocol,
        "corpus_name": task.name,
        "limit": task.limit,
        "shots": protocol.shots,
        "loaded": data.corpora[0],
        "loaded_train": data.corpora[1] if len(data.corpora) > 1 else None,
        "tokenizer": prepared.tokenizer,
        "max_new_tokens": task.max_new_tokens,
    }
    passkey.check_positions(prepared, protocol)
    manager = TaskManager(
        include_path=str(data_folder("tasks")), include_defaults=False, metadata=metadata
    )
    names = _lm_eval_names(task.name, protocol)
    with _own_progress_only():
        loaded = manager.load(names)
    for item in loaded["tasks"].values():
        item.set_fewshot_seed(seed=FEWSHOT_SEED)
        if protocol.asks:
            item.set_config(key="num_fewshot", value=protocol.shots)
            if item.OUTPUT_TYPE == "generate_until":
                item.set_config(
                    key="generation_kwargs",
                    value={"max_gen_toks": task.max_new_tokens},
                    update=True,
                )
            elif task.chat_template:  # an answer is a turn of its own there
                item.set_config(key="doc_to_target", value="{{answer}}")
    model = OasisLM(prepared, batch_size=batch_size, quiet=quiet)
    per_item = protocol.per_document or protocol.asks
    with _own_progress_only():
        result = lm_evaluate(
            lm=model,
            task_dict=loaded,
            limit=task.limit if per_item else None,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=task.chat_template,
            fewshot_as_multiturn=task.chat_template,
        )
    assert result is not None  # only ranks above 0 get None
    if protocol.kind == "gsm8k":
        return _question_outcome(result, task, protocol, batch_size)
    if protocol.kind == "passkey":
        samples = passkey.samples_of(result, task)
        details = passkey.details_of(task, protocol, batch_size)
        return Outcome(passkey.metrics_of(samples, task), _info(protocol, details), samples, ())
    return _text_outcome(result, names[0], task, protocol, batch_size)


def input_windows(prepared: PreparedModel, task: TaskRef, data: TaskData) -> list[list[int]]:
    """Return the token ids of every forward pass; see `scored_windows`."""
    return [window.input_ids for window in scored_windows(prepared, task, data)]


def scored_windows(prepared: PreparedModel, task: TaskRef, data: TaskData) -> list[Window]:
    """Return every forward pass that scoring a text task takes, in the order of its samples.

    Args:
        prepared: For its tokenizer and its number of positions.
        task: A perplexity task.
        data: Its texts, from `load_data`.

    Raises:
        DataError: The text is too short for the protocol, or the window too long for the model.
    """
    protocol, text = parse_protocol(task.protocol), data.corpora[0]
    units = texts_of(protocol, text)
    limit: int | None = task.limit
    detokenize: Callable[[str], str] = str
    if protocol.per_document:  # a limit counts documents there
        units, limit, detokenize = units[: task.limit], None, detokenizer(text.name)
    plans = [
        plan(
            protocol,
            [detokenize(item) for item in unit],
            prepared.tokenizer,
            context_length=prepared.context_length,
            limit=limit,
        )
        for unit in units
    ]
    return [window for item in plans for window in item.windows]


@contextmanager
def _own_progress_only() -> Iterator[None]:
    """Keep lm-eval's log and its bars over requests from standing between ours."""
    from lm_eval.api import task as lm_eval_task

    logger = logging.getLogger("lm_eval")
    level, bar = logger.level, lm_eval_task.tqdm
    logger.setLevel(logging.ERROR)
    lm_eval_task.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval_task.tqdm = bar


def _lm_eval_names(task: str, protocol: Protocol) -> list[str]:
    if protocol.asks:
        return [f"oasis_{task}", f"oasis_{task}_answer"]
    return [f"oasis_{task}_word" if protocol.per_document else f"oasis_{task}"]


def _values(result: Any, name: str) -> dict[str, float]:
    """Return lm-eval's metrics of one task without the filter suffix."""
    return {
        key.partition(",")[0]: float(value)
        for key, value in result["results"][name].items()
        if "," in key and "_stderr" not in key
    }


# --- perplexity -------------------------------------------------------------------------------


def _text_outcome(
    result: Any, name: str, task: TaskRef, protocol: Protocol, batch_size: int
) -> Outcome:
    values = _values(result, name)
    samples: list[dict[str, object]] = []
    details: Details = {}
    for sample in result["samples"][name]:
        score = sample["filtered_resps"][0]
        details = {**score.details, "limit": task.limit, "batch_size": batch_size}
        for index, window in enumerate(score.windows):
            samples.append(
                {
                    "task": task.name,
                    "protocol": task.protocol,
                    "document": sample["doc_id"],
                    "window": index,
                    "nll_nats": window.nll_nats,
                    "num_tokens": window.num_tokens,
                    "squares": window.squares,
                    **_positions(window),
                }
            )
    if not samples:
        raise DataError(
            f"{task.name}: {task.protocol} finds no token to score in "
            f"{len(result['samples'][name])} documents"
        )
    skipped = int(values.pop("num_skipped", details.get("skipped") or 0))
    details["skipped"] = skipped
    if protocol.kind == "qualcomm":
        values["token_perplexity_batch_mean"] = _batch_mean(samples, batch_size)
    stderr = _log_stderr(samples, per_token=protocol.kind == "llamacpp")
    finite = math.isfinite(values.get("token_perplexity", math.nan))
    metrics = tuple(
        Metric(
            task=task.name,
            name=metric,
            value=value,
            stderr=value * stderr if metric == "token_perplexity" and stderr and finite else None,
            count=len(samples),
            protocol=task.protocol,
        )
        for metric, value in sorted(values.items())
    )
    warnings = (f"{skipped} documents without a scored token were skipped",) if skipped else ()
    return Outcome(metrics, _info(protocol, details), samples, warnings)


def _positions(window: WindowScore) -> dict[str, object]:
    """Return a window's losses by position, where its protocol asks for them."""
    if not window.by_position:
        return {}
    return {
        "position_last": [item.last for item in window.by_position],
        "position_nats": [item.nll_nats for item in window.by_position],
        "position_tokens": [item.num_tokens for item in window.by_position],
    }


def _batch_mean(samples: list[dict[str, Any]], batch_size: int) -> float:
    """Return exp of the unweighted mean of batch losses, as the outlier literature reports it."""
    means = [row["nll_nats"] / row["num_tokens"] for row in samples]
    batches = [means[at : at + batch_size] for at in range(0, len(means), batch_size)]
    mean = sum(sum(batch) / len(batch) for batch in batches) / len(batches)
    return math.exp(mean) if mean < 709.0 else (mean if math.isnan(mean) else math.inf)


def _log_stderr(samples: list[dict[str, Any]], *, per_token: bool) -> float | None:
    """Return the standard error of ln perplexity.

    Per token as llama.cpp prints it, else over windows (a ratio estimator: windows may differ in
    length). Windows are treated as independent.
    """
    tokens = sum(row["num_tokens"] for row in samples)
    if not tokens:
        return None
    mean = sum(row["nll_nats"] for row in samples) / tokens
    if per_token:
        variance = sum(row["squares"] for row in samples) / tokens - mean * mean
        return math.sqrt(variance / (tokens - 1)) if tokens > 1 and variance >= 0 else None
    n = len(samples)
    if n < 2 or not math.isfinite(mean):
        return None
    residual: float = sum((row["nll_nats"] - mean * row["num_tokens"]) ** 2 for row in samples)
    return math.sqrt(residual * n / (n - 1)) / float(tokens)


# --- questions --------------------------------------------------------------------------------


def _question_outcome(result: Any, task: TaskRef, protocol: Protocol, batch_size: int) -> Outcome:
    asked, answered = _lm_eval_names(task.name, protocol)
    values = {**_values(result, asked), **_values(result, answered)}
    samples: list[dict[str, object]] = []
    answers = {
        sample["doc_id"]: sample["filtered_resps"][0] for sample in result["samples"][answered]
    }
    for sample in result["samples"][asked]:
        completion = sample["filtered_resps"][0]
        answer = answers[sample["doc_id"]]
        samples.append(
            {
                "task": task.name,
                "protocol": task.protocol,
                "question": sample["doc_id"],
                "text": sample["doc"]["question"],
                "reference": sample["doc"]["answer"],
                "completion": str(completion),
                "strict": bool(sample["pass@1"]),
                "flexible": bool(sample["pass@1_flexible"]),
                "unread": bool(sample["unread"]),
                "cut": completion.cut,
                "prompt_tokens": completion.prompt_tokens,
                "prompt_truncated": completion.prompt_truncated,
                "num_tokens": completion.num_tokens,
                "answer_nll_nats": -answer[0],
                "answer_tokens": answer.num_tokens,
            }
        )
    n = len(samples)
    details: Details = {
        "shots": protocol.shots,
        "chat_template": task.chat_template,
        "max_new_tokens": task.max_new_tokens,
        "limit": task.limit,
        "batch_size": batch_size,
        "fewshot_seed": FEWSHOT_SEED,
        "num_cut": round(values["cut"] * n),
        "num_unread": round(values["unread"] * n),
        "num_prompt_truncated": round(values["prompt_truncated"] * n),
    }
    metrics = tuple(
        Metric(
            task=task.name,
            name=metric,
            value=value,
            stderr=_binomial_stderr(value, n) if metric.startswith("pass@") else None,
            count=n,
            protocol=task.protocol,
            filter=FILTERS.get(metric),
        )
        for metric, value in sorted(values.items())
    )
    truncated = details["num_prompt_truncated"]
    warnings = (f"{truncated} prompts lost their beginning to fit the window",) if truncated else ()
    return Outcome(metrics, _info(protocol, details), samples, warnings)


def _binomial_stderr(share: float, n: int) -> float | None:
    """Return the sample standard error of a share; None for fewer than two answers."""
    return math.sqrt(share * (1.0 - share) / (n - 1)) if n > 1 else None


def _info(protocol: Protocol, details: Details) -> ProtocolInfo:
    return ProtocolInfo(
        name=protocol.name,
        version=protocol.version,
        sha256=protocol.sha256,
        summary=protocol.summary,
        details=details,
    )
