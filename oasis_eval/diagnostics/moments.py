"""Exact statistics of one activation tensor: infinity norm, kurtosis, massive values.

Each token's features are reduced in fp64 about their own mean, in pieces that stay in the cache;
a sequence is put together from its tokens (Chan et al., 1979; Pébay, 2008). Nothing is subtracted
that is not small, and the fourth power of any fp32 number fits fp64, so the result does not depend
on the scale of the data and no copy of the tensor is ever held.

Kurtosis is raw (3 for a Gaussian), with the unbiased standard deviation, over the flattened
tokens x features of one sequence, as in the literature on outliers (Bondarenko et al., NeurIPS
2023). Data without variance have none: `FLAT_KURTOSIS` stands for it and a flag says so.

Shapes: B sequences, T tokens, F features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLAT_KURTOSIS = 0.0
"""Kurtosis of data without variance; a value that no data with variance can have."""
LITERATURE_EPSILON = 1e-6
"""Added to s^4 in published code, which lowers the kurtosis of small activations."""
MASSIVE_SIZE = 100.0
MASSIVE_RATIO = 1000.0
"""A massive activation exceeds this size and this multiple of its hidden state's median
(Sun et al., COLM 2024)."""

_PIECE_ELEMENTS = 1 << 16


class TokenMoments(NamedTuple):
    """Sums over the features of each token, [B, T] in fp64; [G, B, T] of G tensors stacked."""

    peak: Tensor
    """max |x|."""
    mean: Tensor
    second: Tensor
    """sum (x - mean)^2."""
    third: Tensor
    fourth: Tensor
    num_features: int

    @property
    def kurtosis(self) -> Tensor:
        """Kurtosis over the features of each token, [B, T]."""
        return kurtosis(self.second, self.fourth, self.num_features)


class SequenceMoments(NamedTuple):
    """Statistics of each sequence over its real tokens x features, [B] or [G, B] in fp64."""

    peak: Tensor
    """max |x|."""
    kurtosis: Tensor
    """`FLAT_KURTOSIS` where flat."""
    kurtosis_literature: Tensor
    """With s^4 + 1e-6 for s^4."""
    is_flat: Tensor
    """Whether all values are one and the same."""


def token_moments(x_BTF: Tensor) -> TokenMoments:
    """Reduce the features of each token.

    Args:
        x_BTF: Activations of any floating dtype.
    """
    num_sequences, num_tokens, num_features = x_BTF.shape
    x_NF = x_BTF.detach().reshape(-1, num_features)
    rows = max(1, _PIECE_ELEMENTS // max(num_features, 1))
    pieces = [_reduce(piece) for piece in x_NF.split(rows)]
    peak, mean, second, third, fourth = (
        torch.cat(column).view(num_sequences, num_tokens) for column in zip(*pieces, strict=True)
    )
    return TokenMoments(peak, mean, second, third, fourth, num_features)


def sequence_moments(tokens: TokenMoments, real_BT: Tensor | None) -> SequenceMoments:
    """Put sequences together from their tokens.

    Args:
        tokens: What `token_moments` returned.
        real_BT: Boolean, False for padding; None: no padding. On the device of `tokens`.
    """
    features = tokens.num_features
    num_B1 = _count(tokens.mean, real_BT).unsqueeze(-1) * features
    mean_B1 = _total(tokens.mean * features, real_BT).unsqueeze(-1) / num_B1
    delta_BT = tokens.mean - mean_B1
    second_B = _total(tokens.second + features * delta_BT**2, real_BT)
    fourth_B = _total(
        tokens.fourth
        + 4 * delta_BT * tokens.third
        + 6 * delta_BT**2 * tokens.second
        + features * delta_BT**4,
        real_BT,
    )
    num_B = num_B1.squeeze(-1)
    return SequenceMoments(
        peak=masked_max(tokens.peak, real_BT),
        kurtosis=kurtosis(second_B, fourth_B, num_B),
        kurtosis_literature=_literature(second_B, fourth_B, num_B),
        is_flat=second_B == 0.0,
    )


def kurtosis(second: Tensor, fourth: Tensor, count: Tensor | int) -> Tensor:
    """Return raw kurtosis from central sums: mean fourth power over the unbiased variance squared.

    Args:
        second: Sum of squared deviations, fp64.
        fourth: Sum of their fourth powers.
        count: Number of values.
    """
    variance = second / (count - 1)
    value = fourth / count / variance**2
    return torch.where(second == 0.0, FLAT_KURTOSIS, value)


def masked_max(values_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    """Return the largest of each sequence's real values (NaN wins), 0 where there are none."""
    if real_BT is not None:
        values_BT = torch.where(real_BT, values_BT, 0.0)
    return values_BT.amax(dim=-1)


