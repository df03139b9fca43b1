"""One screen on one model: where its outliers are, whether it sinks, whether its depth collapses.

The words follow from fixed thresholds, which are in the text beside the numbers; they are a reading
aid and no statistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oasis_eval.diagnostics.attention import OVER_NULL_THRESHOLD, SINK_THRESHOLD
from oasis_eval.diagnostics.measure import Diagnostics
from oasis_eval.diagnostics.routing import COLLAPSE_THRESHOLD

HEAVY_KURTOSIS = 10.0
"""Mean kurtosis of Linear inputs from which tails are called heavy (Gaussian: 3)."""
MANY_HEADS = 0.1
"""Share of sinking heads from which a model is said to sink."""
MOST_TOKENS = 0.5
"""Share of collapsed tokens from which a router is said to collapse."""


@dataclass(frozen=True, slots=True)
class _Peak:
    module: str
    value: float


def verdict(found: Diagnostics) -> list[str]:
    """Return the lines of the screen."""
    return [*_outliers(found), "", *_attention(found), "", *_depth(found)]


def _outliers(found: Diagnostics) -> Iterator[str]:
    metrics = found.metrics
    kurtosis = metrics["avg_kurtosis_linear_inputs"]
    massive = metrics["massive_per_window"]
    if massive > 0:
        word = "massive activations"
    elif kurtosis > HEAVY_KURTOSIS:
        word = f"heavy tails (kurtosis above {HEAVY_KURTOSIS:g})"
    else:
        word = "no massive activations, light tails"
    yield f"Outliers: {word}"
    for tensor_set, label in (("outputs", "outputs"), ("linear_inputs", "Linear inputs")):
        norm = _largest(found, f"{tensor_set}.max_inf_norm")
        tail = _largest(found, f"{tensor_set}.kurtosis")
        yield (
            f"  {label:13s} infinity norm {_show(norm.value)} at {norm.module}; without the first "
            f"token {_show(metrics[f'max_inf_norm_rest_{tensor_set}'])}"
        )
        yield (
            f"  {'':13s} kurtosis {_show(metrics[f'avg_kurtosis_{tensor_set}'])} on average, "
            f"{_show(tail.value)} at {tail.module} (Gaussian: 3)"
        )
    if massive > 0:
        stats = {(item.module, item.name): item.value for item in found.layers}
        peak = max(
            (
                _Peak(item.module, item.value)
                for item in found.layers
                if item.name == "massive.1.value"
            ),
            key=lambda item: abs(item.value),
        )
        token, feature = (int(stats[peak.module, f"massive.1.{n}"]) for n in ("token", "feature"))
        yield (
            f"  {massive:.4g} massive activations a window; the largest, {_show(peak.value)}, at "
            f"{peak.module}, token {token}, feature {feature}"
        )


def _attention(found: Diagnostics) -> Iterator[str]:
    metrics = found.metrics
    if "sink_rate" not in metrics:
        yield "Attention: not observed"
        return
    raw, share = metrics["sink_rate"], metrics["sink_rate_renormalised"]
    if raw >= MANY_HEADS:
        word = "the model sinks"
    elif share >= MANY_HEADS:
        word = "the null takes the mass; what is left still goes to the first token"
    else:
        word = "no sink" if raw == 0 else "few heads sink"
    yield f"Attention: {word}"
    yield (
        f"  {raw:.1%} of the heads ({share:.1%} renormalised) put more than {SINK_THRESHOLD:g} of "
        f"their mass on the first token; mean {metrics['sink_mass']:.1%}"
    )
    if metrics["sink_query_share"] < 1.0:
        yield (
            f"  sliding windows: {metrics['sink_query_share']:.1%} of the queries see that token; "
            "only they are averaged"
        )
    if metrics["null_mass"] > 0:
        yield (
            f"  null mass {metrics['null_mass']:.1%}; {metrics['over_null_rate']:.1%} of the "
            f"heads give more than {OVER_NULL_THRESHOLD:g} to the null"
        )
    yield (
        f"  largest logit {_show(metrics['max_logit'])}, {_show(metrics['logit_gap'])} above the "
        f"median; {metrics['near_mass']:.1%} of the mass within 16 tokens"
    )


def _depth(found: Diagnostics) -> Iterator[str]:
    metrics = found.metrics
    if "depth_entropy" not in metrics:
        yield "Depth: no routing over depth"
        return
    rates = [item for item in found.layers if item.name == "depth.collapse_rate"]
    collapsed = [item for item in rates if item.value >= MOST_TOKENS]
    word = f"{len(collapsed)} of {len(rates)} routers collapse" if collapsed else "no collapse"
    yield f"Depth: {word}"
    yield (
        f"  entropy {metrics['depth_entropy']:.3f} of log S; "
        f"{metrics['depth_effective_branches']:.2f} effective branches; the dominant source has "
        f"{metrics['depth_dominant_share']:.1%}"
    )
    yield (
        f"  {metrics['depth_collapse_rate']:.1%} of the tokens give more than "
        f"{COLLAPSE_THRESHOLD:g} to one source; null mass {metrics['depth_null_mass']:.1%}"
    )
    if collapsed:
        worst = max(collapsed, key=lambda item: item.value)
        yield f"  worst: {worst.module}, {worst.value:.1%} of its tokens"
    if "depth_weight_update_correlation" in metrics:
        value = metrics["depth_weight_update_correlation"]
        yield f"  correlation of weight and update norm {value:+.2f} (negative: small ones win)"


def _largest(found: Diagnostics, name: str) -> _Peak:
    items = [item for item in found.layers if item.name == name]
    # NaN is the worst there is.
    worst = max(items, key=lambda item: (item.value != item.value, item.value))
    return _Peak(worst.module, worst.value)


def _show(value: float) -> str:
    return f"{value:.4g}"
