"""The model that a run starts from, and which of its parameters learn and decay.

From scratch, a plain backbone is initialised from the seed and the variant is put around it, as
`convert` does with a trained one. So every variant starts from the same weights, and what only
one variant has (routers, gates) starts from values that do not depend on the seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerBase, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from oasis_eval import loading
from oasis_eval.errors import CheckpointError, SpecError
from oasis_eval.modeling.config import (
    BLOCK_WIRINGS,
    CONFIG_BY_BACKBONE,
    KIMI_WIRINGS,
    SETTING_NAMES,
    OasisConfig,
    OasisSettings,
)
from oasis_eval.modeling.routing import DepthRouter
from oasis_eval.modeling.variants import build_config, resolve_variant
from oasis_eval.modeling.wrapping import wrap
from oasis_eval.spec import BackboneSpec, TrainRecipe

Trained = Literal["all", "routers"]

_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_MODELS = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}
_NEVER_DECAY = ("bias", "null_logit", "oasis_beta_raw")
_FREE_IN_CHECKPOINTS = frozenset(
    {"num_blocks", "depth_output_scale", "clip_train_length", "depth_router", "depth_recency"}
)
"""Settings that a checkpoint may have of its own under the name of a variant."""


def settings_of(
    recipe: TrainRecipe, variant: str, wiring: str | None, changes: Mapping[str, Any]
) -> OasisSettings:
    """Return the settings of a run that starts from scratch.

    Raises:
        UnknownNameError: No variant or setting has that name.
    """
    settings = resolve_variant(variant, changes)
    wired: dict[str, Any] = {} if wiring is None else {"wiring": wiring}
    settings = dataclasses.replace(settings, **wired)
    if settings.wiring in BLOCK_WIRINGS and "num_blocks" not in changes:
        settings = dataclasses.replace(settings, num_blocks=recipe.num_blocks)
    return settings


def plain_config(
    backbone: BackboneSpec, *, context: int, tokenizer: PreTrainedTokenizerBase | None
) -> LlamaConfig | Qwen3Config:
    """Return the configuration of a recipe's backbone without depth routing.

    Args:
        backbone: Sizes.
        context: Positions of the model.
        tokenizer: Gives the special tokens, and the vocabulary where the sizes do not; None only
            where they do and nothing will be generated.

    Raises:
        SpecError: The tokenizer has more tokens than the embedding has rows.
    """
    known = 0 if tokenizer is None else len(tokenizer)
    vocabulary = known if backbone.vocab_size is None else backbone.vocab_size
    if not 0 < vocabulary >= known:
        raise SpecError(
            f"vocab_size is {vocabulary}, but the tokenizer has {known} tokens; raise 'vocab_size' "
            "or leave it out"
        )
    return _CONFIGS[backbone.family](
        vocab_size=vocabulary,
        hidden_size=backbone.hidden_size,
        intermediate_size=backbone.intermediate_size,
        num_hidden_layers=backbone.num_layers,
        num_attention_heads=backbone.num_heads,
        num_key_value_heads=backbone.num_kv_heads,
        head_dim=backbone.head_dim or backbone.hidden_size // backbone.num_heads,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": backbone.rope_theta},
        rms_norm_eps=backbone.rms_norm_eps,
        initializer_range=backbone.initializer_range,
        tie_word_embeddings=backbone.tie_embeddings,
        attention_bias=False,
        bos_token_id=None if tokenizer is None else tokenizer.bos_token_id,
        eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
        pad_token_id=None if tokenizer is None else tokenizer.pad_token_id,
    )


def from_scratch(base: LlamaConfig | Qwen3Config, settings: OasisSettings, *, seed: int) -> Any:
    """Return a variant with initial weights, fp32; the shared ones are those of every variant.

    Raises:
        SpecError: The settings do not fit the backbone.
    """
    config = build_config(base, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = _MODELS[str(base.model_type)](base)
    return wrap(plain, config)


def from_checkpoint(
    reference: loading.Reference, variant: str, wiring: str | None, changes: Mapping[str, Any]
) -> Any:
    """Return the variant of a checkpoint, fp32: a plain one is wrapped, one of ours taken as it is.

    Raises:
        CheckpointError: It is neither.
        SpecError: It is another variant.
    """
    model: Any = reference.model
    settings = resolve_variant(variant, changes)
    if wiring is not None:
        wired: dict[str, Any] = {"wiring": wiring}
        settings = dataclasses.replace(settings, **wired)
    if model.config.model_type in CONFIG_BY_BACKBONE:
        natural: Any = "num_sources" if settings.wiring in KIMI_WIRINGS else "none"
        if "depth_output_scale" not in changes:
            settings = dataclasses.replace(settings, depth_output_scale=natural)
        return wrap(model, build_config(model.config, settings))
    config: Any = model.config
    if not isinstance(config, OasisConfig):
        raise CheckpointError(
            f"{reference.card.name}: model_type is {model.config.model_type!r}; expected a plain "
            f"{' or '.join(sorted(CONFIG_BY_BACKBONE))}, or one that `convert` or `train` wrote"
        )
    _check_variant(config, settings, reference.card.name, variant)
    return model


def freeze_(model: nn.Module, trained: Trained, *, variant: str) -> None:
    """Let only the chosen parameters learn.

    Raises:
        SpecError: There are no routers.
    """
    if trained == "all":
        return
    routers = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, DepthRouter)
        for parameter in module.parameters()
    }
    if not routers:
        raise SpecError(f"--train routers: variant {variant!r} has no depth routers; use all")
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in routers)


def decaying(model: nn.Module, rule: str) -> list[str]:
    """Return the names of the parameters that decay, see `TrainRecipe.decay`."""
    return [
        name
        for name, parameter in model.named_parameters()
        if not name.endswith(_NEVER_DECAY)
        and (parameter.ndim >= 2 or (rule == "matrices_and_vectors" and parameter.numel() > 1))
    ]


def _check_variant(config: OasisConfig, settings: OasisSettings, name: str, variant: str) -> None:
    for setting in SETTING_NAMES:
        found, wanted = getattr(config, setting), getattr(settings, setting)
        if setting not in _FREE_IN_CHECKPOINTS and found != wanted:
            raise SpecError(
                f"{name}: {setting} is {found!r}, but variant {variant!r} has {wanted!r}; name the "
                "variant (and --wiring) that the checkpoint is, or start from a plain one"
            )
