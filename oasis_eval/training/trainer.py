"""transformers' Trainer, told to do what a recipe says and nothing else.

The data set is in the order of the run already, so the Trainer reads it from front to back; the
schedule and the choice of decaying parameters are ours. No step waits for a number: the loss is
fetched where the log has a line.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from oasis_eval import progress
from oasis_eval.errors import SpecError
from oasis_eval.spec import Dtype, TrainRecipe
from oasis_eval.training.blocks import TrainingBlocks, keep
from oasis_eval.training.folder import COMPLETE, RunFolder
from oasis_eval.training.models import decaying
from oasis_eval.training.probes import probe
from oasis_eval.training.schedule import rate_factor

KEPT_CHECKPOINTS = 2
_WAIT_SECONDS = 6 * 3600
"""For other processes; the first one may have to tokenize whole data sets."""


def make_arguments(
    recipe: TrainRecipe, folder: RunFolder, *, steps: int, device: str, dtype: Dtype
) -> TrainingArguments:
    """Return the Trainer's arguments; joins the process group of `torchrun` or `accelerate`.

    Raises:
        SpecError: The device or dtype cannot be trained on, or the batch cannot be divided.
    """
    if device not in ("cpu", "cuda"):
        raise SpecError(
            f"device {device!r}: training takes cpu or cuda; choose one GPU of several with "
            "CUDA_VISIBLE_DEVICES, use several with torchrun"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("device 'cuda': this torch sees no GPU; use cpu")
    if dtype == "fp16":
        raise SpecError("dtype 'fp16' needs scaled gradients to train; use bf16 or fp32")
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        per_device_train_batch_size=recipe.micro_batch_size,
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=recipe.epsilon,
        max_grad_norm=recipe.clip_norm or 0.0,
        optim="adamw_torch_fused",
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # a loss that is not finite is a result, and must be seen
        save_steps=recipe.save_every,
        save_total_limit=KEPT_CHECKPOINTS,
        bf16=dtype == "bf16",
        use_cpu=device == "cpu",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=device == "cuda",
        average_tokens_across_devices=False,  # every block is full: nothing to weigh
        # A wiring may have routers that read nothing and so have no gradient.
        ddp_find_unused_parameters=True,
        ddp_timeout=_WAIT_SECONDS,
    )
    world = arguments.world_size
    if recipe.batch_size % (recipe.micro_batch_size * world):
        raise SpecError(
            f"batch_size {recipe.batch_size} is no multiple of micro_batch_size "
            f"{recipe.micro_batch_size} x {world} processes; start another number of processes"
        )
    arguments.gradient_accumulation_steps = recipe.batch_size // (recipe.micro_batch_size * world)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one GPU; never DataParallel
    return arguments


class RecipeTrainer(Trainer):
    """The Trainer with a recipe's order, schedule and decay."""

    def __init__(
        self, recipe: TrainRecipe, model: nn.Module, blocks: TrainingBlocks, arguments: Any
    ) -> None:
        """Set up; `arguments` come from `make_arguments`."""
        self._recipe = recipe
        super().__init__(model=model, args=arguments, train_dataset=blocks, data_collator=keep)
        self.remove_callback(PrinterCallback)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        """Return the schedule of the recipe over the whole run."""
        scheduler = LambdaLR(
            optimizer or self.optimizer,
            lambda step: rate_factor(self._recipe, step, steps=num_training_steps),
        )
        self.lr_scheduler: Any = scheduler
        self._created_lr_scheduler = True
        return scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parameters that decay by the recipe's rule."""
        return decaying(model, self._recipe.decay)

    def floating_point_ops(self, inputs: dict[str, Tensor | Any]) -> int:
        """Count nothing: the count walks over all parameters in every step."""
        return 0

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


class Journal(TrainerCallback):
    """Writes the log, runs probes, marks whole checkpoints, moves the progress bar."""

    def __init__(
        self,
        recipe: TrainRecipe,
        folder: RunFolder,
        windows_NT: Tensor,
        *,
        seconds_before: float,
        quiet: bool,
    ) -> None:
        """Begin a session.

        Args:
            recipe: Intervals.
            folder: Where to write.
            windows_NT: What probes run on.
            seconds_before: Training time of the steps that earlier sessions made.
            quiet: Whether to hide the progress bar.
        """
        self._recipe = recipe
        self._folder = folder
        self._windows_NT = windows_NT
        self._started = time.monotonic() - seconds_before
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None

    @property
    def seconds(self) -> float:
        """Training time of all sessions so far."""
        return time.monotonic() - self._started

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar; probe the model as it starts."""
        if not state.is_world_process_zero:
            return
        self._bar = progress.bar(
            what=f"train {self._folder.path.name}",
            quiet=self._quiet,
            total=state.max_steps,
            initial=state.global_step,
            unit="step",
        )
        if state.global_step == 0:
            self._probe(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar; probe where it is time to; the last step's loss is logged, too."""
        if state.global_step == state.max_steps:
            control.should_log = True  # in every process: they average it together
        if not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.update(1)
        step = state.global_step
        if step % self._recipe.probe_every == 0 or step == state.max_steps:
            self._probe(step, kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the mean loss since the last line."""
        logs: dict[str, float] = kwargs["logs"]
        if not state.is_world_process_zero or "loss" not in logs:
            return
        step = state.global_step
        line: dict[str, float] = {
            "step": step,
            "tokens": step * self._recipe.batch_size * self._recipe.context,
            **{name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs},
            "seconds": round(self.seconds, 3),
        }
        self._folder.append(line)
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{logs['loss']:.4f}", refresh=False)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint as whole: the Trainer has written everything by now."""
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (checkpoint / COMPLETE).touch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()

    def _probe(self, step: int, model: nn.Module) -> None:
        size = min(self._recipe.micro_batch_size, 4)
        found = probe(model, self._windows_NT, batch_size=size)
        self._folder.append({"step": step, **found, "seconds": round(self.seconds, 3)})
