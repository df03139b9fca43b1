"""Whole attention maps of chosen layers and heads, captured in one forward pass.

Only what was asked for is ever formed: [heads asked for, T, T] of one layer at a time, and the
maps of the layers asked for are kept on the host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from oasis_eval.attention_maps import AttentionMaps, MapInfo
from oasis_eval.diagnostics.attention import AttentionCall, whole_map
from oasis_eval.diagnostics.attention_hooks import watch_attention
from oasis_eval.diagnostics.observation import backbone
from oasis_eval.errors import DataError, SpecError
from oasis_eval.prepared import PreparedModel

MOST_TOKENS = 1024
"""A longer map has more cells than a figure has dots."""
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@torch.no_grad()
def capture_maps(
    prepared: PreparedModel,
    token_ids: Sequence[int],
    *,
    layers: Sequence[int],
    heads: Sequence[int],
    text_sha256: str,
) -> AttentionMaps:
    """Run a model once and return the maps of some layers and heads.

    Args:
        prepared: The model under its scheme; what it computes stays as it is.
        token_ids: One sequence, without padding.
        layers: Numbers of decoder layers.
        heads: Numbers of query heads, the same in every layer.
        text_sha256: Of the text that the tokens are of.

    Raises:
        SpecError: A layer or head is not there, or there are too many tokens.
        DataError: The model's attention cannot be observed, or there is no token.
    """
    if not 1 <= len(token_ids) <= MOST_TOKENS:
        raise SpecError(f"{len(token_ids)} tokens: expected 1 to {MOST_TOKENS} for attention maps")
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    seen: set[int] = set()

    def look(name: str, call: AttentionCall) -> None:
        match = _LAYER.search(name)
        if match is None:
            return
        seen.add(layer := int(match[1]))
        if layer in layers:
            weights, null = whole_map(_of_heads(call, heads, layer))
            found[layer] = (weights[0].cpu(), null[0].cpu())

    ids_1T = torch.tensor([list(token_ids)], device=prepared.device)
    with watch_attention(prepared.model, look):
        backbone(prepared.model)(input_ids=ids_1T, use_cache=False)
    if not seen:
        raise DataError(
            f"{prepared.card.name}: attention could not be observed: the model is not on the "
            "interface"
        )
    for layer in layers:
        if layer not in found:
            raise SpecError(f"layer {layer}: {prepared.card.name} has layers 0 to {max(seen)}")
    info = MapInfo(
        label=prepared.card.label,
        scheme=prepared.scheme.name,
        layers=tuple(layers),
        heads=tuple(heads),
        tokens=tuple(prepared.tokenizer.decode([token]) for token in token_ids),
        token_ids=tuple(token_ids),
        checkpoint_sha256=prepared.digest,
        text_sha256=text_sha256,
    )
    weights = np.stack([found[layer][0].numpy() for layer in layers])
    null = np.stack([found[layer][1].numpy() for layer in layers])
    return AttentionMaps(info, weights.astype(np.float32), null.astype(np.float32))


def _of_heads(call: AttentionCall, heads: Sequence[int], layer: int) -> AttentionCall:
    """Return the call of some heads alone, each with its own keys, mask and null."""
    num_heads, num_key_heads = call.query.shape[1], call.key.shape[1]
    for head in heads:
        if not 0 <= head < num_heads:
            raise SpecError(f"head {head}: layer {layer} has heads 0 to {num_heads - 1}")
    index = torch.tensor(list(heads), device=call.query.device)
    mask, null = call.mask, call.null_logit
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, index]
    if null is not None and null.numel() > 1:
        null = null.reshape(-1)[index]
    return call._replace(
        query=call.query[:, index],
        key=call.key[:, index // (num_heads // num_key_heads)],
        mask=mask,
        null_logit=null,
    )
