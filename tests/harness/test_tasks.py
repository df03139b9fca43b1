"""The task files: what they ask, of which text, and that none of them is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from oasis_eval import corpus
from oasis_eval.errors import DataError
from oasis_eval.harness import run as harness
from oasis_eval.harness.lm import OasisLM
from oasis_eval.harness.protocols import (
    DEFAULTS,
    TASKS,
    parse_protocol,
    with_window,
)
from oasis_eval.harness.run import Outcome, TaskData
from oasis_eval.harness.tasks import score_reference, score_tokens, score_words
from oasis_eval.loading import Reference, prepare
from oasis_eval.paths import data_folder
from oasis_eval.quant import schemes
from oasis_eval.spec import TaskRef
from tests import tiny
from tests.harness.conftest import Measure, load_folder, metric

TASK_FILES = sorted(
    path.stem for path in data_folder("tasks").glob("*.yaml") if not path.stem.startswith("_")
)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def _questions(path: Path, name: str, count: int) -> corpus.Corpus:
    rows = [
        {"question": f"{name} {i}, how many?", "answer": f"It is {i}.\n#### {i}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return corpus.load("gsm8k", data=str(path))


@pytest.mark.parametrize("name", TASK_FILES)
def test_every_task_file_loads(tmp_path: Path, name: str) -> None:
    """lm-eval drops a broken file without a word, so each is asked for by its name."""
    path = tmp_path / "data.jsonl"
    row = {"text": "Some text.", "question": "How many?", "answer": "#### 1"}
    row |= {"number": "1", "key": "12345", "depth": "0.5"}
    path.write_text(json.dumps(row) + "\n")
    metadata = {"data": str(path), "fewshot_data": str(path), "tokenizer": tiny.build_tokenizer()}
    if "passkey" in name:
        metadata["protocol"] = "passkey-300"
    manager = TaskManager(
        include_path=str(data_folder("tasks")), include_defaults=False, metadata=metadata
    )

    loaded = manager.load([name])["tasks"]

    assert list(loaded) == [name]
    assert len(list(loaded[name].test_docs())) == 1


@pytest.mark.parametrize("task", [task for task in TASKS if not parse_protocol(TASKS[task]).asks])
@pytest.mark.parametrize("protocol", DEFAULTS)
def test_every_text_task_takes_every_text_protocol(
    measure: Measure, uniform_reference: Reference, task: str, protocol: str
) -> None:
    """And the uniform model's perplexity is its vocabulary size in all of them."""
    name = with_window(parse_protocol(protocol), 16).name

    outcome = measure(uniform_reference, tiny.prose(100), name, task=task)

    assert metric(outcome, "token_perplexity") == pytest.approx(256.0, rel=1e-6)
    assert outcome.protocol.name == name


def test_another_window_is_another_protocol() -> None:
    """Name, summary and hash tell them apart; GSM8K has no window."""
    short, long = parse_protocol("gptq-1024"), parse_protocol("gptq-2048")

    assert short.sha256 != long.sha256
    assert "1024" in short.summary
    assert with_window(parse_protocol("gsm8k-5shot"), 64) == parse_protocol("gsm8k-5shot")


# --- GSM8K ----------------------------------------------------------------------------------------


class Asked:
    """What a run of GSM8K asked the model."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.contexts: list[tuple[str, str]] = []
        self.ids: list[list[int]] = []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Notes the requests on their way to the model."""
    noted = Asked()
    generate, loglikelihood, tokenize = (
        OasisLM.generate_until,
        OasisLM.loglikelihood,
        OasisLM.tok_encode,
    )

    def noting_generate(self: OasisLM, requests: list[Instance], *args: bool) -> list[str]:
        noted.prompts += [request.args[0] for request in requests]
        noted.ids += [tokenize(self, request.args[0]) for request in requests]
        return generate(self, requests, *args)

    def noting_loglikelihood(
        self: OasisLM, requests: list[Instance], *args: bool
    ) -> list[tuple[float, bool]]:
        noted.contexts += [request.args for request in requests]
        return loglikelihood(self, requests, *args)

    monkeypatch.setattr(OasisLM, "generate_until", noting_generate)
    monkeypatch.setattr(OasisLM, "loglikelihood", noting_loglikelihood)
    return noted