def first_token(real_BT: Tensor | None, like_BT: Tensor) -> Tensor:
    """Return where each sequence has its first real token, boolean [B, T]."""
    if real_BT is None:
        first_BT = torch.zeros(like_BT.shape[-2:], dtype=torch.bool, device=like_BT.device)
        first_BT[:, 0] = True
        return first_BT
    return real_BT & (real_BT.cumsum(dim=-1) == 1)


class Massive(NamedTuple):
    """One massive activation."""

    value: float
    sequence: int
    """Row of the batch."""
    token: int
    """Position among the real tokens of its sequence."""
    feature: int


def massive_activations(
    x_BTF: Tensor, peak_BT: Tensor, real_BT: Tensor | None, *, top: int = 3
) -> tuple[int, list[Massive]]:
    """Count massive activations and return the largest.

    The median is that of |x| over the sequence's real tokens x features. It is computed only where
    some value is large enough to matter.

    Args:
        x_BTF: Hidden states.
        peak_BT: `TokenMoments.peak` of them.
        real_BT: Boolean, False for padding; None: no padding.
        top: How many to return.
    """
    count, found = 0, list[Massive]()
    large = masked_max(peak_BT, real_BT) > MASSIVE_SIZE
    for row in large.nonzero().flatten().tolist():
        x_TF = x_BTF[row] if real_BT is None else x_BTF[row][real_BT[row]]
        size_N = x_TF.detach().abs().flatten().to(torch.float32)
        bound = MASSIVE_RATIO * float(size_N.median())
        hits_N = (size_N > MASSIVE_SIZE) & (size_N >= bound)
        number = int(hits_N.sum())
        count += number
        if number:
            # NaN is no massive activation, and topk would put it first.
            size_N = torch.where(hits_N, size_N, 0.0)
            for index in size_N.topk(min(top, number)).indices.tolist():
                token, feature = divmod(index, x_TF.shape[-1])
                found.append(Massive(float(x_TF[token, feature]), row, token, feature))
    found.sort(key=lambda item: -abs(item.value))
    return count, found[:top]


def _reduce(x_NF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Metal has no fp64; there the pieces are reduced on the CPU.
    device = "cpu" if x_NF.device.type == "mps" else x_NF.device
    deviation_NF = x_NF.to(device, torch.float64, copy=True)
    peak_N = x_NF.abs().amax(dim=-1).to(device, torch.float64)
    # CUDA's `mean` multiplies by the reciprocal of the count: a constant's would not be itself.
    mean_N = deviation_NF.sum(dim=-1) / deviation_NF.shape[-1]
    deviation_NF -= mean_N.unsqueeze(-1)
    square_NF = deviation_NF * deviation_NF
    second_N = square_NF.sum(dim=-1)
    fourth_N = torch.linalg.vector_norm(square_NF, dim=-1).square()
    third_N = square_NF.mul_(deviation_NF).sum(dim=-1)
    return peak_N, mean_N, second_N, third_N, fourth_N


def _literature(second_B: Tensor, fourth_B: Tensor, num_B: Tensor) -> Tensor:
    # One value alone has no unbiased variance; as a flat sequence it counts 0.
    variance_B = second_B / (num_B - 1).clamp_min(1)
    return fourth_B / num_B / (variance_B**2 + LITERATURE_EPSILON)


def _count(like_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    if real_BT is None:
        return like_BT.new_full(like_BT.shape[:-1], like_BT.shape[-1])
    return real_BT.sum(dim=-1).to(like_BT.dtype)


def _total(values_BT: Tensor, real_BT: Tensor | None) -> Tensor:
    if real_BT is not None:
        values_BT = torch.where(real_BT, values_BT, 0.0)
    return values_BT.sum(dim=-1)
