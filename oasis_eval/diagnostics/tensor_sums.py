"""Running statistics of one tensor over the sequences of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.diagnostics.moments import (
    FLAT_KURTOSIS,
    Massive,
    TokenMoments,
    first_token,
    masked_max,
    massive_activations,
    sequence_moments,
)

_TOP = 3


class TensorStatistics(NamedTuple):
    """Means over sequences; see `moments` for what they are means of."""

    max_inf_norm: float
    max_inf_norm_first: float
    """Of the first token of each sequence alone."""
    max_inf_norm_rest: float
    """Of all tokens but the first; NaN where no sequence has another."""
    kurtosis: float
    """Over sequences that are not flat; `FLAT_KURTOSIS` where all are."""
    kurtosis_literature: float
    """Over all sequences."""
    token_kurtosis_first: float
    """Kurtosis over the features of the first token."""
    token_kurtosis_rest: float
    """The same, mean over all other tokens; NaN where there are none."""
    flat_share: float
    """Share of the sequences in which the tensor is constant."""

    @property
    def is_flat(self) -> bool:
        """Whether no sequence gives the tensor a kurtosis."""
        return self.flat_share == 1.0


@dataclass(slots=True)
class TensorSums:
    """Sums behind `TensorStatistics`."""

    num_sequences: int = 0
    massive_count: int = 0
    massive_top: list[Massive] = field(default_factory=list)
    """The largest; `sequence` counts over the whole text."""
    _sums: Tensor | None = None

    def add(self, sums: Tensor, num_sequences: int) -> None:
        """Take in what `sums_over_sequences` returned for this tensor, [11]."""
        self._sums = sums if self._sums is None else self._sums + sums
        self.num_sequences += num_sequences

    def add_massive(self, x_BTF: Tensor, tokens: TokenMoments, real_BT: Tensor | None) -> None:
        """Look for massive activations in hidden states, before `add` of the same pass."""
        count, found = massive_activations(x_BTF, tokens.peak.to(x_BTF.device), real_BT, top=_TOP)
        self.massive_count += count
        moved = [item._replace(sequence=item.sequence + self.num_sequences) for item in found]
        self.massive_top = sorted(self.massive_top + moved, key=lambda item: -abs(item.value))
        self.massive_top = self.massive_top[:_TOP]

    def result(self) -> TensorStatistics:
        """Divide sums by counts, once."""
        assert self._sums is not None
        (
            peak,
            peak_first,
            peak_rest,
            num_with_rest,
            kurtosis,
            num_varied,
            literature,
            first_kurtosis,
            num_first,
            rest_kurtosis,
            num_rest,
        ) = self._sums.tolist()
        number = self.num_sequences
        return TensorStatistics(
            max_inf_norm=peak / number,
            max_inf_norm_first=peak_first / number,
            max_inf_norm_rest=peak_rest / num_with_rest if num_with_rest else float("nan"),
            kurtosis=kurtosis / num_varied if num_varied else FLAT_KURTOSIS,
            kurtosis_literature=literature / number,
            token_kurtosis_first=first_kurtosis / num_first if num_first else FLAT_KURTOSIS,
            token_kurtosis_rest=_rest(rest_kurtosis, num_rest, has_rest=num_with_rest > 0),
            flat_share=1.0 - num_varied / number,
        )


def sums_over_sequences(tokens: TokenMoments, real_BT: Tensor | None) -> Tensor:
    """Return the terms of `TensorStatistics` summed over the sequences of a pass, [G, 11].

    Args:
        tokens: Of G tensors stacked, [G, B, T].
        real_BT: Boolean, False for padding; None: no padding.
    """
    if real_BT is not None:
        real_BT = real_BT.to(tokens.mean.device)
    whole = sequence_moments(tokens, real_BT)
    first_BT = first_token(real_BT, tokens.mean)
    rest_BT = ~first_BT if real_BT is None else real_BT & ~first_BT
    kurtosis_GBT, is_varied_GBT = tokens.kurtosis, tokens.second != 0.0
    terms = (
        whole.peak,
        masked_max(tokens.peak, first_BT),
        masked_max(tokens.peak, rest_BT),
        rest_BT.any(dim=-1).expand_as(whole.peak),
        whole.kurtosis,
        ~whole.is_flat,
        whole.kurtosis_literature,
        *_pair(kurtosis_GBT, first_BT & is_varied_GBT),
        *_pair(kurtosis_GBT, rest_BT & is_varied_GBT),
    )
    return torch.stack([term.to(tokens.mean.dtype).sum(dim=-1) for term in terms], dim=-1)


def _pair(values_BT: Tensor, where_BT: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(where_BT, values_BT, 0.0).sum(dim=-1), where_BT.sum(dim=-1)


def _rest(total: float, count: float, *, has_rest: bool) -> float:
    if not has_rest:
        return float("nan")
    return total / count if count else FLAT_KURTOSIS
