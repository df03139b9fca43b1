"""The one-screen verdict names what was planted, and nothing that is not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from oasis_eval.diagnose import Plan, diagnose
from oasis_eval.diagnostics.measure import Diagnostics, summarize
from oasis_eval.diagnostics.observation import observe
from oasis_eval.diagnostics.verdict import verdict
from oasis_eval.errors import DataError
from oasis_eval.modeling.routing import DepthRouter
from tests import tiny
from tests.modeling.tiny import CASES, new_model, settings_of, shared_model, tiny_config, tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


def look(model: torch.nn.Module, ids: torch.Tensor) -> Diagnostics:
    with observe(model) as observation:
        observation.run(ids)
    return summarize(observation)


def plan(model: Path, **changes: object) -> Plan:
    settings: dict[str, object] = {
        "model": str(model),
        "scheme": "fp32",
        "text": None,
        "window": None,
        "num_windows": 2,
        "batch_size": 1,
        "device": "cpu",
        "dtype": None,
    }
    return Plan(**(settings | changes))  # type: ignore[arg-type]  # a test's settings


@pytest.mark.parametrize("case", CASES)
def test_every_variant_fits_one_screen(case: str) -> None:
    """At most 24 lines of at most 120 characters, for every variant."""
    lines = verdict(look(shared_model("llama", case), tokens(2, 40)))

    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 120
    assert ("Depth: no routing over depth" in lines) == case.startswith("residual-")


def test_a_quiet_model() -> None:
    """A random model has no massive activations, no sink and no depth."""
    lines = verdict(look(tiny.build_model(), tokens(2, 60)))

    assert lines[0] == "Outliers: no massive activations, light tails"
    assert "Attention: no sink" in lines
    assert lines[-1] == "Depth: no routing over depth"


def test_planted_outliers_are_located() -> None:
    """The layer, token and feature of the largest value are named."""
    model = tiny.build_model(initializer_range=0.02)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 5] = -4000.0
    ids = tokens(1, 20, seed=3)
    ids[0, 4] = 7
    lines = verdict(look(model, ids))

    assert lines[0] == "Outliers: massive activations"
    assert any("-4000" in line and "token 4, feature 5" in line for line in lines)


def test_a_collapsed_depth() -> None:
    """Routers that always take one source are counted."""
    model = new_model(tiny_config("llama", settings_of("oasis_repo")))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, DepthRouter) and module.recency_bias is not None:
                module.recency_bias.fill_(40.0)
                module.k_proj.weight.zero_()

    assert "Depth: 6 of 6 routers collapse" in verdict(look(model, tokens(2, 17)))


def test_one_window_is_one_and_a_dtype_is_named_once(tmp_path: Path) -> None:
    """The line reads as a sentence for a reference scheme and a single window, too."""
    folder = tiny.save(tmp_path / "tiny")
    found = dataclasses.replace(plan(folder, scheme="fp32"), num_windows=1)

    assert diagnose(found)[0].endswith(", fp32: 1 window of 128 tokens of builtin")


def test_diagnose_a_checkpoint(tmp_path: Path) -> None:
    """A folder under a scheme, on the text that ships with the suite."""
    folder = tiny.save(tmp_path / "tiny")
    lines = diagnose(plan(folder, scheme="w4a4"))

    assert "w4a4, fp32: 2 windows of 128 tokens of builtin" in lines[0]
    for start in ("Outliers: ", "Fidelity: KL ", "  loss ", "Layers: "):
        assert any(line.startswith(start) for line in lines), start
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120


def test_the_layer_that_carries_the_loss(tmp_path: Path) -> None:
    """Weights far out in one row of every projection of a layer: the layer is named."""
    model = tiny.build_model(num_hidden_layers=4, initializer_range=0.06)
    broken = model.model.layers[1]
    with torch.no_grad():
        for norm in (broken.input_layernorm, broken.post_attention_layernorm):
            norm.weight[0] = 0.0  # what the outliers multiply is nothing
        for layer in (broken.self_attn.v_proj, broken.mlp.up_proj, broken.mlp.gate_proj):
            layer.weight[:, 0] = 20.0
        broken.mlp.down_proj.weight.mul_(4.0)
        # One character follows another, and the text is nothing but that.
        ids = torch.arange(10, 10 + 64)
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1]
        target = 8.0 * torch.nn.functional.one_hot(ids[1:], tiny.VOCABULARY).float()
        model.lm_head.weight.copy_(torch.linalg.lstsq(hidden, target).solution.T)
    folder = tiny.save(tmp_path / "tiny", model=model)
    text = tmp_path / "text.txt"
    text.write_text("".join(tiny.SYMBOLS[token - 3] for token in ids.tolist()))
    lines = diagnose(plan(folder, scheme="w4a4", text=text, window=64))

    assert any(line.startswith("Layers: model.layers.1 carries") for line in lines), lines[-4:]


@pytest.mark.parametrize(
    ("scheme", "start"),
    [("fp32", None), ("w4a4-real", "Layers: scheme 'w4a4-real'"), ("bf16", None)],
)
def test_what_is_not_taken_apart(tmp_path: Path, scheme: str, start: str | None) -> None:
    """Without quantization there is nothing to say; where layers stay whole, it says why."""
    lines = diagnose(plan(tiny.save(tmp_path / "tiny"), scheme=scheme))

    layers = [line for line in lines if line.startswith("Layers: ")]
    assert [line[: len(start or "")] for line in layers] == ([start] if start else [])
    assert any(line.startswith("Fidelity: ") for line in lines) == bool(start)


def test_every_window_has_its_start_token(tmp_path: Path) -> None:
    """A tokenizer that heads texts with special tokens heads each window with them."""
    tokenizer = tiny.build_tokenizer(adds_start=True)
    folder = tiny.save(tmp_path / "tiny", tokenizer=tokenizer)
    text = tmp_path / "text.txt"
    text.write_text(tiny.prose(63))
    lines = diagnose(plan(folder, text=text, window=32, num_windows=9))

    assert lines[0].endswith("2 windows of 32 tokens of text.txt, 1 of them special")


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    """One line says how many tokens there are and how many a window needs."""
    folder = tiny.save(tmp_path / "tiny")
    text = tmp_path / "short.txt"
    text.write_text("too short")
    with pytest.raises(DataError, match="9 tokens, a window takes 64"):
        diagnose(plan(folder, text=text, window=64))
