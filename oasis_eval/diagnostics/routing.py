"""What depth routing does, per router: where the mass goes, and whether small updates draw it.

Weights are reported raw and, where a null takes a part of them, renormalised over real sources;
entropy, effective branches and participation are of the renormalised ones, since only those are a
distribution. A router with one source decides nothing and is left out.

Source: AttnRes, arXiv 2603.15031; OASIS, arXiv 2605.17887 (depth collapse, null coupling).
Shapes: B sequences, T tokens, D width, S sources, N real tokens.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from oasis_eval.diagnostics.attention import largest_to_median
from oasis_eval.modeling.routing import DepthRead, DepthRouter, Source

COLLAPSE_THRESHOLD = 0.9
"""A token whose dominant source has more weight has collapsed onto it."""

_MIN_SPREAD = 1e-5
"""Standard deviations below this share of the mean are rounding: no correlation is defined."""


class UpdateNorms:
    """Norms |v| of sources, computed once a source although many reads see it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def of(self, value_BTD: Tensor) -> Tensor:
        """Return [B, T], fp32 or wider."""
        known = self._known.get(id(value_BTD))
        if known is not None and known[0]() is value_BTD:
            return known[1]
        norm_BT = token_norm(value_BTD)
        self._known[id(value_BTD)] = (weakref.ref(value_BTD), norm_BT)
        return norm_BT

    def clear(self) -> None:
        """Forget a forward pass that has ended."""
        self._known.clear()


def token_norm(value_BTD: Tensor) -> Tensor:
    """Return the Euclidean norm of each token, [B, T], accumulated in fp32 or wider."""
    wide = torch.promote_types(value_BTD.dtype, torch.float32)
    norm_BT: Tensor = torch.linalg.vector_norm(value_BTD, dim=-1, dtype=wide)
    return norm_BT


@dataclass(slots=True)
class RouterSums:
    """Running sums of one router over all of a text, in float64.

    Shares are of what the sources have together; a token that has all of its mass on the null has
    none, and counts in raw weights and null mass alone.
    """

    has_embedding: bool
    """Whether the oldest source is the embedding."""
    beta: float | None
    """Strength of the null coupling; None where this router has none."""
    _sums: dict[str, float] = field(default_factory=dict)
    _share_sums: dict[str, float] = field(default_factory=dict)
    _sources: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0
    _num_with_mass: int = 0
    _max_logit: float = -float("inf")

    def add(
        self, weights_NS: Tensor, null_N: Tensor | None, logits_NS: Tensor, ratios_NS: Tensor
    ) -> None:
        """Take in the real tokens of one forward pass.

        Args:
            weights_NS: Right after the normalizer.
            null_N: Mass of the null, None where there is none.
            logits_NS: Right before the normalizer.
            ratios_NS: Norm of each source over the norm of the read, |v_i| / |h|.
        """
        weights_NS, ratios_NS = weights_NS.double(), ratios_NS.double()
        num_tokens, num_sources = weights_NS.shape
        has_mass_N, share_NS = _shares(weights_NS)
        ratios_NS = ratios_NS[has_mass_N]  # a read of nothing has no length to compare with
        entropy_N = torch.special.entr(share_NS).sum(dim=-1)
        dominant_N, dominant_raw_N = share_NS.amax(dim=-1), weights_NS.amax(dim=-1)
        null_N = (
            (1.0 - weights_NS.sum(dim=-1)).clamp_min(0.0) if null_N is None else null_N.double()
        )
        smallest_N = ratios_NS.argmin(dim=-1)
        shares = {
            "entropy": entropy_N / torch.log(weights_NS.new_tensor(num_sources)),
            "effective_branches": entropy_N.exp(),
            "participation": 1.0 / share_NS.square().sum(dim=-1),
            "dominant_share": dominant_N,
            "newest_share": share_NS[:, -1],
            "collapse_rate": (dominant_N > COLLAPSE_THRESHOLD).double(),
            "smallest_update_dominates": (share_NS.argmax(dim=-1) == smallest_N).double(),
        }
        values = {
            "dominant_share_raw": dominant_raw_N,
            "newest_share_raw": weights_NS[:, -1],
            "null_mass": null_N,
            "collapse_rate_raw": (dominant_raw_N > COLLAPSE_THRESHOLD).double(),
            "logit_gap": largest_to_median(logits_NS).double(),
        }
        if self.has_embedding:
            shares["embedding_share"] = share_NS[:, 0]
            values["embedding_share_raw"] = weights_NS[:, 0]
        for sums, found in ((self._share_sums, shares), (self._sums, values)):
            for name, value_N in found.items():
                sums[name] = sums.get(name, 0.0) + float(value_N.sum())
        self._count += num_tokens
        self._num_with_mass += len(share_NS)
        self._max_logit = max(self._max_logit, float(logits_NS.max()))
        self._add_pair("weight", "update_norm", share_NS, ratios_NS)
        self._add_source("weight_raw", weights_NS)

    def add_psi(self, weights_NS: Tensor, psi_NS: Tensor) -> None:
        """Take in psi of the sources, where the router is coupled; after `add`."""
        has_mass_N, share_NS = _shares(weights_NS.double())
        self._add_pair("psi_weight", "psi", share_NS, psi_NS.double()[has_mass_N])

    def result(self) -> dict[str, float]:
        """Return means over tokens; a correlation that is not defined is left out.

        Shares are NaN where no token has mass.
        """
        result = {name: total / self._count for name, total in self._sums.items()}
        for name, total in self._share_sums.items():
            result[name] = total / self._num_with_mass if self._num_with_mass else math.nan
        result["max_logit"] = self._max_logit
        for name, x, y in (
            ("weight_update_correlation", "weight", "update_norm"),
            ("weight_psi_correlation", "psi_weight", "psi"),
        ):
            value = self._correlation(x, y)
            if value is not None:
                result[name] = value
        if self.beta is not None:
            result["beta"] = self.beta
        for name in ("weight", "weight_raw", "update_norm", "psi"):
            if name in self._sources:
                count = self._count if name == "weight_raw" else self._num_with_mass
                means_S = (self._sources[name] / count).tolist()
                result |= {f"source.{i}.{name}": mean for i, mean in enumerate(means_S)}
        return result

    def _add_pair(self, x: str, y: str, x_NS: Tensor, y_NS: Tensor) -> None:
        products = {x: x_NS, y: y_NS, f"{x}^2": x_NS**2, f"{y}^2": y_NS**2, f"{x}*{y}": x_NS * y_NS}
        for name, product_NS in products.items():
            self._add_source(name, product_NS)

    def _add_source(self, name: str, values_NS: Tensor) -> None:
        sum_S = values_NS.sum(dim=0)
        self._sources[name] = self._sources[name] + sum_S if name in self._sources else sum_S

    def _correlation(self, x: str, y: str) -> float | None:
        """Return Pearson's r over all tokens and sources."""
        if x not in self._sources or not self._num_with_mass:
            return None
        names = (x, y, f"{x}^2", f"{y}^2", f"{x}*{y}")
        mean_x, mean_y, xx, yy, xy = (
            float(self._sources[name].sum()) / (self._num_with_mass * len(self._sources[name]))
            for name in names
        )
        spread_x = math.sqrt(max(xx - mean_x**2, 0.0))
        spread_y = math.sqrt(max(yy - mean_y**2, 0.0))
        if spread_x <= _MIN_SPREAD * abs(mean_x) or spread_y <= _MIN_SPREAD * abs(mean_y):
            return None
        return (xy - mean_x * mean_y) / (spread_x * spread_y)


