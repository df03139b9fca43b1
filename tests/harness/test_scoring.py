"""The head over tiles gives the losses of the whole logits, for every kind of head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
)

from oasis_eval.harness.protocols import Window
from oasis_eval.harness.scoring import Scorer, WindowScore, _nll_
from oasis_eval.modeling.registration import register
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.schemes import resolve
from tests.modeling.tiny import tiny_config

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=16, final_logit_softcapping=3.0, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, final_logit_softcapping=3.0, sliding_window=16
    ),
    "gpt2": lambda: GPT2Config(
        n_embd=48, n_layer=2, n_head=4, vocab_size=256, n_positions=128, initializer_range=0.2
    ),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=7.0),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "opt": lambda: OPTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        word_embed_proj_dim=32,
        vocab_size=256,
        max_position_embeddings=128,
        init_std=0.2,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES,
        mamba_n_heads=4,
        mamba_d_head=24,
        mamba_d_state=8,
        mamba_d_ssm=96,
        lm_head_multiplier=3.0,
    ),
    "oasis": lambda: tiny_config("llama", "oasis_repo"),
}


def build(name: str) -> nn.Module:
    register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def windows(num: int, length: int, offset: int = 0) -> list[Window]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(num):
        ids = torch.randint(3, 256, (length,), generator=generator).tolist()
        made.append(Window(ids, ids[offset + 1 :], offset))
    return made


def by_hand(model: nn.Module, window: Window) -> float:
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([window.input_ids])).logits[0].double()
    rows_RV = logits_TV[window.offset : window.offset + len(window.targets)].log_softmax(-1)
    return -float(rows_RV.gather(-1, torch.tensor(window.targets)[:, None]).sum())


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiles_equal_whole_logits(name: str, batch_size: int) -> None:
    """Soft-capping, logit scales, ties and transposed layers: the loss is the model's own."""
    model = build(name)
    cut = windows(5, 40, offset=7)

    scorer = Scorer(model, device="cpu")
    scores = scorer.score(cut, batch_size=batch_size)

    assert scorer.tiled
    for score, window in zip(scores, cut, strict=True):
        assert score.nll_nats == pytest.approx(by_hand(model, window), rel=2e-6)
        assert score.num_tokens == len(window.targets) == 32


@pytest.mark.parametrize("scheme", ["w8a8", "w4a4", "w4a16"])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "gpt2"])
def test_tiles_of_a_quantized_model(name: str, scheme: str) -> None:
    """Quantized layers are called as the model calls them."""
    model = build(name)
    quantize_(model, resolve(scheme))
    cut = windows(3, 40)

    scores = Scorer(model, device="cpu").score(cut, batch_size=1)

    for score, window in zip(scores, cut, strict=True):
        assert score.nll_nats == pytest.approx(by_hand(model, window), rel=2e-6)


@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_a_quantized_head_keeps_its_ranges(granularity: str) -> None:
    """A head whose input range spans the sequence is never cut into tiles with other ranges."""
    model = build("llama")
    base = resolve("w8a8")
    assert base.activations is not None
    head = base.model_copy(
        update={
            "name": "head",
            "regions": ("linear_inputs", "lm_head"),
            "activations": base.activations.model_copy(update={"granularity": granularity}),
        }
    )
    quantize_(model, head)
    # Two windows of very different sizes in one batch would share a range if rows were joined.
    cut = windows(4, 60, offset=30)

    scorer = Scorer(model, device="cpu")
    scores = scorer.score(cut, batch_size=1)

    assert scorer.tiled == (granularity == "token")
    for score, window in zip(scores, cut, strict=True):
        assert score.nll_nats == pytest.approx(by_hand(model, window), rel=2e-6)


