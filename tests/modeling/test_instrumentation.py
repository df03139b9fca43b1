"""Taps put into plain models: they change nothing, see everything, and leave nothing behind."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GptOssConfig,
    GptOssForCausalLM,
    MptConfig,
    MptForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from oasis_eval.modeling.instrumentation import Point, fast_path, instrumented
from oasis_eval.modeling.interface import attention_forward, register
from oasis_eval.modeling.taps import Tap
from tests import tiny
from tests.modeling.plain import PLAIN, build_plain
from tests.modeling.tiny import new_model, tiny_config, tokens

PARALLEL = ("cohere", "cohere2", "gpt_neox", "phi")
"""Families whose sublayers stand side by side: one addition a layer."""
POINTS: tuple[Point, ...] = ("attention", "kv_cache", "residual")


def logits(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    return output


def taps_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Tap)}


@pytest.mark.parametrize("watched", [False, True], ids=["fast path", "eager path"])
@pytest.mark.parametrize("family", list(PLAIN))
def test_taps_change_nothing(family: str, watched: bool) -> None:
    """With and without padding the logits are the model's own, on either path of attention."""
    model = build_plain(family)
    ids_BT, mask_BT = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask_BT[0, :6] = 0
    expected, padded = logits(model, ids_BT), logits(model, ids_BT, mask_BT)
    with instrumented(model, POINTS) as missing:
        if watched:
            for tap in taps_of(model).values():
                tap.register_forward_hook(lambda *_: None)
        actual, actual_padded = logits(model, ids_BT), logits(model, ids_BT, mask_BT)

    assert not missing
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)
    real = mask_BT.bool()
    torch.testing.assert_close(actual_padded[real], padded[real], rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("family", list(PLAIN))
def test_taps_on_the_stream_change_no_bit(family: str) -> None:
    """The layer's own forward pass is written out here, to the order of its additions."""
    model = build_plain(family)
    ids_BT = tokens(2, 20)
    expected = logits(model, ids_BT)
    with instrumented(model, ("residual",)) as missing:
        actual = logits(model, ids_BT)

    assert not missing
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", list(PLAIN))
def test_every_tap_sees_its_tensor_once(family: str) -> None:
    """Scores, weights, context, keys, values and the stream, with shapes that say which."""
    model = build_plain(family)
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    width = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or 12
    seen: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def keep(name: str, output: Tensor) -> None:
        seen[name].append(tuple(output.shape))

    with instrumented(model, POINTS):
        taps = taps_of(model)
        for name, tap in taps.items():
            tap.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        logits(model, tokens(2, 7))
    wanted = {
        "scores": (2, heads, 7, 7),
        "probs": (2, heads, 7, 7),
        "context": (2, 7, heads, width),
        "key": (2, groups, 7, width),
        "value": (2, groups, 7, width),
    }

    if family == "deepseek_v3":  # its cache holds what keys and values are made of
        wanted |= {"key": (2, 1, 7, 16), "value": (2, 1, 7, 8)}
    for name in taps:
        what = name.rsplit(".", 1)[-1]
        if what != "null_mass":
            assert seen[name] == [wanted.get(what, (2, 7, 48))], name
    streams = [name for name in taps if ".taps.residual" in name]
    assert len(streams) == (3 if family in PARALLEL else 5)


@pytest.mark.parametrize("family", list(PLAIN))
def test_residual_taps_are_the_hidden_states(family: str) -> None:
    """The taps before the first layer and behind each are what the model calls hidden states."""
    model = build_plain(family)
    seen: list[Tensor] = []
    with instrumented(model, ("residual",)):
        for name, tap in taps_of(model).items():
            if name.endswith(("residual_input", "residual_mlp")):
                tap.register_forward_hook(lambda *call: seen.append(call[2]))
        with torch.no_grad():
            states = model(
                input_ids=tokens(1, 6), use_cache=False, output_hidden_states=True
            ).hidden_states

    # The last hidden state is normed.
    assert len(seen) == len(states) == 3
    assert all(torch.equal(*pair) for pair in zip(seen[:-1], states[:-1], strict=True))


class Squared(Tap):
    """A replacement that changes what passes, and not by a factor that a norm takes away."""

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return value * value


@pytest.mark.parametrize("tap", ["scores", "probs", "context", "key", "value", "residual_mlp"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "gpt_neox"])
def test_replaced_taps_act(family: str, tap: str) -> None:
    """What a replacement returns is what the model goes on with; keys with and without a cache."""
    model = build_plain(family)
    ids_BT = tokens(1, 6)
    expected = logits(model, ids_BT)
    with instrumented(model, POINTS):
        for name in taps_of(model):
            if name.endswith(f"taps.{tap}"):
                model.set_submodule(name, Squared())
        actual = logits(model, ids_BT)
        with torch.no_grad():
            cached = model(input_ids=ids_BT, use_cache=True).logits

    assert float((actual - expected).abs().max()) > 1e-3
    torch.testing.assert_close(cached, actual)
    assert torch.equal(logits(model, ids_BT), expected)


@pytest.mark.parametrize("family", list(PLAIN))
def test_the_tapped_key_is_what_the_cache_holds(family: str) -> None:
    """Keys and values reach the cache through their taps."""
    model = build_plain(family)
    seen: dict[str, Tensor] = {}
    cache = DynamicCache(config=model.config)
    with instrumented(model, ("kv_cache",)):
        for name, tap in taps_of(model).items():
            tap.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output}))
        with torch.no_grad():
            model(input_ids=tokens(1, 6), cache=cache, use_cache=True)
    keys = [value for name, value in seen.items() if name.endswith("taps.key")]
    values = [value for name, value in seen.items() if name.endswith("taps.value")]

    for layer, key, value in zip(cache.layers, keys, values, strict=True):
        assert torch.equal(layer.keys, key)
        assert torch.equal(layer.values, value)


