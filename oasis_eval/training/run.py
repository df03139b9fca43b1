"""A training run from a recipe to a checkpoint folder with its card.

The same call on the same folder goes on where the last whole checkpoint is, or says that the run
is finished. Another recipe, variant, seed or text in that folder is refused.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging as transformers_logging

from oasis_eval import checkpoint, corpus, loading, pretrained, registry
from oasis_eval.cells import git_commit, versions
from oasis_eval.errors import DataError, SpecError, UnknownNameError
from oasis_eval.minicorpus import tokenizer as mini_tokenizer
from oasis_eval.modeling.variants import variant_name
from oasis_eval.record import write_text_atomically
from oasis_eval.spec import DirSource, Dtype, ModelCard, TrainRecipe
from oasis_eval.training import tokens
from oasis_eval.training.blocks import TrainingBlocks
from oasis_eval.training.folder import (
    Identity,
    RunFolder,
    RunInfo,
    Session,
    TextInfo,
    difference,
    step_of,
)
from oasis_eval.training.models import (
    Trained,
    freeze_,
    from_checkpoint,
    from_scratch,
    plain_config,
    settings_of,
)
from oasis_eval.training.trainer import Journal, RecipeTrainer, make_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to train; what is None follows from the recipe or the device."""

    recipe: TrainRecipe
    variant: str
    seed: int = 0
    wiring: str | None = None
    """None: the variant's."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of another value than the variant's."""
    start: str | None = None
    """What `evaluate` takes: a checkpoint to start from; None: from scratch."""
    train: Trained = "all"
    device: str = "cpu"
    dtype: Dtype | None = None
    """None: fp32 on the CPU, bf16 elsewhere."""
    tokenizer: Path | None = None
    """Folder of a tokenizer that replaces the recipe's."""
    data: dict[str, str] = field(default_factory=dict)
    """Local files by name of a text."""
    max_steps: int | None = None
    """Replaces the steps of the recipe."""

    @property
    def steps(self) -> int:
        """Updates of the run."""
        return self.recipe.steps if self.max_steps is None else self.max_steps

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of matrix products."""
        return self.dtype or ("fp32" if self.device == "cpu" else "bf16")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call did."""

    folder: RunFolder
    info: RunInfo
    resumed_from: int | None
    """Updates that earlier sessions had made; None: the run began here."""
    already_finished: bool = False

    def lines(self) -> list[str]:
        """Describe it for a reader, a line at a time."""
        path, card = self.folder.path, self.folder.card_file
        if self.already_finished:
            return [
                f"{path} is finished: nothing to do (train anew with --overwrite)",
                _hint(card),
            ]
        seconds = sum(session.seconds or 0.0 for session in self.info.sessions)
        log = self.folder.log()
        held_out = [line["held_out_loss"] for line in log if "held_out_loss" in line]
        losses = [line["loss"] for line in log if "loss" in line]
        again = "" if self.resumed_from is None else f", resumed at step {self.resumed_from}"
        return [
            f"Trained: {path} ({self.info.identity.steps} steps, {seconds:.0f} s{again})",
            f"Loss: {losses[-1]:.4f} in training, {held_out[0]:.4f} -> {held_out[-1]:.4f} nats a "
            "token on held-out text",
            _hint(card),
        ]


