"""The decoder on the parts of Llama."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from oasis_eval.modeling.config import LlamaOasisConfig
from oasis_eval.modeling.decoder import OasisForCausalLM, OasisModel
from oasis_eval.modeling.decoder_layer import Backbone
from oasis_eval.modeling.self_attention import OasisAttentionMixin


class LlamaOasisAttention(OasisAttentionMixin, LlamaAttention):
    """Llama's projections under any token normalizer."""


class LlamaOasisModel(OasisModel):
    """The decoder without head."""

    config_class = LlamaOasisConfig
    backbone = Backbone(LlamaOasisAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding)


class LlamaOasisForCausalLM(OasisForCausalLM):
    """The decoder with its language-model head."""

    config_class = LlamaOasisConfig
    model_class = LlamaOasisModel
