"""Tiny checkpoints made on the spot: a character tokenizer, seeded models, folders on disk."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 256
POSITIONS = 128
UNKNOWN, START, END = "<unk>", "<s>", "</s>"
SYMBOLS = [chr(code) for code in [9, 10, 13, *range(32, 127), *range(161, 316)]]
"""Characters with a token of their own: 253, id 3 and up."""

Specials = Literal["start+end", "end", "none"]
Padding = Literal["own", "end", "none"]


def build_tokenizer(
    *,
    specials: Specials = "start+end",
    padding: Padding = "none",
    adds_start: bool = False,
    model_max_length: float | None = None,
) -> PreTrainedTokenizerFast:
    """One token a character.

    Args:
        specials: Which special tokens the tokenizer declares; the ids 1 and 2 are theirs anyway.
        padding: Its pad token: one of its own (in the last symbol's place), the end token, or none.
        adds_start: Whether the start token heads a text by default.
        model_max_length: As tokenizers of real checkpoints have it, right or wrong.
    """
    names = [UNKNOWN, START, END, *SYMBOLS]
    if padding == "own":
        names[-1] = "<pad>"
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    if adds_start:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, 1)]
        )
    declared: dict[str, object] = {"unk_token": UNKNOWN}
    if specials == "start+end":
        declared["bos_token"] = START
    if specials != "none":
        declared["eos_token"] = END
    if padding != "none":
        declared["pad_token"] = "<pad>" if padding == "own" else END
    if model_max_length is not None:
        declared["model_max_length"] = model_max_length
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **declared)


def build_model(*, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A seeded Llama with 15 linear layers and weights large enough to matter."""
    settings: dict[str, object] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def persimmon() -> PersimmonForCausalLM:
    """Return a model whose decoder layers the suite does not know, in a vocabulary of 256."""
    torch.manual_seed(0)
    return PersimmonForCausalLM(
        PersimmonConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            vocab_size=256,
            max_position_embeddings=64,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def scale_head_(model: LlamaForCausalLM, factor: float) -> LlamaForCausalLM:
    """Multiply the output head; 0 makes every token equally likely."""
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def save(
    folder: Path,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    max_shard_size: str = "5GB",
    generation: dict[str, object] | None = None,
) -> Path:
    """Write a checkpoint folder with safetensors and return it.

    Args:
        folder: Where.
        model: TINY with seed 0 if not given.
        tokenizer: The one without a pad token if not given.
        max_shard_size: Splits the weights.
        generation: Content of `generation_config.json`, whether sensible or not.
    """
    (model or build_model()).save_pretrained(folder, max_shard_size=max_shard_size)
    (tokenizer or build_tokenizer()).save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def prose(length: int, *, seed: int = 0) -> str:
    """`length` characters of words, spaces and full stops, none at either end a space."""
    chance = random.Random(seed)
    text = ""
    while len(text) < length:
        word = "".join(chance.choices("etaoinshrdlucmfw", k=chance.randint(1, 9)))
        text += word + chance.choice([" ", " ", " ", ". ", ", "])
    return text[: length - 1] + "x"


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """Write one document a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
