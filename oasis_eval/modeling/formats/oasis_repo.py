"""Checkpoints written by the OASIS authors' code.

Their training script puts depth routers into a plain Llama or Qwen3 and saves that model's own
configuration, so nothing but the tensor names says what the file is, and nothing at all says
which softmax it was trained with. The paper's, softmax1 at both levels, is taken; the names of
the script's arguments in `config.json` (`attn_softmax`, `attn_res_softmax_fn`) say otherwise.

Tensor names are the same as ours.

Source: the OASIS authors' code (arXiv 2605.17887).
"""

from __future__ import annotations

from types import MappingProxyType

from oasis_eval.modeling.config import DepthNormalizerName, OasisSettings, apply_settings
from oasis_eval.modeling.formats.keys import KeyMap
from oasis_eval.modeling.formats.translation import (
    Names,
    PublicFormat,
    RawConfig,
    Translation,
    backbone_config,
    refuse_unless,
    setting,
)

TOKEN_ARGUMENT = "attn_softmax"  # noqa: S105 - the name of an argument
DEPTH_ARGUMENT = "attn_res_softmax_fn"

_NORMALIZERS: MappingProxyType[str, DepthNormalizerName] = MappingProxyType(
    {
        "vanilla": "softmax",
        "softmax1": "softmax1",
        "sparsemax": "sparsemax",
        "entmax": "entmax15",
    }
)


def _matches(raw: RawConfig, names: Names) -> bool:
    return any(".attn_res_sa." in name or ".attn_res_mlp." in name for name in names)


def _translate(raw: RawConfig, names: Names) -> Translation:
    settings = OasisSettings(
        wiring="oasis_repo",
        token_normalizer=_normalizer(raw, TOKEN_ARGUMENT),
        depth_normalizer=_normalizer(raw, DEPTH_ARGUMENT),
        null_coupling=True,
    )
    own = frozenset({TOKEN_ARGUMENT, DEPTH_ARGUMENT})
    base = backbone_config(setting(raw, "model_type", str, ""), raw, without=own)
    unsaid = [name for name in sorted(own) if raw.get(name) is None]
    notes: tuple[str, ...] = ()
    if unsaid:
        notes = (
            "the OASIS authors' format does not store which softmax a checkpoint was trained "
            f"with; softmax1 was assumed (config.json may say {' and '.join(unsaid)})",
        )
    return Translation(apply_settings(base, settings), KeyMap(), notes)


def _normalizer(raw: RawConfig, name: str) -> DepthNormalizerName:
    value = setting(raw, name, str, "softmax1")
    refuse_unless(value in _NORMALIZERS, f"{name} {value!r}", ", ".join(_NORMALIZERS))
    return _NORMALIZERS[value]


OASIS_REPO = PublicFormat("OASIS authors' code", _matches, _translate)
