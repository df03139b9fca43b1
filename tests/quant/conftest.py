"""Tiny models on the spot: seeded, read-only originals and copies to quantize."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from oasis_eval.quant.calibrate import Batch

VOCABULARY = 256


def build_llama(**changes: object) -> LlamaForCausalLM:
    """Return a seeded Llama of 15 linear layers; its weights are large enough to matter."""
    settings: dict[str, object] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


@pytest.fixture(scope="session")
def _llama() -> LlamaForCausalLM:
    return build_llama()


@pytest.fixture
def llama(_llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """A Llama that a test may change."""
    return copy.deepcopy(_llama)


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    """A GPT-2, whose projections are transposed and whose head is tied to its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=48,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=128,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="session")
def ids_BT() -> Tensor:  # noqa: N802 - shape suffix
    """Two sequences of 60 tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (2, 60), generator=generator)


@pytest.fixture(scope="session")
def batches(ids_BT: Tensor) -> list[Batch]:
    """Calibration text: the two sequences, one a batch."""
    return [Batch(row[None], torch.ones_like(row[None])) for row in ids_BT]


def logits_of(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Return the logits [B, T, vocabulary] without a gradient."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    return logits


def nll_of(model: nn.Module, ids_BT: Tensor) -> float:
    """Return the mean negative log-likelihood in nats, summed in float64."""
    logits_BTV = logits_of(model, ids_BT)[:, :-1].double()
    return float(nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten()))
