"""One pass over a text: what it finds, what it must not depend on, and what it leaves behind."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oasis_eval import registry
from oasis_eval.diagnostics.capture import targets
from oasis_eval.diagnostics.measure import Diagnostics, measure, summarize
from oasis_eval.diagnostics.observation import observe
from oasis_eval.errors import DataError
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.quant import schemes
from tests import tiny
from tests.diagnostics.naive import kurtosis, save_activations
from tests.modeling.tiny import CASES, new_model, settings_of, shared_model, tiny_config, tokens

OUTLIERS = ("max_inf_norm", "avg_kurtosis", "avg_kurtosis_literature", "token_kurtosis_first")


def run(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Diagnostics:
    with observe(model) as observation:
        observation.run(ids, mask)
    return summarize(observation)


def agree(one: dict[str, float], other: dict[str, float], rel: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert other[name] == pytest.approx(value, rel=rel, abs=1e-6, nan_ok=True), name


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """TINY, loaded; schemes are taken off again after each use."""
    folder = tiny.save(tmp_path_factory.mktemp("diagnostics") / "tiny")
    return load(registry.resolve(str(folder)), dtype="fp32")


def test_outliers_of_both_tensor_sets() -> None:
    """Norms and kurtosis equal float64 on the saved activations of the named modules."""
    model = tiny.build_model()
    ids = tokens(1, 50)
    saved = save_activations(model, ids)
    layers = [f"model.layers.{i}" for i in range(2)]
    inner = ("", ".mlp", ".input_layernorm", ".post_attention_layernorm", ".self_attn.o_proj")
    read = (".self_attn.q_proj", ".self_attn.o_proj", ".mlp.gate_proj", ".mlp.down_proj")
    expected = {
        "outputs": [saved.outputs[a + b] for a in layers for b in inner]
        + [saved.outputs["model.norm"]],
        "linear_inputs": [saved.inputs[a + b] for a in layers for b in read],
    }
    metrics = run(model, ids).metrics

    for name, found in expected.items():
        values = [kurtosis(x) for x in found]
        literature = [kurtosis(x, 1e-6) for x in found]
        peak = max(float(x.abs().max()) for x in found)
        rest = [kurtosis(row) for x in found for row in x[0, 1:]]
        assert metrics[f"avg_kurtosis_{name}"] == pytest.approx(sum(values) / len(values), rel=1e-6)
        assert metrics[f"avg_kurtosis_literature_{name}"] == pytest.approx(
            sum(literature) / len(literature), rel=1e-6
        )
        assert metrics[f"max_inf_norm_{name}"] == peak
        assert metrics[f"token_kurtosis_rest_{name}"] == pytest.approx(
            sum(rest) / len(rest), rel=1e-6
        )


@pytest.mark.parametrize("case", CASES)
def test_every_variant(case: str) -> None:
    """All variants run; what the backbone returns is bit for bit what it returns unobserved."""
    model = shared_model("qwen3", case)
    ids = tokens(2, 24)
    with torch.no_grad():
        before = model.model(input_ids=ids, use_cache=False).last_hidden_state
    num_hooks = hooks(model)
    with observe(model) as observation:
        during = observation.run(ids).last_hidden_state
    result = summarize(observation)

    assert torch.equal(before, during)
    assert hooks(model) == num_hooks
    assert not result.warnings
    assert all(math.isfinite(value) for value in result.metrics.values())
    has_depth = "depth_entropy" in result.metrics
    assert has_depth == (not case.startswith("residual-"))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_public_models_compute_the_same(implementation: str) -> None:
    """Logits during and after a measurement are bit for bit those before it."""
    model = tiny.build_model()
    model.set_attn_implementation(implementation)
    ids = tokens(2, 31)
    with torch.no_grad():
        before = model(input_ids=ids).logits
    with observe(model) as observation, torch.no_grad():
        observation.run(ids)
        during = model.lm_head(observation.run(ids).last_hidden_state)
    with torch.no_grad():
        after = model(input_ids=ids).logits

    assert torch.equal(before, during)
    assert torch.equal(before, after)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", ["plain", "oasis", "vanilla", "oasis_repo"])
def test_padding_enters_no_statistic(case: str, side: str) -> None:
    """Texts of 3 and 60 tokens padded together, the pad embedding 100 times as large."""
    model = (
        tiny.build_model()
        if case == "plain"
        else new_model(tiny_config("llama", settings_of(case)))
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 100.0
    texts = [tokens(1, 3, seed=1), tokens(1, 60, seed=2)]
    with observe(model) as alone:
        for text in texts:
            alone.run(text)
    ids, mask = torch.zeros(2, 60, dtype=torch.long), torch.zeros(2, 60, dtype=torch.long)
    for row, text in enumerate(texts):
        length = text.shape[1]
        place = slice(60 - length, None) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = text[0], 1
    together = run(model, ids, mask)
    expected = summarize(alone)

    agree(expected.metrics, together.metrics)
    assert (expected.num_windows, expected.num_tokens, expected.length) == (2, 63, 60)
    assert (together.num_windows, together.num_tokens, together.length) == (2, 63, 60)


@pytest.mark.parametrize("scheme", ["fp32", "w8a8", "w4a4"])
def test_batch_size_and_schemes(reference: Reference, scheme: str) -> None:
    """Batches of 1 and 8 agree, lengths mixed; a scheme moves the numbers."""
    windows = [tokens(40, seed=i).tolist() for i in range(8)] + [tokens(17).tolist()]
    with prepare(reference, schemes.resolve(scheme), dtype="fp32") as prepared:
        single = measure(prepared, windows, batch_size=1)
        batched = measure(prepared, windows, batch_size=8)
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        plain = measure(prepared, windows, batch_size=4)

    # Rounding of a batched product may move a quantized value by a level.
    agree(single.metrics, batched.metrics, rel=1e-5 if scheme == "fp32" else 0.02)
    changed = single.metrics["avg_kurtosis_outputs"] != pytest.approx(
        plain.metrics["avg_kurtosis_outputs"], rel=1e-4
    )
    assert changed == (scheme != "fp32")
    assert single.protocol.name == "diagnostics-40"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_dtypes(reference: Reference, dtype: str) -> None:
    """Narrow activations are reduced wide: the numbers are close to those in fp32."""
    windows = [tokens(30, seed=i).tolist() for i in range(2)]
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        wide = measure(prepared, windows, batch_size=2).metrics
    with prepare(reference, schemes.resolve(dtype), dtype="fp32") as prepared:
        narrow = measure(prepared, windows, batch_size=2).metrics

    for name in (f"{stem}_outputs" for stem in OUTLIERS):
        assert narrow[name] == pytest.approx(wide[name], rel=0.05)


@pytest.mark.parametrize("case", CASES)
def test_a_flat_layer_is_flagged(case: str) -> None:
    """A zeroed output projection makes no NaN: it is named, and the others are averaged."""
    model = new_model(tiny_config("llama", settings_of(case)))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    result = run(model, tokens(2, 20))

    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["num_flat_outputs"] >= 1.0
    assert any("model.layers.1.self_attn.o_proj" in text for text in result.warnings)


def test_massive_activations_are_found() -> None:
    """A channel that one token drives far out shows with its layer, token and feature."""
    model = tiny.build_model(initializer_range=0.02)
    with torch.no_grad():
        model.get_input_embeddings().weight[7, 5] = 4000.0
    ids = tokens(1, 20, seed=3)
    ids[0, 4] = 7
    result = run(model, ids)
    stats = {(item.module, item.name): item.value for item in result.layers}

    assert result.metrics["massive_per_window"] == 2.0  # once after each layer
    assert stats["model.layers.0", "massive.1.token"] == 4.0
    assert stats["model.layers.0", "massive.1.feature"] == 5.0
    assert stats["model.layers.1", "massive.1.value"] == pytest.approx(4000.0, rel=0.01)
    assert result.metrics["max_inf_norm_outputs"] == pytest.approx(4000.0, rel=0.01)


class Broken(nn.Module):
    """Fails in the middle of a forward pass."""

    def forward(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("broken on purpose")


@pytest.fixture
def interface() -> Iterator[dict[str, object]]:
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    yield before
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping


@pytest.mark.parametrize("case", ["plain", "oasis"])
def test_nothing_stays_behind_after_an_error(case: str, interface: dict[str, object]) -> None:
    """Hooks and the attention interface are as before, and the model measures again."""
    model = (
        tiny.build_model()
        if case == "plain"
        else new_model(tiny_config("llama", settings_of(case)))
    )
    ids = tokens(1, 12)
    expected = run(model, ids).metrics
    num_hooks = hooks(model)
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = Broken()
    with pytest.raises(RuntimeError, match="on purpose"):
        run(model, ids)
    model.model.layers[1].mlp = mlp

    assert hooks(model) == num_hooks
    assert interface == ALL_ATTENTION_FUNCTIONS._local_mapping
    assert run(model, ids).metrics == expected


def test_other_models_are_left_alone() -> None:
    """Another model that runs meanwhile is neither seen nor changed."""
    model, other = tiny.build_model(), tiny.build_model(seed=1)
    ids = tokens(1, 12)
    expected = run(model, ids).metrics
    with observe(model) as observation:
        observation.run(ids)
        with torch.no_grad():
            other(input_ids=ids)

    assert summarize(observation).metrics == expected


def test_gates_and_routers_are_no_linear_inputs() -> None:
    """Linears that only some variants have are not in the set that compares variants."""
    sets = []
    for case in ("vanilla", "gated", "gated_g1", "lowrank"):
        model = shared_model("llama", case)
        sets.append([t.name for t in targets(model) if t.tensor_set == "linear_inputs"])

    assert sets[0] == sets[1] == sets[2] == sets[3]
    assert len(sets[0]) == 3 * 7


def test_nothing_to_measure(reference: Reference) -> None:
    """No windows, or empty ones, are an error and not a NaN."""
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        for windows in ([], [[]]):
            with pytest.raises(DataError, match="at least one window"):
                measure(prepared, windows, batch_size=1)


def test_single_token_windows(reference: Reference) -> None:
    """A window of one token gives numbers where there are any."""
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as prepared:
        metrics = measure(prepared, [[5]], batch_size=1).metrics

    assert metrics["sink_mass"] == pytest.approx(1.0)
    assert math.isfinite(metrics["max_inf_norm_outputs"])
    assert math.isnan(metrics["max_inf_norm_rest_outputs"])
