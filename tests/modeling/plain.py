"""Tiny plain models of transformers, seeded, with weights large enough to matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_BASE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_GEMMA = _BASE | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
_TWO_KINDS = ["sliding_attention", "full_attention"]

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_FEW_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_ALIKE = (
    *("apertus", "arcee", "cohere", "ernie4_5", "exaone4", "gemma", "glm", "glm4"),
    *("ministral3", "nemotron", "olmo", "olmo2", "phi", "phi3", "seed_oss", "smollm3"),
    "starcoder2",
)


def of_family(name: str, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(_BASE | changes)))


PLAIN: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_BASE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_BASE, sliding_window=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_BASE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_BASE, head_dim=16)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_GEMMA, layer_types=_TWO_KINDS, attn_logit_softcapping=3.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, layer_types=_TWO_KINDS)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=2,
            n_head=4,
            vocab_size=256,
            n_positions=128,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_NEOX)),
    **{name: partial(of_family, name) for name in _ALIKE},
    "opt": lambda: of_family(
        "opt", num_key_value_heads=4, ffn_dim=96, word_embed_proj_dim=48, init_std=0.2
    ),
    "bitnet": partial(of_family, "bitnet"),
    "deepseek_v3": lambda: of_family(
        "deepseek_v3",
        **_FEW_ROUTED,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        rope_interleave=True,
    ),
    "flex_olmo": lambda: of_family("flex_olmo", **_EXPERTS),
    "glm4_moe": lambda: of_family("glm4_moe", **_FEW_ROUTED),
    "phimoe": lambda: of_family("phimoe", **_EXPERTS),
    "cohere2": lambda: of_family("cohere2", sliding_window=8, layer_types=_TWO_KINDS),
    "gpt_oss": lambda: of_family(
        "gpt_oss", sliding_window=8, layer_types=_TWO_KINDS, head_dim=16, **_EXPERTS
    ),
    "helium": lambda: of_family("helium", head_dim=12),
    "hunyuan_v1_dense": lambda: of_family("hunyuan_v1_dense", head_dim=12),
    "ministral": lambda: of_family("ministral", head_dim=12, sliding_window=8),
    "granite": lambda: of_family("granite", residual_multiplier=0.3),
    "mixtral": lambda: of_family("mixtral", **_EXPERTS),
    "olmo3": lambda: of_family("olmo3", sliding_window=8, layer_types=_TWO_KINDS),
    "olmoe": lambda: of_family("olmoe", **_EXPERTS),
    "qwen2_moe": lambda: of_family(
        "qwen2_moe", moe_intermediate_size=32, shared_expert_intermediate_size=32, **_EXPERTS
    ),
    "qwen3_moe": lambda: of_family("qwen3_moe", moe_intermediate_size=32, **_EXPERTS),
}
"""Families whose decoder layers can be given taps on the residual stream."""


def build_plain(family: str) -> Any:
    """Return a model of a family in evaluation mode."""
    torch.manual_seed(0)
    return PLAIN[family]().eval()
