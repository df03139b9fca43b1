"""Word problems in GSM8K's form: a question, one working line a step, the answer after `####`.

The one idea: every step adds, takes away or multiplies two small numbers, so each working line is a
look-up that a small model can learn, and what has to be understood is which numbers meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from oasis_eval.errors import SpecError
from oasis_eval.minicorpus.chance import Chance, Split, split_of
from oasis_eval.minicorpus.words import COUNTED, HOLDERS, PEOPLE, Person

Kind = Literal["chain", "groups", "compare", "trade"]
_TRIES = 30
_ATTEMPTS = 10_000
_SMALLEST_NUMBER = 2  # "1 apples" is no English
_LARGEST_FACTOR = 5
_SMALLEST_RESULT = _SMALLEST_NUMBER**2  # of as many bags with as many each
_LARGEST_RESULT = 99


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How hard the problems are."""

    kinds: tuple[Kind, ...] = ("chain", "groups", "compare", "trade")
    """`chain`: one person's things come and go. `groups`: they come in equal bags. `compare`: a
    second person has more or fewer. `trade`: one of two people gives to the other."""
    fewest_steps: int = 1
    """Changes and comparisons in a question. In a `trade`, those of the person whom it does not ask
    about do not matter, and the answer has no line for them."""
    most_steps: int = 4
    largest_start: int = 15
    """Largest number that somebody begins with."""
    largest_change: int = 9
    """Largest number by which it changes at once."""
    largest_result: int = 24
    """Largest number on the way."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            SpecError: No problem fits them.
        """
        if not self.kinds:
            raise SpecError("difficulty: no kind of problem; expected at least one")
        if not 1 <= self.fewest_steps <= self.most_steps:
            raise SpecError(
                f"difficulty: {self.fewest_steps} to {self.most_steps} steps; "
                "expected at least 1, and no more at least than at most"
            )
        if not _SMALLEST_RESULT <= self.largest_result <= _LARGEST_RESULT:
            raise SpecError(
                f"difficulty: results up to {self.largest_result}; "
                f"expected {_SMALLEST_RESULT} to {_LARGEST_RESULT}"
            )
        if not _SMALLEST_NUMBER <= self.largest_start <= self.largest_result:
            raise SpecError(
                f"difficulty: starts up to {self.largest_start}; "
                f"expected {_SMALLEST_NUMBER} to {self.largest_result}"
            )
        if not _SMALLEST_NUMBER <= self.largest_change <= self.largest_result:
            raise SpecError(
                f"difficulty: changes up to {self.largest_change}; "
                f"expected {_SMALLEST_NUMBER} to {self.largest_result}"
            )


DEFAULT = Difficulty()
"""Of the task `mini_gsm`."""


class Problem(NamedTuple):
    """A question and its worked answer."""

    question: str
    answer: str


class _DeadEndError(Exception):
    """No sentence of the wanted split fits here: begin again."""


def problem(chance: Chance, split: Split, difficulty: Difficulty = DEFAULT) -> Problem:
    """Return one problem.

    Args:
        chance: Where its choices come from.
        split: Every sentence with a number in its question belongs to this split and so to no
            other: two splits have no such sentence in common. Working lines are shared, for they
            are the arithmetic that is to be learnt.
        difficulty: How hard.

    Raises:
        SpecError: So few numbers are allowed that the split has no such problem, or hardly any.
    """
    for _ in range(_ATTEMPTS):
        kind = chance.pick(difficulty.kinds)
        steps = chance.between(difficulty.fewest_steps, difficulty.most_steps)
        try:
            return _Draft(chance, split, difficulty).build(kind, steps)
        except _DeadEndError:
            continue
    raise SpecError(
        f"difficulty: found no {split} problem of {difficulty}; "
        "expected larger numbers or fewer steps"
    )


_VERBS = (
    *(("+", verb) for verb in ("buys {} more", "finds {}", "gets {} more", "wins {}")),
    *(("-", verb) for verb in ("gives away {}", "loses {}", "sells {}", "uses {}")),
)
_ORDER = ("First", "Then", "Next", "After that")
"""What happens is numbered, so that a working line finds its sentence by its first word."""


