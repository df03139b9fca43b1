"""The normalizers as attention implementations of transformers, for any model that offers them.

    register()
    AutoModelForCausalLM.from_config(config, attn_implementation="softmax1")

Every name is registered twice: as an attention function and as a mask function. Without the second
transformers makes no mask at all, and padding is attended to without a word.

Constants come from where the model has a place for them: `module.null_logit` (learned, per head)
and `module.sinks`; otherwise the fields `token_log_n`, `clip_alpha`, `clip_train_length` and
`clip_zeta` of the model's configuration. What has no sensible default and is found nowhere is a
`SpecError`. A module that carries `AttentionTaps` as `taps` is observed through them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from oasis_eval.errors import SpecError
from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.normalizers import Normalizer, NormalizerName, clip_gamma

DEFAULT_CLIP_ALPHA = 12.0

# What models hand to every attention function and what does not bear on the numbers: requests for
# other outputs, and positions, which the rotary embedding and the mask have already used.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def register() -> None:
    """Register every normalizer under its name; calling it again changes nothing."""
    for kind in get_args(NormalizerName):
        AttentionInterface.register(kind, partial(attention_forward, kind))
        AttentionMaskInterface.register(kind, visible_keys_mask)


def visible_keys_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Make the boolean mask [B, 1, T, S] of a model's layers, True where visible.

    None stands for one thing only: queries are the last positions and see every earlier key, which
    is what `attend` takes it for. transformers skips more than that, such as the unused end of a
    preallocated cache, so that None would not say which keys are meant.

    Args:
        q_length: T.
        kv_length: S.
        q_offset: Position of the first query; a tensor where reading it would cost a graph break.
        kv_offset: Position of the first key.
        allow_is_causal_skip: Whether the caller can do without a mask.
        **kwargs: The rest of transformers' arguments, see its `sdpa_mask`.
    """
    ends_meet = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    kwargs["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and ends_meet,
        **kwargs,
    )
    return mask


def attention_forward(  # noqa: PLR0913, PLR0917 - transformers' signature
    kind: NormalizerName,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers asks its attention functions to.

    Args:
        kind: Normalizer; bound at registration.
        module: The model's attention module.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: What `visible_keys_mask` made, or a caller's own mask of 4 dimensions,
            boolean or additive with nothing but 0 and minus infinity in it.
        dropout: Probability of dropping a weight.
        scaling: Factor on the dot products; None: 1 / sqrt(D).
        is_causal: Without a mask, whether later keys are hidden; None: `module.is_causal`.
        sliding_window: Keys a query sees, itself included; in `attention_mask` where there is one.
        softcap: Cap of the scores.
        s_aux: Learned sink logits [H] of the model.
        output_attentions: Whether to return the weights. A few models (GPT-2) do not hand the
            request on; their `attentions` stay empty as under 'sdpa', and a tap still sees them.
        **kwargs: Only what has no effect on the result.

    Returns:
        Context [B, T, H, D], and weights [B, H, T, S] or None.

    Raises:
        SpecError: A constant of the normalizer is missing, or the model asks for something that
            would change the result and is not supported.
    """
    for name, given in kwargs.items():
        if given is not None and name not in _WITHOUT_EFFECT:
            raise SpecError(
                f"attention {kind!r} in {type(module).__name__}: argument {name!r} is not "
                "supported; use attn_implementation 'eager' or 'sdpa' for this model"
            )
    normalizer, null_logit_H = resolve_normalizer(kind, module, s_aux)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if attention_mask is not None:
        mask: Tensor | None = _as_boolean(attention_mask, kind)
    else:
        mask = _window_mask(query, key, sliding_window, is_causal=is_causal)
    config = getattr(module, "config", None)
    output = attend(
        query,
        key,
        value,
        mask,
        normalizer=normalizer,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        null_logit_H=null_logit_H,
        is_causal=is_causal,
        softcap=softcap,
        dropout=dropout,
        need_probs=bool(output_attentions or getattr(config, "output_attentions", False)),
        taps=getattr(module, "taps", None),
    )
    return output.context.contiguous(), output.probs


def resolve_normalizer(
    kind: NormalizerName, module: nn.Module, s_aux: Tensor | None
) -> tuple[Normalizer, Tensor | None]:
    """Find the constants of `kind` on an attention module, then in its configuration.

    Args:
        kind: Normalizer, the name of the attention implementation.
        module: The model's attention module.
        s_aux: Learned sink logits [H] that the model hands over.

    Returns:
        The normalizer, and its learned null logit [H] or None.

    Raises:
        SpecError: A constant is missing, or sink logits would be left out.
    """
    config = getattr(module, "config", None)
    sinks = getattr(module, "sinks", None) if s_aux is None else s_aux
    if sinks is not None and kind != "sink":
        raise SpecError(
            f"{type(module).__name__} has learned sink logits, which attention {kind!r} would "
            "leave out; use attn_implementation 'sink'"
        )
    learned = getattr(module, "null_logit", None)
    if kind == "sink":
        logit = learned if sinks is None else sinks
        if logit is None:
            raise SpecError(
                f"attention 'sink' needs one learned logit per head, as 'sinks' or 'null_logit' "
                f"of {type(module).__name__}; found neither"
            )
        return Normalizer(kind), logit
    if kind == "softmax1":
        return Normalizer(kind, log_n=float(getattr(config, "token_log_n", 0.0))), learned
    if kind == "clipped_softmax":
        train_length = getattr(config, "clip_train_length", None)
        if train_length is None:
            raise SpecError(
                "attention 'clipped_softmax' needs the training length, as 'clip_train_length' "
                f"of {type(config).__name__}; found none"
            )
        gamma = clip_gamma(getattr(config, "clip_alpha", DEFAULT_CLIP_ALPHA), train_length)
        return Normalizer(kind, gamma=gamma, zeta=getattr(config, "clip_zeta", 1.0)), None
    return Normalizer(kind), None


def _as_boolean(mask: Tensor, kind: str) -> Tensor:
    """Turn an additive mask into a boolean one, and refuse a bias, which is neither."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not mask.is_floating_point() or not torch.all(visible | (mask <= _lowest(mask))):
        raise SpecError(
            f"attention {kind!r} takes a mask that is boolean or additive with 0 and minus "
            f"infinity (or the lowest {mask.dtype}); found other values"
        )
    return visible


def _lowest(mask: Tensor) -> float:
    return torch.finfo(mask.dtype).min


def _window_mask(
    query: Tensor, key: Tensor, sliding_window: int | None, *, is_causal: bool
) -> Tensor | None:
    """Return the causal sliding-window mask [T, S], or None where the window hides nothing."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if sliding_window is None or num_keys <= sliding_window:
        return None
    if not is_causal:
        raise SpecError("a sliding window without causality needs an explicit mask; found none")
    key_S = torch.arange(num_keys, device=key.device)
    query_T1 = key_S[num_keys - num_queries :, None]
    return (key_S <= query_T1) & (key_S > query_T1 - sliding_window)
