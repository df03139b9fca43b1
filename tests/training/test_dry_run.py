"""What a dry run counts is what real tensors take; what it says is complete."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from oasis_eval.training import recipes
from oasis_eval.training.dry_run import _config as config_of
from oasis_eval.training.dry_run import _model as model_of
from oasis_eval.training.dry_run import count, dry_run
from oasis_eval.training.memory import peak_bytes
from oasis_eval.training.run import Plan
from tests.training.tiny import plan, recipe


@pytest.mark.parametrize("variant", ["vanilla", "oasis"])
def test_pass_is_counted_as_real_tensors_take_it(place: Path, variant: str) -> None:
    """The same pass with content: equal but for one matrix of scores, which the kernel skips."""
    asked = plan(place, variant=variant)
    config = config_of(asked)
    ids_BT = torch.zeros(2, 16, dtype=torch.long)
    real = peak_bytes(model_of(config, asked), ids_BT, dtype=torch.float32)
    counted = count(config, asked).pass_bytes
    scores = 2 * 4 * 16 * 16 * 4

    assert real <= counted <= real + 4 * scores
    assert real > 10 * scores


def test_peak_of_a_linear_map_by_hand() -> None:
    """One matrix product of [B, T] ids: logits, their gradient, the weight's gradient."""

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(32, 1000))

        def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
            loss = (input_ids.float() @ self.weight).sum()
            return type("Output", (), {"loss": loss})

    found = peak_bytes(Bare(), torch.zeros(64, 32, dtype=torch.long), dtype=torch.float32)
    inputs, logits, weight = 64 * 32 * 4, 64 * 1000 * 4, 32 * 1000 * 4

    assert inputs + logits <= found <= inputs + logits + weight + 64


def test_checkpointing_needs_less(place: Path) -> None:
    """Layers that are computed again keep nothing but their inputs."""
    deep = recipe(place).backbone.model_copy(update={"num_layers": 6})
    plain = recipe(place).model_copy(update={"backbone": deep})
    saving = plain.model_copy(update={"gradient_checkpointing": True})
    needs = [
        count(config_of(asked), asked)
        for asked in (plan(place, recipe=plain), plan(place, recipe=saving))
    ]

    assert needs[1].pass_bytes < 0.6 * needs[0].pass_bytes
    assert needs[1].flops == pytest.approx(needs[0].flops * 4 / 3)


def test_says_what_is_measured_and_what_estimated(place: Path) -> None:
    """A tiny model is timed; the lines name parameters, memory, schedule and time."""
    text = "\n".join(dry_run(plan(place)))

    assert "Parameters (counted)" in text
    assert "Memory (counted" in text
    assert "learning rate 0 to 0.01 over 3 steps, cosine to 0.001 at 12" in text
    assert "Time (measured" in text


@pytest.mark.slow
def test_large_model_in_a_minute() -> None:
    """The 1B recipe is counted and its time estimated without holding its weights."""
    start = time.process_time()
    lines = dry_run(Plan(recipe=recipes.resolve("llama-3.2-1b"), variant="vanilla"))

    assert time.process_time() - start < 60
    assert "1,235,949,568" in lines[1]
    assert "Time (estimated" in lines[-1]
