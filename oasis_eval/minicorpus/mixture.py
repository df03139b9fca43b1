"""Splits of the generated corpus: rows that the tasks read, documents to train on.

Every row has a stream of draws of its own, fixed by kind, split, seed and number, so any part can
be made anywhere and is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice
from typing import Literal, Protocol

from oasis_eval.errors import SpecError
from oasis_eval.minicorpus.chance import Chance, Split
from oasis_eval.minicorpus.problems import DEFAULT, Difficulty, problem
from oasis_eval.minicorpus.stories import story

Name = Literal["mini_ppl", "mini_gsm"]
VERSION = 2
"""Raised when the generated text changes, which changes every number that comes of it."""
_MOST_STORIES = 2
_MOST_PROBLEMS = 6
_PASSAGE = (3, 14)
"""Sentences that are told twice: few enough for both to stand in one training sequence."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What training text is made of; the tasks' own text is always that of the defaults."""

    problem_share: float = 0.5
    """Of the text, in characters; the rest are stories."""
    difficulty: Difficulty = DEFAULT
    repeat_share: float = 0.0
    """Of the documents that are stories; those are a passage told twice, word for word. Text that
    comes again is what a small model learns to look things up from (Olsson et al., 2022)."""

    def __post_init__(self) -> None:
        """Check the shares.

        Raises:
            SpecError: One of them is none.
        """
        for name in ("problem_share", "repeat_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise SpecError(f"{name} {getattr(self, name)}: expected 0 to 1")


DEFAULTS = Settings()


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that making blocks needs."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize one string."""
        ...


def rows(name: Name, split: Split, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yield the rows of a task's data set, no two with the same text or question.

    Args:
        name: `mini_ppl` has the column `text`, `mini_gsm` has `question` and `answer`.
        split: No text of one split occurs in another; see `story` and `problem`.
        seed: Another seed is other rows of the same split.
        count: How many; more begin with the same ones.
    """
    seen: set[str] = set()
    for number in count_from():
        if len(seen) == count:
            return
        chance = Chance(f"{VERSION}/{name}/{split}/{seed}/{number}")
        if name == "mini_ppl":
            row = {"text": story(chance, split)}
        else:
            row = problem(chance, split)._asdict()
        (text, *_) = row.values()
        if text not in seen:
            seen.add(text)
            yield row


def documents(split: Split, *, seed: int, settings: Settings = DEFAULTS) -> Iterator[str]:
    """Yield documents without end: some stories, or some problems as a prompt has them.

    One or two stories, one to six problems, or a passage of a story and the same again stand in a
    document, two newlines between them as in the text that is scored and in prompts with examples.

    Args:
        split: `train`, but for measuring what was learnt.
        seed: Another seed is other text of the same split.
        settings: What it is made of.
    """
    share = settings.problem_share
    told = asked = 0  # characters of stories and of problems so far
    for number in count_from():
        chance = Chance(f"{VERSION}/documents/{split}/{seed}/{number}")
        if share > 0.0 and asked * (1.0 - share) <= told * share:
            items = range(chance.between(1, _MOST_PROBLEMS))
            text = "\n\n".join(_as_prompt(chance, split, settings.difficulty) for _ in items)
            asked += len(text)
        else:
            items = range(chance.between(1, _MOST_STORIES))
            text = "\n\n".join(story(chance, split) for _ in items)
            if settings.repeat_share > 0.0 and chance.random() < settings.repeat_share:
                text = _passage_twice(chance, text)
            told += len(text)
        yield text


def _passage_twice(chance: Chance, text: str) -> str:
    """Return some sentences of the first story of a text, two times."""
    sentences = text.split("\n\n", maxsplit=1)[0].removesuffix(".").split(". ")
    count = chance.between(*_PASSAGE)
    first = chance.below(max(1, len(sentences) - count))
    passage = ". ".join(sentences[first : first + count]) + "."
    return f"{passage}\n\n{passage}"


def _as_prompt(chance: Chance, split: Split, difficulty: Difficulty) -> str:
    """Return a problem as the prompt of GSM8K has it; see `tasks/_gsm8k.yaml`."""
    question, answer = problem(chance, split, difficulty)
    return f"Question: {question}\nAnswer: {answer}"


def sample(split: Split, *, seed: int, count: int, settings: Settings = DEFAULTS) -> list[str]:
    """Return the first `count` documents."""
    return list(islice(documents(split, seed=seed, settings=settings), count))
