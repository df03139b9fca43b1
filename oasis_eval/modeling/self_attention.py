# ruff: noqa: S105 - a token here is a piece of text, not a secret
"""Self-attention of a backbone under any token normalizer, with an optional gate.

The projections, their norms and their names are the backbone's: the family modules subclass its
attention class. Only what happens between the projections is replaced.

Sources: per-head gate, Bondarenko et al., NeurIPS 2023; elementwise gate G1, Qiu et al., 2025
("Gated attention for large language models").
Shapes: B batch, T tokens, H heads, E = D / H slice of the width, C = head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.config import OasisConfig
from oasis_eval.modeling.normalizers import Normalizer, clip_gamma
from oasis_eval.modeling.taps import KeyValueTaps, Tap

PER_HEAD_GATE_START = 0.25
"""Opening of a per-head gate at initialisation, for inputs near 0."""


class Wanted(NamedTuple):
    """What a caller wants to see of a forward pass besides its result."""

    attentions: bool = False
    null_mass: bool = False
    depth_weights: bool = False
    hidden_states: bool = False


class SelfAttentionOutput(NamedTuple):
    """Result of an attention sublayer."""

    output: Tensor
    """[B, T, D]."""
    probs: Tensor | None
    """[B, H, T, S]; only where attentions are wanted or the eager path runs."""
    null_mass: Tensor | None
    """[B, H, T] fp32; only where it is wanted and the normalizer has a null."""


class SelfAttentionTaps(KeyValueTaps):
    """Those of `attend`, what goes into the KV cache, and the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Tap()
        """[B, H, T, C] after the rotary embedding."""


class GateProjection(nn.Linear):
    """Linear map of a gate; a small projection, of a region of its own."""

    quantization_region = "attention_gate"


class HeadGate(GateProjection):
    """Logit of one head's gate; a type of its own, so that `_init_weights` finds its bias."""


class PerHeadGate(nn.Module):
    """One number a head: sigmoid of a linear map of the head's slice of the sublayer input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        # One Linear a head, so that quantizers treat the gate like any other projection.
        self.heads = nn.ModuleList(HeadGate(width // num_heads, 1) for _ in range(num_heads))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return factors [B, T, H, 1]."""
        slices = hidden_BTD.chunk(len(self.heads), dim=-1)
        logits = [head(part_BTE) for head, part_BTE in zip(self.heads, slices, strict=True)]
        return torch.sigmoid(torch.stack(logits, dim=-2))


class ElementwiseGate(nn.Module):
    """One number a channel of the attention context: sigmoid of a linear map of the input."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.proj = GateProjection(width, num_heads * head_width, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return factors [B, T, H, C]."""
        logits: Tensor = self.proj(hidden_BTD)
        return torch.sigmoid(logits.unflatten(-1, (-1, self.head_width)))


class OasisAttentionMixin:
    """What replaces the core of a backbone's attention class; goes before it in the bases."""

    if TYPE_CHECKING:
        config: OasisConfig
        layer_idx: int
        head_dim: int
        scaling: float
        training: bool
        attention_dropout: float
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        o_proj: nn.Linear

    def __init__(self, config: OasisConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[call-arg]  # the backbone's, next in line
        self.normalizer = token_normalizer(config)
        num_heads = config.num_attention_heads
        has_null_parameter = config.token_null == "learned" or self.normalizer.kind == "sink"
        self.null_logit = nn.Parameter(torch.zeros(num_heads)) if has_null_parameter else None
        self.gate: PerHeadGate | ElementwiseGate | None = None
        if config.attention_gate == "per_head":
            self.gate = PerHeadGate(config.hidden_size, num_heads)
        elif config.attention_gate == "g1":
            self.gate = ElementwiseGate(config.hidden_size, num_heads, self.head_dim)
        self.taps = SelfAttentionTaps()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        *,
        wanted: Wanted,
    ) -> SelfAttentionOutput:
        """Attend among the tokens of a sequence.

        Args:
            hidden_states: [B, T, D], normed input of the sublayer.
            position_embeddings: Cosines and sines, [B, T, C] each.
            attention_mask: Boolean [B, 1, T, S], True is visible; None: causal.
            cache: Keys and values so far; extended by these tokens.
            wanted: Which by-products to return.
        """
        query_BHTC = self._split(self.q_proj(hidden_states), "q_norm")
        key_BKTC = self._split(self.k_proj(hidden_states), "k_norm")
        value_BKTC = self._split(self.v_proj(hidden_states), None)
        query_BHTC, key_BKTC = apply_rotary_pos_emb(query_BHTC, key_BKTC, *position_embeddings)
        query_BHTC = self.taps.query(query_BHTC)
        key_BKTC, value_BKTC = self.taps.key(key_BKTC), self.taps.value(value_BKTC)
        if cache is not None:
            key_BKTC, value_BKTC = cache.update(key_BKTC, value_BKTC, self.layer_idx)
        attended = attend(
            query_BHTC,
            key_BKTC,
            value_BKTC,
            attention_mask,
            normalizer=self.normalizer,
            scaling=self.scaling,
            null_logit_H=self.null_logit,
            dropout=self.attention_dropout if self.training else 0.0,
            # "eager" is the explicit formula, which exists wherever weights are formed.
            need_probs=wanted.attentions or self.config._attn_implementation == "eager",
            need_null_mass=wanted.null_mass and self.normalizer.has_null,
            taps=self.taps,
        )
        context_BTHC = attended.context
        if self.gate is not None:
            context_BTHC = context_BTHC * self.gate(hidden_states)
        output_BTD = self.o_proj(context_BTHC.flatten(-2))
        return SelfAttentionOutput(output_BTD, attended.probs, attended.null_mass)

    def _split(self, projected: Tensor, norm_name: str | None) -> Tensor:
        """Turn [B, T, heads * C] into [B, heads, T, C], normed per head where the backbone does."""
        heads = projected.unflatten(-1, (-1, self.head_dim))
        norm: Any = getattr(self, norm_name, None) if norm_name else None
        split: Tensor = (heads if norm is None else norm(heads)).transpose(1, 2)
        return split


def token_normalizer(config: OasisConfig) -> Normalizer:
    """Return the token normalizer of a checked configuration."""
    gamma = None
    if config.token_normalizer == "clipped_softmax":
        assert config.clip_train_length is not None
        gamma = clip_gamma(config.clip_alpha, config.clip_train_length)
    return Normalizer(
        config.token_normalizer, log_n=config.token_log_n, gamma=gamma, zeta=config.clip_zeta
    )
