"""From logits to weights: every normalizer of the suite, for keys and for depth sources alike.

Pure functions over the last dimension, computed in fp32 or wider. They share one contract: the
mask is boolean (True: visible), a logit of minus infinity counts as hidden, and a row without
visible entries gives weights 0 and, where the normalizer has a null, null mass 1.

softmax1 is Miller's "off by one" softmax, exp(x_j) / (n + sum_k exp(x_k)): a softmax with one more
logit, log n, whose weight goes nowhere. `sink` is the same with a learned logit. The extra logit
takes part in the maximum that is subtracted for stability; leaving it out changes the function.

Sources: OutEffHop (ICML 2024) for softmax1; clipped softmax (Bondarenko et al., NeurIPS 2023);
sparsemax (Martins and Astudillo, ICML 2016); 1.5-entmax (Peters et al., ACL 2019); softpick
(Zuhri et al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from entmax import entmax15 as project_entmax15
from entmax import sparsemax as project_sparsemax
from torch import Tensor

from oasis_eval.errors import SpecError, UnknownNameError

NormalizerName = Literal[
    "softmax", "softmax1", "clipped_softmax", "sparsemax", "entmax15", "softpick", "sink"
]


_LIKELY_SUPPORT = 32
"""Entries that sparsemax and entmax15 sort first; where more have weight, the library sorts on, to
the same bits. Measured in `benchmarks/bench_projections.py`."""


class Normalized(NamedTuple):
    """Weights of a row and what was left over."""

    probs: Tensor
    """Shape and dtype of the logits; 0 where hidden."""
    null_mass: Tensor | None
    """`logits.shape[:-1]`, fp32 (fp64 for fp64 logits); None for normalizers without a null."""


@dataclass(frozen=True, slots=True)
class Normalizer:
    """Which normalizer, with its constants.

    Raises:
        SpecError: A constant is missing or out of range.
    """

    kind: NormalizerName
    log_n: float = 0.0
    """softmax1: logit of the null, log n; replaced by a learned logit where one is given."""
    gamma: float | None = None
    """clipped_softmax: lower stretch, at most 0; fixed by the training length, see `clip_gamma`."""
    zeta: float = 1.0
    """clipped_softmax: upper stretch, at least 1."""
    eps: float = 1e-6
    """softpick: added to the denominator."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(NormalizerName):
            raise UnknownNameError("normalizer", self.kind, get_args(NormalizerName))
        if not math.isfinite(self.log_n):
            raise SpecError(f"log_n is {self.log_n}; expected a finite number (0 means n = 1)")
        if self.kind == "clipped_softmax" and self.gamma is None:
            raise SpecError("clipped_softmax needs 'gamma' = -alpha / training length, at most 0")
        if self.gamma is not None and not -math.inf < self.gamma <= 0.0:
            raise SpecError(f"gamma is {self.gamma}; expected -alpha / training length, at most 0")
        if not 1.0 <= self.zeta < math.inf:
            raise SpecError(f"zeta is {self.zeta}; expected 1 or more")
        if not 0.0 < self.eps < math.inf:
            raise SpecError(f"eps is {self.eps}; expected a positive number")

    @property
    def has_null(self) -> bool:
        """Whether rows have a null mass."""
        return self.kind in ("softmax1", "sink")


def clip_gamma(alpha: float, train_length: int) -> float:
    """Return the lower stretch of clipped softmax, -alpha / T.

    T is the length the model was trained with; it stays the same in evaluation and decoding,
    whatever number of keys a query sees.
    """
    return -alpha / train_length


def normalize(
    logits: Tensor,
    mask: Tensor | None,
    normalizer: Normalizer,
    *,
    null_logit: Tensor | None = None,
) -> Normalized:
    """Apply `normalizer` over the last dimension.

    Args:
        logits: [..., S], any floating dtype.
        mask: Boolean, broadcastable to `logits`; True is visible. None: all visible.
        normalizer: Kind and constants.
        null_logit: Learned logit of the null, broadcastable to `logits.shape[:-1]`. Required by
            `sink`; replaces `log_n` of softmax1.

    Raises:
        SpecError: `sink` without a logit, or a logit for a normalizer that has no null.
    """
    if null_logit is not None and not normalizer.has_null:
        raise SpecError(f"a learned null logit was given, but {normalizer.kind} has no null")
    match normalizer.kind:
        case "softmax":
            return softmax(logits, mask)
        case "softmax1":
            return softmax1(
                logits, mask, log_n=normalizer.log_n if null_logit is None else null_logit
            )
        case "sink":
            if null_logit is None:
                raise SpecError("normalizer sink needs its learned logit, found none")
            return sink(logits, mask, null_logit)
        case "clipped_softmax":
            assert normalizer.gamma is not None
            return clipped_softmax(logits, mask, gamma=normalizer.gamma, zeta=normalizer.zeta)
        case "sparsemax":
            return sparsemax(logits, mask)
        case "entmax15":
            return entmax15(logits, mask)
        case "softpick":
            return softpick(logits, mask, eps=normalizer.eps)


def softmax(logits: Tensor, mask: Tensor | None = None) -> Normalized:
    """Softmax over the visible entries; no null."""
    return Normalized(_softmax(logits, mask).to(logits.dtype), None)


