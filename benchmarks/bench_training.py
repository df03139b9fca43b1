"""What OASIS costs in training, next to vanilla depth routing and to a plain residual.

Steps of the `mini` recipe (its sizes, batch and optimizer) on random tokens, on the CPU. The models
take turns and change their order from turn to turn; times are medians over turns, in CPU seconds of
the process, which a busy machine disturbs less than the clock; ratios are medians of the ratios
within a turn. The last line is a step of the Trainer next to a bare loop's.

    OMP_NUM_THREADS=1 python benchmarks/bench_training.py [--turns 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from oasis_eval.training import recipes
from oasis_eval.training.blocks import TrainingBlocks
from oasis_eval.training.folder import RunFolder
from oasis_eval.training.models import decaying
from oasis_eval.training.run import Plan, build_model, load_tokenizer
from oasis_eval.training.tokens import TokenInfo, Tokens
from oasis_eval.training.trainer import RecipeTrainer, make_arguments

MODELS = ("oasis", "vanilla", "residual-vanilla")
BUDGETS = (("oasis", "vanilla", 1.35), ("oasis", "residual-vanilla", 1.6))
TRAINER_STEPS = 8


class Learner:
    """A model with its optimizer, as a run has them."""

    def __init__(self, variant: str) -> None:
        self.plan = Plan(recipe=recipes.resolve("mini"), variant=variant)
        recipe = self.plan.recipe
        self.model: Any = build_model(self.plan, load_tokenizer(self.plan), None).train()
        names = set(decaying(self.model, recipe.decay))
        named = list(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if n in names], "weight_decay": 0.1},
                {"params": [p for n, p in named if n not in names], "weight_decay": 0.0},
            ],
            lr=1e-4,
            betas=recipe.betas,
            fused=True,
        )

    def step(self, ids_BT: Tensor) -> None:
        """Make one update."""
        recipe = self.plan.recipe
        for part_BT in ids_BT.split(recipe.micro_batch_size):
            loss = self.model(input_ids=part_BT, labels=part_BT, use_cache=False).loss
            (loss * len(part_BT) / len(ids_BT)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm or torch.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def random_ids(learner: Learner, seed: int) -> Tensor:
    """Return one batch of the recipe, [B, T]."""
    recipe = learner.plan.recipe
    generator = torch.Generator().manual_seed(seed)
    vocabulary = learner.model.config.vocab_size
    shape = (recipe.batch_size, recipe.context)
    return torch.randint(vocabulary, shape, generator=generator)


def interleaved(learners: dict[str, Learner], turns: int) -> dict[str, list[float]]:
    """Return CPU seconds of a step of each model, one per turn."""
    times: dict[str, list[float]] = {name: [] for name in learners}
    names = list(learners)
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ids_BT = random_ids(learners[name], turn)
            start = time.process_time()
            learners[name].step(ids_BT)
            if turn:  # the first one warms up
                times[name].append(time.process_time() - start)
    return times


class Clock(TrainerCallback):
    """Notes when each step ends, in CPU seconds of the process."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.process_time())


def trainer_seconds(variant: str, folder: Path) -> float:
    """Return the median CPU seconds of a step of the Trainer, without log and checkpoints."""
    recipe = recipes.resolve("mini").model_copy(
        update={"log_every": 10**6, "save_every": 10**6, "probe_every": 10**6}
    )
    plan = Plan(recipe=recipe, variant=variant, max_steps=TRAINER_STEPS)
    tokenizer = load_tokenizer(plan)
    ids = np.random.default_rng(0).integers(3, len(tokenizer), size=200 * recipe.context)
    info = TokenInfo("random", "random", None, "", 1, len(ids), "")
    blocks = TrainingBlocks(recipe, [Tokens(info, ids.astype(np.uint16))], steps=plan.steps, seed=0)
    arguments = make_arguments(
        recipe, RunFolder(folder), steps=plan.steps, device="cpu", dtype="fp32"
    )
    arguments.save_strategy = "no"
    trainer = RecipeTrainer(recipe, build_model(plan, tokenizer, None), blocks, arguments)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(b - a for a, b in pairwise(clock.ends))


def main() -> None:
    """Measure, then print times and the ratios that have a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    learners = {name: Learner(name) for name in MODELS}
    times = interleaved(learners, turns)
    recipe = recipes.resolve("mini")
    tokens = recipe.batch_size * recipe.context
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:18s} {median:7.3f} CPU s a step, {tokens / median:8.0f} tokens a CPU second")
    for name, reference, limit in BUDGETS:
        pairs = zip(times[name], times[reference], strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        print(f"{name} / {reference} = {ratio:.3f} (limit {limit})")
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer_seconds("vanilla", Path(folder) / "run")
    bare = statistics.median(times["vanilla"])
    print(f"Trainer / bare loop, vanilla = {whole / bare:.3f}")


if __name__ == "__main__":
    main()
