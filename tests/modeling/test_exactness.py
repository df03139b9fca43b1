"""Functions that must coincide: with the equations, with transformers, with each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from oasis_eval.modeling.config import OasisSettings
from oasis_eval.modeling.decoder import OasisForCausalLM
from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from tests.modeling.naive import NaiveModel
from tests.modeling.tiny import (
    BACKBONES,
    QUICK_CASES,
    REPO,
    base_config,
    new_model,
    randomize_,
    relative_gap,
    settings_of,
    tiny_config,
    tokens,
)

OASIS = settings_of("oasis")
EXACT_EPS = 1e-12
"""RMSNorm epsilon at which a factor in front of a norm really cancels."""

# The other normalizers have their own literal counterparts in `test_normalizers.py`.
NOT_NAIVE = ("clipped", "softpick", "sparsemax", "entmax15")
NAIVE_CASES = [name for name in (*QUICK_CASES, "residual-gated") if name not in NOT_NAIVE]

SWITCHES: dict[str, OasisSettings] = {
    "psi last": dataclasses.replace(OASIS, coupling_block_psi="last"),
    "psi max": dataclasses.replace(OASIS, coupling_block_psi="max"),
    "psi mlp zero": dataclasses.replace(OASIS, coupling_mlp_psi="zero"),
    "psi embedding neutral": dataclasses.replace(OASIS, coupling_embedding_psi="neutral"),
    "not centred": dataclasses.replace(OASIS, coupling_centred=False),
    "beta fixed": dataclasses.replace(OASIS, coupling_beta="fixed", coupling_beta_value=2.5),
    "clamped": dataclasses.replace(OASIS, coupling_logit_clamp=0.3),
    "final read free": dataclasses.replace(OASIS, coupling_final_read=False),
    "null is partial": dataclasses.replace(OASIS, depth_null_value="partial"),
    "null is embedding": dataclasses.replace(OASIS, depth_null_value="embedding"),
    "other n": dataclasses.replace(OASIS, token_log_n=0.7, depth_log_n=-0.4),
    "scaled": dataclasses.replace(OASIS, depth_output_scale="num_sources"),
    "recency last": dataclasses.replace(OASIS, depth_recency="last"),
    "recency linear": dataclasses.replace(OASIS, depth_recency="linear"),
    "uneven blocks": dataclasses.replace(OASIS, num_blocks=4),
    "full": dataclasses.replace(OASIS, wiring="attnres_full", num_blocks=None),
    "coupled reset": dataclasses.replace(OASIS, wiring="reset"),
    "coupled cumulative": dataclasses.replace(OASIS, wiring="cumulative"),
    "coupled cumulative full": dataclasses.replace(
        OASIS, wiring="cumulative_full", num_blocks=None, coupling_embedding_psi="neutral"
    ),
    "delta, psi mlp zero": dataclasses.replace(REPO, wiring="delta", coupling_mlp_psi="zero"),
    "repo, psi mlp zero": dataclasses.replace(REPO, coupling_mlp_psi="zero"),
    "repo, pseudo query": dataclasses.replace(REPO, depth_router="pseudo_query"),
}


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("case", NAIVE_CASES)
def test_equals_the_equations(case: str, backbone: str) -> None:
    """Random queries: float32 logits equal a literal float64 implementation to 1e-5."""
    model = new_model(tiny_config(backbone, case), seed=1)
    ids = tokens(1, 5)

    actual = logits_of(model, ids)[0]

    assert relative_gap(actual, NaiveModel(model).logits(ids[0])) < 1e-5


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_equals_the_equations(switch: str) -> None:
    """Each setting of coupling, null and recency does what its equation says."""
    model = new_model(tiny_config("llama", SWITCHES[switch]), seed=2)
    ids = tokens(1, 5)

    actual = logits_of(model, ids)[0]

    assert relative_gap(actual, NaiveModel(model).logits(ids[0])) < 1e-5


# Centring is the exception: it changes the null's share, and that is nothing under Kimi wiring.
KIMI_SWITCHES = [name for name in list(SWITCHES)[:12] if name != "not centred"]


@pytest.mark.parametrize("switch", KIMI_SWITCHES)
def test_every_switch_changes_the_function(switch: str) -> None:
    """A setting that had no effect would pass every comparison with itself."""
    ids = tokens(1, 5)
    with_switch = new_model(tiny_config("llama", SWITCHES[switch]), seed=2)
    without = new_model(tiny_config("llama", OASIS), seed=2)
    without.load_state_dict(with_switch.state_dict(), strict=False)

    assert relative_gap(logits_of(with_switch, ids), logits_of(without, ids)) > 1e-5


def plain_and_wrapped(
    backbone: str, settings: OasisSettings, **changes: object
) -> tuple[PreTrainedModel, OasisForCausalLM]:
    """A plain model and a depth-routed one of the same weights, its queries still zero."""
    plain = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[backbone](
        base_config(backbone, **changes)
    )
    randomize_(plain, seed=3)
    wrapped = new_model(tiny_config(backbone, settings, **changes))
    for name, parameter in wrapped.named_parameters():
        if name.endswith(".query"):
            torch.nn.init.zeros_(parameter)
    wrapped.load_state_dict(plain.state_dict(), strict=False)
    return plain.eval(), wrapped


WRAPS = [OasisSettings(num_blocks=count) for count in (1, 2, 4, 6)]
WRAPS.append(OasisSettings(wiring="attnres_full"))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("settings", WRAPS, ids=lambda s: f"{s.wiring}-{s.num_blocks}")
def test_zero_queries_and_scale_equal_the_plain_model(
    settings: OasisSettings, backbone: str
) -> None:
    """Wrapping a plain checkpoint with `num_sources` is exact at the model's own epsilon."""
    scaled = dataclasses.replace(settings, depth_output_scale="num_sources")
    plain, wrapped = plain_and_wrapped(backbone, scaled)
    ids = tokens(2, 20)

    assert relative_gap(logits_of(wrapped, ids), logits_of(plain, ids)) < 1e-5


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("settings", WRAPS, ids=lambda s: f"{s.wiring}-{s.num_blocks}")
def test_zero_queries_equal_the_plain_model_without_epsilon(
    settings: OasisSettings, backbone: str
) -> None:
    """Without the scale the pre-norm removes 1 / S, exactly so when its epsilon is nothing."""
    plain, wrapped = plain_and_wrapped(backbone, settings, rms_norm_eps=EXACT_EPS)
    ids = tokens(2, 20)

    assert relative_gap(logits_of(wrapped, ids), logits_of(plain, ids)) < 1e-5


