"""Taps in models of transformers, for the length of a block and without changing their function.

Our own variants have a tap wherever something can be looked at or replaced. A plain model has
none; here it is given those of attention, of the KV cache and of the residual stream:

- attention goes through `attend`, which every model on transformers' attention interface allows
  by the name of its attention implementation;
- keys and values pass a stand-in for the cache on their way into it, and the same stand-in where
  there is no cache, so that both ways give the same numbers;
- a decoder layer becomes a subclass of itself whose forward pass is the same with taps in it.

Everything is taken back at the end of the block: attributes, classes, hooks, configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oasis_eval.modeling.interface import attention_forward, register
from oasis_eval.modeling.normalizers import NormalizerName
from oasis_eval.modeling.residual_taps import tapped_layers
from oasis_eval.modeling.self_attention import OasisAttentionMixin
from oasis_eval.modeling.taps import KeyValueTaps

Point = Literal["attention", "kv_cache", "residual"]
"""What taps are wanted for: scores, weights and context; keys and values; the residual stream."""

_CACHE_NAMES = ("cache", "layer_past", "past_key_values")
_PROBE_TOKENS = 4


@contextmanager
def instrumented(model: nn.Module, points: Collection[Point]) -> Iterator[Mapping[Point, str]]:
    """Give `model` taps for the length of the block.

    Args:
        model: A causal language model; our own variants have their taps already.
        points: What taps are wanted for.

    Yields:
        Why some of `points` cannot be had in this model, by point; empty: all can.
    """
    if not points or any(isinstance(module, OasisAttentionMixin) for module in model.modules()):
        yield {}
        return
    missing: dict[Point, str] = {}
    with ExitStack() as undo:
        if "attention" in points or "kv_cache" in points:
            with _through_attend(model):
                attending = _attending(model)
            for module in attending:
                undo.enter_context(_attribute(module, "taps", KeyValueTaps()))
            if "attention" in points and attending:
                undo.enter_context(_through_attend(model))
            if not attending:
                reason = f"{type(model).__name__} does not use transformers' attention interface"
                missing |= {point: reason for point in points if point != "residual"}
        if "kv_cache" in points and "kv_cache" not in missing:
            for module in attending:
                undo.enter_context(_cache_stand_in(module))
            idle = _without_key_taps(model, attending)
            if idle is not None:
                missing["kv_cache"] = f"keys and values of {idle} do not pass the cache"
        if "residual" in points:
            unknown = undo.enter_context(tapped_layers(model))
            if unknown is not None:
                missing["residual"] = unknown
        yield missing


def fast_path(model: nn.Module) -> str:
    """Return the attention that runs where nobody asks for scores or weights."""
    config: Any = model.config
    implementation = str(getattr(config, "_attn_implementation", "unknown"))
    if implementation not in get_args(NormalizerName):
        return implementation
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    has_softcap = getattr(text, "attn_logit_softcapping", None) is not None
    is_fused = implementation in ("softmax", "softmax1", "sink") and not has_softcap
    return "sdpa" if is_fused else "eager"


class TappedCache:
    """Stands in for a cache, or for none, and lets what is written to it pass the taps."""

    def __init__(self, cache: Any, taps: KeyValueTaps) -> None:
        self._cache = cache
        self._taps = taps

    def update(
        self, key: Tensor, value: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, K, T, C] and return all that there are."""
        key, value = self._taps.key(key), self._taps.value(value)
        if self._cache is None:
            return key, value
        updated: tuple[Tensor, Tensor] = self._cache.update(key, value, *args, **kwargs)
        return updated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@contextmanager
def _attribute(module: nn.Module, name: str, value: nn.Module) -> Iterator[None]:
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)


@contextmanager
def _through_attend(model: nn.Module) -> Iterator[None]:
    """Let attention run through `attend`, under the normalizer that the model has."""
    register()
    has_sinks = any(getattr(module, "sinks", None) is not None for module in model.modules())
    before: list[tuple[Any, Any]] = []
    for config in _configurations(model):
        if config._attn_implementation not in get_args(NormalizerName):
            before.append((config, config._attn_implementation_internal))
            config._attn_implementation_internal = "sink" if has_sinks else "softmax"
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _configurations(model: nn.Module) -> list[Any]:
    """Return every configuration that a module of the model looks its attention up in."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for item in (config, getattr(config, "text_config", None)):
            if hasattr(item, "_attn_implementation_internal"):
                found[id(item)] = item
    return list(found.values())


def _attending(model: nn.Module) -> list[nn.Module]:
    """Return the modules that call the attention interface, in order, by having them do so."""
    found: dict[int, nn.Module] = {}

    def record(kind: NormalizerName, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found[id(module)] = module
        return attention_forward(kind, module, *args, **kwargs)

    # An entry of the class itself is seen by the interfaces that a model's file makes for itself.
    entries: dict[str, Callable[..., Any]] = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    names = [name for name in get_args(NormalizerName) if name in entries]
    before = {name: entries[name] for name in names}
    entries.update({name: partial(record, name) for name in names})
    try:
        _probe(model)
    except (AttributeError, TypeError):
        # MPT asks for a mask by the name of the implementation, and uses the one it gets: none.
        if getattr(model, "_supports_attention_backend", True):
            raise
        return []
    finally:
        entries.update(before)
    return list(found.values())


@contextmanager
def _cache_stand_in(module: nn.Module) -> Iterator[None]:
    """Hand the stand-in instead of the cache to an attention module that has taps."""
    parameters = list(inspect.signature(module.forward).parameters)
    known = [name for name in _CACHE_NAMES if name in parameters]
    if not known:
        yield
        return
    index = parameters.index(known[0])
    taps = cast(KeyValueTaps, module.taps)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if index < len(args):
            stand_in = TappedCache(args[index], taps)
            return (*args[:index], stand_in, *args[index + 1 :]), kwargs
        name = next((name for name in _CACHE_NAMES if name in kwargs), known[0])
        return args, {**kwargs, name: TappedCache(kwargs.get(name), taps)}

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _without_key_taps(model: nn.Module, attending: list[nn.Module]) -> str | None:
    """Return the first attention module whose keys or values miss their tap, or None."""
    seen: set[int] = set()
    taps = {id(module): cast(KeyValueTaps, module.taps) for module in attending}
    handles = [
        tap.register_forward_hook(lambda tap, *_: seen.add(id(tap)))
        for item in taps.values()
        for tap in (item.key, item.value)
    ]
    try:
        _probe(model)
    finally:
        for handle in handles:
            handle.remove()
    for name, module in model.named_modules():
        item = taps.get(id(module))
        if item is not None and not {id(item.key), id(item.value)} <= seen:
            return str(name)
    return None


def _probe(model: nn.Module) -> None:
    """Run a few tokens through the model."""
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for module in training:
            module.training = True
