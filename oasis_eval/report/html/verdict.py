"""The verdict in plain words: what each scheme costs each model, the worst, and what failed.

The words follow from fixed thresholds, which stand below them; they are a reading aid and no
statistic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from oasis_eval.record import Status
from oasis_eval.report.html.effects import ANSWERS, Effect, Line
from oasis_eval.report.html.markup import Html, details, element, markup, named
from oasis_eval.report.html.selection import Selection
from oasis_eval.report.html.sources import without_folders
from oasis_eval.report.numbers import (
    format_change,
    format_number,
    format_value,
    is_floor,
    metric_style,
)

Severity = Literal["none", "better", "small", "clear", "severe", "broken", "unknown"]
SMALL_PERCENT = 5.0
"""Relative change of a perplexity up to which it is called small."""
SEVERE_PERCENT = 100.0
"""From which it is called severe: twice the perplexity."""
SMALL_POINTS = 1.0
"""Change of right answers, in points, up to which it is called small."""
_TIMES_PERCENT = 200.0
"""From which a perplexity is said to be a multiple."""
_OPEN_MODELS = 8
_LEAD_SCHEMES = 8
_WORDS: dict[Severity, str] = {
    "none": "not measurable",
    "better": "better",
    "small": "small",
    "clear": "clear",
    "severe": "severe",
    "broken": "broken",
    "unknown": "not known",
}
_LEGEND = (
    f"Cost in perplexity: small up to {SMALL_PERCENT:g} %, severe from {SEVERE_PERCENT:g} %, "
    "broken when it is infinite or not a number. Cost in answers: small up to "
    f"{SMALL_POINTS:g} point, severe when half of the right ones or more are lost. Not measurable: "
    "the paired 95 % interval holds zero; over several seeds that is the interval of the mean of "
    "their differences. A single run without samples beside its record has none."
)


@dataclass(frozen=True, slots=True)
class Said:
    """One effect in words."""

    severity: Severity
    text: str
    status: Status = "ok"
    """Of the run; what did not finish is called by it."""

    @property
    def word(self) -> str:
        """Return the severity as a word, or why there is none."""
        return _WORDS[self.severity] if self.status == "ok" else self.status


def say(effect: Effect, line: Line) -> Said:
    """Return what is said about a scheme's effect on a number."""
    result = effect.result
    if result.value is None:
        status = result.first.status
        if status == "ok":
            return Said("unknown", f"{result.problem}; choose one with --where")
        return Said("unknown", without_folders(result.problem or ""), status)
    value = format_value(result.value, line.metric)
    if not math.isfinite(result.value):
        what = "not a number" if math.isnan(result.value) else "infinite"
        return Said("broken", f"{_noun(line)} is {what}")
    if effect.problem is not None:
        return Said("unknown", f"{value}; {effect.problem}")
    base = line.reference.value if line.reference else None
    if base is None or not math.isfinite(base):
        return Said("unknown", f"{value}; no unquantized number to compare with")
    if line.metric == ANSWERS:
        return _say_points(effect, value, base)
    return _say_percent(effect, value)


def _say_percent(effect: Effect, value: str) -> Said:
    percent = effect.percent
    if percent is None:
        return Said("unknown", f"{value}; the unquantized number is zero")
    change = change_text(percent)
    if effect.low is not None and effect.high is not None:
        low, high = format_change(effect.low), format_change(effect.high)
        change += f" (95 % interval {low} to {high} %)"
    severity: Severity = "small" if percent <= SMALL_PERCENT else "clear"
    if percent >= SEVERE_PERCENT:
        severity = "severe"
    if percent < 0.0:
        severity = "better"
    if not effect.is_measurable:
        severity = "none"
    return Said(severity, f"{change}, to {value}")


def change_text(percent: float) -> str:
    """Return a relative change in percent, a large one as a multiple."""
    if percent >= _TIMES_PERCENT:
        return f"{format_number(1.0 + percent / 100.0, None)} times as high"
    return f"{format_change(percent)} %"


def _say_points(effect: Effect, value: str, base: float) -> Said:
    points = effect.points or 0.0
    change = f"{format_change(points)} points"
    if effect.low is not None and effect.high is not None:
        low, high = format_change(effect.low), format_change(effect.high)
        change += f" (95 % interval {low} to {high})"
    change += f", to {value} %"
    if effect.lost is not None and effect.gained is not None:
        change += f"; {effect.lost} right answers lost, {effect.gained} gained"
    severity: Severity = "small" if points >= -SMALL_POINTS else "clear"
    if points < 0 and -points >= base * 100.0 / 2.0:
        severity = "severe"
    if points > 0.0:
        severity = "better"
    if not effect.is_measurable:
        severity = "none"
    return Said(severity, change)


def _noun(line: Line) -> str:
    return "share of right answers" if line.metric == ANSWERS else "perplexity"


