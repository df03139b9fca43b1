"""Decoder layers of transformers whose forward pass is known, written out with taps in it.

A layer is known by its class, or by the source of its forward pass where that reads like a known
one. The order of every addition is the layer's own: nothing moves by a bit.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

_MODELS = "transformers.models."


class TappedLayer:
    """Base of the forward passes below."""

    taps: Any
    """`ResidualTaps`; the other attributes are the layer's own."""
    is_parallel = False

    def enter(self, hidden_BTD: Tensor) -> Tensor:
        """Return the input of the layer."""
        first = getattr(self.taps, "residual_input", None)
        return hidden_BTD if first is None else first(hidden_BTD)


class _TwoSublayers(TappedLayer):
    """Attention, then the MLP, each added to the stream; subclasses say what stands around them."""

    self_attn: Any
    mlp: Any
    norms: ClassVar[tuple[str, str] | None] = ("input_layernorm", "post_attention_layernorm")
    """Before attention and before the MLP; None: the sublayers read the stream itself."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        attended, _ = self.self_attn(hidden_states=self._read(0, stream), **kwargs)
        stream = self.taps.residual_attention(stream + self.after_attention(attended))
        output = self.mlp(self._read(1, stream))
        tapped: Tensor = self.taps.residual_mlp(stream + self.after_mlp(output))
        return tapped

    def _read(self, sublayer: int, stream: Tensor) -> Tensor:
        if self.norms is None:
            return stream
        normed: Tensor = getattr(self, self.norms[sublayer])(stream)
        return normed

    def after_attention(self, output: Tensor) -> Tensor:
        """Return what is added to the stream."""
        return output

    def after_mlp(self, output: Any) -> Tensor:
        """Return what is added to the stream."""
        added: Tensor = output
        return added


class _PreNorm(_TwoSublayers):
    """A norm before each sublayer: Llama and most others."""


class _Apertus(_TwoSublayers):
    """The same under other names."""

    norms = ("attention_layernorm", "feedforward_layernorm")


class _Phi3(_TwoSublayers):
    """A norm before and dropout behind each sublayer: Phi-3."""

    resid_attn_dropout: Any
    resid_mlp_dropout: Any

    def after_attention(self, output: Tensor) -> Tensor:
        """Drop out."""
        dropped: Tensor = self.resid_attn_dropout(output)
        return dropped

    def after_mlp(self, output: Tensor) -> Tensor:
        """Drop out."""
        dropped: Tensor = self.resid_mlp_dropout(output)
        return dropped


class _Granite(_TwoSublayers):
    """A norm before and a factor behind each sublayer: Granite."""

    residual_multiplier: float

    def after_attention(self, output: Tensor) -> Tensor:
        """Scale."""
        return output * self.residual_multiplier

    def after_mlp(self, output: Tensor) -> Tensor:
        """Scale."""
        return output * self.residual_multiplier


class _GptOss(_TwoSublayers):
    """A norm before each sublayer, and an MLP that also returns its router's scores: gpt-oss."""

    def after_mlp(self, output: tuple[Tensor, Tensor]) -> Tensor:
        """Leave the scores."""
        return output[0]


