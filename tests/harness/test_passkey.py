"""Passkey retrieval through the harness: a model that copies finds all, scores are by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from oasis_eval import corpus, plan
from oasis_eval.errors import DataError, SpecError
from oasis_eval.harness import run as harness
from oasis_eval.harness.lm import Completion, OasisLM
from oasis_eval.harness.passkey import documents, score_key
from oasis_eval.harness.protocols import parse_protocol
from oasis_eval.harness.run import Outcome
from oasis_eval.loading import Reference, prepare
from oasis_eval.minicorpus.passkey import DEPTHS
from oasis_eval.paths import data_folder
from oasis_eval.quant import schemes
from oasis_eval.spec import EvaluationSpec, TaskRef
from oasis_eval.statistics import wilson
from tests import tiny
from tests.harness.conftest import Piece, load_folder, metric, nll_by_hand

LENGTH = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with room for a question in characters."""
    model = tiny.build_model(max_position_embeddings=LENGTH)
    return tiny.save(tmp_path_factory.mktemp("passkey") / "tiny", model=model)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return load_folder(folder)


def task_of(protocol: str = f"passkey-{LENGTH}", **changes: object) -> TaskRef:
    spec = EvaluationSpec(models=("m",), tasks=("passkey",), protocols=(protocol,), **changes)  # type: ignore[arg-type]
    (task,) = plan.task_refs(spec)
    return task


def run(reference: Reference, task: TaskRef) -> Outcome:
    data = harness.load_data(task, fewshot=None)
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        return harness.evaluate(prepared, task, data, batch_size=2, quiet=True)


