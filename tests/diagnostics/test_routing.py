"""Depth-routing statistics against loops in float64 over what the model itself returns."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from oasis_eval.diagnostics.measure import summarize
from oasis_eval.diagnostics.observation import observe
from oasis_eval.diagnostics.routing import RouterSums
from oasis_eval.modeling.decoder import OasisForCausalLM
from oasis_eval.modeling.routing import DepthRouter
from tests.modeling.tiny import new_model, settings_of, shared_model, tiny_config, tokens

CASES = ("vanilla", "aos", "oasis", "oasis_adaptive", "sparsemax", "oasis_repo", "delta", "lowrank")


def observed(model: OasisForCausalLM, ids: Tensor) -> dict[str, dict[str, float]]:
    with observe(model) as observation:
        observation.run(ids)
    return {name: sums.result() for name, sums in observation.routing.sums.items()}


def test_a_token_whose_mass_is_all_on_the_null_has_no_shares() -> None:
    """It counts in null mass and raw weights; shares are means over the other tokens."""
    weights_NS = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0], [0.0, 0.0, 0.4]])
    null_N = 1.0 - weights_NS.sum(-1)
    ratios_NS = torch.tensor([[1.0, 2.0, 3.0], [math.inf] * 3, [2.0, 1.0, 4.0]])
    psi_NS = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.9, 0.9], [0.3, 0.1, 0.2]])
    sums = RouterSums(has_embedding=True, beta=1.0)
    sums.add(weights_NS, null_N, torch.zeros(3, 3), ratios_NS)
    sums.add_psi(weights_NS, psi_NS)
    found = sums.result()

    assert found["participation"] == pytest.approx((1 / (0.25 + 2 * 0.0625) + 1.0) / 2)
    assert found["effective_branches"] == pytest.approx((math.exp(1.5 * math.log(2)) + 1.0) / 2)
    assert found["dominant_share"] == pytest.approx(0.75)
    assert found["dominant_share_raw"] == pytest.approx((0.5 + 0.4) / 3)
    assert found["collapse_rate"] == 0.5
    assert found["collapse_rate_raw"] == 0.0
    assert found["null_mass"] == pytest.approx((0.0 + 1.0 + 0.6) / 3)
    assert found["embedding_share"] == pytest.approx(0.25)
    assert found["embedding_share_raw"] == pytest.approx(0.5 / 3)
    share, update = [0.5, 0.25, 0.25, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 2.0, 1.0, 4.0]
    psi = [0.1, 0.2, 0.3, 0.3, 0.1, 0.2]
    expected = statistics.correlation(share, update)
    assert found["weight_update_correlation"] == pytest.approx(expected)
    expected = statistics.correlation(share, psi)
    assert found["weight_psi_correlation"] == pytest.approx(expected)
    assert found["source.2.update_norm"] == pytest.approx(3.5)
    assert found["source.2.weight_raw"] == pytest.approx(0.65 / 3)

    nothing = RouterSums(has_embedding=False, beta=None)
    nothing.add(weights_NS[1:2], null_N[1:2], torch.zeros(1, 3), ratios_NS[1:2])
    assert nothing.result()["null_mass"] == 1.0
    assert math.isnan(nothing.result()["entropy"])


def naive(weights: Tensor, null: Tensor | None, norms: Tensor, read: Tensor) -> dict[str, float]:
    """Weights [N, S], null [N], norms of sources [N, S] and of the read [N], token by token."""
    rows: dict[str, list[float]] = {}
    pairs = []
    for n, row in enumerate(weights.double().tolist()):
        total = sum(row)
        share = [value / total for value in row]
        entropy = -sum(p * math.log(p) for p in share if p > 0)
        ratios = [float(norms[n, i]) / float(read[n]) for i in range(len(row))]
        pairs += list(zip(share, ratios, strict=True))
        for name, value in {
            "entropy": entropy / math.log(len(row)),
            "effective_branches": math.exp(entropy),
            "participation": 1 / sum(p * p for p in share),
            "dominant_share": max(share),
            "dominant_share_raw": max(row),
            "newest_share": share[-1],
            "newest_share_raw": row[-1],
            "embedding_share": share[0],
            "null_mass": max(0.0, 1 - total) if null is None else float(null[n]),
            "collapse_rate": float(max(share) > 0.9),
            "collapse_rate_raw": float(max(row) > 0.9),
            "smallest_update_dominates": float(
                share.index(max(share)) == ratios.index(min(ratios))
            ),
        }.items():
            rows.setdefault(name, []).append(value)
    result = {name: statistics.fmean(values) for name, values in rows.items()}
    result["weight_update_correlation"] = statistics.correlation(*zip(*pairs, strict=True))
    return result


@pytest.mark.parametrize("case", CASES)
def test_statistics_of_every_router(case: str) -> None:
    """Entropy, shares, null mass, collapse and update norms equal their definitions."""
    model = shared_model("llama", case)
    ids = tokens(2, 21)
    reads = {}
    names = {module: name for name, module in model.named_modules()}
    handles = [
        module.register_forward_hook(
            lambda module, args, read: reads.update({names[module]: (args[0], read)})
        )
        for module in model.modules()
        if isinstance(module, DepthRouter)
    ]
    result = observed(model, ids)
    for handle in handles:
        handle.remove()

    wanted = {name for name, (sources, _) in reads.items() if len(sources) > 1}
    assert set(result) == wanted
    for name in wanted:
        sources, read = reads[name]
        norms = torch.stack([source.value.double().norm(dim=-1) for source in sources], dim=-1)
        expected = naive(
            read.weights.flatten(0, 1),
            None if read.null_mass is None else read.null_mass.flatten(),
            norms.flatten(0, 1),
            read.hidden.double().norm(dim=-1).flatten(),
        )
        if case == "delta":
            assert "embedding_share" not in result[name]
            del expected["embedding_share"]
        for key, value in expected.items():
            assert result[name][key] == pytest.approx(value, rel=1e-6, abs=1e-6), key


def test_psi_and_beta_of_coupled_routers() -> None:
    """psi per source is the mean null mass of its attention; beta is the router's own."""
    model = shared_model("llama", "oasis_repo")
    ids = tokens(2, 15)
    result = observed(model, ids)
    with torch.no_grad():
        null_mass = model(input_ids=ids, output_null_mass=True).null_mass
    last = result["model.layers.2.attn_res_mlp"]

    assert last["source.0.psi"] == 0.0
    assert last["source.1.psi"] == pytest.approx(float(null_mass[0].mean()), rel=1e-6)
    assert last["beta"] == pytest.approx(float(model.model.layers[2].attn_res_mlp.beta), rel=1e-6)
    assert -1.0 <= last["weight_psi_correlation"] <= 1.0