def worst(found: Sequence[Line]) -> tuple[Line, Effect, Said] | None:
    """Return the costliest effect: by severity, then by the size of the change."""
    said = [(line, effect, say(effect, line)) for line in found for effect in line.effects]
    rank = ("clear", "severe", "broken")
    known = [item for item in said if item[2].severity in rank]
    if not known:
        return None

    def cost(item: tuple[Line, Effect, Said]) -> tuple[float, ...]:
        _, effect, words = item
        size = effect.percent if effect.percent is not None else -(effect.points or 0.0)
        return (rank.index(words.severity), size)

    return max(known, key=cost)


def render(selection: Selection, found: Sequence[Line]) -> Html:
    """Return the section."""
    models = [
        _model(name, [line for line in found if line.model == name], selection)
        for name in selection.models
    ]
    more = models[_OPEN_MODELS:]
    rest = details(f"{len(more)} more models", *more) if more else None
    return element(
        "section",
        element("h2", "Verdict"),
        element("ul", *_lead(selection, found), class_="lead"),
        element("div", *models[:_OPEN_MODELS], class_="verdicts"),
        rest,
        element("p", _LEGEND, class_="hint"),
        id="verdict",
    )


def _lead(selection: Selection, found: Sequence[Line]) -> list[Html]:
    count = dict.fromkeys(("ok", "failed", "unsupported"), 0)
    for record in selection.records:
        count[record.status] += 1
    items = [
        [
            f"{_count(len(selection.records), 'record')}: "
            f"{_count(len(selection.models), 'model')}, "
            f"{_count(len(selection.schemes), 'scheme')}, "
            f"{_count(len(selection.tasks), 'task')}. ",
            f"{count['ok']} finished, {count['failed']} failed, "
            f"{count['unsupported']} unsupported.",
        ]
    ]
    by_scheme = [list(parts) for parts in _by_scheme(selection, found)]
    items += by_scheme[:_LEAD_SCHEMES]
    if len(by_scheme) > _LEAD_SCHEMES:
        items.append([f"{len(by_scheme) - _LEAD_SCHEMES} more schemes: model by model below."])
    costliest = worst(found)
    if costliest is not None:
        line, effect, words = costliest
        items.append(
            [
                element("strong", "Worst: "),
                named(effect.result.first.scheme),
                " on ",
                named(selection.labels[line.model]),
                ", ",
                named(line.task),
                f": {words.text} ({words.word}).",
            ]
        )
    if not any(line.reference for line in found):
        items.append(["No unquantized run is among the records: nothing to compare with."])
    return [element("li", *parts) for parts in items]


def _by_scheme(selection: Selection, found: Sequence[Line]) -> Iterable[list[Html | str]]:
    """Yield what each scheme costs in perplexity over all models and texts."""
    for scheme in selection.schemes:
        effects = [
            (effect, say(effect, line).severity)
            for line in found
            if line.metric != ANSWERS
            for effect in line.effects
            if effect.result.first.scheme == scheme and effect.result.value is not None
        ]
        changes = sorted(item.percent for item, _ in effects if item.percent is not None)
        broken = sum(severity == "broken" for _, severity in effects)
        if not changes and not broken:
            continue
        text = ""
        if changes:
            ends = dict.fromkeys(map(change_text, (changes[0], changes[-1])))
            over = _count(len(changes), "comparison")
            text = f": perplexity {' to '.join(ends)} ({over})"
        if broken:
            text += f"{';' if changes else ':'} breaks {broken} of {_count(len(effects), 'run')}"
        yield [element("strong", named(scheme)), f"{text}."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _model(name: str, found: Sequence[Line], selection: Selection) -> Html:
    return element(
        "article",
        element("h3", named(selection.labels[name])),
        *(_line(line) for line in found),
        class_="card",
        data_model=name,
    )


def _line(line: Line) -> Html:
    limit = f", first {line.limit}" if line.limit is not None else ""
    heading = element("h4", named(line.task), element("small", f" {line.protocol}{limit}"))
    if not line.effects and line.reference is None:
        return markup([heading])
    rows = [_row(effect, line) for effect in line.effects]
    return element("div", heading, _reference(line), element("dl", *rows), data_task=line.task)


def _reference(line: Line) -> Html:
    reference = line.reference
    if reference is None:
        return element("p", "No unquantized run.", class_="base")
    header = metric_style(line.metric).header
    name = [named(reference.first.scheme), ": "]
    if reference.value is None:
        problem = without_folders(reference.problem or "")
        return element("p", *name, f"{reference.first.status}, {problem}", class_="base")
    text = f"{header} {format_value(reference.value, line.metric)}"
    first = reference.first
    if is_floor(line.metric, reference.value, stderr=first.stderr, count=first.count):
        text += ", not distinguishable from 0: there is little to lose"
    if len(reference.numbers) > 1:
        text += f", mean of {len(reference.numbers)} seeds"
    return element("p", *name, text, class_="base")


def _row(effect: Effect, line: Line) -> Html:
    words = say(effect, line)
    scheme = effect.result.first.scheme
    return element(
        "div",
        element("dt", named(scheme)),
        element(
            "dd",
            element("span", words.word, class_=f"tag {words.severity} {words.status}"),
            " ",
            element("span", words.text),
        ),
        data_scheme=scheme,
    )
