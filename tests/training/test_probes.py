"""A probe's numbers against the plain loss and the diagnostics; it leaves the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oasis_eval.diagnostics.observation import observe
from oasis_eval.training.probes import METRICS, probe
from oasis_eval.training.run import build_model, load_tokenizer
from tests.training.tiny import plan


@pytest.mark.parametrize("variant", ["vanilla", "oasis", "residual-vanilla"])
def test_loss_is_the_models_own(place: Path, variant: str) -> None:
    """The mean over windows of the loss that the model itself returns, in any batch size."""
    asked = plan(place, variant=variant)
    model = build_model(asked, load_tokenizer(asked), None)
    windows_NT = torch.randint(3, 250, (5, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        losses = [model(input_ids=row, labels=row).loss.item() for row in windows_NT.split(1)]

    for size in (1, 2, 5):
        found = probe(model, windows_NT, batch_size=size)["held_out_loss"]
        assert found == pytest.approx(sum(losses) / 5, rel=1e-5)


def test_numbers_are_those_of_the_diagnostics(place: Path) -> None:
    """Each metric as an observation by itself gives it."""
    from oasis_eval.diagnostics.measure import summarize

    asked = plan(place, variant="oasis")
    model = build_model(asked, load_tokenizer(asked), None).eval()
    windows_NT = torch.randint(3, 250, (4, 16), generator=torch.Generator().manual_seed(1))
    with observe(model) as observation:
        for row in windows_NT.split(1):
            observation.run(row)
    expected = summarize(observation).metrics
    found = probe(model, windows_NT, batch_size=1)

    assert {name: found[name] for name in METRICS} == {n: expected[n] for n in METRICS}


def test_leaves_mode_gradients_and_random_stream(place: Path) -> None:
    asked = plan(place)
    model = build_model(asked, load_tokenizer(asked), None).train()
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    probe(model, torch.ones(2, 16, dtype=torch.long), batch_size=2)

    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.rand(2), expected)
