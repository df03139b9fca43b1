"""Taps on the residual stream of transformers' decoder layers.

A layer is turned into a subclass of itself, in place, whose forward pass is the layer's own with a
tap behind every addition (and, in the first layer, before everything). Layers are known by their
class; a model of other layers has no such taps, and says so.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from oasis_eval.modeling.taps import Tap


class ResidualTaps(nn.Module):
    """The residual stream around one decoder layer."""

    def __init__(self, *, is_first: bool, is_parallel: bool) -> None:
        super().__init__()
        if is_first:
            self.residual_input = Tap()
            """[B, T, D] what enters the first layer."""
        if not is_parallel:
            self.residual_attention = Tap()
            """[B, T, D] after the attention sublayer's output was added."""
        self.residual_mlp = Tap()
        """[B, T, D] after the MLP's output was added; what leaves the layer."""


class _Tapped:
    """Base of the forward passes below."""

    taps: Any
    """`ResidualTaps`; the other attributes are the layer's own."""
    is_parallel = False

    def enter(self, hidden_BTD: Tensor) -> Tensor:
        """Return the input of the layer."""
        first = getattr(self.taps, "residual_input", None)
        return hidden_BTD if first is None else first(hidden_BTD)


class _PreNorm(_Tapped):
    """A norm before each sublayer: Llama, Mistral, Qwen2, Qwen3, Gemma."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(stream), **kwargs)
        stream = self.taps.residual_attention(stream + attended)
        output = self.mlp(self.post_attention_layernorm(stream))
        tapped: Tensor = self.taps.residual_mlp(stream + output)
        return tapped


class _Sandwich(_Tapped):
    """A norm before and after each sublayer: Gemma 2 and 3."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    pre_feedforward_layernorm: Any
    post_feedforward_layernorm: Any

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(stream), **kwargs)
        stream = self.taps.residual_attention(stream + self.post_attention_layernorm(attended))
        output = self.mlp(self.pre_feedforward_layernorm(stream))
        tapped: Tensor = self.taps.residual_mlp(stream + self.post_feedforward_layernorm(output))
        return tapped


class _Gpt2(_Tapped):
    """GPT-2 without cross-attention."""

    attn: Any
    mlp: Any
    ln_1: Any
    ln_2: Any

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        assert encoder_hidden_states is None
        assert encoder_attention_mask is None
        stream = self.enter(hidden_states)
        attended, _ = self.attn(
            self.ln_1(stream), cache=cache, attention_mask=attention_mask, **kwargs
        )
        stream = self.taps.residual_attention(attended + stream)
        tapped: Tensor = self.taps.residual_mlp(stream + self.mlp(self.ln_2(stream)))
        return tapped


class _GptNeoX(_Tapped):
    """GPT-NeoX with both sublayers side by side: one addition."""

    attention: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    post_attention_dropout: Any
    post_mlp_dropout: Any
    is_parallel = True

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        attended, _ = self.attention(self.input_layernorm(stream), **kwargs)
        attended = self.post_attention_dropout(attended)
        output = self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(stream)))
        tapped: Tensor = self.taps.residual_mlp(output + attended + stream)
        return tapped


_FORWARDS: Mapping[str, type[_Tapped]] = MappingProxyType(
    {
        "gemma.modeling_gemma.GemmaDecoderLayer": _PreNorm,
        "gemma2.modeling_gemma2.Gemma2DecoderLayer": _Sandwich,
        "gemma3.modeling_gemma3.Gemma3DecoderLayer": _Sandwich,
        "gpt2.modeling_gpt2.GPT2Block": _Gpt2,
        "gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _GptNeoX,
        "llama.modeling_llama.LlamaDecoderLayer": _PreNorm,
        "mistral.modeling_mistral.MistralDecoderLayer": _PreNorm,
        "qwen2.modeling_qwen2.Qwen2DecoderLayer": _PreNorm,
        "qwen3.modeling_qwen3.Qwen3DecoderLayer": _PreNorm,
    }
)
"""By the class of the layer, below `transformers.models`."""


@contextmanager
def tapped_layers(model: nn.Module) -> Iterator[str | None]:
    """Put residual taps into the decoder layers of `model` for the length of the block.

    Yields:
        Why there are none, in a model of unknown layers; else None.
    """
    layers = _decoder_layers(model)
    unknown = [layer for layer in layers if _forward_of(layer) is None]
    if unknown or not layers:
        stranger = unknown[0] if unknown else model
        yield f"the layers of {type(stranger).__name__} are not known"
        return
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    subclasses: dict[str, type[nn.Module]] = {}
    try:
        for index, layer in enumerate(layers):
            kind = type(layer)
            forward = _forward_of(layer)
            assert forward is not None
            layer.taps = ResidualTaps(is_first=index == 0, is_parallel=forward.is_parallel)
            layer.__class__ = subclasses.setdefault(kind.__name__, _tapped(kind, forward))
            changed.append((layer, kind))
        yield None
    finally:
        for layer, kind in changed:
            layer.__class__ = kind
            del layer.taps


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder: its first list of modules of which each attends."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            is_layer = [
                any("attn" in n or "attention" in n for n, _ in m.named_children()) for m in module
            ]
            if all(is_layer):
                return list(module)
    return []


def _forward_of(layer: nn.Module) -> type[_Tapped] | None:
    kind = type(layer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith("transformers.models."):
        return None
    forward = _FORWARDS.get(name.removeprefix("transformers.models."))
    if forward is _GptNeoX and not layer.use_parallel_residual:
        return None
    if forward is _Gpt2 and hasattr(layer, "crossattention"):
        return None
    return forward


def _tapped(kind: type[nn.Module], forward: type[_Tapped]) -> type[nn.Module]:
    """Return the layer's class with another forward pass."""
    return type(f"Tapped{kind.__name__}", (forward, kind), {})
