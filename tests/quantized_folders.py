"""Models to quantize and write, and folders to damage."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from tests import tiny
from tests.modeling import tiny as variants

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": tiny.VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2(*, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=48,
        n_layer=2,
        n_head=4,
        vocab_size=tiny.VOCABULARY,
        n_positions=128,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config).eval()


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)).eval()


def biased_llama() -> nn.Module:
    model = tiny.build_model(attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(torch.randn(parameter.shape))
    return model


def oasis(variant: str) -> nn.Module:
    config = variants.tiny_config("llama", variant, vocab_size=tiny.VOCABULARY)
    model = variants.new_model(config)
    variants.randomize_(model, 3)
    return model


def calibration_text(folder: Path) -> str:
    path = folder / "calibration.txt"
    path.write_text(tiny.prose(3000))
    return str(path)


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path)
