"""The learning rate of each step, against values worked out by hand and torch's own schedule."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from oasis_eval.training.schedule import describe, rate_factor
from tests.training.tiny import recipe


def test_linear_by_hand(place: Path) -> None:
    """Warm-up over 4 steps, then down to a tenth at step 12."""
    tiny = recipe(place, schedule="linear", warmup_steps=4, final_rate=0.1)
    rates = [rate_factor(tiny, step, steps=12) for step in range(13)]
    falling = [1.0 - 0.9 * part / 8 for part in range(9)]

    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.75, *falling])


def test_cosine_by_hand(place: Path) -> None:
    """Full at the end of the warm-up, the middle half-way, the final rate at the end."""
    tiny = recipe(place, schedule="cosine", warmup_steps=2, final_rate=0.2)

    assert rate_factor(tiny, 2, steps=10) == 1.0
    assert rate_factor(tiny, 6, steps=10) == pytest.approx(0.6)
    assert rate_factor(tiny, 10, steps=10) == pytest.approx(0.2)
    assert rate_factor(tiny, 4, steps=10) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))


def test_constant(place: Path) -> None:
    tiny = recipe(place, schedule="constant", warmup_steps=1, final_rate=0.0)

    assert [rate_factor(tiny, step, steps=4) for step in range(4)] == [0.0, 1.0, 1.0, 1.0]


def test_shorter_than_the_warmup(place: Path) -> None:
    """The rate just grows; the description says where it stops."""
    tiny = recipe(place, warmup_steps=10)

    assert rate_factor(tiny, 3, steps=4) == 0.3
    assert "ends in the warm-up, at 0.003" in describe(tiny, steps=4)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_against_transformers(place: Path, schedule: str) -> None:
    """With a final rate of 0 these are the library's schedules."""
    from transformers import get_scheduler

    tiny = recipe(place, schedule=schedule, warmup_steps=3, final_rate=0.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    library = get_scheduler(schedule, optimizer, num_warmup_steps=3, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates.append(library.get_last_lr()[0])
        optimizer.step()
        library.step()

    assert [rate_factor(tiny, step, steps=20) for step in range(20)] == pytest.approx(rates)
