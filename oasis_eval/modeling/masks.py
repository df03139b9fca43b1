"""Which keys a query sees, as `attend` wants it: boolean masks, or None for plain causal.

Shapes: B batch, T queries, S keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from oasis_eval.modeling.config import OasisConfig

Masks = Mapping[str, Tensor | None]
"""Per attention type of `layer_types`: [B, 1, T, S], True is visible, or None."""

_MASK_OF_LAYER_TYPE = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


def visible_masks(
    config: OasisConfig,
    inputs_embeds: Tensor,
    *,
    attention_mask: Tensor | Masks | None,
    cache: Cache | None,
    position_ids: Tensor | None,
) -> Masks:
    """Return the masks of a forward pass.

    Args:
        config: Names the attention types.
        inputs_embeds: [B, T, ...]; only shape, dtype and device count.
        attention_mask: [B, S] with 0 for padding; [B, 1, T, S], boolean or additive; masks that
            were made before; or None.
        cache: Keys and values so far.
        position_ids: [B, T] or [1, T]; positions that start anew mark packed sequences.
    """
    if isinstance(attention_mask, Mapping):
        return attention_mask
    layer_types = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    if attention_mask is not None and attention_mask.dim() == 4:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return dict.fromkeys(layer_types, visible)
    # transformers makes masks for the attention implementation of the configuration: additive ones
    # for "eager". `attend` has one form for all paths.
    boolean_config = copy.copy(config)
    boolean_config._attn_implementation_internal = "sdpa"
    return {
        layer_type: _MASK_OF_LAYER_TYPE[layer_type](
            config=boolean_config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
            # A static cache returns more keys than were written: "causal" is then ambiguous.
            allow_is_causal_skip=not getattr(cache, "is_compileable", False),
        )
        for layer_type in layer_types
    }