def train(plan: Plan, out: Path, *, overwrite: bool = False, quiet: bool = False) -> Outcome | None:
    """Train, or go on training.

    Args:
        plan: What to train.
        out: Folder of the run; the card is `<out>.yaml`.
        overwrite: Whether a run in that folder is removed first.
        quiet: Whether to hide the progress bar.

    Returns:
        What was done; None in the processes of a group that only helped.

    Raises:
        SpecError: Settings do not fit, or the folder holds something else.
        DataError: A text cannot be had.
        CheckpointError: The checkpoint to start from, or the tokenizer, cannot be had.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _check(plan)
    folder = RunFolder(out)
    arguments = make_arguments(
        plan.recipe, folder, steps=plan.steps, device=plan.device, dtype=plan.compute_dtype
    )
    reference = None
    if plan.start is not None:
        reference = loading.load(registry.resolve(plan.start), dtype="fp32")
    tokenizer = reference.tokenizer if reference is not None else load_tokenizer(plan)
    with arguments.main_process_first(local=False):
        texts = [tokens.load(text, tokenizer, data=plan.data) for text in plan.recipe.data]
    head = start_tokens(plan.recipe, tokenizer)
    blocks = TrainingBlocks(plan.recipe, texts, steps=plan.steps, seed=plan.seed, head=head)
    model = build_model(plan, tokenizer, reference)
    start = None if reference is None else reference.digest
    label = plan.recipe.name if reference is None else reference.card.label
    del reference  # its weights, where they were wrapped
    identity = Identity(
        recipe=plan.recipe,
        variant=plan.variant,
        wiring=model.config.wiring,
        settings=plan.settings,
        seed=plan.seed,
        steps=plan.steps,
        start=start,
        train=plan.train,
        dtype=plan.compute_dtype,
        tokenizer_sha256=tokens.tokenizer_sha256(tokenizer),
        data=tuple(TextInfo(**asdict(text.info)) for text in texts),
    )
    with arguments.main_process_first(local=False):
        info = _open(folder, identity, arguments, overwrite=overwrite)
    is_first = arguments.process_index == 0
    if info.status == "finished":
        return Outcome(folder, info, None, already_finished=True) if is_first else None
    resumed = folder.last_checkpoint()
    first_step = 0 if resumed is None else step_of(resumed)
    if is_first:
        folder.rewind(first_step)
        session = _session(arguments, first_step, plan)
        info = info.model_copy(update={"sessions": (*info.sessions, session)})
        folder.write(info)
    if plan.recipe.gradient_checkpointing:
        checkpoint_activations(model)
    trainer = RecipeTrainer(plan.recipe, model, blocks, arguments)
    before = max((line["seconds"] for line in folder.log()), default=0.0) if is_first else 0.0
    journal = Journal(
        plan.recipe, folder, blocks.held_out_NT, seconds_before=before, quiet=quiet or not is_first
    )
    trainer.add_callback(journal)
    # The Trainer's optimizer, scheduler and random states are pickles. They are read back with
    # weights_only, and nothing else is ever put into this folder: our own run wrote them.
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    if not is_first:
        return None
    spent = journal.seconds - before
    session = session.model_copy(update={"last_step": plan.steps, "seconds": round(spent, 3)})
    sessions = (*info.sessions[:-1], session)
    info = info.model_copy(update={"status": "finished", "sessions": sessions})
    _write(folder, info, model, tokenizer, label=label)
    return Outcome(folder, info, None if resumed is None else first_step)


def load_tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run that starts from scratch.

    Raises:
        CheckpointError: It cannot be had.
        SpecError: A hub name lacks its revision.
    """
    name = str(plan.tokenizer) if plan.tokenizer is not None else plan.recipe.tokenizer
    if name == "mini":
        return mini_tokenizer.load()
    place, _, revision = name.partition("@")
    is_local = Path(name).expanduser().is_dir()
    if not is_local and not revision:
        raise SpecError(
            f"tokenizer {name!r}: no such folder, and a hub name needs its revision: {name}@main"
        )
    hint = "" if is_local else "; give a folder with --tokenizer"
    with checkpoint.as_checkpoint_error(f"tokenizer {name}: cannot be loaded{hint}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            Path(name).expanduser() if is_local else place,
            revision=revision or None,
            trust_remote_code=False,
            local_files_only=is_local,
        )
    return tokenizer


