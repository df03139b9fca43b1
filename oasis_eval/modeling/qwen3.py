"""The decoder on the parts of Qwen3."""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from oasis_eval.modeling.config import Qwen3OasisConfig
from oasis_eval.modeling.decoder import OasisForCausalLM, OasisModel
from oasis_eval.modeling.decoder_layer import Backbone
from oasis_eval.modeling.self_attention import OasisAttentionMixin


class Qwen3OasisAttention(OasisAttentionMixin, Qwen3Attention):
    """Qwen3's projections under any token normalizer."""


class Qwen3OasisModel(OasisModel):
    """The decoder without head."""

    config_class = Qwen3OasisConfig
    backbone = Backbone(Qwen3OasisAttention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding)


class Qwen3OasisForCausalLM(OasisForCausalLM):
    """The decoder with its language-model head."""

    config_class = Qwen3OasisConfig
    model_class = Qwen3OasisModel
