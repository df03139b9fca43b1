"""Depth routing: how a sublayer reads what earlier sublayers left.

A read scores every source, turns the scores into weights and adds up the sources. AttnRes scores
with one learned query per read against RMS-normed sources. As

    w . (g * v / rms(v))  =  (w * g) . v / rms(v)

the norm of a source is one number a token that all reads share, and a read is one matrix-vector
product and one multiply-add a source: no normed copy is formed, stacked or kept for backward.

OASIS lowers the score of a source by beta (psi - mean psi), where psi is the attention mass that
went to the null when the source was made.

Sources: AttnRes, arXiv 2603.15031; OASIS, arXiv 2605.17887; low-rank router: the authors' code.
Shapes: B batch, T tokens, D width, S sources, A width of the low-rank router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oasis_eval.modeling.config import OasisConfig
from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.modeling.taps import Tap

MAX_BETA = 10.0
MIN_LOWRANK_WIDTH = 64


class Source(NamedTuple):
    """One thing a depth read can see."""

    value: Tensor
    """[B, T, D]."""
    inverse_rms: Tensor | None
    """[B, T] fp32; None where no router norms its keys."""
    psi: Tensor | None
    """[B, T] fp32 null mass of the attention behind it; None without null coupling."""


class DepthRead(NamedTuple):
    """Result of a depth read."""

    hidden: Tensor
    """[B, T, D]."""
    weights: Tensor
    """[B, T, S] fp32, sources in order of age."""
    null_mass: Tensor | None
    """[B, T] fp32; None where the depth normalizer has no null."""


def inverse_rms(value_BTD: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(v^2) + eps) of each token, [B, T] in fp32 or wider."""
    # The norm widens and squares on the fly: no copy of the width is formed.
    wide = torch.promote_types(value_BTD.dtype, torch.float32)
    norm_BT = torch.linalg.vector_norm(value_BTD, dim=-1, dtype=wide)
    return torch.rsqrt(norm_BT.square() / value_BTD.shape[-1] + eps)


def pseudo_query_logits(query_D: Tensor, sources: Sequence[Source]) -> Tensor:
    """Score sources against one query.

    Args:
        query_D: Query times the weight of the key norm, fp32.
        sources: With their inverse RMS.

    Returns:
        [B, T, S], fp32.
    """
    columns = []
    # Mixed-precision training would compute the product in its narrow dtype.
    with torch.autocast(query_D.device.type, enabled=False):
        for source in sources:
            assert source.inverse_rms is not None
            columns.append(torch.matmul(_widen(source.value), query_D) * source.inverse_rms)
    return torch.stack(columns, dim=-1)


def couple(logits_BTS: Tensor, psi_BTS: Tensor, beta: Tensor | float, *, centred: bool) -> Tensor:
    """Lower depth logits by the null mass of their sources, s - beta (psi - mean psi).

    Args:
        logits_BTS: Depth logits of a read over S sources.
        psi_BTS: Null mass of the attention in each source, mean over heads, 0 to 1.
        beta: Strength, 0 or more; one number for the read.
        centred: Whether the mean over sources is taken off psi first.
    """
    shift_BTS = psi_BTS - psi_BTS.mean(dim=-1, keepdim=True) if centred else psi_BTS
    return logits_BTS - beta * shift_BTS


