"""The registered names on models of transformers: padding, caches, outputs, constants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StaticCache,
)

from oasis_eval.errors import SpecError
from oasis_eval.modeling.interface import register, visible_keys_mask
from oasis_eval.modeling.normalizers import NormalizerName
from oasis_eval.modeling.taps import AttentionTaps

NAMES = get_args(NormalizerName)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


WINDOW: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **WINDOW, query_pre_attn_scalar=12),
    "gemma2": lambda: Gemma2Config(
        **SIZES, **WINDOW, query_pre_attn_scalar=12, attn_logit_softcapping=1.0
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
}


PADDING = 5


def build(family: str, name: str) -> PreTrainedModel:
    """Make a small model with sharp attention; `sink` gets distinct logits, one per head."""
    register()
    config = CONFIGS[family]()
    config.clip_train_length = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    if name == "sink":
        for module in model.modules():
            if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention"):
                module.sinks = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(5))


def pad_left(tokens: Tensor) -> dict[str, Tensor]:
    """Put padding before `tokens`, with mask and positions."""
    mask = torch.ones(1, PADDING + tokens.shape[1], dtype=torch.long)
    mask[:, :PADDING] = 0
    return {
        "input_ids": torch.cat((torch.zeros(1, PADDING, dtype=torch.long), tokens), dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_softmax_is_the_stock_model(family: str, tokens: Tensor) -> None:
    """Under `softmax`, fused and eager, with padding and without, logits are transformers' own."""
    stock, ours = build(family, "eager"), build(family, "softmax")
    with torch.no_grad():
        for inputs in ({"input_ids": tokens}, pad_left(tokens)):
            expected = stock(**inputs).logits[:, -9:]
            for asked in (False, True):
                logits = ours(**inputs, output_attentions=asked).logits[:, -9:]
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_left_padding(family: str, name: str, tokens: Tensor) -> None:
    """Padded and unpadded logits agree at every real position, and nothing is NaN anywhere."""
    model = build(family, name)

    padded = model(**pad_left(tokens)).logits

    assert torch.isfinite(padded).all()
    torch.testing.assert_close(padded[:, PADDING:], model(tokens).logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_cached_equals_full(family: str, name: str, kind: str, tokens: Tensor) -> None:
    """A prefill of 4, a chunk of 3 and single steps give the logits of one pass, padded or not."""
    model = build(family, name)
    for inputs in ({"input_ids": tokens}, pad_left(tokens)):
        full = model(**inputs).logits
        length = full.shape[1]
        cache = (
            DynamicCache(config=model.config)
            if kind == "dynamic"
            else StaticCache(config=model.config, max_cache_len=20)
        )
        parts = []
        for start, stop in ((0, 4), (4, 7), *((i, i + 1) for i in range(7, length))):
            piece = {
                name: x[:, :stop] if name == "attention_mask" else x[:, start:stop]
                for name, x in inputs.items()
            }
            parts.append(model(**piece, past_key_values=cache, use_cache=True).logits)

        torch.testing.assert_close(
            torch.cat(parts, dim=1)[:, -9:], full[:, -9:], atol=1e-4, rtol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_generate(family: str, name: str, tokens: Tensor) -> None:
    """Greedy text is the same from padded and unpadded prompts, dynamic and static caches."""
    model = build(family, name)
    padded = pad_left(tokens)
    del padded["position_ids"]

    plain = model.generate(tokens, max_new_tokens=6, do_sample=False)
    others = [
        model.generate(
            **padded, max_new_tokens=6, do_sample=False, cache_implementation=implementation
        )
        for implementation in ("dynamic", "static")
    ]

    for other in others:
        assert torch.equal(other[:, -6:], plain[:, -6:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2"])
@torch.no_grad()
def test_output_attentions(family: str, name: str, tokens: Tensor) -> None:
    """Weights come out on request, causal, without changing the logits."""
    model = build(family, name)

    asked = model(tokens, output_attentions=True)

    torch.testing.assert_close(asked.logits, model(tokens).logits, atol=1e-4, rtol=1e-5)
    assert len(asked.attentions) == 2
    for weights in asked.attentions:
        assert weights.shape == (1, 4, 9, 9)
        assert torch.equal(weights, weights.tril())


@torch.no_grad()
def test_normalizers_differ(tokens: Tensor) -> None:
    """No two names compute the same model, so none silently stands in for another."""
    logits = {name: build("llama", name)(tokens).logits for name in NAMES}

    for first in NAMES:
        for second in NAMES:
            if first < second:
                assert (logits[first] - logits[second]).abs().max() > 1e-3, (first, second)


def test_gradients_reach_every_parameter() -> None:
    """A training step through softmax1 on a padded batch has finite gradients everywhere."""
    model = build("qwen3", "softmax1").train()
    inputs = pad_left(torch.arange(3, 12)[None])
    model(**inputs, labels=inputs["input_ids"]).loss.backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_autocast(tokens: Tensor) -> None:
    """Under bf16 autocast, where queries and values come in different dtypes, training works."""
    model = build("qwen3", "softmax1").train()
    inputs = pad_left(tokens)
    exact = model(**inputs, labels=inputs["input_ids"]).loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()

    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.05)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_mask_function_is_registered(tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name has its mask function; without one, padding would change the logits."""
    register()
    for name in NAMES:
        assert AttentionMaskInterface._global_mapping[name] is visible_keys_mask
    model = build("llama", "softmax1")
    expected = model(tokens).logits
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "softmax1")

    unmasked = model(**pad_left(tokens)).logits[:, PADDING:]

    assert (unmasked - expected).abs().max() > 1e-2


def test_register_twice() -> None:
    """Registering again leaves working names."""
    register()
    register()

    assert build("llama", "softmax1").config._attn_implementation == "softmax1"


def test_switching_a_loaded_model(tokens: Tensor) -> None:
    """`set_attn_implementation` switches a model between names and back."""
    model = build("llama", "softmax")
    with torch.no_grad():
        before = model(tokens).logits
        model.set_attn_implementation("softmax1")
        changed = model(tokens).logits
        expected = build("llama", "softmax1")(tokens).logits
        model.set_attn_implementation("softmax")
        after = model(tokens).logits

    torch.testing.assert_close(changed, expected)
    assert torch.equal(before, after)


@torch.no_grad()
def test_gpt_oss_sinks(tokens: Tensor) -> None:
    """`sink` uses the sink logits a model brings and equals its own eager implementation."""
    register()
    config = GptOssConfig(
        **SIZES, **WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None
    )
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in stock.modules():
        if hasattr(module, "sinks"):
            module.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    ours = copy.deepcopy(stock)
    ours.set_attn_implementation("sink")

    torch.testing.assert_close(ours(tokens).logits, stock(tokens).logits, atol=1e-4, rtol=1e-5)
    ours.set_attn_implementation("softmax1")
    with pytest.raises(SpecError, match="sink logits, which attention 'softmax1' would leave out"):
        ours(tokens)


@torch.no_grad()
def test_constants_from_the_configuration(tokens: Tensor) -> None:
    """`token_log_n`, `clip_alpha`, `clip_train_length` and `clip_zeta` are read and act."""
    for name, field, value in (
        ("softmax1", "token_log_n", 2.0),
        ("clipped_softmax", "clip_alpha", 3.0),
        ("clipped_softmax", "clip_train_length", 64),
        ("clipped_softmax", "clip_zeta", 1.1),
    ):
        model = build("llama", name)
        before = model(tokens).logits
        setattr(model.config, field, value)
        assert (model(tokens).logits - before).abs().max() > 1e-4, field


def test_learned_null_logit_of_a_module(tokens: Tensor) -> None:
    """A module's `null_logit`, one per head, replaces log n of softmax1 and is trained."""
    model = build("llama", "softmax1")
    attention = model.model.layers[0].self_attn
    attention.null_logit = nn.Parameter(torch.zeros(4))
    reference = build("llama", "softmax1")
    torch.testing.assert_close(model(tokens).logits, reference(tokens).logits)

    model(tokens, labels=tokens).loss.backward()

    assert attention.null_logit.grad is not None
    assert (attention.null_logit.grad != 0).all()


@torch.no_grad()
def test_taps_of_a_module(tokens: Tensor) -> None:
    """A module that carries `AttentionTaps` is observed, with the same logits."""
    model = build("llama", "softmax1")
    expected = model(tokens).logits
    taps = AttentionTaps()
    model.model.layers[1].self_attn.taps = taps
    seen: list[Tensor] = []
    taps.probs.register_forward_hook(lambda *hook: seen.append(hook[2]))

    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-5)
    assert [tuple(x.shape) for x in seen] == [(1, 4, 9, 9)]
