"""Where queries, keys and masks are had from: our models' taps, or transformers' interface.

A model on the attention interface looks its attention function up at every call. For the length of
a measurement the function it finds is the same one with an onlooker: it computes what it always
does, then shows the onlooker its arguments. Neither the model nor its configuration is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oasis_eval.diagnostics.attention import AttentionCall
from oasis_eval.modeling.interface import resolve_normalizer
from oasis_eval.modeling.normalizers import Normalizer, NormalizerName
from oasis_eval.modeling.self_attention import OasisAttentionMixin

Onlooker = Callable[[str, AttentionCall], None]
"""Called with the attention module's name and its call, once a layer and forward pass."""


@contextmanager
def watch_attention(model: nn.Module, onlooker: Onlooker) -> Iterator[None]:
    """Show every attention of `model` to `onlooker` for the length of the block."""
    with ExitStack() as undo:
        names: dict[int, str] = {}
        implementations: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, OasisAttentionMixin):
                undo.enter_context(_watch_ours(name, module, onlooker))
                continue
            names[id(module)] = name
            config = getattr(module, "config", None)
            implementation = getattr(config, "_attn_implementation", None)
            if isinstance(implementation, str):
                implementations.add(implementation)
        for implementation in sorted(implementations):
            undo.enter_context(_watch_interface(implementation, names, onlooker))
        yield


@contextmanager
def _watch_ours(name: str, module: Any, onlooker: Onlooker) -> Iterator[None]:
    """Watch one of our attention modules through its taps."""
    running: dict[str, Tensor | None] = {}

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running["mask"] = args[2] if len(args) > 2 else kwargs.get("attention_mask")

    def take_query(_: nn.Module, __: object, query: Tensor) -> None:
        running["query"] = query

    def take_key(_: nn.Module, __: object, key: Tensor) -> None:
        query = running.pop("query")
        assert query is not None
        call = AttentionCall(
            query,
            key,
            module.normalizer,
            module.scaling,
            mask=running.pop("mask"),
            null_logit=module.null_logit,
        )
        onlooker(name, call)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.taps.query.register_forward_hook(take_query),
        module.taps.key.register_forward_hook(take_key),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watch_interface(
    implementation: str, names: dict[int, str], onlooker: Onlooker
) -> Iterator[None]:
    """Put the onlooker behind one entry of the attention interface."""
    # An entry of the instance goes before the class's own; only the former is ours to remove.
    entries: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping
    absent = object()
    before = entries.get(implementation, absent)
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        original = _eager_function(module) if function is None else function
        result = original(module, query, key, value, attention_mask, **kwargs)
        if id(module) in names and key.shape[2] == query.shape[2]:
            call = _interface_call(implementation, module, query, key, attention_mask, kwargs)
            onlooker(names[id(module)], call)
        return result

    entries[implementation] = attend
    try:
        yield
    finally:
        if before is absent:
            del entries[implementation]
        else:
            entries[implementation] = before


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of a model, which stands in its own file and in no register."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]  # of transformers
    raise AssertionError(f"{type(module).__name__} has no eager attention")


def _interface_call(  # noqa: PLR0913, PLR0917 - what an attention function is given
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> AttentionCall:
    s_aux = kwargs.get("s_aux")
    if implementation in get_args(NormalizerName):
        normalizer, null_logit = resolve_normalizer(implementation, module, s_aux)  # type: ignore[arg-type]  # checked
    else:
        normalizer = Normalizer("softmax" if s_aux is None else "sink")
        null_logit = s_aux
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    window = kwargs.get("sliding_window")
    if mask is None or mask.dim() == 2:
        mask = _explicit_mask(query, mask, is_causal=is_causal, window=window)
    scaling = kwargs.get("scaling")
    return AttentionCall(
        query,
        key,
        normalizer,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=mask,
        is_causal=is_causal,
        null_logit=null_logit,
        softcap=kwargs.get("softcap"),
    )


def _explicit_mask(
    query: Tensor, padding_BS: Tensor | None, *, is_causal: bool, window: int | None
) -> Tensor | None:
    """Return the mask that a fused kernel makes for itself; None where plain causal says it."""
    num_tokens = query.shape[2]
    has_window = is_causal and window is not None and window < num_tokens
    if padding_BS is None and not has_window:
        return None
    index_S = torch.arange(num_tokens, device=query.device)
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device)
    if is_causal:
        visible = index_S <= index_S[:, None]
    if has_window:
        assert window is not None
        visible &= index_S > index_S[:, None] - window
    if padding_BS is None:
        return visible[None, None]
    return visible & padding_BS.bool()[:, None, None, :]
