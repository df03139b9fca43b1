"""Plain Llama and Qwen3 models wrapped as a variant, and whether that changes their function.

Depth routing starts with zero queries: reads are uniform and their sources add up to the
residual. So it can be put around a trained model without changing it, where
`depth_output_scale: num_sources` undoes the 1/S; other parts of a variant do change it.

Source: AttnRes, arXiv 2603.15031.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.config import KIMI_WIRINGS, OasisConfig
from oasis_eval.modeling.formats.folder import causal_class

_SEED = 0
"""Of the values that some new parameters (gates, low-rank routers) start from."""


def wrap(plain: Any, config: OasisConfig) -> Any:
    """Return a variant with the weights of a plain model; what is new has initial values.

    Args:
        plain: A Llama or Qwen3 of transformers, fp32.
        config: Its configuration with the variant's settings.

    Raises:
        CheckpointError: A tensor of the plain model was not taken over.
    """
    kind: Any = causal_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=plain.state_dict(),
            dtype=torch.float32,
            output_loading_info=True,
        )
    lost = sorted(info["unexpected_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lost:
        raise CheckpointError(f"tensor {lost[0]} has no place in {kind.__name__}")
    not_new = sorted(set(info["missing_keys"]) & set(plain.state_dict()))
    if not_new:
        raise CheckpointError(f"tensor {not_new[0]} was not taken over")
    return model


def reasons_of_change(config: OasisConfig) -> tuple[str, ...]:
    """Return why wrapping a plain model in a configuration changes its function; empty: it is kept.

    Speaks of new parameters at their initial values.
    """
    reasons = []
    normalizer = config.token_normalizer
    if normalizer == "softmax1":
        reasons.append(
            "token_normalizer softmax1: each row of attention loses 1 / (1 + sum exp) of its "
            "weight to a null that the model was not trained with"
        )
    elif normalizer != "softmax":
        reasons.append(f"token_normalizer {normalizer}: the model was trained with softmax")
    if config.attention_gate != "none":
        reasons.append(
            f"attention_gate {config.attention_gate}: new, untrained gates scale attention"
        )
    return (*reasons, *_depth_reasons(config))


def _depth_reasons(config: OasisConfig) -> list[str]:
    if config.wiring == "residual":
        return []
    if config.wiring not in KIMI_WIRINGS:
        return [
            f"wiring {config.wiring}: its reads are not the plain residual for any queries; "
            "attnres_block and attnres_full are"
        ]
    reasons = []
    if config.depth_output_scale == "none":
        reasons.append(
            "depth_output_scale none: a read of S sources is 1/S of the residual, and the epsilon "
            "of the norm does not shrink with it"
        )
    if config.depth_normalizer == "softmax1":
        reasons.append(
            "depth_normalizer softmax1: the null takes a share of each read; the norm removes "
            "that factor up to its epsilon"
        )
    if config.depth_null_value != "zero":
        reasons.append(f"depth_null_value {config.depth_null_value}: the reads are not uniform")
    if config.null_coupling and config.token_normalizer in ("softmax1", "sink"):
        reasons.append(
            "null_coupling: depth weights follow the null mass of attention, "
            + (
                f"with beta {config.coupling_beta_value:.2g}"
                if config.coupling_beta_value is not None
                else "at first with beta "
                f"{math.log1p(math.exp(config.coupling_beta_raw_init)):.2g}, which is learned"
            )
        )
    return reasons