def _shares(weights_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens have mass on a source, [N], and the shares of their sources, [M, S]."""
    total_N = weights_NS.sum(dim=-1)
    has_mass_N = total_N > 0
    return has_mass_N, weights_NS[has_mass_N] / total_N[has_mass_N, None]


class RoutingWatch:
    """Sums of every router that is watched, by module name."""

    def __init__(self) -> None:
        self.sums: dict[str, RouterSums] = {}
        self.real_BT: Tensor | None = None
        """Real tokens of the running pass; None: no padding."""
        self._norms = UpdateNorms()
        self._running: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the depth routers of `model` for the length of the block."""
        wiring = getattr(getattr(model, "config", None), "wiring", None)
        handles = []
        for name, module in model.named_modules():
            if not isinstance(module, DepthRouter):
                continue
            handles += [
                module.taps.depth_logits.register_forward_hook(partial(self._keep, "logits")),
                module.taps.depth_psi.register_forward_hook(partial(self._keep, "psi")),
                module.register_forward_hook(
                    partial(self._read, name, wiring != "delta"), always_call=False
                ),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_pass(self) -> None:
        """Forget the tensors of a forward pass that has ended."""
        self._norms.clear()
        self._running.clear()

    def _keep(self, what: str, _: nn.Module, __: object, value: Tensor) -> None:
        self._running[what] = value

    def _read(
        self,
        name: str,
        has_embedding: bool,
        module: nn.Module,
        args: tuple[Sequence[Source], ...],
        read: DepthRead,
    ) -> None:
        sources = args[0]
        logits_BTS, psi_BTS = self._running.pop("logits"), self._running.pop("psi", None)
        if len(sources) < 2:
            return
        if name not in self.sums:
            assert isinstance(module, DepthRouter)
            beta = float(module.beta) if module.is_coupled else None
            self.sums[name] = RouterSums(has_embedding, beta)
        norms_BTS = torch.stack([self._norms.of(source.value) for source in sources], dim=-1)
        ratios_BTS = norms_BTS / token_norm(read.hidden).unsqueeze(-1)
        weights_NS = self._real(read.weights)
        null_N = None if read.null_mass is None else self._real(read.null_mass)
        sums = self.sums[name]
        sums.add(weights_NS, null_N, self._real(logits_BTS), self._real(ratios_BTS))
        if psi_BTS is not None:
            sums.add_psi(weights_NS, self._real(psi_BTS))

    def _real(self, values: Tensor) -> Tensor:
        """Return the values of real tokens, [N, ...]."""
        return values.flatten(0, 1) if self.real_BT is None else values[self.real_BT]
