"""What attention does, from queries and keys: sinks, null mass, logits, locality.

The map of a layer is formed in tiles of a few queries and reduced at once; neither the maps of all
layers nor even one whole map is ever held. It is computed beside the model's own attention, which
stays as it is, in fp32 from the very queries and keys that the model attends with.

Which queries are averaged: all real ones, the first token's own included, as Gu et al. (ICLR 2025,
"When attention sink emerges") do. Sink masses average only those that can see the first token:
in a layer with a sliding window W these are the first W.

Shapes: B sequences, T queries, S keys, H query heads, K key heads, C head width, R queries of a
tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.positions import last_positions

SINK_THRESHOLD = 0.3
"""A head with a higher mean mass on the first token sinks (Gu et al., ICLR 2025)."""
SINK_LENGTH = 64
"""Their number of tokens; causal, so the first 64 queries of any window are it."""
OVER_NULL_THRESHOLD = 0.9
NEAR = 16
"""Keys that count as near: the query's own and the 15 before it."""
GAP_QUERIES = 16
"""Queries of a sequence, evenly spread and the last one among them, whose logits are sorted."""

_SIMPLEX = ("sparsemax", "entmax15")
_BY_POSITION = "position."
_ENDS = tuple(last_positions(1 << 22))
_TILE_ELEMENTS = 1 << 19
_MIN_TILE_QUERIES = 16
_MAX_TILE_QUERIES = 128


class AttentionCall(NamedTuple):
    """One layer's attention, as far as its map goes."""

    query: Tensor
    """[B, H, T, C], as it meets the keys."""
    key: Tensor
    """[B, K, S, C]; T = S."""
    normalizer: Normalizer
    scaling: float
    mask: Tensor | None = None
    """[B or 1, H or 1, T, S]: boolean, True is visible, or a bias in which the lowest number and
    minus infinity hide; None: causal."""
    is_causal: bool = True
    """Without a mask: whether later keys are hidden."""
    null_logit: Tensor | None = None
    """[H] or one number."""
    softcap: float | None = None


class HeadStatistics(NamedTuple):
    """Results of one layer, [H] in fp64 where not said otherwise."""

    sink_mass: Tensor
    """Mean weight of the first token, over the queries that see it."""
    sink_mass_renormalised: Tensor
    """The same share of the weight on real keys; 0 for a query that has none."""
    sink_mass_64: Tensor
    """`sink_mass` over the first 64 queries."""
    sink_mass_renormalised_64: Tensor
    null_mass: Tensor
    """Mean weight that goes to no key: the null's, or what a row lacks to 1."""
    max_logit: Tensor
    """Largest visible logit."""
    logit_gap: Tensor
    """Mean distance from the largest to the median visible logit, over `GAP_QUERIES`."""
    mean_distance: Tensor
    """Mean tokens between query and key, weighted by renormalised weights."""
    near_mass: Tensor
    """Mean renormalised weight within `NEAR` keys."""
    sink_query_share: float
    """Share of the queries that see the first token."""


