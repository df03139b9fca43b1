"""Tiny models of many structures, whose gains and biases are away from 1 and 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oasis_eval.modeling.config import OasisSettings
from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from oasis_eval.modeling.qwen3 import Qwen3OasisForCausalLM
from oasis_eval.modeling.variants import VARIANT_NAMES, build_config
from oasis_eval.quant.calibrate import Batch

VOCABULARY = 256
SIZES: dict[str, object] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIRINGS = ("attnres_full", "oasis_repo", "cumulative", "cumulative_full", "reset", "delta")


def _sizes(**changes: object) -> dict[str, object]:
    return SIZES | changes


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=128,
            initializer_range=0.1,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _ours(backbone: str, settings: str | OasisSettings) -> PreTrainedModel:
    if backbone == "llama":
        return LlamaOasisForCausalLM(build_config(LlamaConfig(**_sizes()), settings))
    return Qwen3OasisForCausalLM(build_config(Qwen3Config(**_sizes(head_dim=16)), settings))


BIASED = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
PLAIN: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_sizes())),
    "llama-tied-biased": lambda: LlamaForCausalLM(LlamaConfig(**_sizes(**BIASED))),
    "llama-ungrouped": lambda: LlamaForCausalLM(LlamaConfig(**_sizes(num_key_value_heads=4))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_sizes(head_dim=16))),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_sizes(head_dim=16, tie_word_embeddings=True))
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_sizes())),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_sizes())),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_sizes(head_dim=16))),
}
"""Models whose residual stream is rotated offline."""
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_sizes(head_dim=16, query_pre_attn_scalar=16))
    ),
    "gpt2": _gpt2,
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_sizes())),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_sizes())),
}
"""Models that are rotated before each layer."""
VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    f"{backbone}-{name}": lambda backbone=backbone, name=name: _ours(backbone, name)  # type: ignore[misc]
    for backbone in ("llama", "qwen3")
    for name in VARIANT_NAMES
}
WIRED: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        wiring: lambda wiring=wiring: _ours("llama", OasisSettings(wiring=wiring))  # type: ignore[misc]
        for wiring in WIRINGS
    },
    "lowrank": lambda: _ours("llama", OasisSettings(depth_router="lowrank_qk")),
    "sink": lambda: _ours("qwen3", OasisSettings(token_normalizer="sink")),
    "null_value": lambda: _ours(
        "llama", OasisSettings(depth_normalizer="softmax1", depth_null_value="embedding")
    ),
}
FP32_NORMS = ("qwen2", "mistral", "gemma", "phi3", "olmo2")
"""Models with RMS norms that `wide_norms` does not replace."""
STREAMS = PLAIN | VARIANTS | WIRED
ALL = STREAMS | OTHERS


def build(name: str) -> PreTrainedModel:
    """Return a seeded model; vectors (gains, biases, queries) are moved by up to about 1."""
    torch.manual_seed(0)
    model = ALL[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for key, parameter in model.named_parameters():
            if "attn_res" in key and parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def text(*, seed: int = 1, padding: int = 7) -> Batch:
    """Two sequences of 40 tokens, the first with padding on its left."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(3, VOCABULARY, (2, 40), generator=generator)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :padding] = 0
    return Batch(ids_BT, mask_BT)


def real_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of real tokens [N, vocabulary]."""
    with torch.no_grad():
        logits_BTV: Tensor = model(
            input_ids=batch.input_ids_BT, attention_mask=batch.attention_mask_BT, use_cache=False
        ).logits
    return logits_BTV[batch.attention_mask_BT.bool()]


def tolerance(name: str) -> float:
    """Return how far fp32 logits may move, as a share of the largest one.

    That of one model is wider: its own fp32 logits are 2e-5 away from its float64 ones, since
    sparsemax has kinks that rounding crosses.
    """
    return 1e-4 if name == "llama-sparsemax" else 1e-5


def deviation(after: Tensor, before: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((after - before).abs().max() / before.abs().max())


@contextmanager
def wide_norms() -> Iterator[None]:
    """Let RMS norms, which compute in fp32, compute in float64, so that exactness can be seen."""

    def gain_times(norm: nn.Module, offset: float, x: Tensor) -> Tensor:
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed * (offset + norm.weight)  # type: ignore[operator,no-any-return]

    originals = {kind: kind.forward for kind in (LlamaRMSNorm, Qwen3RMSNorm, Gemma3RMSNorm)}
    try:
        LlamaRMSNorm.forward = lambda self, x: gain_times(self, 0.0, x)
        Qwen3RMSNorm.forward = lambda self, x: gain_times(self, 0.0, x)
        Gemma3RMSNorm.forward = lambda self, x: gain_times(self, 1.0, x)
        yield
    finally:
        for kind, forward in originals.items():
            kind.forward = forward
