"""Settings, configurations and the table of variants."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import GPT2Config

from oasis_eval.errors import SpecError, UnknownNameError
from oasis_eval.modeling.config import OasisSettings, apply_settings
from oasis_eval.modeling.variants import VARIANT_NAMES, build_config, resolve_variant
from oasis_eval.modeling.wrapping import reasons_of_change
from tests.modeling.tiny import BACKBONES, base_config, settings_of, tiny_config

REFUSED: dict[str, tuple[OasisSettings, str]] = {
    "unknown wiring": (OasisSettings(wiring="ring"), "wiring is 'ring'"),
    "wrong type": (OasisSettings(null_coupling="yes"), "null_coupling is 'yes'; expected bool"),
    "number as flag": (OasisSettings(coupling_centred=1), "coupling_centred is 1"),
    "not a number": (OasisSettings(coupling_beta_raw_init=float("nan")), "finite number"),
    "too many blocks": (OasisSettings(num_blocks=7), "num_blocks is 7"),
    "no blocks": (OasisSettings(num_blocks=0), "num_blocks is 0"),
    "more blocks than layers": (OasisSettings(wiring="cumulative", num_blocks=4), "num_blocks"),
    "blocks without blocks": (OasisSettings(wiring="attnres_full", num_blocks=2), "num_blocks"),
    "coupled clipped": (
        OasisSettings(token_normalizer="clipped_softmax", null_coupling=True),
        "token_normalizer 'clipped_softmax'",
    ),
    "coupled softpick": (
        OasisSettings(token_normalizer="softpick", null_coupling=True),
        "token_normalizer 'softpick'",
    ),
    "coupled residual": (OasisSettings(wiring="residual", null_coupling=True), "null_coupling"),
    "depth without depth": (
        OasisSettings(wiring="residual", depth_normalizer="softmax1"),
        "depth_normalizer",
    ),
    "null value without null": (OasisSettings(depth_null_value="partial"), "depth_null_value"),
    "learned null without null": (OasisSettings(depth_null="learned"), "depth_null"),
    "log n without null": (OasisSettings(depth_log_n=1.0), "depth_log_n"),
    "token log n without null": (OasisSettings(token_log_n=1.0), "token_log_n"),
    "learned token null without null": (OasisSettings(token_null="learned"), "token_null"),
    "scale elsewhere": (
        OasisSettings(wiring="oasis_repo", depth_output_scale="num_sources"),
        "depth_output_scale",
    ),
    "fixed beta without value": (OasisSettings(coupling_beta="fixed"), "coupling_beta_value"),
    "value of a learned beta": (OasisSettings(coupling_beta_value=1.0), "coupling_beta_value"),
    "negative beta": (
        OasisSettings(coupling_beta="fixed", coupling_beta_value=-1.0),
        "coupling_beta_value",
    ),
    "clamp of nothing": (OasisSettings(coupling_logit_clamp=0.0), "coupling_logit_clamp"),
    "negative alpha": (
        OasisSettings(token_normalizer="clipped_softmax", clip_alpha=-1.0),
        "clip_alpha is -1.0; expected",
    ),
    "small zeta": (
        OasisSettings(token_normalizer="clipped_softmax", clip_zeta=0.5),
        "clip_zeta is 0.5; expected",
    ),
    "stretch of nothing": (OasisSettings(clip_zeta=1.1), "does nothing where token_normalizer"),
    "detail of no coupling": (
        OasisSettings(coupling_block_psi="max"),
        "coupling_block_psi is 'max', which does nothing where null_coupling is off",
    ),
    "start of no recency": (
        OasisSettings(wiring="attnres_block", depth_recency_init=2.0),
        "does nothing where depth_recency is 'none'",
    ),
    "no training length": (
        OasisSettings(token_normalizer="clipped_softmax", clip_train_length=0),
        "clip_train_length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_settings_name_the_field(name: str) -> None:
    """What is no choice, or would have no effect, is refused by name."""
    settings, message = REFUSED[name]

    with pytest.raises(SpecError, match=message):
        apply_settings(base_config("llama"), settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "at first with beta 0.0067, which is learned"),  # log(1 + e^-5)
        ({"coupling_beta": "fixed", "coupling_beta_value": 1.5}, "with beta 1.5"),
    ],
)
def test_a_wrapped_model_is_told_its_own_coupling(changes: dict[str, object], said: str) -> None:
    """The strength that acts, learned or fixed."""
    settings = dataclasses.replace(settings_of("oasis"), **changes)
    reasons = reasons_of_change(apply_settings(base_config("llama"), settings))

    assert f"null_coupling: depth weights follow the null mass of attention, {said}" in reasons


def test_gate_that_does_not_divide_is_refused() -> None:
    """Per-head gates slice the width; Qwen3 allows widths that heads do not divide."""
    base = base_config("qwen3", hidden_size=50)

    with pytest.raises(SpecError, match="attention_gate"):
        build_config(base, "gated")


def test_other_backbones_are_refused() -> None:
    """The message lists the backbones there are."""
    with pytest.raises(SpecError, match="llama, qwen3"):
        build_config(GPT2Config(), "vanilla")


def test_unknown_variant_has_suggestions() -> None:
    """A typing error is answered with the nearest name."""
    with pytest.raises(UnknownNameError, match="oasis_adaptive"):
        resolve_variant("oasis-adaptive")


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_variant_fits_every_backbone(name: str, backbone: str) -> None:
    """A configuration keeps the settings of its variant."""
    config = build_config(base_config(backbone), name)

    expected = resolve_variant(name)
    for field in dataclasses.fields(OasisSettings):
        value = getattr(expected, field.name)
        if value is not None:
            assert getattr(config, field.name) == value, field.name


def test_variants_are_distinct() -> None:
    """No two names mean the same settings, and copies do not share state."""
    values = [dataclasses.astuple(resolve_variant(name)) for name in VARIANT_NAMES]
    changed = resolve_variant("vanilla")
    changed.num_blocks = 1

    assert len(set(values)) == len(values)
    assert resolve_variant("vanilla").num_blocks is None


def test_residual_names_stand_for_what_differs_without_depth() -> None:
    """Without depth, aos and oasis are outeffhop, and only outeffhop is named."""
    names = {name for name in VARIANT_NAMES if name.startswith("residual-")}

    assert "residual-outeffhop" in names
    assert not names & {"residual-aos", "residual-oasis"}
    assert all(resolve_variant(name).wiring == "residual" for name in names)


def test_settings_that_follow_from_others() -> None:
    """Defaults that depend on wiring, depth or context hold the value in use."""
    base = base_config("llama")

    assert build_config(base, "vanilla").num_blocks == 6
    assert build_config(base, OasisSettings(wiring="cumulative")).num_blocks == 3
    assert build_config(base, "residual-vanilla").num_blocks is None
    assert build_config(base, "clipped").clip_train_length == 128
    repo = build_config(base, OasisSettings(wiring="oasis_repo"))
    assert (repo.depth_router, repo.depth_recency) == ("lowrank_qk", "linear")
    cumulative = build_config(base, OasisSettings(wiring="cumulative_full"))
    assert (cumulative.depth_router, cumulative.depth_recency) == ("pseudo_query", "last")


def test_settings_can_be_replaced() -> None:
    """A configuration of ours is a base, too: its settings go, the backbone's stay."""
    first = tiny_config("qwen3", "oasis", rms_norm_eps=1e-5)

    second = build_config(first, "gated_g1")

    assert second.attention_gate == "g1"
    assert not second.null_coupling
    assert second.rms_norm_eps == 1e-5
    assert second.model_type == "qwen3_oasis"


def test_settings_come_back_out() -> None:
    """`settings` is what a configuration was built from."""
    settings = settings_of("oasis")

    returned = tiny_config("llama", settings).settings

    assert dataclasses.replace(returned, depth_router=None, depth_recency=None) == settings