@dataclass(slots=True)
class HeadSums:
    """Running sums of one layer over all of a text."""

    by_position: bool = False
    """Whether sink and null mass are also kept by position of the query (see `positions`)."""
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, call: AttentionCall, real_BT: Tensor | None) -> None:
        """Take in one forward pass.

        Args:
            call: Queries, keys and how they are turned into weights.
            real_BT: Boolean, False for padding; None: no padding.
        """
        num_keys, device = call.key.shape[2], call.query.device
        if real_BT is None:
            real_BT = torch.ones(call.query.shape[0], num_keys, dtype=torch.bool, device=device)
        positions = _Positions.of(real_BT)
        for tile in _tiles(call):
            self._add_tile(tile, call, positions)

    def result(self) -> HeadStatistics:
        """Return means over everything that was added; NaN where nothing was."""
        counts, sums = self._counts, self._sums
        mean = {name: sums[name] / counts[name] for name in sums if name in counts}
        return HeadStatistics(
            sink_mass=mean["sink"],
            sink_mass_renormalised=mean["sink_renormalised"],
            sink_mass_64=mean["sink_64"],
            sink_mass_renormalised_64=mean["sink_renormalised_64"],
            null_mass=mean["null"],
            max_logit=sums["max_logit"],
            logit_gap=mean["gap"],
            mean_distance=mean["distance"],
            near_mass=mean["near"],
            sink_query_share=float((counts["sink"] / counts["null"]).mean()),
        )

    def result_by_position(self) -> dict[str, dict[int, float]]:
        """Return means over heads and queries by name and last position of a bucket."""
        found: dict[str, dict[int, float]] = {}
        for name, sums in self._sums.items():
            if name.startswith(_BY_POSITION):
                counts = self._counts[name].tolist()
                found[name.removeprefix(_BY_POSITION)] = {
                    last: total / count
                    for last, total, count in zip(_ENDS, sums.tolist(), counts, strict=True)
                    if count > 0
                }
        return found

    def _add_tile(self, tile: _Tile, call: AttentionCall, positions: _Positions) -> None:
        real_BR = positions.real[:, tile.rows]
        shares_BHRS, kept_BHR, null_BHR = _shares(call, tile.logits)
        self._mean("null", null_BHR, real_BR[:, None])

        index = positions.first.view(-1, 1, 1, 1).expand(*kept_BHR.shape, 1)
        share_BHR = shares_BHRS.gather(-1, index).squeeze(-1)
        sees_BHR = tile.logits.gather(-1, index).squeeze(-1) > -torch.inf
        for suffix, counted in (
            ("", real_BR),
            ("_64", real_BR & (positions.number[:, tile.rows] < SINK_LENGTH)),
        ):
            where = sees_BHR & counted[:, None]
            self._mean(f"sink{suffix}", share_BHR * kept_BHR, where)
            self._mean(f"sink_renormalised{suffix}", share_BHR, where)

        if self.by_position:
            bucket_BR = torch.bucketize(
                positions.number[:, tile.rows] + 1, torch.tensor(_ENDS, device=real_BR.device)
            )
            seen_BHR = sees_BHR & real_BR[:, None]
            for name, values_BHR, where_BHR in (
                ("sink_mass", share_BHR * kept_BHR, seen_BHR),
                ("sink_mass_renormalised", share_BHR, seen_BHR),
                ("null_mass", null_BHR, real_BR[:, None].expand_as(null_BHR)),
            ):
                self._add_by_position(name, values_BHR, where_BHR, bucket_BR)

        has_mass = (kept_BHR > 0) & real_BR[:, None]
        distance_RS = (tile.query - tile.key).abs().float()
        near_S = slice(max(0, tile.rows.start - NEAR + 1), None)
        is_near_RS = (distance_RS[:, near_S] < NEAR).float()
        self._mean("near", (shares_BHRS[..., near_S] * is_near_RS).sum(dim=-1), has_mass)
        self._mean("distance", shares_BHRS.mul_(distance_RS).sum(dim=-1), has_mass)
        self._add_logits(tile.logits, real_BR, positions.sampled[:, tile.rows])

    def _add_logits(self, logits_BHRS: Tensor, real_BR: Tensor, sampled_BR: Tensor) -> None:
        peak_BHR = torch.where(real_BR[:, None], logits_BHRS.amax(dim=-1), -torch.inf)
        peak_H = peak_BHR.amax(dim=(0, 2))
        peak_H = peak_H.to(_wide(peak_H))
        before = self._sums.get("max_logit")
        self._sums["max_logit"] = peak_H if before is None else torch.maximum(before, peak_H)
        rows = sampled_BR.nonzero()
        if len(rows) == 0:
            return
        logits_NHS = logits_BHRS[rows[:, 0], :, rows[:, 1]]
        gap_NH = largest_to_median(logits_NHS)
        self._mean("gap", gap_NH.T[None], gap_NH.T[None].isfinite())

    def _add_by_position(
        self, name: str, values_BHR: Tensor, where_BHR: Tensor, bucket_BR: Tensor
    ) -> None:
        name = f"{_BY_POSITION}{name}"
        if name not in self._sums:
            zeros = torch.zeros(len(_ENDS), device=values_BHR.device)
            self._sums[name] = zeros.to(_wide(zeros))
            self._counts[name] = zeros.to(_wide(zeros))
        wide = self._sums[name].dtype
        index = bucket_BR.flatten()
        total_BR = torch.where(where_BHR, values_BHR, 0.0).sum(dim=1).to(wide)
        self._sums[name].index_add_(0, index, total_BR.flatten())
        self._counts[name].index_add_(0, index, where_BHR.sum(dim=1).to(wide).flatten())

    def _mean(self, name: str, values_BHR: Tensor, where_BHR: Tensor) -> None:
        """Add to a mean over sequences and queries."""
        where_BHR = where_BHR.expand_as(values_BHR)
        sum_H = torch.where(where_BHR, values_BHR, 0.0).sum(dim=(0, 2), dtype=torch.float32)
        number_H = where_BHR.sum(dim=(0, 2))
        if name in self._sums:
            self._sums[name] += sum_H
            self._counts[name] += number_H
        else:
            self._sums[name] = sum_H.to(_wide(sum_H))
            self._counts[name] = number_H.to(_wide(sum_H))