def test_uncoupled_routers_have_neither() -> None:
    """Without coupling there is no psi and no beta to report."""
    result = observed(shared_model("llama", "aos"), tokens(1, 9))

    assert all("beta" not in values for values in result.values())
    assert all("weight_psi_correlation" not in values for values in result.values())


@pytest.mark.parametrize("case", ["vanilla", "aos"])
def test_zero_queries_are_uniform(case: str) -> None:
    """Entropy is log S, every branch counts, and no correlation is made of rounding."""
    model = new_model(tiny_config("llama", settings_of(case)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, DepthRouter):
                module.query.zero_()
    result = observed(model, tokens(2, 17))

    assert result
    for values in result.values():
        num_sources = sum(name.endswith(".weight") for name in values)
        assert values["entropy"] == pytest.approx(1.0, abs=1e-6)
        assert values["effective_branches"] == pytest.approx(num_sources, rel=1e-6)
        assert values["participation"] == pytest.approx(num_sources, rel=1e-6)
        assert "weight_update_correlation" not in values
        null = 0.0 if case == "vanilla" else 1 / (1 + num_sources)
        assert values["null_mass"] == pytest.approx(null, abs=1e-6)


def test_a_collapsed_router() -> None:
    """A router that always takes the newest source is told as collapsed."""
    model = new_model(tiny_config("llama", settings_of("oasis_repo")))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, DepthRouter) and module.recency_bias is not None:
                module.recency_bias.fill_(40.0)
                module.k_proj.weight.zero_()
    with observe(model) as observation:
        observation.run(tokens(2, 17))
    metrics = summarize(observation).metrics

    assert metrics["depth_newest_share"] > 0.99
    assert metrics["depth_collapse_rate"] == 1.0
    assert metrics["depth_logit_gap"] > 10.0
