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
_MOST_DECIMALS = 8


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


_OUTLIERS: tuple[tuple[str, str, Literal["lower"] | None], ...] = (
    ("max_inf_norm", "Max. infinity norm", "lower"),
    ("max_inf_norm_first", "Max. infinity norm of token 0", "lower"),
    ("max_inf_norm_rest", "Max. infinity norm but token 0", "lower"),
    ("avg_kurtosis", "Avg. kurtosis", "lower"),
    ("avg_kurtosis_literature", "Avg. kurtosis (s^4 + 1e-6)", "lower"),
    ("token_kurtosis_first", "Kurtosis of token 0", "lower"),
    ("token_kurtosis_rest", "Kurtosis of other tokens", "lower"),
    ("num_flat", "Constant tensors", None),
)
"""Measured on two sets of tensors each."""

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
    "kl_nats": MetricStyle("KL (nats)", "lower"),
    **{
        f"kl_{name}_nats": MetricStyle(f"KL, {label} (nats)", "lower")
        for name, label in (
            ("p50", "median"),
            ("p90", "90 %"),
            ("p99", "99 %"),
            ("p99_9", "99.9 %"),
            ("max", "max."),
        )
    },
    "kl_tail_share": MetricStyle("KL of the worst 1 % (%)", None, 1, percent=True),
    "increase_tail_share": MetricStyle("Loss increase of the worst 1 % (%)", None, 1, percent=True),
    "nll_tail_share": MetricStyle("Loss of the worst 0.1 % (%)", None, 1, percent=True),
    "same_top1": MetricStyle("Same top-1 (%)", "higher", 1, percent=True),
    "delta_nll_nats": MetricStyle("Δ NLL (nats)", "lower"),
    "median_nll_nats": MetricStyle("Median NLL (nats)", "lower", 3),
    "worst_window_nll_nats": MetricStyle("NLL of the worst window (nats)", "lower", 3),
    "flips_right_to_wrong": MetricStyle("Right to wrong (%)", "lower", 1, percent=True),
    "flips_wrong_to_right": MetricStyle("Wrong to right (%)", None, 1, percent=True),
    "max_inf_norm": MetricStyle("Max. infinity norm", "lower", 2),
    "avg_kurtosis": MetricStyle("Avg. kurtosis", "lower", 2),
    **{
        f"{name}_{tensors}": MetricStyle(f"{header}, {label}", better, 2)
        for tensors, label in (("outputs", "outputs"), ("linear_inputs", "Linear inputs"))
        for name, header, better in _OUTLIERS
    },
    "massive_per_window": MetricStyle("Massive activations a window", "lower", 2),
    "sink_mass": MetricStyle("First-token mass (%)", "lower", 1, percent=True),
    "sink_mass_renormalised": MetricStyle(
        "First-token mass, renormalised (%)", "lower", 1, percent=True
    ),
    "sink_rate": MetricStyle("Sink rate (%)", "lower", 1, percent=True),
    "sink_rate_64": MetricStyle("Sink rate, 64 tokens (%)", "lower", 1, percent=True),
    "sink_rate_renormalised": MetricStyle("Sink rate, renormalised (%)", "lower", 1, percent=True),
    "sink_rate_renormalised_64": MetricStyle(
        "Sink rate, renormalised, 64 tokens (%)", "lower", 1, percent=True
    ),
    "sink_query_share": MetricStyle("Queries that see token 0 (%)", None, 1, percent=True),
    "null_mass": MetricStyle("Null mass (%)", None, 1, percent=True),
    "over_null_rate": MetricStyle("Over-null rate (%)", None, 1, percent=True),
    "max_logit": MetricStyle("Max. attention logit", None, 2),
    "logit_gap": MetricStyle("Attention logit gap", None, 2),
    "mean_distance": MetricStyle("Attention distance (tokens)", None, 1),
    "near_mass": MetricStyle("Mass within 16 tokens (%)", None, 1, percent=True),
    "depth_entropy": MetricStyle("Depth entropy / log S", None, 3),
    "depth_effective_branches": MetricStyle("Effective branches", None, 2),
    "depth_participation": MetricStyle("Depth participation", None, 2),
    "depth_collapse_rate": MetricStyle("Depth collapse (%)", "lower", 1, percent=True),
    "depth_collapse_rate_raw": MetricStyle("Depth collapse, raw (%)", "lower", 1, percent=True),
    "depth_null_mass": MetricStyle("Depth null mass (%)", None, 1, percent=True),
    "depth_smallest_update_dominates": MetricStyle(
        "Smallest update dominates (%)", None, 1, percent=True
    ),
    "depth_max_logit": MetricStyle("Max. depth logit", None, 2),
    "depth_logit_gap": MetricStyle("Depth logit gap", None, 2),
    "depth_weight_update_correlation": MetricStyle("r(depth weight, update norm)", None, 3),
    "depth_weight_psi_correlation": MetricStyle("r(depth weight, psi)", None, 3),
    "depth_beta": MetricStyle("Coupling beta", None, 3),
    **{
        f"depth_{name}{suffix}": MetricStyle(f"{header}{note} (%)", None, 1, percent=True)
        for name, header in (
            ("dominant_share", "Dominant source"),
            ("embedding_share", "Embedding's share"),
            ("newest_share", "Newest source's share"),
        )
        for suffix, note in (("", ""), ("_raw", ", raw"))
    },
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


def format_with_error(value: float, error: float, metric: str) -> str:
    """Print a value and its uncertainty as `value ± error`, both with the same decimals.

    There are more decimals than `format_value` has where the error's first digit is behind them:
    `2.790 ± 0.004`. A value from 1000 on keeps its own form.
    """
    style = metric_style(metric)
    scale = 100.0 if style.percent else 1.0
    shown, spread = value * scale, error * scale
    value_text, error_text = format_value(value, metric), format_value(error, metric)
    decimals = style.decimals
    if decimals is not None and math.isfinite(spread) and spread > 0.0:
        needed = -math.floor(math.log10(spread))
        if decimals < needed <= _MOST_DECIMALS and round(abs(shown), needed) < _MAX_FIXED:
            value_text, error_text = (format_number(item, needed) for item in (shown, spread))
        elif not error_text.strip("0."):
            error_text = f"{spread:.0e}"
    return f"{value_text} ± {error_text}"


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
