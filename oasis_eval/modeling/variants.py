# ruff: noqa: S106 - a token here is a piece of text, not a secret
"""The named variants: each one a combination of settings, listed once, here.

Under Kimi wiring (`attnres_block`, `attnres_full`) `aos` computes what `outeffhop` computes up to
the norm's epsilon, because the pre-norm removes a factor common to all sources; `docs/variants.md`
says which wiring makes the difference testable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from oasis_eval.errors import UnknownNameError
from oasis_eval.modeling.config import (
    SETTING_NAMES,
    OasisConfig,
    OasisSettings,
    apply_settings,
)

RESIDUAL_PREFIX = "residual-"

_DEPTH_VARIANTS: dict[str, OasisSettings] = {
    "vanilla": OasisSettings(),
    "outeffhop": OasisSettings(token_normalizer="softmax1"),
    "aos": OasisSettings(token_normalizer="softmax1", depth_normalizer="softmax1"),
    "clipped": OasisSettings(token_normalizer="clipped_softmax"),
    "gated": OasisSettings(attention_gate="per_head"),
    "gated_g1": OasisSettings(attention_gate="g1"),
    "sparsemax": OasisSettings(token_normalizer="sparsemax", depth_normalizer="sparsemax"),
    "entmax15": OasisSettings(token_normalizer="entmax15", depth_normalizer="entmax15"),
    "oasis": OasisSettings(
        token_normalizer="softmax1", depth_normalizer="softmax1", null_coupling=True
    ),
    "oasis_adaptive": OasisSettings(
        token_normalizer="softmax1",
        token_null="learned",
        depth_normalizer="softmax1",
        depth_null="learned",
        null_coupling=True,
    ),
}


def _without_depth(settings: OasisSettings) -> OasisSettings:
    return dataclasses.replace(
        settings,
        wiring="residual",
        depth_normalizer="softmax",
        depth_null="fixed",
        null_coupling=False,
    )


def _residual_variants() -> dict[str, OasisSettings]:
    """Keep the first name of each function that is left when depth routing goes."""
    distinct: dict[str, OasisSettings] = {}
    for name, settings in _DEPTH_VARIANTS.items():
        plain = _without_depth(settings)
        if plain not in distinct.values():
            distinct[RESIDUAL_PREFIX + name] = plain
    return distinct


_VARIANTS = MappingProxyType(_DEPTH_VARIANTS | _residual_variants())

VARIANT_NAMES: tuple[str, ...] = tuple(_VARIANTS)
"""Every name that `resolve_variant` knows, those with depth routing first."""


def resolve_variant(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> OasisSettings:
    """Return a copy of the settings of a named variant.

    Args:
        name: One of `VARIANT_NAMES`.
        changes: Settings of another value than the variant's, as in an ablation.

    Raises:
        UnknownNameError: No variant or setting has that name.
    """
    if name not in _VARIANTS:
        raise UnknownNameError("variant", name, _VARIANTS)
    for setting in changes:
        if setting not in SETTING_NAMES:
            raise UnknownNameError("setting", setting, SETTING_NAMES)
    return dataclasses.replace(_VARIANTS[name], **changes)


def variant_name(
    name: str, wiring: str, changes: Mapping[str, object] = MappingProxyType({})
) -> str:
    """Return how a variant is called, with whatever is not its own: `oasis (oasis_repo)`."""
    own = resolve_variant(name)
    other = [] if wiring == own.wiring else [wiring]
    other += [
        f"{setting} {value}"
        for setting, value in changes.items()
        if setting != "wiring" and value != getattr(own, setting)
    ]
    return f"{name} ({', '.join(other)})" if other else name


def build_config(base_config: PreTrainedConfig, variant: str | OasisSettings) -> OasisConfig:
    """Return the configuration of a variant on a backbone.

    Args:
        base_config: Configuration of a plain Llama or Qwen3 model, or one of ours.
        variant: Name of a variant, or settings.

    Raises:
        UnknownNameError: No variant has that name.
        SpecError: Another backbone, or settings that do not fit it.
    """
    settings = resolve_variant(variant) if isinstance(variant, str) else variant
    return apply_settings(base_config, settings)
