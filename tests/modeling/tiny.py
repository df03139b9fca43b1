"""Tiny models of every variant on both backbones, with parameters that no symmetry hides."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from oasis_eval.modeling.config import OasisConfig, OasisSettings
from oasis_eval.modeling.decoder import OasisForCausalLM
from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from oasis_eval.modeling.qwen3 import Qwen3OasisForCausalLM
from oasis_eval.modeling.variants import VARIANT_NAMES, build_config, resolve_variant

BACKBONES = ("llama", "qwen3")
VOCABULARY = 256

REPO = OasisSettings(
    wiring="oasis_repo",
    token_normalizer="softmax1",
    depth_normalizer="softmax1",
    null_coupling=True,
)
WIRINGS: dict[str, OasisSettings] = {
    "full": OasisSettings(wiring="attnres_full"),
    "oasis_repo": REPO,
    "cumulative": OasisSettings(wiring="cumulative", num_blocks=2),
    "cumulative_full": OasisSettings(wiring="cumulative_full"),
    "reset": OasisSettings(wiring="reset", num_blocks=2),
    "delta": dataclasses.replace(REPO, wiring="delta"),
    "lowrank": OasisSettings(num_blocks=2, depth_router="lowrank_qk"),
    "softpick": OasisSettings(num_blocks=2, token_normalizer="softpick"),
    "sink": OasisSettings(num_blocks=2, token_normalizer="sink", null_coupling=True),
}
"""Settings that have no variant name."""

CASES: tuple[str, ...] = (*VARIANT_NAMES, *WIRINGS)
"""Names of everything that the shared checks run on."""

QUICK_CASES: tuple[str, ...] = (
    *(name for name in VARIANT_NAMES if not name.startswith("residual-")),
    "residual-vanilla",
    *WIRINGS,
)
"""Those that differ in more than leaving depth routing out."""


def settings_of(case: str) -> OasisSettings:
    """Settings of a case; two blocks of three sublayers where there are blocks."""
    if case in WIRINGS:
        return WIRINGS[case]
    settings = resolve_variant(case)
    blocks = 2 if settings.wiring == "attnres_block" else None
    return dataclasses.replace(settings, num_blocks=blocks)


def base_config(backbone: str, **changes: object) -> LlamaConfig | Qwen3Config:
    """Configuration of the plain tiny model."""
    values: dict[str, object] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if backbone == "llama":
        return LlamaConfig(**(values | changes))
    # A head width that is not hidden_size / heads, as in Qwen3-0.6B.
    return Qwen3Config(**({"head_dim": 16} | values | changes))


def tiny_config(backbone: str, settings: OasisSettings | str, **changes: object) -> OasisConfig:
    """Configuration of a case or of settings."""
    chosen = settings_of(settings) if isinstance(settings, str) else settings
    return build_config(base_config(backbone, **changes), chosen)


def new_model(config: OasisConfig, seed: int = 0) -> OasisForCausalLM:
    """A model of its own with random parameters, in evaluation mode."""
    kind = LlamaOasisForCausalLM if config.model_type == "llama_oasis" else Qwen3OasisForCausalLM
    model = kind(config)
    randomize_(model, seed)
    return model.eval()


@cache
def shared_model(backbone: str, case: str) -> OasisForCausalLM:
    """The model of a case that all tests share: read it, never change it."""
    return new_model(tiny_config(backbone, case)).requires_grad_(False)


def randomize_(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter so that each one matters: no zero query, no unit norm, no tiny beta."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("beta_raw"):
                parameter.copy_(1.0 + 0.5 * noise)
            elif name.endswith((".query", "recency_bias", "null_logit", ".bias")):
                parameter.copy_(0.3 * noise)
            elif "attn_res" in name:
                parameter.copy_(0.03 * noise)  # low-rank logits are of unnormed sources
            elif "embed_tokens" in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(0.12 * noise)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids that are no special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def relative_gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()