@pytest.mark.parametrize("backbone", BACKBONES)
def test_residual_wiring_is_the_plain_model(backbone: str) -> None:
    """Wiring `residual` with softmax is transformers' own model, bit for bit."""
    plain, wrapped = plain_and_wrapped(backbone, settings_of("residual-vanilla"))
    ids = tokens(2, 20)

    torch.testing.assert_close(logits_of(wrapped, ids), logits_of(plain, ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["vanilla", "oasis"])
def test_as_many_blocks_as_sublayers_is_full(case: str) -> None:
    """N = L blocks and `attnres_full` are the same function, bit for bit."""
    settings = settings_of(case)
    blocks = new_model(tiny_config("llama", dataclasses.replace(settings, num_blocks=6)))
    full = new_model(
        tiny_config("llama", dataclasses.replace(settings, wiring="attnres_full", num_blocks=None))
    )
    ids = tokens(2, 20)

    assert torch.equal(logits_of(blocks, ids), logits_of(full, ids))


def with_same_weights(
    first: OasisSettings, second: OasisSettings, **changes: object
) -> tuple[OasisForCausalLM, OasisForCausalLM]:
    left = new_model(tiny_config("llama", first, **changes), seed=4)
    right = new_model(tiny_config("llama", second, **changes), seed=5)
    right.load_state_dict(left.state_dict(), strict=False)
    return left, right


def test_depth_softmax1_does_nothing_under_kimi_wiring() -> None:
    """`aos` is `outeffhop`: the null's share is a factor that the pre-norm removes."""
    aos, outeffhop = with_same_weights(
        settings_of("aos"), settings_of("outeffhop"), rms_norm_eps=EXACT_EPS
    )
    ids = tokens(2, 20)

    assert relative_gap(logits_of(aos, ids), logits_of(outeffhop, ids)) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        dataclasses.replace(REPO, null_coupling=False),
        dataclasses.replace(REPO, wiring="delta", null_coupling=False),
        dataclasses.replace(settings_of("aos"), depth_null_value="partial"),
        dataclasses.replace(settings_of("aos"), depth_null_value="embedding"),
    ],
    ids=["oasis_repo", "delta", "partial", "embedding"],
)
def test_depth_softmax1_acts_elsewhere(settings: OasisSettings) -> None:
    """Where the read re-enters the residual, or the null has a value, it changes the function."""
    softmax = dataclasses.replace(settings, depth_normalizer="softmax", depth_null_value="zero")
    left, right = with_same_weights(settings, softmax, rms_norm_eps=EXACT_EPS)
    ids = tokens(2, 20)

    assert relative_gap(logits_of(left, ids), logits_of(right, ids)) > 1e-3


def test_centring_does_nothing_under_depth_softmax() -> None:
    """A shift that all sources share leaves a softmax alone."""
    centred = dataclasses.replace(OASIS, depth_normalizer="softmax")
    left, right = with_same_weights(centred, dataclasses.replace(centred, coupling_centred=False))
    ids = tokens(2, 20)

    assert relative_gap(logits_of(left, ids), logits_of(right, ids)) < 1e-5


@pytest.mark.parametrize("backbone", BACKBONES)
def test_coupling_of_nothing_is_vanilla(backbone: str) -> None:
    """Beta 0, no clamp and softmax at both levels equal vanilla AttnRes bit for bit."""
    coupled = dataclasses.replace(
        settings_of("vanilla"),
        null_coupling=True,
        coupling_beta="fixed",
        coupling_beta_value=0.0,
        coupling_logit_clamp=None,
    )
    left = new_model(tiny_config(backbone, coupled), seed=4)
    right = new_model(tiny_config(backbone, "vanilla"), seed=4)
    ids = tokens(2, 20)

    assert torch.equal(logits_of(left, ids), logits_of(right, ids))


def test_softmax_has_no_null_to_couple() -> None:
    """Under token softmax psi is 0 and any beta leaves the function alone."""
    coupled = dataclasses.replace(settings_of("vanilla"), null_coupling=True)
    left, right = with_same_weights(coupled, settings_of("vanilla"))
    ids = tokens(2, 20)

    assert torch.equal(logits_of(left, ids), logits_of(right, ids))


def test_queries_are_parameters_of_the_width() -> None:
    """Quantizers replace every Linear, so a query must not be one; it starts at zero."""
    config = tiny_config("llama", "oasis")
    router = LlamaOasisForCausalLM(config).model.layers[0].attn_res_sa

    assert isinstance(router.query, torch.nn.Parameter)
    assert torch.equal(router.query, torch.zeros(config.hidden_size))
    assert router.beta.item() == pytest.approx(0.006715, abs=1e-6)
