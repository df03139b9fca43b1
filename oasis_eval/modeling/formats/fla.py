"""Checkpoints of the `transformer` model of flash-linear-attention, with and without AttnRes.

Its attention is that of Llama, or of Qwen3 where `qk_norm` is on. `attnres_block_size` counts
sublayers. The library's other models (linear attention) are refused by name.

Source: flash-linear-attention 0.6 (`fla/models/transformer`, `fla/layers/attn.py`,
`fla/modules/mlp.py`).
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.config import OasisSettings, apply_settings
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

_MODEL_TYPE = "transformer"
_BLOCK_SIZE = "attnres_block_size"
_HEAD_NORM_EPS = 1e-5
"""Of the norms of queries and keys; not configurable there, that of all norms here."""
_ROUND_UP = 256
_SHARED = frozenset(
    {
        "hidden_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "initializer_range",
        "vocab_size",
        "tie_word_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "use_cache",
        "dtype",
        "torch_dtype",
    }
)
"""Fields that Llama and Qwen3 have, too, with the same meaning."""

_LAYER = "model.layers.{layer}."
KEYS = KeyMap(
    (
        Rule("model.embeddings.weight", "model.embed_tokens.weight"),
        Rule(f"{_LAYER}attn_norm.weight", f"{_LAYER}input_layernorm.weight"),
        Rule(f"{_LAYER}mlp_norm.weight", f"{_LAYER}post_attention_layernorm.weight"),
        *(
            Rule(f"{_LAYER}attn.{part}.weight", f"{_LAYER}self_attn.{part}.weight")
            for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        ),
        *(
            rule
            for public, ours in (
                (f"{_LAYER}attn_res", f"{_LAYER}attn_res_sa"),
                (f"{_LAYER}mlp_res", f"{_LAYER}attn_res_mlp"),
                ("model.res", "model.final_res"),
            )
            for rule in (
                Rule(f"{public}_proj.weight", f"{ours}.query", "row"),
                Rule(f"{public}_norm.weight", f"{ours}.key_norm.weight"),
            )
        ),
    )
)


def _matches(raw: RawConfig, names: Names) -> bool:
    return raw.get(_BLOCK_SIZE) is not None or raw.get("model_type") == _MODEL_TYPE


def _translate(raw: RawConfig, names: Names) -> Translation:
    model_type = raw.get("model_type")
    refuse_unless(
        model_type == _MODEL_TYPE,
        f"model_type {model_type!r} of flash-linear-attention",
        repr(_MODEL_TYPE),
    )
    settings = OasisSettings(wiring="residual")
    if raw.get(_BLOCK_SIZE) is not None:
        num_sublayers = 2 * required(raw, "num_hidden_layers")
        num_blocks = blocks_of(num_sublayers, required(raw, _BLOCK_SIZE), unit="sublayers")
        settings = OasisSettings(wiring="attnres_block", num_blocks=num_blocks)
    return Translation(apply_settings(_backbone(raw), settings), KEYS)


def _backbone(raw: RawConfig) -> PreTrainedConfig:
    for name, plain in (("qkv_bias", False), ("window_size", None), ("elementwise_affine", True)):
        value = raw.get(name)
        refuse_unless(value in (None, plain), f"{name} {value!r}", repr(plain))
    activation = setting(raw, "hidden_act", str, "swish")
    refuse_unless(activation in ("swish", "silu"), f"hidden_act {activation!r}", "'swish'")
    if "rope_theta" in raw and raw["rope_theta"] is None:
        raise CheckpointError("config.json: rope_theta null (no rotary embedding): not supported")
    has_head_norms = setting(raw, "qk_norm", bool, False)
    eps = setting(raw, "norm_eps", float, 1e-6)
    if has_head_norms and eps != _HEAD_NORM_EPS:
        raise CheckpointError(
            f"config.json: norm_eps is {eps}, but the norms of queries and keys (qk_norm) have "
            f"{_HEAD_NORM_EPS}; two different epsilons are not supported"
        )
    width, num_heads = required(raw, "hidden_size"), required(raw, "num_heads")
    fields = {name: value for name, value in raw.items() if name in _SHARED} | {
        "num_attention_heads": num_heads,
        "num_key_value_heads": setting(raw, "num_kv_heads", int, num_heads),
        "head_dim": width // num_heads,
        "intermediate_size": _intermediate_size(raw, width),
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": setting(raw, "rope_theta", float, 10000.0),
        "attention_bias": False,
    }
    model_type = "qwen3" if has_head_norms else "llama"
    return backbone_config(model_type, fields, without=frozenset())


def _intermediate_size(raw: RawConfig, width: int) -> int:
    """Return the width of the MLP: as given, else 2/3 of the ratio, rounded up."""
    if raw.get("intermediate_size") is not None:
        return required(raw, "intermediate_size")
    size = int(width * setting(raw, "hidden_ratio", int, 4) * 2 / 3)
    return -(-size // _ROUND_UP) * _ROUND_UP


FLA = PublicFormat("flash-linear-attention", _matches, _translate)
