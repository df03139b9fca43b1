"""Answers question by question: the reference scheme and each quantized one side by side.

Questions whose answer flips under some scheme come first, then the others in their own order; what
does not fit is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oasis_eval.errors import RecordError
from oasis_eval.record import read_samples
from oasis_eval.report.html.effects import ANSWERS, Line, Result
from oasis_eval.report.html.markup import Html, details, element, named
from oasis_eval.report.html.selection import Selection

MAX_QUESTIONS = 40
"""Of one model and task."""
MAX_BYTES = 1_500_000
"""Size of all questions together."""
MAX_CHARACTERS = 4_000
"""Of one text; what is cut off is counted."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Question:
    """One question and what each scheme made of it."""

    number: object
    reference: Row | None
    """Sample of the unquantized run."""
    others: tuple[tuple[str, Row], ...]
    """Scheme and sample."""

    @property
    def flips(self) -> tuple[str, ...]:
        """Return what changed under each scheme: `lost`, `gained` or nothing."""
        if self.reference is None:
            return tuple("" for _ in self.others)
        before = bool(self.reference.get("strict"))
        return tuple(_flip(before, bool(row.get("strict"))) for _, row in self.others)

    @property
    def any_row(self) -> Row:
        """Return a sample to read the question from."""
        return self.reference if self.reference is not None else self.others[0][1]


def _flip(before: bool, after: bool) -> str:
    if before == after:
        return ""
    return "lost" if before else "gained"


def render(selection: Selection, found: Sequence[Line]) -> Html:
    """Return the section; empty where no samples of questions lie beside the records."""
    panels: list[Html] = []
    budget = MAX_BYTES
    for line in found:
        if line.metric != ANSWERS:
            continue
        try:
            questions, apart = _questions(line, selection)
        except RecordError as error:
            panels.append(element("p", str(error), class_="note"))
            continue
        if not questions:
            continue
        panel, size = _panel(line, questions, apart, selection, budget)
        budget -= size
        panels.append(panel)
    if not panels:
        return Html("")
    return element("section", element("h2", "Answers"), *panels, id="answers")


def _questions(line: Line, selection: Selection) -> tuple[list[Question], list[str]]:
    """Return the questions, and the schemes whose samples are of other questions."""
    reference = _rows(line.reference, selection) if line.reference else {}
    others: list[tuple[str, dict[object, Row]]] = []
    apart = []
    for effect in line.effects:
        rows = _rows(effect.result, selection)
        if not rows:
            continue
        scheme = effect.result.first.scheme
        if any(_differs(reference.get(key), row) for key, row in rows.items()):
            apart.append(scheme)
        else:
            others.append((scheme, rows))
    keys = dict.fromkeys([*reference, *(key for _, rows in others for key in rows)])
    questions = [
        Question(
            key,
            reference.get(key),
            tuple((scheme, rows[key]) for scheme, rows in others if key in rows),
        )
        for key in keys
    ]
    return questions, apart


def _differs(reference: Row | None, row: Row) -> bool:
    return reference is not None and reference.get("text") != row.get("text")


def _rows(result: Result, selection: Selection) -> dict[object, Row]:
    """Return the samples of a result's first run by question."""
    key = result.first.key
    rows = read_samples(selection.folder(key), key)
    return {row["question"]: row for row in rows if "question" in row}


def _panel(
    line: Line,
    questions: Sequence[Question],
    apart: Sequence[str],
    selection: Selection,
    budget: int,
) -> tuple[Html, int]:
    ordered = sorted(questions, key=lambda item: not any(item.flips))  # stable
    scheme = line.reference.first.scheme if line.reference else None
    items: list[Html] = []
    size = 0
    for question in ordered[:MAX_QUESTIONS]:
        item = _question(question, scheme, line)
        if size + len(item) > budget:
            break
        size += len(item)
        items.append(item)
    flips = sum(any(question.flips) for question in questions)
    notes = [f"{flips} of {len(questions)} questions flip under some scheme."]
    left_out = len(questions) - len(items)
    if left_out:
        shown = sum(any(question.flips) for question in ordered[: len(items)])
        notes.append(
            f"{len(items)} are shown, flips first; {left_out} are left out "
            f"({flips - shown} of them flips). All are in the samples beside the records."
        )
    notes += [f"{name}: its samples are of other questions." for name in apart]
    panel = details(
        [
            named(selection.labels[line.model]),
            ", ",
            named(line.task),
            element("small", f" {line.protocol}"),
        ],
        element("p", " ".join(notes), class_="hint"),
        *items,
        class_="panel",
        open=True,
        data_model=line.model,
        data_task=line.task,
    )
    return panel, size


def _question(question: Question, scheme: str | None, line: Line) -> Html:
    row = question.any_row
    answers = []
    if question.reference is not None and scheme is not None:
        answers.append(_answer(scheme, question.reference, ""))
    answers += [
        _answer(name, sample, flip)
        for (name, sample), flip in zip(question.others, question.flips, strict=True)
    ]
    return element(
        "article",
        element("h4", f"Question {question.number}"),
        _text(row.get("text"), "ask"),
        details("Reference answer", _text(row.get("reference"), "says")),
        element("div", *answers, class_="side"),
        class_="question",
        data_model=line.model,
        data_task=line.task,
        data_flips=any(question.flips),
    )


def _answer(scheme: str, row: Row, flip: str) -> Html:
    is_right = bool(row.get("strict"))
    words = {"lost": "right → wrong", "gained": "wrong → right", "": ""}[flip]
    remarks = [
        text
        for name, text in (("cut", "cut by the token limit"), ("unread", "no answer found"))
        if row.get(name)
    ]
    return element(
        "div",
        element(
            "h5",
            named(scheme),
            element("span", "right" if is_right else "wrong", class_="yes" if is_right else "no"),
            element("span", words, class_=f"flip {flip}") if flip else None,
        ),
        _text(row.get("completion"), "says"),
        element("p", ", ".join(remarks), class_="hint") if remarks else None,
        class_=f"answer {flip}".strip(),
        data_scheme=scheme,
    )


def _text(value: object, kind: str) -> Html:
    if value is None:
        return element("p", "not stored", class_="hint")
    text = str(value)
    more = len(text) - MAX_CHARACTERS
    end = element("em", f" … {more} more characters") if more > 0 else None
    return element("pre", text[:MAX_CHARACTERS], end, class_=kind, dir="auto")