class _Draft:
    """A problem being written."""

    def __init__(self, chance: Chance, split: Split, difficulty: Difficulty) -> None:
        self.chance = chance
        self.split = split
        self.difficulty = difficulty
        self.sentences: list[str] = []
        self.working: list[str] = []
        self.num_events = 0
        self.who, self.other = chance.some(PEOPLE, 2)
        self.what = chance.pick(COUNTED)

    def build(self, kind: Kind, steps: int) -> Problem:
        """Write a problem of that kind with that many steps."""
        {
            "chain": self._chain,
            "groups": self._groups,
            "compare": self._compare,
            "trade": self._trade,
        }[kind](steps)
        result = self.working[-1].rpartition(" ")[2].rstrip(".")
        return Problem(" ".join(self.sentences), "\n".join([*self.working, f"#### {result}"]))

    # --- kinds ------------------------------------------------------------------------------------

    def _chain(self, steps: int) -> None:
        total = self._start(self.who)
        self._changes(self.who, total, steps)
        self._ask(self.who)

    def _groups(self, steps: int) -> None:
        holder = self.chance.pick(HOLDERS)
        limits = self.difficulty
        count = self.chance.between(2, min(_LARGEST_FACTOR, limits.largest_result // 2))
        most_each = min(limits.largest_change, limits.largest_result // count)
        text = f"{self.who.name} has {count} {holder} with {{}} {self.what} each."
        each, _ = self._number([text], range(_SMALLEST_NUMBER, most_each + 1))
        total = self._work(f"{self.who.name} has {count} {holder} with {each}", count, "*", each)
        self._changes(self.who, total, steps - 1)
        self._ask(self.who)

    def _compare(self, steps: int) -> None:
        total = self._start(self.who)
        total = self._changes(self.who, total, steps - 1)
        sign, word = self.chance.pick((("+", "more"), ("-", "fewer")))
        text = f"{self.other.name} has {{}} {self.what} {word} than {self.who.name}."
        change, _ = self._number([text], self._room(total, sign))
        self._work(f"{self.other.name} has {change} {word}", total, sign, change)
        self._ask(self.other)

    def _trade(self, steps: int) -> None:
        mine = self._start(self.who)
        mine = self._changes(self.who, mine, steps - 1)
        before = [*self.working]
        theirs = self._start(self.other)
        room = self._room(theirs, "+")
        said = f"{self._when()} {self.who.name} gives"
        text = f"{said} {{}} {self.what} to {self.other.name}."
        given, _ = self._number([text], range(room.start, min(room.stop, mine + 1)))
        if self.chance.random() < 0.5:
            self.working = before  # what the other one has does not matter
            self._work(f"{said} {given}", mine, "-", given)
            self._ask(self.who)
        else:
            self.working = self.working[len(before) :]
            self._work(f"{said} {given}", theirs, "+", given)
            self._ask(self.other)

    # --- parts ------------------------------------------------------------------------------------

    def _start(self, who: Person) -> int:
        numbers = range(_SMALLEST_NUMBER, self.difficulty.largest_start + 1)
        number, _ = self._number([f"{who.name} has {{}} {self.what}."], numbers)
        self.working.append(f"{who.name} has {number}.")
        return number

    def _when(self) -> str:
        """Return the word that the next event's sentence begins with."""
        self.num_events += 1
        return _ORDER[min(self.num_events, len(_ORDER)) - 1]

    def _changes(self, who: Person, total: int, count: int) -> int:
        left: list[tuple[str, str]] = []
        for _ in range(count):
            left = left or [*_VERBS]  # a verb comes again only when all have come
            sign, _ = self.chance.pick(left)
            said = f"{self._when()} {who.subject.lower()}"
            texts = {f"{said} {verb} {self.what}.": verb for of, verb in left if of == sign}
            change, text = self._number([*texts], self._room(total, sign))
            left.remove((sign, texts[text]))
            total = self._work(text.partition("{}")[0] + str(change), total, sign, change)
        return total

    def _room(self, total: int, sign: str) -> range:
        """Return by how much a total may change."""
        most = self.difficulty.largest_result - total if sign == "+" else total
        return range(_SMALLEST_NUMBER, min(most, self.difficulty.largest_change) + 1)

    def _number(self, texts: list[str], numbers: range) -> tuple[int, str]:
        """Say one of `texts` with one of `numbers` such that it belongs to the split."""
        for _ in range(_TRIES if numbers else 0):
            number, text = self.chance.pick(numbers), self.chance.pick(texts)
            said = text.format(number)
            if split_of(said) == self.split:
                self.sentences.append(said)
                return number, text
        raise _DeadEndError

    def _work(self, said: str, left: int, sign: str, right: int) -> int:
        """Write a working line, what is said and what it comes to, and return its result."""
        total = {"+": left + right, "-": left - right, "*": left * right}[sign]
        self.working.append(f"{said}: {left} {sign} {right} = {total}.")
        return total

    def _ask(self, who: Person) -> None:
        self.sentences.append(f"How many {self.what} does {who.name} have now?")
