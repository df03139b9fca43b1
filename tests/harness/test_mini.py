"""The suite's own tasks: text that needs no file, the usual prompt and protocols."""

from __future__ import annotations

from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from oasis_eval import corpus, plan
from oasis_eval.errors import DataError
from oasis_eval.harness import run as harness
from oasis_eval.harness.plugin import PluginLM
from oasis_eval.harness.protocols import QUESTION_TASKS, TASKS, new_tokens
from oasis_eval.harness.run import Outcome
from oasis_eval.harness.tasks import score_answer
from oasis_eval.loading import Reference, prepare
from oasis_eval.minicorpus import mixture, tokenizer
from oasis_eval.paths import data_folder
from oasis_eval.quant import schemes
from oasis_eval.spec import EvaluationSpec, TaskRef
from tests import tiny
from tests.harness.conftest import Piece, load_folder, metric, nll_by_hand

NUM_QUESTIONS, NUM_STORIES, VOCABULARY = 500, 300, 536
NUM_ANSWERED = 6
SHORT = ("mini_gsm", "passkey")
"""Tasks whose answers are short."""


@pytest.fixture(scope="session")
def mini_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with the corpus's tokenizer and 256 positions."""
    model = tiny.build_model(vocab_size=VOCABULARY, max_position_embeddings=256)
    folder = tmp_path_factory.mktemp("models") / "mini"
    return tiny.save(folder, model=model, tokenizer=tokenizer.load())


@pytest.fixture(scope="session")
def mini(mini_folder: Path) -> Reference:
    return load_folder(mini_folder)


def _task(name: str, **changes: object) -> TaskRef:
    spec = EvaluationSpec(models=("m",), tasks=(name,), **changes)  # type: ignore[arg-type]
    (task,) = plan.task_refs(spec)
    return task


def _run(reference: Reference, task: TaskRef) -> Outcome:
    data = harness.load_data(task, fewshot=None)
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        return harness.evaluate(prepared, task, data, batch_size=4, quiet=True)


def test_the_data_is_generated_and_told() -> None:
    """Origin, split, size and hash are in the record as those of files are."""
    for name, count in (("mini_ppl", NUM_STORIES), ("mini_gsm", NUM_QUESTIONS)):
        (info,) = harness.load_data(_task(name), fewshot=None).infos

        assert (info.name, info.origin, info.split) == (name, "oasis-eval:minicorpus@2", "test")
        assert info.num_rows == count
        assert info.sha256 != corpus.load(name, split="train").sha256


def test_an_unknown_split_is_refused() -> None:
    """With those there are."""
    with pytest.raises(DataError, match="no split 'dev'; expected one of train, validation, test"):
        corpus.load("mini_ppl", split="dev")


def test_a_local_file_still_takes_its_place(tmp_path: Path) -> None:
    """As that of every data set."""
    path = tiny.write_jsonl(tmp_path / "own.jsonl", ["Mine."])

    assert corpus.load("mini_ppl", data=str(path)).texts() == ["Mine."]


def test_perplexity_by_hand(mini: Reference) -> None:
    """Windows of 256 of one stream with a start token at its head, 255 scored tokens each."""
    outcome = _run(mini, _task("mini_ppl", limit=3))
    words = tokenizer.load()
    text = "\n\n".join(row["text"] for row in mixture.rows("mini_ppl", "test", 0, 10))
    ids = words.encode(text)
    pieces = [Piece(ids[at : at + 256], 1) for at in (0, 256, 512)]
    expected, count = nll_by_hand(mini.model, pieces)

    assert ids[0] == words.bos_token_id
    assert outcome.protocol.name == "gptq-256"
    assert metric(outcome, "num_tokens") == count == 765
    assert metric(outcome, "nll_nats") == pytest.approx(expected, rel=1e-6)