def softmax1(
    logits: Tensor, mask: Tensor | None = None, *, log_n: float | Tensor = 0.0
) -> Normalized:
    """Softmax with an additional logit `log_n` whose weight is the null mass.

    Args:
        logits: [..., S].
        mask: Boolean, broadcastable to `logits`.
        log_n: Number, or tensor broadcastable to `logits.shape[:-1]`.
    """
    wide, _ = _hide(logits, mask, -math.inf)
    null = torch.as_tensor(log_n, dtype=wide.dtype, device=wide.device)
    # One softmax over [logits, null]: the null is in the maximum, and its own column is the null
    # mass exp(log n - logsumexp), which 1 - sum(p) would lose to cancellation.
    column = null.expand(wide.shape[:-1]).unsqueeze(-1)
    extended = torch.softmax(torch.cat((wide, column), dim=-1), dim=-1)
    return Normalized(extended[..., :-1].to(logits.dtype), extended[..., -1])


def sink(logits: Tensor, mask: Tensor | None, sink_logit: Tensor) -> Normalized:
    """Softmax over the visible entries and one learned logit, whose weight is dropped.

    Args:
        logits: [..., S].
        mask: Boolean, broadcastable to `logits`.
        sink_logit: Broadcastable to `logits.shape[:-1]`.
    """
    return softmax1(logits, mask, log_n=sink_logit)


def clipped_softmax(
    logits: Tensor, mask: Tensor | None = None, *, gamma: float, zeta: float = 1.0
) -> Normalized:
    """Softmax stretched to [gamma, zeta] and then cut to [0, 1], so that 0 and 1 are reachable.

    Args:
        logits: [..., S].
        mask: Boolean, broadcastable to `logits`; False hides an entry.
        gamma: Lower end of the stretch, 0 or less: -alpha / training length.
        zeta: Upper end, 1 or more.

    Returns:
        Weights [..., S] that need not sum to 1; no null mass is defined.
    """
    probs = _softmax(logits, mask)
    clipped = ((zeta - gamma) * probs + gamma).clamp(0.0, 1.0)
    return Normalized(clipped.to(logits.dtype), None)


def sparsemax(logits: Tensor, mask: Tensor | None = None) -> Normalized:
    """Euclidean projection of the visible entries onto the simplex."""
    # Entries more than 1 below the maximum have weight 0, so cutting at 2 changes nothing.
    return _project(logits, mask, project_sparsemax, span=2.0)


def entmax15(logits: Tensor, mask: Tensor | None = None) -> Normalized:
    """1.5-entmax of the visible entries."""
    # Entries more than 2 below the maximum have weight 0, so cutting at 4 changes nothing.
    return _project(logits, mask, project_entmax15, span=4.0)


def softpick(logits: Tensor, mask: Tensor | None = None, *, eps: float = 1e-6) -> Normalized:
    """Rectified softmax relu(e^x - 1) / (sum |e^x - 1| + eps); rows sum to less than 1."""
    # A hidden entry as 0 adds exactly nothing to either sum.
    wide, _ = _hide(logits, mask, 0.0)
    peak = wide.detach().amax(dim=-1, keepdim=True).clamp_min(0.0)
    # e^x - 1 scaled by exp(-peak), split by sign so that neither large nor tiny x cancels.
    above, below = wide.relu(), (-wide).relu()
    floor = torch.exp(-peak)
    positive = torch.exp(above - peak) * -torch.expm1(-above)
    negative = floor * -torch.expm1(-below)
    total = (positive + negative).sum(dim=-1, keepdim=True) + eps * floor
    return Normalized((positive / total).to(logits.dtype), None)


def _hide(logits: Tensor, mask: Tensor | None, fill: float) -> tuple[Tensor, Tensor]:
    """Widen to at least fp32 and set hidden entries to `fill`; also return where they are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Not isinf or <=: a NaN must stay visible as NaN instead of turning into a hidden entry.
    hidden = wide == -math.inf
    if mask is not None:
        hidden = hidden | ~mask
    return wide.masked_fill(hidden, fill), hidden


def _softmax(logits: Tensor, mask: Tensor | None) -> Tensor:
    wide, hidden = _hide(logits, mask, -math.inf)
    dead = hidden.all(dim=-1, keepdim=True)
    # A dead row is made uniform first: its gradient is then 0 * something finite, never NaN.
    return torch.softmax(wide.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)


def _project(
    logits: Tensor, mask: Tensor | None, projection: Callable[..., Tensor], *, span: float
) -> Normalized:
    """Project rows onto the simplex after shifting them to maximum 0.

    Hidden entries and everything further than `span` below the maximum are raised to -span, which
    must not change the weights: the library's sums over sorted rows then stay small and finite.
    """
    wide, hidden = _hide(logits, mask, -math.inf)
    dead = hidden.all(dim=-1, keepdim=True)
    peak = wide.detach().amax(dim=-1, keepdim=True)
    # The library indexes out of bounds where a row holds NaN or plus infinity.
    broken = ~(peak.isfinite() | dead)
    wide = (wide - peak).masked_fill(dead | broken, 0.0).clamp_min(-span)
    probs = (
        projection(wide, dim=-1, k=_LIKELY_SUPPORT)
        .masked_fill(dead, 0.0)
        .masked_fill(broken, math.nan)
    )
    return Normalized(probs.to(logits.dtype), None)
