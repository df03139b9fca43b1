"""Regions between layers of plain checkpoints: taps come and go with the scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from oasis_eval import registry
from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import QuantScheme
from tests.tiny import persimmon, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny Llama as a user has it: a folder."""
    return load(registry.resolve(str(save(tmp_path_factory.mktemp("llama")))), dtype="fp32")


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        output: Tensor = model(input_ids=ids, use_cache=False).logits
    return output


def regions(*names: str) -> QuantScheme:
    return QuantScheme.model_validate(
        {
            "name": "mine",
            "activations": {"bits": 4, "granularity": "token", "ranges": "dynamic"},
            "regions": names,
        }
    )


@pytest.mark.parametrize("name", ["w8a8-static", "w4a4-static"])
def test_a_plain_checkpoint_has_the_full_graph(llama: Reference, name: str) -> None:
    """The presets run, say what they covered and which attention ran, and leave nothing behind."""
    reference = logits(llama.model)
    modules = [(key, type(module)) for key, module in llama.model.named_modules()]
    with prepare(llama, resolve(name), dtype="fp32") as prepared:
        changed = logits(prepared.model)
        coverage = prepared.coverage
    assert coverage is not None
    covered = {item.region for item in coverage.modules if item.quantized}

    assert prepared.attention == "eager"
    (clipped,) = prepared.warnings[len(llama.warnings) :]
    assert clipped == "calibration sequences have 128 tokens, the positions of the model, not 512"
    assert float((changed - reference).abs().max()) > 1e-2
    assert (coverage.num_quantized, coverage.num_sites) == (14, 15)
    assert covered == {
        None,
        "attention_scores",
        "attention_probs",
        "attention_context",
        "kv_cache",
        "residual",
        "embedding",
    }
    assert set(coverage.absent_regions) == {"attention_gate", "depth_router", "depth_sources"}
    assert modules == [(key, type(module)) for key, module in llama.model.named_modules()]
    assert torch.equal(logits(llama.model), reference)


@pytest.mark.parametrize(
    ("names", "attention"),
    [
        (("kv_cache", "residual"), "sdpa"),
        (("attention_context",), "sdpa"),
        (("attention_probs", "linear_inputs"), "eager"),
        (("linear_inputs",), "sdpa"),
    ],
)
def test_the_attention_that_ran_is_said(
    llama: Reference, names: tuple[str, ...], attention: str
) -> None:
    """Scores and weights need the explicit path; other regions leave the fast one on."""
    with prepare(llama, regions(*names), dtype="fp32") as prepared:
        logits(prepared.model)

    assert prepared.attention == attention


def test_a_model_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    """The full graph of unknown layers is refused before calibration; its attention is not."""
    reference = load(registry.resolve(str(save(tmp_path, model=persimmon()))), dtype="fp32")
    expected = logits(reference.model)
    with (
        pytest.raises(
            UnsupportedSchemeError,
            match=r"'w8a8-static': region residual cannot be quantized in PersimmonForCausalLM: "
            r"the layers of PersimmonDecoderLayer are not known; leave it out of 'regions'",
        ),
        prepare(reference, resolve("w8a8-static"), dtype="fp32", calibration_data="/nowhere"),
    ):
        pass

    assert torch.equal(logits(reference.model), expected)
    with prepare(reference, regions("attention_scores", "kv_cache"), dtype="fp32") as prepared:
        assert not torch.equal(logits(prepared.model), expected)
