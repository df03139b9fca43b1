"""Regions of the graph outside of Linear layers: where they are, and what quantizes them.

A model shows such a place as an identity module whose name ends in `taps.<what>`. Quantizing it
means changing the module's class, as for layers: hooks and references stay, and undoing is exact.
Which of a model's taps ever run is found out by running a few tokens, since a model may have taps
that its wiring does not use.

Dimensions: B sequences, T tokens, H heads, S keys, C head width, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.activations import ActivationQuantizer, RowQuantizer, StaticQuantizer
from oasis_eval.quant.layers import Session
from oasis_eval.spec import QuantScheme, Region, TensorFormat

TAP_REGIONS: Mapping[str, Region] = MappingProxyType(
    {
        "*taps.scores": "attention_scores",
        "*taps.probs": "attention_probs",
        "*taps.context": "attention_context",
        "*taps.key": "kv_cache",
        "*taps.value": "kv_cache",
        "*taps.residual": "residual",
        "*taps.residual_*": "residual",
        "*taps.depth_sources": "depth_sources",
        "*taps.depth_query": "depth_query",
        "*taps.depth_weights": "depth_weights",
    }
)
"""Regions by name of the tap."""
EVERYWHERE: frozenset[Region] = frozenset(
    {"attention_scores", "attention_probs", "attention_context", "kv_cache", "residual"}
)
"""Regions that every transformer has, so that not finding one is not the same as its absence."""
ROWS: Mapping[Region, str] = MappingProxyType(
    {
        "attention_scores": "query and head, over the keys that the query sees",
        "attention_probs": "query and head, over the keys that the query sees",
        "kv_cache": "token and head",
        "depth_query": "query",
        "depth_weights": "token, over its sources",
    }
)
"""Regions whose rows are no channels of a token, and what shares a dynamic range in them; each has
one range, whatever the group size."""
_PROBE_TOKENS = 4


class RegionSite(NamedTuple):
    """One place of a region."""

    name: str
    tap: nn.Module
    region: Region


class TapQuantizer(Protocol):
    """Quantizes and dequantizes what passes a tap."""

    def __call__(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Return a tensor of the shape and dtype of `x`.

        Args:
            x: What passes; it may be written to.
            mask: What of it is visible, where the tap knows.
            name: For error messages.
        """
        ...


@dataclass(frozen=True, slots=True)
class TapQuantization:
    """How one tap quantizes."""

    name: str
    session: Session
    quantizer: TapQuantizer


class FakeQuantTap(nn.Module):
    """A tap that quantizes and dequantizes what passes it."""

    quantization: TapQuantization

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return `value` quantized."""
        quantization = self.quantization
        session = quantization.session
        session.called.add(quantization.name)
        x = value.detach()
        if session.activation_changed and not value.requires_grad:
            return quantization.quantizer(x, mask, quantization.name)
        quantized = quantization.quantizer(x.clone(), mask, quantization.name)
        if not session.activation_changed:
            session.activation_changed = not torch.equal(quantized, x)
        return quantized


def become_quantized_tap_(tap: nn.Module, quantization: TapQuantization) -> None:
    """Turn a tap into one that quantizes, in place.

    Raises:
        QuantizationError: Somebody else has replaced the tap.
    """
    if type(tap).__name__ != "Tap":
        raise QuantizationError(
            f"{quantization.name}: a {type(tap).__name__} and no plain tap; undo what replaced it"
        )
    tap.__class__ = FakeQuantTap
    cast(FakeQuantTap, tap).quantization = quantization


def tap_sites(model: nn.Module) -> list[RegionSite]:
    """Return every tap of the model that belongs to a region."""
    sites = []
    for name, module in model.named_modules():
        for pattern, region in TAP_REGIONS.items():
            if fnmatchcase(name, pattern):
                sites.append(RegionSite(name, module, region))
    return sites


def running_taps(model: nn.Module, sites: Sequence[RegionSite]) -> set[str]:
    """Return the names of those taps that a forward pass of a few tokens goes through."""
    if not sites:
        return set()
    seen: set[int] = set()
    handles = [
        site.tap.register_forward_pre_hook(lambda tap, _: seen.add(id(tap))) for site in sites
    ]
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for module in training:
            module.training = True
        for handle in handles:
            handle.remove()
    return {site.name for site in sites if id(site.tap) in seen}


def is_static(region: Region, scheme: QuantScheme) -> bool:
    """Return whether the ranges of a region are fixed by calibration.

    Keys and values are always quantized by what is written: each token and head has its range.
    """
    return scheme.is_static and region != "kv_cache"


class AnyShape:
    """Quantizes what passes as a quantizer of activations does."""

    def __init__(self, quantizer: ActivationQuantizer) -> None:
        self._quantizer = quantizer

    def __call__(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Quantize [..., D]."""
        return self._quantizer(x, name)


class InPlace:
    """Quantizes attention scores and weights by a fixed range, hidden entries like the others."""

    def __init__(self, quantizer: StaticQuantizer) -> None:
        self._quantizer = quantizer

    def __call__(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Quantize [B, H, T, S]."""
        return self._quantizer.quantize_(x, name)


class PerQuery:
    """Dynamic ranges of attention: one per query and head, over the keys that the query sees.

    Were hidden keys in the range, a token would depend on those after it.
    """

    def __init__(self, fmt: TensorFormat) -> None:
        self._quantizer = RowQuantizer(fmt)

    def __call__(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Quantize [B, H, T, S]; hidden entries become 0, which belongs to every range."""
        if mask is not None:
            x = x.masked_fill_(~mask, 0.0)
        return self._quantizer(x, name)


class PerTokenOfHeads:
    """Dynamic ranges of the attention context: as for a layer that reads all heads at once."""

    def __init__(self, fmt: TensorFormat) -> None:
        self._quantizer = RowQuantizer(fmt)

    def __call__(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """Quantize [B, T, H, C]."""
        return self._quantizer(x.flatten(-2), name).view(x.shape)


def static_tap_quantizer(region: Region, quantizer: StaticQuantizer) -> TapQuantizer:
    """Return what quantizes a region by a fixed range."""
    if region in ("attention_scores", "attention_probs"):
        return InPlace(quantizer)
    return AnyShape(quantizer)


def dynamic_tap_quantizer(region: Region, fmt: TensorFormat) -> TapQuantizer:
    """Return what quantizes a region by the tensor at hand.

    Args:
        region: Where.
        fmt: Of granularity `token` or `group`, or static where the region is keys and values.
    """
    if region not in ROWS:
        return (
            PerTokenOfHeads(fmt) if region == "attention_context" else AnyShape(RowQuantizer(fmt))
        )
    row = fmt.model_copy(
        update={
            "granularity": "token",
            "group_size": None,
            "ranges": "dynamic",
            "percentile": 100.0,
        }
    )
    if region in ("attention_scores", "attention_probs"):
        return PerQuery(row)
    return AnyShape(RowQuantizer(row))