def _run(
    reference: Reference, folder: Path, *, shots: int, limit: int | None = 3, chat: bool = False
) -> Outcome:
    test = _questions(folder / "test.jsonl", "Test", 6)
    train = _questions(folder / "train.jsonl", "Train", 9)
    ref = TaskRef(
        name="gsm8k",
        protocol=f"gsm8k-{shots}shot",
        limit=limit,
        max_new_tokens=4,
        chat_template=chat,
    )
    data = TaskData((test, train) if shots else (test,))
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        return harness.evaluate(prepared, ref, data, batch_size=2, quiet=True)


@pytest.mark.parametrize("shots", [0, 2, 5])
def test_the_prompt_is_lm_evals(
    tmp_path: Path, tiny_reference: Reference, asked: Asked, shots: int
) -> None:
    """Question and answer lines, examples from the training file, the same for both readings."""
    outcome = _run(tiny_reference, tmp_path, shots=shots)

    assert len(asked.prompts) == outcome.samples.__len__() == 3
    for index, prompt in enumerate(asked.prompts):
        *examples, question = prompt.split("\n\n")
        assert question == f"Question: Test {index}, how many?\nAnswer:"
        assert len(set(examples)) == shots
        for example in examples:
            number = example.split()[2].removesuffix(",")
            assert example == (
                f"Question: Train {number}, how many?\nAnswer: It is {number}.\n#### {number}"
            )
    answers = [f" It is {i}.\n#### {i}" for i in range(3)]
    assert asked.contexts == list(zip(asked.prompts, answers, strict=True))
    assert outcome.protocol.details["shots"] == shots


def test_the_examples_do_not_change_with_the_model_or_the_limit(
    tmp_path: Path, tiny_reference: Reference, uniform_reference: Reference, asked: Asked
) -> None:
    """A paired comparison asks every model the very same prompts."""
    for reference, limit in ((tiny_reference, 3), (uniform_reference, 3), (tiny_reference, None)):
        _run(reference, tmp_path, shots=3, limit=limit)

    first, second, whole = asked.prompts[:3], asked.prompts[3:6], asked.prompts[6:]
    assert first == second == whole[:3]
    assert len(whole) == 6


def test_the_answers_loss_is_that_of_the_uniform_model(
    tmp_path: Path, uniform_reference: Reference
) -> None:
    """log 256 a token: the reference answer is what is scored, and nothing else."""
    outcome = _run(uniform_reference, tmp_path, shots=0)

    assert metric(outcome, "answer_nll_per_token") == pytest.approx(5.545177444, rel=1e-6)
    tokens = [len(" It is 0.\n#### 0")] * 3
    assert [row["answer_tokens"] for row in outcome.samples] == tokens


def test_a_chat_template_wraps_the_question_and_starts_once(tmp_path: Path, asked: Asked) -> None:
    """The template is used, noted, and its start token not doubled."""
    tokenizer = tiny.build_tokenizer(adds_start=True)
    tokenizer.chat_template = TEMPLATE
    reference = load_folder(tiny.save(tmp_path / "m", tokenizer=tokenizer))

    outcome = _run(reference, tmp_path, shots=1, chat=True)

    answers = [f"It is {i}.\n#### {i}" for i in range(3)]
    assert asked.contexts == list(zip(asked.prompts, answers, strict=True))
    assert outcome.protocol.details["chat_template"] is True
    for prompt, ids in zip(asked.prompts, asked.ids, strict=True):
        assert prompt.startswith("<s>user: Question: Train ")
        assert prompt.endswith("how many?\nAnswer:\n<s>assistant:")
        assert ids[0] == 1
        assert ids[1] != 1


def test_more_shots_than_questions_are_refused(tmp_path: Path) -> None:
    """With what there is."""
    path = tmp_path / "train.jsonl"
    _questions(path, "Train", 3)
    ref = TaskRef(name="gsm8k", protocol="gsm8k-5shot", data=str(path))

    with pytest.raises(Exception, match="has 3 questions"):
        harness.load_data(ref, fewshot=str(path))


@pytest.mark.parametrize("score", [score_tokens, score_words])
def test_a_bare_sum_of_another_model_type_is_refused(score: object) -> None:
    """It has no token count, so no perplexity can be made of it."""
    doc = {"words": 2, "bytes": 9}

    with pytest.raises(DataError, match="model type 'oasis'"):
        score(doc, [-12.5])  # type: ignore[operator]
    with pytest.raises(DataError, match="model type 'oasis'"):
        score_reference(doc, [(-1.0, False)])