def test_more_rows_than_a_tile() -> None:
    """A batch that spans several tiles loses and doubles no row."""
    model = build("llama")
    cut = windows(40, 128)  # 5080 rows; a tile of a small vocabulary has 4096

    together = Scorer(model, device="cpu").score(cut, batch_size=40)

    alone = Scorer(model, device="cpu").score(cut, batch_size=1)
    assert [s.num_tokens for s in together] == [127] * 40
    assert [s.nll_nats for s in together] == pytest.approx([s.nll_nats for s in alone], rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bf16_sums_in_float64(name: str) -> None:
    """Low-precision logits are widened before the loss and never summed in bf16."""
    model = build(name).to(torch.bfloat16)
    cut = windows(3, 100)

    scorer = Scorer(model, device="cpu")
    scores = scorer.score(cut, batch_size=1)

    assert scorer.tiled
    for score, window in zip(scores, cut, strict=True):
        assert score.nll_nats == pytest.approx(by_hand(model, window), rel=1e-3)


class HeadOverAllTokens(nn.Module):
    """A model whose logits depend on the number of rows its head sees."""

    base_model_prefix = "model"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner.get_submodule("model")
        self.lm_head = inner.get_submodule("lm_head")
        self.dtype = torch.float32

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_submodule("embed_tokens")

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        output = self.model(input_ids=input_ids, use_cache=False)
        hidden_BTD = output.last_hidden_state
        output.logits = self.lm_head(hidden_BTD - hidden_BTD.mean(dim=1, keepdim=True))
        return output


def test_a_head_that_mixes_tokens_is_not_cut() -> None:
    """Where the head does not run apart, whole logits are scored, window by window."""
    model = HeadOverAllTokens(build("llama"))
    cut = windows(3, 40)

    scorer = Scorer(model, device="cpu")
    scores = scorer.score(cut, batch_size=3)

    assert not scorer.tiled
    for score, window in zip(scores, cut, strict=True):
        assert score.nll_nats == pytest.approx(by_hand(model, window), rel=2e-6)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1e5])
def test_the_loss_has_no_bias_at_a_large_vocabulary(scale: float) -> None:
    """Within a few 1e-7 of float64 at 262k entries, where fp32 log_softmax is off by 3e-5 nats."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(8, 262_144, generator=generator) * scale
    targets_R = torch.randint(0, 262_144, (8,), generator=generator)
    expected_R = -logits_RV.double().log_softmax(-1).gather(-1, targets_R[:, None])[:, 0]

    nll_R, _ = _nll_(logits_RV.clone(), targets_R)

    assert torch.allclose(nll_R.double(), expected_R, rtol=1e-6, atol=1e-6)


def test_infinite_and_nan_logits_are_seen() -> None:
    """They never come out as an ordinary loss."""
    inf, nan = float("inf"), float("nan")
    logits_RV = torch.tensor([[0.0, -inf], [inf, 0.0], [nan, 0.0], [-inf, -inf]])

    nll_R, hit_R = _nll_(logits_RV, torch.tensor([1, 1, 1, 0]))

    assert nll_R[0] == inf
    assert nll_R[1] == inf
    assert nll_R[2:].isnan().all()
    assert not hit_R[:3].any()


def test_greedy_is_told_per_window() -> None:
    """A window is greedy if each of its targets is the most likely token."""
    model = build("llama")
    ids = windows(1, 12)[0].input_ids
    with torch.no_grad():
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
    other = [*best[:-1], (best[-1] + 1) % 256]

    scores: list[WindowScore] = Scorer(model, device="cpu").score(
        [Window(ids, best, 0), Window(ids, other, 0)], batch_size=2
    )

    assert [score.is_greedy for score in scores] == [True, False]


def test_of_equal_logits_greedy_picks_the_first() -> None:
    """A model that knows nothing is right once in a vocabulary, as greedy decoding would be."""
    logits_RV = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0]])

    for token in range(3):
        _, hit_R = _nll_(logits_RV.clone(), torch.tensor([token] * 3))
        assert hit_R.tolist() == (logits_RV.argmax(-1) == token).tolist()


def test_scoring_leaves_the_model_alone() -> None:
    """The exchange of the backbone for fixed hidden states is never visible outside."""
    model = build("llama")
    before = {name: id(module) for name, module in model.named_modules()}

    Scorer(model, device="cpu").score(windows(2, 20), batch_size=2)

    assert {name: id(module) for name, module in model.named_modules()} == before