def test_questions_are_asked_as_they_stand_in_training_text(mini: Reference) -> None:
    """Prompt and reference answer together are a document, token by token, and leave room."""
    task = _task("mini_gsm", limit=NUM_ANSWERED)
    outcome = _run(mini, task)
    words = tokenizer.load()
    rows = list(mixture.rows("mini_gsm", "test", 0, NUM_QUESTIONS))

    assert (task.protocol, task.max_new_tokens) == ("gsm8k-0shot", 64)
    assert [sample["text"] for sample in outcome.samples] == [
        row["question"] for row in rows[:NUM_ANSWERED]
    ]
    for row, sample in zip(rows, outcome.samples, strict=False):
        prompt = f"Question: {row['question']}\nAnswer:"
        document = words.encode(f"{prompt} {row['answer']}")
        assert document[: len(words.encode(prompt))] == words.encode(prompt)
        assert sample["prompt_tokens"] == len(words.encode(prompt))
        assert sample["answer_tokens"] == len(document) - len(words.encode(prompt))
    longest = max(len(words.encode(row["answer"], add_special_tokens=False)) for row in rows)
    assert longest < 64
    assert max(len(words.encode(row["question"])) for row in rows) + 5 <= 256 - 64


def test_reference_answers_score_one_and_others_zero() -> None:
    """Of every question; a number one too large is wrong."""
    for row in mixture.rows("mini_gsm", "test", 0, NUM_QUESTIONS):
        number = int(row["answer"].rpartition(" ")[2])

        right, wrong = (
            score_answer(row, [text])  # type: ignore[arg-type]
            for text in (row["answer"], f"#### {number + 1}")
        )
        assert (right["pass@1"], right["pass@1_flexible"]) == (1.0, 1.0)
        assert (wrong["pass@1"], wrong["pass@1_flexible"]) == (0.0, 0.0)


def test_examples_come_from_the_training_split(mini: Reference) -> None:
    """Where they are asked for; they are no test questions."""
    task = _task("mini_gsm", protocols=("gsm8k-2shot",))
    test, train = harness.load_data(task, fewshot=None).corpora

    assert train.split == "train"
    assert not {row["question"] for row in train.rows} & {row["question"] for row in test.rows}


def test_answers_of_other_tasks_may_be_as_long_as_ever() -> None:
    """256 tokens; a number given replaces any task's own."""
    assert set(QUESTION_TASKS) == {"gsm8k", "mini_gsm"}
    assert {task: new_tokens(task) for task in TASKS if task not in SHORT} == dict.fromkeys(
        [task for task in TASKS if task not in SHORT], 256
    )
    assert _task("gsm8k").max_new_tokens == 256
    assert _task("gsm8k", max_new_tokens=7).max_new_tokens == 7
    assert _task("mini_gsm", max_new_tokens=7).max_new_tokens == 7
    assert _task("wikitext2", max_new_tokens=7).max_new_tokens == 256


def test_lm_evals_tasks_are_the_same(mini: Reference, mini_folder: Path) -> None:
    """Same text, prompt, budget and numbers as `evaluate`, without any data given."""
    from lm_eval.evaluator import evaluate

    names = ["oasis_mini_ppl", "oasis_mini_gsm", "oasis_mini_gsm_answer"]
    manager = TaskManager(include_path=str(data_folder("tasks")), include_defaults=False)
    loaded = manager.load(names)
    tasks = loaded["tasks"]
    kept = tasks["oasis_mini_ppl"].dataset
    kept["test"] = kept["test"].map(lambda row: {"oasis_limit": 3})
    found = evaluate(
        lm=PluginLM(str(mini_folder), batch_size=4),
        task_dict=loaded,
        limit=NUM_ANSWERED,
        bootstrap_iters=0,
    )
    assert found is not None
    text = _run(mini, _task("mini_ppl", limit=3))
    answers = _run(mini, _task("mini_gsm", limit=NUM_ANSWERED))

    assert [len(tasks[name].test_docs()) for name in names] == [1, NUM_QUESTIONS, NUM_QUESTIONS]
    assert tasks["oasis_mini_gsm"].config.num_fewshot == 0
    assert tasks["oasis_mini_gsm"].config.generation_kwargs["max_gen_toks"] == 64
    for outcome, task, name in (
        (text, "oasis_mini_ppl", "token_perplexity"),
        (answers, "oasis_mini_gsm", "pass@1"),
        (answers, "oasis_mini_gsm", "cut"),
        (answers, "oasis_mini_gsm_answer", "answer_nll_per_token"),
    ):
        assert found["results"][task][f"{name},none"] == metric(outcome, name)