def whole_map(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the map of one layer, for a few heads of a short text.

    Args:
        call: With the heads that are wanted and no others.

    Returns:
        Weights on keys [B, H, T, S] and what goes to none of them [B, H, T], fp32.
    """
    batch, heads, num_queries, _ = call.query.shape
    shape = (batch, heads, num_queries, call.key.shape[2])
    weights_BHTS = torch.zeros(shape, device=call.query.device)
    nulls = []
    for tile in _tiles(call):
        shares_BHRS, kept_BHR, null_BHR = _shares(call, tile.logits)
        weights_BHTS[:, :, tile.rows, : len(tile.key)] = shares_BHRS * kept_BHR.unsqueeze(-1)
        nulls.append(null_BHR)
    return weights_BHTS, torch.cat(nulls, dim=-1)


def largest_to_median(logits_NS: Tensor) -> Tensor:
    """Return the distance from the largest to the median entry of each row, hidden ones left out.

    Args:
        logits_NS: [..., S]; minus infinity is hidden.

    Returns:
        [...]; NaN for a row without visible entries.
    """
    sorted_NS = logits_NS.float().sort(dim=-1).values
    last = sorted_NS.shape[-1] - 1
    # Ascending: the hidden entries come first.
    hidden_N1 = (sorted_NS == -torch.inf).sum(dim=-1, keepdim=True)
    middle_N1 = hidden_N1 + (last - hidden_N1).clamp_min(0) // 2
    other_N1 = hidden_N1 + (last - hidden_N1 + 1).clamp_min(0) // 2
    low_N1 = sorted_NS.gather(-1, middle_N1.clamp_max(last))
    high_N1 = sorted_NS.gather(-1, other_N1.clamp_max(last))
    return (sorted_NS[..., -1:] - (low_N1 + high_N1) / 2).squeeze(-1)


class _Positions(NamedTuple):
    """Where the real tokens of a batch are."""

    real: Tensor
    """[B, T]."""
    first: Tensor
    """[B] index of the first real token."""
    number: Tensor
    """[B, T] position among the real tokens."""
    sampled: Tensor
    """[B, T] queries whose logits are sorted."""

    @classmethod
    def of(cls, real_BT: Tensor) -> _Positions:
        number_BT = real_BT.cumsum(dim=-1) - 1
        sampled_BT = torch.zeros_like(real_BT)
        for row, length in enumerate(real_BT.sum(dim=-1).tolist()):
            chosen = torch.linspace(0, length - 1, GAP_QUERIES, dtype=torch.float64).round()
            is_chosen = torch.isin(number_BT[row], chosen.to(number_BT))
            sampled_BT[row] = is_chosen & real_BT[row]
        return cls(real_BT, real_BT.int().argmax(dim=-1), number_BT, sampled_BT)


class _Tile(NamedTuple):
    """The logits of a few queries."""

    logits: Tensor
    """[B, H, R, S'] fp32, hidden entries minus infinity; S' may leave out later keys."""
    rows: slice
    query: Tensor
    """[R, 1] index of each query."""
    key: Tensor
    """[S'] index of each key."""


def _shares(call: AttentionCall, logits_BHRS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return renormalised weights, the mass that they divide up, and the rest.

    Args:
        call: For its normalizer.
        logits_BHRS: Hidden entries minus infinity.

    Returns:
        [B, H, R, S], 0 in rows without mass; mass on real keys and null mass, [B, H, R].
    """
    normalizer = call.normalizer
    if normalizer.kind in ("softmax", "softmax1", "sink"):
        # One softmax for all three: their weights differ by a factor a row.
        shares_BHRS = torch.softmax(logits_BHRS, dim=-1)
        peak_BHR = logits_BHRS.amax(dim=-1)
        if call.mask is not None:  # padding may see no key at all
            shares_BHRS.masked_fill_((peak_BHR == -torch.inf).unsqueeze(-1), 0.0)
        if normalizer.kind == "softmax":
            return shares_BHRS, *_all_kept(shares_BHRS)
        null = normalizer.log_n if call.null_logit is None else call.null_logit.float()
        null_H1 = torch.as_tensor(null, device=logits_BHRS.device).reshape(-1, 1)
        lse_BHR = peak_BHR - shares_BHRS.amax(dim=-1).log()
        return shares_BHRS, torch.sigmoid(lse_BHR - null_H1), torch.sigmoid(null_H1 - lse_BHR)
    probs_BHRS = normalize(logits_BHRS, None, normalizer).probs
    if normalizer.kind in _SIMPLEX:
        return probs_BHRS, *_all_kept(probs_BHRS)
    kept_BHR = probs_BHRS.sum(dim=-1)
    probs_BHRS /= torch.where(kept_BHR > 0, kept_BHR, 1.0).unsqueeze(-1)
    return probs_BHRS, kept_BHR, (1.0 - kept_BHR).clamp_min(0.0)


def _all_kept(shares_BHRS: Tensor) -> tuple[Tensor, Tensor]:
    kept_BHR = torch.ones_like(shares_BHRS[..., 0])
    return kept_BHR, torch.zeros_like(kept_BHR)


def _tiles(call: AttentionCall) -> Iterator[_Tile]:
    batch, heads, num_queries, _ = call.query.shape
    key_BKCS = call.key.float().transpose(-1, -2)
    num_key_heads, num_keys = key_BKCS.shape[1], key_BKCS.shape[-1]
    size = _TILE_ELEMENTS // max(1, batch * heads * num_keys)
    size = min(_MAX_TILE_QUERIES, max(_MIN_TILE_QUERIES, size))
    index_S = torch.arange(num_keys, device=call.query.device)
    for start in range(0, num_queries, size):
        rows = slice(start, min(start + size, num_queries))
        query_R1 = index_S[rows].unsqueeze(-1)
        causal_only = call.mask is None and call.is_causal
        key_S = index_S[: rows.stop] if causal_only else index_S
        query_BHRC = call.query[:, :, rows].float() * call.scaling
        # The heads that share keys side by side: broadcasting would copy the keys for each.
        query_BKNC = query_BHRC.reshape(batch, num_key_heads, -1, query_BHRC.shape[-1])
        logits_BKNS = query_BKNC @ key_BKCS[..., : len(key_S)]
        logits = logits_BKNS.view(batch, heads, -1, len(key_S))
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if causal_only:
            # Keys before the tile's first query are visible to all of it.
            logits[..., start:].masked_fill_(key_S[start:] > query_R1, -torch.inf)
        elif call.mask is not None:
            _apply_mask_(logits, call.mask[..., rows, : len(key_S)])
        yield _Tile(logits, rows, query_R1, key_S)


def _apply_mask_(logits_BHRS: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        logits_BHRS.masked_fill_(~mask, -torch.inf)
        return
    logits_BHRS += mask.float()
    # Half of the lowest number: a bias may have been added to it.
    logits_BHRS.masked_fill_(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
