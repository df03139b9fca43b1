"""The learning rate of each step, as a pure function."""

from __future__ import annotations

import math

from oasis_eval.spec import TrainRecipe


def rate_factor(recipe: TrainRecipe, step: int, *, steps: int) -> float:
    """Return the learning rate of a step as a part of the recipe's highest one.

    The rate grows linearly over the warm-up, from 0 at step 0 to 1 at step `warmup_steps`, then
    falls to `final_rate`, which it reaches at step `steps`: the last update, that of step
    `steps` - 1, is one step short of it.

    Args:
        recipe: Gives warm-up and shape.
        step: Updates that were made before this one.
        steps: Updates of the whole run.
    """
    if step < recipe.warmup_steps:
        return step / recipe.warmup_steps
    if recipe.schedule == "constant" or steps <= recipe.warmup_steps:
        return 1.0
    progress = min((step - recipe.warmup_steps) / (steps - recipe.warmup_steps), 1.0)
    if recipe.schedule == "linear":
        fallen = 1.0 - progress
    else:
        fallen = 0.5 * (1.0 + math.cos(math.pi * progress))
    return recipe.final_rate + (1.0 - recipe.final_rate) * fallen


def describe(recipe: TrainRecipe, *, steps: int) -> str:
    """Return the schedule in one line."""
    text = f"learning rate 0 to {recipe.learning_rate:g} over {recipe.warmup_steps} steps"
    if steps <= recipe.warmup_steps:
        reached = recipe.learning_rate * rate_factor(recipe, steps - 1, steps=steps)
        return f"{text}; the run ends in the warm-up, at {reached:.3g}"
    if recipe.schedule == "constant":
        return f"{text}, constant to step {steps}"
    return f"{text}, {recipe.schedule} to {recipe.learning_rate * recipe.final_rate:g} at {steps}"
