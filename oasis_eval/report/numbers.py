"""How metrics are named in headers and how their values are printed.

The printed form is the same in every format; only the LaTeX renderer sets it in math. The marks
of a table (`NaN`, `inf`, `failed`, `n/a`, `–`) are defined here once for all formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "unsupported", "missing", "reference", "undefined"]

MARKS: dict[Status, str] = {
    "failed": "failed",
    "unsupported": "n/a",
    "missing": "–",
    "reference": "ref.",
    "undefined": "undef.",
}
FLOOR = "floor"
FLOOR_ERRORS = 1.96
"""A share within this many standard errors of 0 is at the floor."""

_MAX_FIXED = 1000.0
_MAX_INTEGER = 10000.0


@dataclass(frozen=True, slots=True)
class MetricStyle:
    """Presentation of one metric."""

    header: str
    better: Literal["lower", "higher"] | None = None
    decimals: int | None = None
    """Digits after the point below 1000; None: four significant digits."""
    percent: bool = False
    """Whether a share is printed in percent."""

    @property
    def arrow(self) -> str:
        """Return the direction in which the metric improves, as an arrow."""
        return {"lower": "↓", "higher": "↑", None: ""}[self.better]


_STYLES = {
    "token_perplexity": MetricStyle("Perplexity", "lower", 2),
    "word_perplexity": MetricStyle("Word perplexity", "lower", 2),
    "byte_perplexity": MetricStyle("Byte perplexity", "lower", 3),
    "bits_per_byte": MetricStyle("Bits per byte", "lower", 3),
    "token_perplexity_batch_mean": MetricStyle("Perplexity, batch mean", "lower", 2),
    "answer_nll_per_token": MetricStyle("Answer NLL (nats)", "lower", 3),
    "cut": MetricStyle("Cut (%)", "lower", 1, percent=True),
    "unread": MetricStyle("Unread (%)", "lower", 1, percent=True),
    "nll_nats": MetricStyle("NLL (nats)", "lower"),
    "num_tokens": MetricStyle("Tokens"),
    "pass@1": MetricStyle("Pass@1 (%)", "higher", 1, percent=True),
    "pass@1_flexible": MetricStyle("Pass@1, flexible (%)", "higher", 1, percent=True),
    "acc": MetricStyle("Accuracy (%)", "higher", 1, percent=True),
    "acc_norm": MetricStyle("Accuracy, normalised (%)", "higher", 1, percent=True),
    "exact_match": MetricStyle("Exact match (%)", "higher", 1, percent=True),
    "max_inf_norm": MetricStyle("Max. infinity norm", "lower", 2),
    "avg_kurtosis": MetricStyle("Avg. kurtosis", "lower", 2),
}
KNOWN_METRICS = frozenset(_STYLES)


def metric_style(name: str) -> MetricStyle:
    """Return how `name` is printed; a metric that is not known here keeps its own name."""
    if name in _STYLES:
        return _STYLES[name]
    if name.startswith("pass@"):
        return MetricStyle(f"P{name[1:]} (%)", "higher", 1, percent=True)
    return MetricStyle(name)


def format_number(value: float, decimals: int | None) -> str:
    """Print `value` with `decimals` digits; from 1000 on with four significant digits.

    From 10,000 on the form is `1.235e4`. NaN is `NaN`, infinity `inf` or `-inf`.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if decimals is not None and round(size, decimals) < _MAX_FIXED:
        return _no_negative_zero(f"{value:.{decimals}f}")
    if decimals is None and 1e-3 <= size < _MAX_FIXED:
        return f"{value:.4g}"
    if _MAX_FIXED <= round(size) < _MAX_INTEGER:
        return f"{value:.0f}"
    if size == 0.0:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def format_value(value: float, metric: str) -> str:
    """Print a value (or an uncertainty) of `metric`."""
    style = metric_style(metric)
    return format_number(value * 100.0 if style.percent else value, style.decimals)


def format_change(percent: float) -> str:
    """Print a relative change with its sign and two decimals."""
    text = format_number(percent, 2)
    return f"+{text}" if math.isfinite(percent) and percent > 0 and text != "0.00" else text


def is_floor(metric: str, value: float, *, stderr: float | None, count: int | None) -> bool:
    """Tell whether a Pass@k is not distinguishable from 0.

    It is when it is at most 1.96 standard errors above 0; without a stored standard error that of
    a binomial share is used. Nothing is claimed where the number of questions is unknown.
    """
    if not metric.startswith("pass@") or not count or not math.isfinite(value):
        return False
    error = stderr if stderr else math.sqrt(max(value * (1.0 - value), 0.0) / count)
    return value <= FLOOR_ERRORS * error or value == 0.0


def _no_negative_zero(text: str) -> str:
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text
