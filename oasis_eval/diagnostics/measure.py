"""Everything about one prepared model on one text: model-level numbers and those behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from oasis_eval.diagnostics.attention import (
    GAP_QUERIES,
    OVER_NULL_THRESHOLD,
    SINK_THRESHOLD,
    HeadStatistics,
)
from oasis_eval.diagnostics.capture import TENSOR_SETS
from oasis_eval.diagnostics.observation import Observation, observe
from oasis_eval.diagnostics.tensor_sums import TensorStatistics
from oasis_eval.errors import DataError
from oasis_eval.parsing import content_hash
from oasis_eval.prepared import PreparedModel
from oasis_eval.record import LayerStat, Metric, ProtocolInfo

VERSION = 2
"""Raised when a change of the code changes a number."""

_SUMMARY = (
    "outliers, attention and depth routing on the inputs of the windows; statistics a sequence, "
    "then means over sequences; sinks over the queries that see the first token, itself included"
)
_HEAD_MEANS = ("sink_mass", "sink_mass_renormalised", "null_mass", "logit_gap")
_LOCALITY = ("mean_distance", "near_mass")


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What one pass over a text gave."""

    metrics: dict[str, float]
    """Model-level numbers by name."""
    layers: tuple[LayerStat, ...]
    num_windows: int
    num_tokens: int
    length: int
    """Tokens of the longest window."""
    warnings: tuple[str, ...]

    @property
    def protocol(self) -> ProtocolInfo:
        """How the numbers were measured."""
        name = f"diagnostics-{self.length}"
        return ProtocolInfo(
            name=name,
            version=VERSION,
            sha256=content_hash([name, VERSION, _SUMMARY]),
            summary=_SUMMARY,
            details={
                "window": self.length,
                "num_windows": self.num_windows,
                "num_tokens": self.num_tokens,
                "sink_threshold": SINK_THRESHOLD,
                "gap_queries": GAP_QUERIES,
            },
        )

    def as_metrics(self, task: str) -> tuple[Metric, ...]:
        """Return the model-level numbers as a record of `task` holds them, sorted by name."""
        return tuple(
            Metric(
                task=task,
                name=name,
                value=value,
                count=self.num_windows,
                protocol=self.protocol.name,
            )
            for name, value in sorted(self.metrics.items())
        )


def measure(
    prepared: PreparedModel,
    windows: Sequence[Sequence[int]],
    *,
    batch_size: int,
    by_position: bool = False,
) -> Diagnostics:
    """Measure a model in one pass over a text.

    Args:
        prepared: The model under its scheme; what it computes stays bit for bit the same.
        windows: Token ids of each sequence.
        batch_size: Most sequences of one forward pass; only equal lengths share one, so there is
            no padding.
        by_position: Whether sink and null mass are also reported by position of the query, for
            each layer: `position.LAST.sink_mass`.

    Raises:
        DataError: There is nothing to measure on.
    """
    if not any(windows):
        raise DataError("diagnostics need at least one window with a token; found none")
    with observe(prepared.model, by_position=by_position) as observation:
        for batch in _batches(windows, batch_size):
            observation.run(torch.tensor(batch, device=prepared.device))
    return summarize(observation)


def summarize(observation: Observation) -> Diagnostics:
    """Turn the sums of an observation into numbers."""
    metrics: dict[str, float] = {}
    layers: list[LayerStat] = []
    warnings: list[str] = []
    for part in (_outliers, _attention, _routing):
        part(observation, metrics, layers, warnings)
    return Diagnostics(
        metrics=metrics,
        layers=tuple(layers),
        num_windows=observation.num_sequences,
        num_tokens=observation.num_tokens,
        length=observation.longest,
        warnings=tuple(warnings),
    )


def _outliers(
    observation: Observation,
    metrics: dict[str, float],
    layers: list[LayerStat],
    warnings: list[str],
) -> None:
    watch = observation.activations
    num_massive = 0
    for tensor_set in TENSOR_SETS:
        results = {name: s.result() for (kind, name), s in watch.sums.items() if kind == tensor_set}
        if not results:
            warnings.append(f"diagnostics found none of the tensors called {tensor_set}")
            continue
        metrics |= _of_set(tensor_set, list(results.values()))
        for name, result in results.items():
            values = result._asdict()
            layers += [
                LayerStat(module=name, name=f"{tensor_set}.{key}", value=value)
                for key, value in values.items()
            ]
        flat = [name for name, result in results.items() if result.is_flat]
        if flat:
            warnings.append(f"constant {tensor_set}, left out of the mean kurtosis: {_some(flat)}")
    for (_, name), sums in watch.sums.items():
        num_massive += sums.massive_count
        if sums.massive_count:
            layers.append(LayerStat(module=name, name="massive.count", value=sums.massive_count))
        for rank, item in enumerate(sums.massive_top, start=1):
            layers += [
                LayerStat(module=name, name=f"massive.{rank}.{key}", value=float(value))
                for key, value in item._asdict().items()
            ]
    metrics["massive_per_window"] = num_massive / observation.num_sequences
    if watch.unread:
        warnings.append(f"not measured, tokens in an order of their own: {_some(watch.unread)}")