@pytest.fixture(autouse=True)
def _two_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question alone has some 200 characters, which are tokens here."""
    monkeypatch.setattr("oasis_eval.harness.protocols._MOST_PASSKEY_LENGTHS", 2)


Say = Callable[[str, str], str]
"""From prompt and key in it to what is said."""


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> Callable[[Say], None]:
    """Replaces what the model generates by a rule on the very tokens that it is given."""

    def install(say: Say) -> None:
        def generate(self: OasisLM, prompts: list[list[int]], _: object) -> list[Completion]:
            found = []
            for ids in prompts:
                text = self.tokenizer.decode(ids)
                (key,) = re.findall(r"\d+", text)
                completion = Completion(say(text, key))
                completion.cut, completion.num_tokens = False, len(completion)
                found.append(completion)
            return found

        monkeypatch.setattr(OasisLM, "_generate", generate)

    return install


def by_name(outcome: Outcome) -> dict[str, float]:
    return {item.name: item.value for item in outcome.metrics}


def test_a_model_that_copies_finds_every_key(
    reference: Reference, speaker: Callable[[Say], None]
) -> None:
    """100 % at every length and depth; the key is in the tokens that reach the model."""
    speaker(lambda _, key: f" {key}")
    outcome = run(reference, task_of(limit=10))
    found = by_name(outcome)

    assert found["exact_match"] == 1.0
    assert found["exact_match_512"] == 1.0
    for depth in DEPTHS:
        assert found[f"exact_match_depth_{depth:g}"] == 1.0
        assert found[f"exact_match_512_depth_{depth:g}"] == 1.0
    assert found["exact_match_high"] == 1.0
    assert found["exact_match_low"] == pytest.approx(10 / (10 + 1.959963984540054**2))
    assert found["unread"] == found["cut"] == 0.0
    assert len(outcome.samples) == 10


def test_a_model_that_finds_the_first_half_only(
    reference: Reference, speaker: Callable[[Say], None]
) -> None:
    """Shares, counts and errors by hand, split by depth."""

    def say(text: str, key: str) -> str:
        return f" {key}." if text.index(key) < len(text) / 2 else " 12345 or 54321"

    speaker(say)
    outcome = run(reference, task_of(limit=10))
    right = {row["depth"]: row["strict"] for row in outcome.samples}
    found = {item.name: item for item in outcome.metrics}
    share = sum(bool(row["strict"]) for row in outcome.samples) / 10

    assert right[0.0]
    assert not right[1.0]
    assert found["exact_match_depth_0"].value == 1.0
    assert found["exact_match_depth_1"].value == 0.0
    assert found["exact_match_depth_0"].count == 2
    assert found["exact_match"].value == share
    assert found["exact_match"].count == 10
    assert found["exact_match"].stderr == pytest.approx(math.sqrt(share * (1 - share) / 9))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" 48213", 1.0),
        ("48213.", 1.0),
        (" the number 48213 and 11111", 1.0),
        (" 48213\n", 1.0),
        (" 482130", 0.0),
        (" 4821", 0.0),
        (" 11111 48213", 0.0),
        (" 48,213", 0.0),
        (" I do not know", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_number_must_be_the_key(completion: str, expected: float) -> None:
    """Digit by digit, whatever stands around it; a completion without one is unread."""
    found = score_key({"key": "48213"}, [completion])

    assert found["exact_match"] == expected
    assert found["unread"] == float(not re.search(r"\d", completion))


def few(count: int) -> corpus.Corpus:
    """Return the first rows of the data set."""
    whole = corpus.load("passkey")
    return replace(whole, rows=whole.rows[:count])


@pytest.mark.parametrize("adds_start", [False, True])
def test_prompts_fit_the_context_with_their_answer(adds_start: bool) -> None:
    """Measured with the tokenizer at hand, start token included; lengths take turns in a row."""
    tokenizer = tiny.build_tokenizer(adds_start=adds_start)
    docs = documents(protocol="passkey-600", tokenizer=tokenizer, max_new_tokens=20, loaded=few(4))[
        "test"
    ]

    assert [doc["length"] for doc in docs] == [300, 600] * 4
    assert [doc["depth"] for doc in docs] == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    for doc in docs:
        size = len(tokenizer(doc["prompt"])["input_ids"])
        assert doc["length"] - 20 - 80 < size <= doc["length"] - 20
        assert re.findall(r"\d+", doc["prompt"]) == [doc["key"]]


def test_likelihood_of_the_key_by_hand(reference: Reference) -> None:
    """Unbatched passes over prompt and key give the loss and whether the key is most likely."""
    outcome = run(reference, task_of(limit=4))
    docs = documents(
        protocol="passkey-512", tokenizer=reference.tokenizer, loaded=few(2), max_new_tokens=16
    )["test"]
    total, tokens = 0.0, 0
    for doc, row in zip(docs, outcome.samples, strict=True):
        prompt = corpus.encode(reference.tokenizer, doc["prompt"], special_tokens=False)
        answer = corpus.encode(reference.tokenizer, f" {doc['key']}", special_tokens=False)
        loss, count = nll_by_hand(reference.model, [Piece([*prompt, *answer], len(prompt))])

        assert row["answer_nll_nats"] == pytest.approx(loss, rel=1e-5)
        assert row["answer_tokens"] == count == 6
        assert row["prompt_tokens"] == len(prompt)
        assert not row["prompt_truncated"]
        assert row["greedy"] is False
        total, tokens = total + loss, tokens + count
    found = by_name(outcome)
    assert metric(outcome, "answer_nll_per_token") == pytest.approx(total / tokens, rel=1e-5)
    assert found["greedy_match"] == 0.0
    parts = [found[f"answer_nll_per_token_{length}"] for length in (256, 512)]
    assert sum(parts) / 2 == pytest.approx(total / tokens, rel=1e-5)


def test_a_record_says_how_it_was_measured(reference: Reference) -> None:
    """Lengths, room for the answer, and data that is generated."""
    task = task_of(limit=2)
    outcome = run(reference, task)
    (info,) = harness.load_data(task, fewshot=None).infos

    assert outcome.protocol.name == "passkey-512"
    assert {"lengths": "256, 512", "max_new_tokens": 16, "limit": 2}.items() <= (
        outcome.protocol.details.items()
    )
    assert (info.name, info.origin, info.num_rows) == ("passkey", "oasis-eval:passkey@1", 50)
    assert all(row["length"] in (256, 512) for row in outcome.samples)


def test_lengths_of_a_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context and its halves, at most four, none below 256 but the context itself."""
    monkeypatch.undo()

    assert parse_protocol("passkey-8192").lengths == (1024, 2048, 4096, 8192)
    assert parse_protocol("passkey-1024").lengths == (256, 512, 1024)
    assert parse_protocol("passkey-300").lengths == (300,)
    assert parse_protocol("passkey-64").lengths == (64,)
    assert "contexts of 256, 512, 1024 tokens" in parse_protocol("passkey-1024").summary