def mix(weights_BTS: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Add up sources [B, T, D] by their weights, in fp32, and return their dtype."""
    weights = weights_BTS.unsqueeze(-1).unbind(dim=-2)
    hidden_BTD = weights[0] * values[0]
    for weight_BT1, value_BTD in zip(weights[1:], values[1:], strict=True):
        # In place: backward needs the weights and the sources, not the partial sums.
        hidden_BTD = hidden_BTD.addcmul_(weight_BT1, _widen(value_BTD))
    return hidden_BTD.to(values[0].dtype)


class DepthTaps(nn.Module):
    """The observable tensors of one sublayer's place in the depth wiring."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = Tap()
        """[B, T, D] running sum (or, where a read replaces it, that read) after the sublayer."""
        self.depth_sources = Tap()
        """[B, T, D] source as it is kept for later reads; once a source, not once a read."""
        self.depth_query = Tap()
        """[D] query times key norm weight, or [B, T, A] projected query."""
        self.depth_psi = Tap()
        """[B, T, S] psi of the sources of this read."""
        self.depth_logits = Tap()
        """[B, T, S] right before the normalizer."""
        self.depth_weights = Tap()
        """[B, T, S] right after the normalizer; without the null's share."""
        self.depth_null_mass = Tap()
        """[B, T] null mass of this read."""
        self.depth_output = Tap()
        """[B, T, D] what the read returns."""


class DepthPort(nn.Module):
    """A sublayer's place in the depth wiring: taps, and nothing else where nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = DepthTaps()


class DepthKeyRMSNorm(nn.Module):
    """Holds the weight of the key norm; `pseudo_query_logits` applies it inside the query."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class DepthKeyProjection(nn.Linear):
    """Keys of a low-rank router; a small projection, of a region of its own."""

    quantization_region = "depth_router"


class DepthQueryProjection(nn.Linear):
    """Query of a low-rank router; a type of its own, so that `_init_weights` zeroes it."""

    quantization_region = "depth_router"


class DepthRouter(DepthPort):
    """One depth read with its own parameters."""

    def __init__(self, config: OasisConfig, *, is_coupled: bool) -> None:
        """Create parameters; their values are set by the model's `_init_weights`.

        Args:
            config: Checked configuration.
            is_coupled: Whether this read is coupled to the null mass of attention.
        """
        super().__init__()
        width = config.hidden_size
        self.router = config.depth_router
        self.normalizer = Normalizer(config.depth_normalizer, log_n=config.depth_log_n)
        self.recency = config.depth_recency
        self.null_value = config.depth_null_value
        self.scales_output = config.depth_output_scale == "num_sources"
        self.is_coupled = is_coupled
        self.is_centred = config.coupling_centred
        self.logit_clamp = config.coupling_logit_clamp
        self.fixed_beta = config.coupling_beta_value
        self.has_neutral_embedding = (
            config.coupling_embedding_psi == "neutral" and config.wiring != "delta"
        )
        if self.router == "lowrank_qk":
            rank = max(width // 4, MIN_LOWRANK_WIDTH)
            self.q_proj = DepthQueryProjection(width, rank, bias=False)
            self.k_proj = DepthKeyProjection(width, rank, bias=False)
        else:
            self.query = nn.Parameter(torch.zeros(width))
            self.key_norm = DepthKeyRMSNorm(width)
        self.recency_bias = _scalar() if self.recency != "none" else None
        learns_beta = is_coupled and config.coupling_beta == "learned"
        self.oasis_beta_raw = _scalar() if learns_beta else None
        self.null_logit = _scalar() if config.depth_null == "learned" else None

    @property
    def beta(self) -> Tensor | float:
        """Strength of the coupling, min(softplus(raw), 10) where it is learned."""
        if self.oasis_beta_raw is not None:
            return F.softplus(self.oasis_beta_raw.float()).clamp(max=MAX_BETA)
        return 0.0 if self.fixed_beta is None else self.fixed_beta

    def forward(self, sources: tuple[Source, ...]) -> DepthRead:
        """Read `sources`, oldest first; the last one is the newest."""
        logits_BTS = self.taps.depth_logits(self._logits(sources))
        normalized = normalize(logits_BTS, None, self.normalizer, null_logit=self._wide_null())
        weights_BTS = self.taps.depth_weights(normalized.probs)
        null_mass_BT = normalized.null_mass
        mixture_BTS = weights_BTS
        if null_mass_BT is not None:
            null_mass_BT = self.taps.depth_null_mass(null_mass_BT)
            mixture_BTS = self._place_null(weights_BTS, null_mass_BT)
        if self.scales_output:
            mixture_BTS = mixture_BTS * len(sources)
        hidden_BTD = mix(mixture_BTS, [source.value for source in sources])
        return DepthRead(self.taps.depth_output(hidden_BTD), weights_BTS, null_mass_BT)

    def _logits(self, sources: tuple[Source, ...]) -> Tensor:
        if self.router == "lowrank_qk":
            logits_BTS = self._lowrank_logits(sources)
        else:
            query_D = _widen(self.query) * _widen(self.key_norm.weight)
            logits_BTS = pseudo_query_logits(self.taps.depth_query(query_D), sources)
        if self.recency_bias is not None:
            logits_BTS = logits_BTS + self.recency_bias * self._recency_positions(logits_BTS)
        if not self.is_coupled:
            return logits_BTS
        psi_BTS = self.taps.depth_psi(self._stack_psi(sources))
        logits_BTS = couple(logits_BTS, psi_BTS, self.beta, centred=self.is_centred)
        if self.logit_clamp is not None:
            logits_BTS = logits_BTS.clamp(-self.logit_clamp, self.logit_clamp)
        return logits_BTS

    def _lowrank_logits(self, sources: tuple[Source, ...]) -> Tensor:
        query_BTA = _widen(self.taps.depth_query(self.q_proj(sources[-1].value)))
        columns = [
            torch.linalg.vecdot(query_BTA, _widen(self.k_proj(source.value))) for source in sources
        ]
        return torch.stack(columns, dim=-1) / math.sqrt(query_BTA.shape[-1])

    def _recency_positions(self, logits_BTS: Tensor) -> Tensor:
        last = logits_BTS.shape[-1] - 1
        positions_S = torch.arange(last + 1, device=logits_BTS.device, dtype=logits_BTS.dtype)
        if self.recency == "linear":
            return positions_S / max(last, 1)
        return torch.eq(positions_S, last).to(logits_BTS.dtype)

    def _stack_psi(self, sources: tuple[Source, ...]) -> Tensor:
        columns = []
        for source in sources:
            assert source.psi is not None
            columns.append(source.psi)
        if self.has_neutral_embedding and len(columns) > 1:
            columns[0] = torch.stack(columns[1:], dim=-1).mean(dim=-1)
        return torch.stack(columns, dim=-1)

    def _wide_null(self) -> Tensor | None:
        return None if self.null_logit is None else _widen(self.null_logit)

    def _place_null(self, weights_BTS: Tensor, null_mass_BT: Tensor) -> Tensor:
        if self.null_value == "zero":
            return weights_BTS
        index = 0 if self.null_value == "embedding" else weights_BTS.shape[-1] - 1
        columns = list(weights_BTS.unbind(dim=-1))
        columns[index] = columns[index] + null_mass_BT
        return torch.stack(columns, dim=-1)


def _scalar() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
