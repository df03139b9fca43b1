"""Checkpoints with the tensor names of Kimi K3.

K3 itself mixes linear attention and latent experts, which the decoder does not have: its names
map, and evaluating it is refused. A Llama or Qwen3 under these names is read.

Source: the Kimi K3 model definition; `attn_res_block_size` counts decoder layers.
"""

from __future__ import annotations

from oasis_eval.modeling.config import OasisSettings, apply_settings
from oasis_eval.modeling.formats.keys import KeyMap, Rule
from oasis_eval.modeling.formats.translation import (
    Names,
    PublicFormat,
    RawConfig,
    Translation,
    backbone_config,
    blocks_of,
    required,
    setting,
)

_BLOCK_SIZE = "attn_res_block_size"

KEYS = KeyMap(
    tuple(
        rule
        for public, ours in (
            ("model.layers.{layer}.self_attention_res", "model.layers.{layer}.attn_res_sa"),
            ("model.layers.{layer}.mlp_res", "model.layers.{layer}.attn_res_mlp"),
            ("model.output_attn_res", "model.final_res"),
        )
        for rule in (
            Rule(f"{public}_proj.weight", f"{ours}.query", "row"),
            Rule(f"{public}_norm.weight", f"{ours}.key_norm.weight"),
        )
    )
)


def _matches(raw: RawConfig, names: Names) -> bool:
    return any(".self_attention_res_proj." in name for name in names)


def _translate(raw: RawConfig, names: Names) -> Translation:
    base = backbone_config(
        setting(raw, "model_type", str, ""), raw, without=frozenset({_BLOCK_SIZE})
    )
    num_blocks = blocks_of(
        required(raw, "num_hidden_layers"), required(raw, _BLOCK_SIZE), unit="layers"
    )
    settings = OasisSettings(wiring="attnres_block", num_blocks=num_blocks)
    return Translation(apply_settings(base, settings), KEYS)


KIMI = PublicFormat("Kimi K3 naming", _matches, _translate)