def test_what_cannot_be_is_refused(reference: Reference, tmp_path: Path) -> None:
    """More positions than the model has, no room, a template, no tokenizer, a row that is none."""
    with pytest.raises(
        DataError, match="passkey-1024: a context of 1024 tokens, the model has 512"
    ):
        run(reference, task_of("passkey-1024"))
    with pytest.raises(DataError, match="hold no question with one sentence"):
        run(reference, task_of("passkey-128"))
    with pytest.raises(SpecError, match="--chat-template: a passkey prompt"):
        task_of(chat_template=True)
    with pytest.raises(DataError, match="run it with model type 'oasis'"):
        documents(protocol="passkey-512")
    for row, words in (
        ({"number": "1", "key": "x1", "depth": "0"}, "key 'x1' is no number"),
        ({"number": "1", "key": "11111", "depth": "2"}, "depth '2'; expected a number from 0 to 1"),
    ):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=re.escape(words)):
            documents(protocol="passkey-512", data=str(path), tokenizer=reference.tokenizer)


def test_texts_questions_and_passkeys_keep_their_protocols() -> None:
    """A protocol goes to the tasks that it can score."""
    spec = EvaluationSpec(
        models=("m",),
        tasks=("text", "gsm8k", "passkey"),
        protocols=("context-64", "gsm8k-1shot", "passkey-256"),
        data={"text": "x"},
    )

    assert [(task.name, task.protocol) for task in plan.task_refs(spec)] == [
        ("text", "context-64"),
        ("gsm8k", "gsm8k-1shot"),
        ("passkey", "passkey-256"),
    ]


def test_lm_eval_reads_the_prompts_with_the_models_own_tokenizer(folder: Path) -> None:
    """From `--model_args`, so that its command line and ours ask the same."""
    manager = TaskManager(
        include_path=str(data_folder("tasks")),
        include_defaults=False,
        metadata={"model": str(folder), "protocol": "passkey-512"},
    )
    for name in ("oasis_passkey", "oasis_passkey_answer"):
        task = manager.load([name])["tasks"][name]
        doc = next(iter(task.test_docs()))
        ours = documents(protocol="passkey-512", tokenizer=tiny.build_tokenizer())["test"][0]

        assert doc == ours
        assert task.doc_to_text(doc) == ours["prompt"]
        assert task.doc_to_target(doc) == f" {ours['key']}"


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (3, 7), (50, 100)])
def test_wilson_interval_by_its_formula(right: int, count: int) -> None:
    """Wilson's own, and wide where the standard error of a share is 0."""
    z, p = 1.959963984540054, right / count
    centre = (p + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    found = wilson(right, count)

    assert found.estimate == p
    assert found.low == pytest.approx(centre - reach, abs=1e-12)
    assert found.high == pytest.approx(centre + reach, abs=1e-12)


@pytest.mark.parametrize(("right", "count"), [(1, 0), (3, 2), (-1, 2)])
def test_wilson_interval_of_nothing_is_refused(right: int, count: int) -> None:
    """There is no share of no questions."""
    with pytest.raises(ValueError, match="right answers of"):
        wilson(right, count)