def build_model(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, reference: loading.Reference | None
) -> Any:
    """Return the model as training starts with it, fp32, with frozen parameters where asked.

    Raises:
        SpecError: Settings do not fit.
        CheckpointError: The checkpoint is of another kind.
    """
    if reference is None:
        base = plain_config(plan.recipe.backbone, context=plan.recipe.context, tokenizer=tokenizer)
        settings = settings_of(plan.recipe, plan.variant, plan.wiring, plan.settings)
        model = from_scratch(base, settings, seed=plan.seed)
    else:
        positions = reference.context_length
        if positions is not None and positions < plan.recipe.context:
            raise SpecError(
                f"{reference.card.name} has {positions} positions, the recipe's context is "
                f"{plan.recipe.context}"
            )
        model = from_checkpoint(reference, plan.variant, plan.wiring, plan.settings)
    freeze_(model, plan.train, variant=plan.variant)
    return model


def start_tokens(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that every block begins with.

    Raises:
        SpecError: The recipe asks for start tokens and the tokenizer has none.
    """
    if not recipe.start_each_block:
        return []
    head = corpus.head_tokens(tokenizer)
    if not head:
        raise SpecError(
            "start_each_block: the tokenizer puts no token before a text; leave the setting out"
        )
    return head


def _check(plan: Plan) -> None:
    names = [text.name for text in plan.recipe.data]
    for name, path in plan.data.items():
        if name not in names:
            raise UnknownNameError(f"text of recipe {plan.recipe.name!r}", name, names)
        if not Path(path).expanduser().is_file():
            raise DataError(f"{name}: {path} is no file; expected a text, jsonl or parquet file")
    if plan.steps < 1:
        raise SpecError(f"--max-steps {plan.steps}: expected at least 1")
    if plan.start is not None and plan.tokenizer is not None:
        raise SpecError("--tokenizer does not go with --from: a checkpoint brings its own")


def _open(
    folder: RunFolder, identity: Identity, arguments: TrainingArguments, *, overwrite: bool
) -> RunInfo:
    """Return the run of the folder, which is this one, or begin it."""
    is_first = arguments.process_index == 0
    if overwrite and is_first:
        folder.clear()
    info = folder.read()
    if info is None:
        info = RunInfo(status="running", identity=identity)
        if is_first:
            folder.write(info)
    elif (what := difference(info.identity, identity)) is not None:
        raise SpecError(
            f"{folder.path} holds a run of {what}; choose another --out, or train anew with "
            "--overwrite"
        )
    return info


def _session(arguments: TrainingArguments, first_step: int, plan: Plan) -> Session:
    return Session(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        first_step=first_step,
        device=plan.device,
        num_processes=arguments.world_size,
        num_threads=torch.get_num_threads(),
        versions={
            **versions(),
            "accelerate": importlib.metadata.version("accelerate"),
            "oasis_eval": importlib.metadata.version("oasis-eval"),
        },
        git_commit=git_commit(),
    )


def checkpoint_activations(model: Any) -> None:
    """Compute layers again in the backward pass instead of keeping their activations."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _write(
    folder: RunFolder,
    info: RunInfo,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    label: str,
) -> None:
    """Write the model, its tokenizer and card; `config.json`, which makes it one, comes last."""
    identity = info.identity
    weights = identity.recipe.weights
    model.to("cpu", pretrained.DTYPES[weights])
    model.config.dtype = pretrained.DTYPES[weights]
    model.config.use_cache = True  # the Trainer turns it off
    work = folder.path / ".writing"
    shutil.rmtree(work, ignore_errors=True)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(folder.path / file.name)
    work.rmdir()
    name = variant_name(identity.variant, identity.wiring, identity.settings)
    override = "" if identity.steps == identity.recipe.steps else f", {identity.steps} steps"
    card = ModelCard(
        name=folder.path.name,
        family=model.config.model_type,
        variant=name,
        source=DirSource(path=folder.path.name),
        dtype=weights,
        label=f"{label}, {name}, seed {identity.seed}{override}",
        context_length=identity.recipe.context,
        seed=identity.seed,
    )
    content = card.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    write_text_atomically(folder.card_file, text)
    folder.write(info)


def _hint(card: Path) -> str:
    return f"Card: {card}   Evaluate: oasis-eval evaluate {card}"
