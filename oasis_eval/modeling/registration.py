"""Makes the model families known to transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from oasis_eval.modeling.config import LlamaOasisConfig, Qwen3OasisConfig
from oasis_eval.modeling.llama import LlamaOasisForCausalLM, LlamaOasisModel
from oasis_eval.modeling.qwen3 import Qwen3OasisForCausalLM, Qwen3OasisModel

FAMILIES = (
    (LlamaOasisConfig, LlamaOasisModel, LlamaOasisForCausalLM),
    (Qwen3OasisConfig, Qwen3OasisModel, Qwen3OasisForCausalLM),
)


def register() -> None:
    """Register every family; a second call changes nothing.

    Loading a checkpoint through an Auto class needs this call first.
    """
    for config_class, model_class, causal_class in FAMILIES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, causal_class, exist_ok=True)