@pytest.mark.parametrize("family", list(PLAIN))
def test_nothing_is_left_behind(family: str) -> None:
    """Modules, classes, attributes, hooks, configuration and the interface are as before."""
    model = build_plain(family)

    def state() -> tuple[object, ...]:
        return (
            [(name, type(module)) for name, module in model.named_modules()],
            [sorted(vars(module)) for module in model.modules()],
            [len(module._forward_pre_hooks) for module in model.modules()],
            list(model.state_dict()),
            model.config.to_json_string(),
            model.config._attn_implementation,
            list(ALL_ATTENTION_FUNCTIONS),
            list(ALL_ATTENTION_FUNCTIONS._local_mapping),
        )

    register()  # the names of the normalizers stay
    before = state()
    with suppress(ZeroDivisionError), instrumented(model, POINTS):
        assert list(model.state_dict()) == before[3]
        raise ZeroDivisionError

    assert state() == before
    entry = ALL_ATTENTION_FUNCTIONS["softmax"]
    assert (entry.func, entry.args) == (attention_forward, ("softmax",))


def test_generation_is_unchanged() -> None:
    """Greedy text of a tapped model is the model's own."""
    model = build_plain("gemma3")
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens(1, 6), **arguments)
    with instrumented(model, POINTS):
        actual = model.generate(tokens(1, 6), **arguments)

    assert torch.equal(actual, expected)


def test_what_cannot_be_had_is_said() -> None:
    """Unknown layers and attention off the interface are named; the model is as it was."""
    persimmon = tiny.persimmon().eval()
    bloom = BloomForCausalLM(
        BloomConfig(hidden_size=48, n_head=4, n_layer=2, vocab_size=256, pad_token_id=0)
    ).eval()
    with instrumented(persimmon, POINTS) as missing:
        assert dict(missing) == {"residual": "the layers of PersimmonDecoderLayer are not known"}
    mpt = MptForCausalLM(MptConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=256)).eval()
    for model in (bloom, mpt):
        expected = logits(model, tokens(1, 6))
        with instrumented(model, POINTS) as missing:
            assert set(missing) == set(POINTS)
            name = type(model).__name__
            assert missing["attention"].startswith(f"{name} does not use transformers'")
            assert torch.equal(logits(model, tokens(1, 6)), expected)


def test_a_probe_that_fails_is_no_attention_off_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that is on the interface and cannot run is an error, not a model without it."""
    model = build_plain("llama")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"), instrumented(model, ("attention",)):
        pass


def test_learned_sinks_are_kept() -> None:
    """A model with sink logits goes through the normalizer that has them."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(
        GptOssConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            num_local_experts=2,
            num_experts_per_tok=1,
            vocab_size=256,
            pad_token_id=0,
            sliding_window=8,
            initializer_range=0.2,
        )
    ).eval()
    expected = logits(model, tokens(1, 12))
    with instrumented(model, ("attention", "kv_cache")) as missing:
        actual = logits(model, tokens(1, 12))

    assert not missing
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_our_variants_have_their_taps() -> None:
    """Nothing is added to them."""
    model = new_model(tiny_config("llama", "oasis"))
    before = [name for name, _ in model.named_modules()]
    with instrumented(model, POINTS) as missing:
        assert [name for name, _ in model.named_modules()] == before
    assert not missing


def test_the_fast_path_has_a_name() -> None:
    """Fused where a kernel exists, explicit where scores are capped."""
    names = []
    for family in ("llama", "gemma2"):
        model = build_plain(family)
        with instrumented(model, ("attention",)):
            names.append(fast_path(model))
    assert names == ["sdpa", "eager"]


class _Alike(LlamaDecoderLayer):
    """Another class with Llama's forward pass under other names of arguments."""

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, mask, **kwargs)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class _Scaled(LlamaDecoderLayer):
    """Almost Llama's."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + 0.5 * hidden_states
        return hidden_states


@pytest.mark.parametrize(
    ("kind", "module", "known"),
    [
        (_Alike, "transformers.models.alike.modeling_alike", True),
        (_Scaled, "transformers.models.alike.modeling_alike", False),
        (_Alike, "somebody.elses", False),
    ],
)
def test_layers_are_known_by_what_they_do(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], module: str, known: bool
) -> None:
    """The source of the forward pass, to the last factor, and only of transformers' own models."""
    own = type(kind.__name__, (kind,), {"forward": kind.forward, "__module__": module})
    model = build_plain("llama")
    for layer in model.model.layers:
        layer.__class__ = own
    with instrumented(model, ("residual",)) as missing:
        assert bool(missing) != known