def _of_set(tensor_set: str, results: Sequence[TensorStatistics]) -> dict[str, float]:
    varied = [result for result in results if not result.is_flat]
    values = {
        "max_inf_norm": _max(result.max_inf_norm for result in results),
        "max_inf_norm_first": _max(result.max_inf_norm_first for result in results),
        "max_inf_norm_rest": _max(result.max_inf_norm_rest for result in results),
        "avg_kurtosis": _mean(result.kurtosis for result in varied or results),
        "avg_kurtosis_literature": _mean(result.kurtosis_literature for result in results),
        "token_kurtosis_first": _mean(result.token_kurtosis_first for result in varied or results),
        "token_kurtosis_rest": _mean(result.token_kurtosis_rest for result in varied or results),
        "num_flat": float(sum(result.is_flat for result in results)),
    }
    return {f"{name}_{tensor_set}": value for name, value in values.items()}


def _attention(
    observation: Observation,
    metrics: dict[str, float],
    layers: list[LayerStat],
    warnings: list[str],
) -> None:
    if not observation.heads:
        warnings.append("attention could not be observed: the model is not on the interface")
        return
    results = {name: sums.result() for name, sums in observation.heads.items()}
    for name, result in results.items():
        share = result.sink_query_share
        layers.append(LayerStat(module=name, name="sink_query_share", value=share))
        for key, value in result._asdict().items():
            if isinstance(value, torch.Tensor):
                layers += [
                    LayerStat(module=name, name=f"head.{head}.{key}", value=number)
                    for head, number in enumerate(value.tolist())
                ]
    for name, sums in observation.heads.items():
        layers += [
            LayerStat(module=name, name=f"position.{last}.{key}", value=value)
            for key, values in sums.result_by_position().items()
            for last, value in values.items()
        ]
    metrics |= _of_heads(list(results.values()))


def _of_heads(results: Sequence[HeadStatistics]) -> dict[str, float]:
    def heads(name: str) -> list[float]:
        return [number for result in results for number in getattr(result, name).tolist()]

    metrics = {name: _mean(heads(name)) for name in _HEAD_MEANS}
    for name in _LOCALITY:  # a head that leaves all of its mass to the null is nowhere
        metrics[name] = _mean(value for value in heads(name) if not math.isnan(value))
    metrics["max_logit"] = _max(heads("max_logit"))
    for name, stem in (
        ("sink_mass", "sink_rate"),
        ("sink_mass_64", "sink_rate_64"),
        ("sink_mass_renormalised", "sink_rate_renormalised"),
        ("sink_mass_renormalised_64", "sink_rate_renormalised_64"),
    ):
        metrics[stem] = _share_above(heads(name), SINK_THRESHOLD)
    metrics["over_null_rate"] = _share_above(heads("null_mass"), OVER_NULL_THRESHOLD)
    metrics["sink_query_share"] = _mean(result.sink_query_share for result in results)
    return metrics


def _routing(
    observation: Observation,
    metrics: dict[str, float],
    layers: list[LayerStat],
    warnings: list[str],
) -> None:
    del warnings
    collected: dict[str, list[float]] = {}
    for router, sums in observation.routing.sums.items():
        for name, value in sums.result().items():
            layers.append(LayerStat(module=router, name=f"depth.{name}", value=value))
            if not name.startswith("source."):
                collected.setdefault(name, []).append(value)
    for name, values in collected.items():
        metrics[f"depth_{name}"] = _max(values) if name == "max_logit" else _mean(values)


def _batches(windows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[list[int]]]:
    """Yield sequences of one length, longest first so that memory peaks at the start."""
    by_length: dict[int, list[list[int]]] = {}
    for window in windows:
        if window:
            by_length.setdefault(len(window), []).append(list(window))
    for length in sorted(by_length, reverse=True):
        group = by_length[length]
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def _max(values: Iterable[float]) -> float:
    """Return the largest value; NaN wins, which `max` would lose."""
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed)


def _share_above(values: Sequence[float], threshold: float) -> float:
    return sum(value > threshold for value in values) / len(values)


def _some(names: object) -> str:
    listed = list(names)  # type: ignore[call-overload]  # a list or a mapping of names
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