class _PostNorm(_TwoSublayers):
    """A norm behind each sublayer: OLMo 2 and 3, EXAONE 4."""

    norms: ClassVar[tuple[str, str] | None] = None
    after: ClassVar[tuple[str, str]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    def after_attention(self, output: Tensor) -> Tensor:
        """Norm."""
        normed: Tensor = getattr(self, self.after[0])(output)
        return normed

    def after_mlp(self, output: Tensor) -> Tensor:
        """Norm."""
        normed: Tensor = getattr(self, self.after[1])(output)
        return normed


class _Sandwich(_PostNorm):
    """A norm before and behind each sublayer: Gemma 2 and 3."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")


class _Glm4(_PostNorm):
    """The same under other names."""

    norms = ("input_layernorm", "post_attention_layernorm")
    after = ("post_self_attn_layernorm", "post_mlp_layernorm")


class _Cohere(TappedLayer):
    """Both sublayers side by side behind one norm: Cohere."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    is_parallel = True

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        normed = self.input_layernorm(stream)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        tapped: Tensor = self.taps.residual_mlp(self.add(stream, attended, self.mlp(normed)))
        return tapped

    def add(self, stream: Tensor, attended: Tensor, output: Tensor) -> Tensor:
        """Add in the layer's own order."""
        return stream + attended + output


class _Phi(_Cohere):
    """The same with dropout: Phi."""

    resid_dropout: Any

    def add(self, stream: Tensor, attended: Tensor, output: Tensor) -> Tensor:
        """Add in the layer's own order."""
        added: Tensor = self.resid_dropout(attended) + self.resid_dropout(output) + stream
        return added


class _Gpt2(TappedLayer):
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


class _Opt(TappedLayer):
    """OPT with its norms before the sublayers."""

    self_attn: Any
    self_attn_layer_norm: Any
    final_layer_norm: Any
    fc1: Any
    activation_fn: Any
    fc2: Any
    dropout: float
    training: bool

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        """Run both sublayers on [B, T, D]; the rest is for the attention."""
        stream = self.enter(hidden_states)
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(stream),
            cache=cache,
            attention_mask=attention_mask,
            **kwargs,
        )
        stream = self.taps.residual_attention(stream + self._drop(attended))
        rows = stream.reshape(-1, stream.size(-1))
        inner = self.activation_fn(self.fc1(self.final_layer_norm(rows)))
        output = (rows + self._drop(self.fc2(inner))).view(stream.shape)
        tapped: Tensor = self.taps.residual_mlp(output)
        return tapped

    def _drop(self, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, p=self.dropout, training=self.training)


class _GptNeoX(TappedLayer):
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


_FORWARDS: Mapping[str, type[TappedLayer]] = MappingProxyType(
    {
        "llama.modeling_llama.LlamaDecoderLayer": _PreNorm,
        "apertus.modeling_apertus.ApertusDecoderLayer": _Apertus,
        "cohere.modeling_cohere.CohereDecoderLayer": _Cohere,
        "gemma2.modeling_gemma2.Gemma2DecoderLayer": _Sandwich,
        "glm4.modeling_glm4.Glm4DecoderLayer": _Glm4,
        "gpt2.modeling_gpt2.GPT2Block": _Gpt2,
        "gpt_neox.modeling_gpt_neox.GPTNeoXLayer": _GptNeoX,
        "gpt_oss.modeling_gpt_oss.GptOssDecoderLayer": _GptOss,
        "granite.modeling_granite.GraniteDecoderLayer": _Granite,
        "olmo2.modeling_olmo2.Olmo2DecoderLayer": _PostNorm,
        "opt.modeling_opt.OPTDecoderLayer": _Opt,
        "phi.modeling_phi.PhiDecoderLayer": _Phi,
        "phi3.modeling_phi3.Phi3DecoderLayer": _Phi3,
    }
)
"""By the class of the layer, below `transformers.models`. A layer of any other class whose forward
pass reads the same, word for word but for what is handed to the attention, is known as well."""


def forward_of(layer: nn.Module) -> type[TappedLayer] | None:
    """Return the forward pass with taps of a layer; None: it is not known."""
    kind: Any = type(layer)
    forward = _known(kind)
    if forward is _GptNeoX and not layer.use_parallel_residual:
        return None
    if forward is _Opt and not layer.do_layer_norm_before:
        return None
    if forward is _Gpt2 and hasattr(layer, "crossattention"):
        return None
    return forward


@cache
def _known(kind: Any) -> type[TappedLayer] | None:
    """Return the forward pass with taps of a class of layers."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith(_MODELS):
        return None
    if name.removeprefix(_MODELS) in _FORWARDS:
        return _FORWARDS[name.removeprefix(_MODELS)]
    form = _form(kind)
    for known, forward in _FORWARDS.items():
        module, _, own = f"{_MODELS}{known}".rpartition(".")
        if form is not None and form == _form(getattr(importlib.import_module(module), own)):
            return forward
    return None


@cache
def _form(kind: Any) -> str | None:
    """Return a class' forward pass as text to compare: no names of arguments, no comments."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return None
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return "\n".join(ast.unparse(_WithoutArguments().visit(line)) for line in body)


class _WithoutArguments(ast.NodeTransformer):
    """Empties the call of the attention, which is given whatever the layer was given."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Empty it if it is that one."""
        self.generic_visit(node)
        if ast.unparse(node.func) == "self.self_attn":
            node.args, node.keywords = [], []
        return node
