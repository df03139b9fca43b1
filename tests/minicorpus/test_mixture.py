"""Rows and documents: repeatable anywhere, splits apart, in the prompt's form."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys

import pytest

from oasis_eval import corpus
from oasis_eval.errors import SpecError
from oasis_eval.minicorpus import mixture, tokenizer
from oasis_eval.minicorpus.chance import SPLITS, Split
from oasis_eval.minicorpus.mixture import Name, Settings
from oasis_eval.minicorpus.problems import Difficulty

NAMES: tuple[Name, ...] = ("mini_ppl", "mini_gsm")
NUM_TRAINING_DOCUMENTS = 1500
GOLDEN_ROWS = {
    "mini_ppl": "f2699ec95170ae725e5b9236942ef4b3787b88e33abe40ff1aac5d69898e5d7e",
    "mini_gsm": "7a4ca6ff89bdf8a5cfdcd286ca587e16edbcb65320c98f78244f872ceabb2a61",
}


@pytest.fixture(scope="module")
def training() -> str:
    """Text that a model may have been trained on, a few MB of it, from two seeds."""
    parts = [
        text
        for seed in (0, 1)
        for text in mixture.sample("train", seed=seed, count=NUM_TRAINING_DOCUMENTS)
    ]
    return "\n\n".join(parts)


def _rows(name: Name, split: Split, count: int = 300) -> list[dict[str, str]]:
    return list(mixture.rows(name, split, 0, count))


def _facts(text: str) -> set[str]:
    """Return the sentences of questions that hold a number."""
    lines = [line for line in text.split("\n") if "How many" in line]
    return {
        sentence
        for line in lines
        for sentence in re.split(r"(?<=[.?]) ", line.removeprefix("Question: "))
        if re.search(r"\d", sentence)
    }


@pytest.mark.parametrize("split", ["validation", "test"])
def test_training_text_has_nothing_of_the_other_splits(training: str, split: Split) -> None:
    """No story, not even its opening, no question, and no sentence of one that has a number."""
    stories = {row["text"] for row in _rows("mini_ppl", split)}
    questions = {row["question"] for row in _rows("mini_gsm", split)}
    opening = re.compile(r"One .*?It belonged to \w+\.(?! \w+ had a| There was a)")

    assert len(stories) == len(questions) == 300
    assert not stories & set(training.split("\n\n"))
    assert not set(opening.findall("\n".join(stories))) & set(opening.findall(training))
    assert not [text for text in questions if text in training]
    assert not _facts("\n".join(questions)) & _facts(training)
    assert len(_facts(training)) > 5000


def test_test_and_validation_have_nothing_in_common() -> None:
    """Either may be looked at while the other stays unseen."""
    stories = [{row["text"] for row in _rows("mini_ppl", split)} for split in SPLITS]
    facts = [
        _facts("\n".join(row["question"] for row in _rows("mini_gsm", split))) for split in SPLITS
    ]

    for sets in (stories, facts):
        assert not sets[0] & sets[1]
        assert not sets[0] & sets[2]
        assert not sets[1] & sets[2]


@pytest.mark.parametrize("name", NAMES)
def test_more_rows_begin_with_the_same_ones(name: Name) -> None:
    """And another seed has others."""
    few, many = _rows(name, "test", 5), _rows(name, "test", 20)

    assert many[:5] == few
    assert not [row for row in mixture.rows(name, "test", 1, 20) if row in many]


@pytest.mark.parametrize("name", NAMES)
def test_the_tasks_text_is_the_one_noted(name: Name) -> None:
    """A change of the generator changes every number that comes of it: raise VERSION and this."""
    assert corpus.load(name).sha256 == GOLDEN_ROWS[name]
    assert mixture.VERSION == 2


def test_another_process_makes_the_same_text() -> None:
    """Whatever its hash seed."""
    code = (
        "from oasis_eval.minicorpus import mixture\n"
        "import hashlib\n"
        "text = '|'.join(mixture.sample('train', seed=3, count=20))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    text = "|".join(mixture.sample("train", seed=3, count=20))
    assert found == {hashlib.sha256(text.encode()).hexdigest()}


def test_documents_are_stories_or_problems_as_prompts_have_them() -> None:
    """In the share of the text asked for; one or two stories, one to six problems each."""
    found = mixture.sample("train", seed=0, count=600, settings=Settings(problem_share=0.25))
    asking = [text for text in found if text.startswith("Question: ")]
    telling = [text for text in found if text.startswith("One ")]

    assert len(asking) + len(telling) == 600
    share = sum(map(len, asking)) / sum(map(len, found))
    assert share == pytest.approx(0.25, abs=0.01)
    assert {len(text.split("\n\n")) for text in asking} == {1, 2, 3, 4, 5, 6}
    assert {len(text.split("\n\n")) for text in telling} == {1, 2}
    for text in asking:
        for item in text.split("\n\n"):
            assert re.fullmatch(
                r"Question: [^\n]+\?\nAnswer: (\w+ has \d+\.\n)?([^\n]+: \d+ [-+*] \d+ = \d+\.\n)+"
                r"#### \d+",
                item,
            )
    assert not re.search(r"\d|\n(?!\n?One )", "".join(telling))


def test_difficulty_reaches_the_documents() -> None:
    """Two steps were asked for."""
    difficulty = Difficulty(kinds=("chain", "compare"), fewest_steps=2, most_steps=2)
    settings = Settings(problem_share=1.0, difficulty=difficulty)
    text = "\n\n".join(mixture.sample("train", seed=0, count=50, settings=settings))

    for item in text.split("\n\n"):
        assert item.count(" = ") == 2


def test_some_stories_are_a_passage_told_twice() -> None:
    """In the share asked for, word for word, and short enough for a training sequence."""
    words = tokenizer.load()
    found = mixture.sample("train", seed=0, count=600, settings=Settings(0.25, repeat_share=0.5))
    plain = "\n\n".join(mixture.sample("train", seed=0, count=600, settings=Settings(0.25)))
    telling = [text for text in found if not text.startswith("Question: ")]
    twice = [text for text in telling if len(set(text.split("\n\n"))) < len(text.split("\n\n"))]

    assert len(twice) / len(telling) == pytest.approx(0.5, abs=0.06)
    for text in twice:
        passage, again = text.split("\n\n")
        assert passage == again
        assert re.fullmatch(r"([^.]+\.( |$))+", passage)
        assert 1 <= passage.count(".") <= 14
        assert len(words.encode(text)) < 512
    lengths = [len(words.encode(text)) for text in twice]
    assert sorted(lengths)[len(lengths) * 9 // 10] <= 256
    assert any(text.split("\n\n")[0] in plain for text in twice)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_may_be_all_or_nothing(share: float) -> None:
    """Then no document of the other kind is there."""
    found = mixture.sample("train", seed=0, count=60, settings=Settings(problem_share=share))

    assert {text.startswith("Question: ") for text in found} == {share == 1.0}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    """With what was found."""
    with pytest.raises(SpecError, match="expected 0 to 1"):
        Settings(problem_share=share)
    with pytest.raises(SpecError, match=r"repeat_share .*expected 0 to 1"):
        Settings(repeat_share=share)


def test_rows_are_plain_json() -> None:
    """As the files that can stand in for them."""
    for name in NAMES:
        for row in _rows(name, "train", 3):
            assert json.loads(json.dumps(row)) == row
            assert list(row) == list(corpus.DATA_SETS[name].columns)
