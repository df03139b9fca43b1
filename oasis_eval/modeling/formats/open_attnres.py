"""Checkpoints of the open-attention-residuals project (`model_type: qwen3_attnres`).

One name, `attnres_mode: block`, stands for three wirings. They differ in what is stored:

    attnres_mode   *_res_bias   model.final_res_*   wiring
    block          yes          no                  cumulative
    block          yes          yes                 reset
    block          no           yes                 attnres_block (whole layers a block)
    full           yes          no                  cumulative_full
    full           no           yes                 attnres_full
    delta          yes          no                  delta

Everything else is refused, `delta` without biases among it: that later form also reads the
embedding. The plain baselines of the project are ordinary Qwen3 checkpoints.

Source: the releases `wdlctc/open-attnres-*` and the publisher's model definition.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.config import OasisSettings, Wiring, apply_settings
from oasis_eval.modeling.formats.keys import KeyMap, Rule
from oasis_eval.modeling.formats.translation import (
    Names,
    PublicFormat,
    RawConfig,
    Translation,
    backbone_config,
    blocks_of,
    refuse_unless,
    required,
    setting,
)

MODEL_TYPE = "qwen3_attnres"
DEFAULT_BLOCKS = 8

_FIELDS = frozenset(
    {
        "attnres_num_blocks",
        "attnres_mode",
        "attnres_gate_type",
        "attnres_recency_bias_init",
        "attnres_init_bias",
        "attnres_gate_init",
    }
)
"""The last two are leftovers that the publisher's code drops, too."""


class _Stored(NamedTuple):
    """What tells the wirings of one mode apart."""

    mode: str
    has_biases: bool
    has_final_read: bool


WIRINGS: MappingProxyType[_Stored, Wiring] = MappingProxyType(
    {
        _Stored("block", True, False): "cumulative",
        _Stored("block", True, True): "reset",
        _Stored("block", False, True): "attnres_block",
        _Stored("full", True, False): "cumulative_full",
        _Stored("full", False, True): "attnres_full",
        _Stored("delta", True, False): "delta",
    }
)

KEYS = KeyMap(
    tuple(
        rule
        for public, ours in (
            ("model.layers.{layer}.attn_res", "model.layers.{layer}.attn_res_sa"),
            ("model.layers.{layer}.mlp_res", "model.layers.{layer}.attn_res_mlp"),
            ("model.final_res", "model.final_res"),
        )
        for rule in (
            Rule(f"{public}_proj.weight", f"{ours}.query", "row"),
            Rule(f"{public}_norm.weight", f"{ours}.key_norm.weight"),
            Rule(f"{public}_bias", f"{ours}.recency_bias", "scalar"),
        )
    )
)


def _matches(raw: RawConfig, names: Names) -> bool:
    return raw.get("model_type") == MODEL_TYPE or "attnres_mode" in raw


def _translate(raw: RawConfig, names: Names) -> Translation:
    gate = setting(raw, "attnres_gate_type", str, "bias")
    refuse_unless(gate == "bias", f"attnres_gate_type {gate!r}", "'bias'")
    own = frozenset(name for name in raw if name.startswith("attnres_"))
    for name in sorted(own - _FIELDS):
        refuse_unless(not raw[name], f"{name} {raw[name]!r}", "checkpoints without it")
    stored = _Stored(
        mode=setting(raw, "attnres_mode", str, "block"),
        has_biases=any(name.endswith("_res_bias") for name in names),
        has_final_read=any(name.startswith("model.final_res_") for name in names),
    )
    wiring = WIRINGS.get(stored)
    if wiring is None:
        raise _unknown(stored)
    num_layers = required(raw, "num_hidden_layers")
    num_blocks = None
    if stored.mode == "block":
        num_blocks = required({"attnres_num_blocks": DEFAULT_BLOCKS, **raw}, "attnres_num_blocks")
        num_blocks = min(num_blocks, num_layers)
        if wiring == "attnres_block":
            num_blocks = blocks_of(num_layers, -(-num_layers // num_blocks), unit="layers")
    settings = OasisSettings(
        wiring=wiring,
        num_blocks=num_blocks,
        depth_recency="last" if stored.has_biases else "none",
        depth_recency_init=setting(raw, "attnres_recency_bias_init", float, 0.0),
    )
    return Translation(apply_settings(backbone_config("qwen3", raw, without=own), settings), KEYS)


def _unknown(stored: _Stored) -> CheckpointError:
    known = sorted({known.mode for known in WIRINGS})
    if stored.mode not in known:
        return CheckpointError(
            f"config.json: attnres_mode {stored.mode!r} is not supported; supported: "
            f"{', '.join(known)}"
        )
    if stored == _Stored("delta", False, False):
        return CheckpointError(
            "attnres_mode 'delta' without *_res_bias tensors also reads the embedding, which is "
            "not supported; supported: the form with biases, which reads sublayer outputs only"
        )
    biases = "has" if stored.has_biases else "lacks"
    final = "has" if stored.has_final_read else "lacks"
    return CheckpointError(
        f"attnres_mode {stored.mode!r}: the checkpoint {biases} *_res_bias tensors and {final} "
        "model.final_res_* tensors, which is no known form of this mode"
    )


OPEN_ATTNRES = PublicFormat("open-attention-residuals", _matches, _translate)
