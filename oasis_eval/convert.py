"""A plain Llama or Qwen3 checkpoint wrapped as a named variant.

Depth routing starts with zero queries, so it can be put around a trained model without changing
it: the reads are uniform, their sources add up to the residual, and `depth_output_scale:
num_sources` undoes the 1/S. Other parts of a variant (softmax1, gates, the null coupling) do
change a model that was trained without them. Which of the two a conversion does is worked out
from the settings and then measured on a text with the checkpoint as it was written: a conversion
that should keep the function and does not is an error.

Source: AttnRes, arXiv 2603.15031.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oasis_eval import checkpoint, corpus, loading, pretrained
from oasis_eval.errors import CheckpointError, DataError, SpecError
from oasis_eval.modeling.config import (
    CONFIG_BY_BACKBONE,
    KIMI_WIRINGS,
    OasisConfig,
    OasisSettings,
)
from oasis_eval.modeling.variants import build_config, resolve_variant, variant_name
from oasis_eval.modeling.wrapping import reasons_of_change, wrap
from oasis_eval.paths import data_folder
from oasis_eval.record import write_text_atomically
from oasis_eval.spec import DirSource, Dtype, ModelCard

PROBE_TOKENS = 512
KEPT = 1e-3
"""Largest difference of a logit, relative to the largest logit, that rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make of a checkpoint; None leaves a choice to the variant or the source."""

    variant: str
    """Name of a variant."""
    wiring: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of another value than the variant's."""
    num_blocks: int | None = None
    depth_output_scale: str | None = None
    """None: `num_sources` where it exists, so that a wrap changes nothing."""
    dtype: Dtype | None = None
    """Dtype of the weights written; None: as stored in the source."""
    text: Path | None = None
    """Text that the change is measured on; None: one that ships with the suite."""


class Deviation(NamedTuple):
    """How far the converted model is from the original on a text."""

    max_logit_difference: float
    """Relative to the largest logit of the original."""
    top1_agreement: float
    """Share of positions with the same most likely token."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written, and what it is."""

    folder: Path
    card_file: Path
    config: OasisConfig
    reasons: tuple[str, ...]
    """Why the function changes; empty: it is kept."""
    deviation: Deviation

    def lines(self) -> list[str]:
        """Describe the conversion for a reader, a line at a time."""
        config, deviation = self.config, self.deviation
        blocks = f", {config.num_blocks} blocks" if config.num_blocks is not None else ""
        scale = config.depth_output_scale
        return [
            f"Written: {self.folder} ({config.wiring}{blocks}, depth_output_scale {scale})",
            *(
                ["The function changes:", *(f"  - {reason}" for reason in self.reasons)]
                if self.reasons
                else [f"The function is kept: {_kept(config)}."]
            ),
            f"Measured on {deviation.num_tokens} tokens: largest logit difference "
            f"{deviation.max_logit_difference:.2g} of the largest logit, top-1 equal on "
            f"{100.0 * deviation.top1_agreement:.1f} %",
            f"Card: {self.card_file}   Evaluate: oasis-eval evaluate {self.card_file}",
        ]


def convert(card: ModelCard, plan: Plan, *, out: Path, overwrite: bool = False) -> Conversion:
    """Wrap a plain checkpoint as a variant and write it, its tokenizer and a card.

    The folder appears whole or not at all. The card is `<out>.yaml`, beside the folder.

    Args:
        card: The source, a plain Llama or Qwen3.
        plan: What to make of it.
        out: Folder to write.
        overwrite: Whether `out` and its card may exist.

    Raises:
        SpecError: The settings do not fit the model, or `out` exists.
        CheckpointError: The source cannot be loaded, is no plain Llama or Qwen3, or a conversion
            that should keep the function does not.
    """
    out = out.expanduser().resolve()
    card_file = out.with_name(f"{out.name}.yaml")
    for path in (out, card_file):
        if path.exists() and not overwrite:
            raise SpecError(f"{path} exists; choose another --out, or add --overwrite")
    settings = settings_of(plan)
    reference = loading.load(card, dtype="fp32")
    if reference.applied is not None:
        raise CheckpointError(
            f"{card.name}: the checkpoint is quantized already, as "
            f"{reference.applied.scheme.name!r}; convert the one that it was made from"
        )
    plain: Any = reference.model
    if plain.config.model_type not in CONFIG_BY_BACKBONE:
        raise CheckpointError(
            f"{card.name}: model_type is {plain.config.model_type!r}; only a plain checkpoint can "
            f"be wrapped: {', '.join(sorted(CONFIG_BY_BACKBONE))}"
        )
    config = build_config(plain.config, settings)
    stored = pretrained.stored_dtype(card)
    dtype = plan.dtype or stored
    reasons = reasons_of_change(config)
    if dtype not in (stored, "fp32"):
        reasons = (*reasons, f"dtype {dtype}: the weights, stored as {stored}, are rounded")
    ids_1T = _probe(reference.tokenizer, plan.text, reference.context_length)
    before_TV = _logits(plain, ids_1T)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    work = scratch / "new"  # a folder of its own: mkdtemp's is closed to others
    try:
        _write(wrap(plain, config), plain.generation_config, dtype, work)
        reference.tokenizer.save_pretrained(work)
        del plain, reference
        variant = variant_name(plan.variant, config.wiring, plan.settings)
        written = ModelCard(
            name=out.name,
            family=config.model_type,
            variant=variant,
            source=DirSource(path=str(work)),
            dtype=dtype,
            label=f"{card.label}, {variant}",
            context_length=card.context_length,
            seed=card.seed,
        )
        deviation = compare(before_TV, _logits(loading.load(written, dtype="fp32").model, ids_1T))
        if not reasons and not deviation.max_logit_difference <= KEPT:
            raise CheckpointError(
                f"{card.name}: the conversion should keep the function, but a logit differs by "
                f"{deviation.max_logit_difference:.2g} of the largest; nothing was written"
            )
        checkpoint.replace_folder(out, work, old=scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    final = written.model_copy(update={"source": DirSource(path=out.name)})
    content = final.model_dump(mode="json", exclude_none=True)
    write_text_atomically(card_file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return Conversion(out, card_file, config, reasons, deviation)


def settings_of(plan: Plan) -> OasisSettings:
    """Return the settings of a plan, unchecked: only a configuration can say whether they fit.

    Raises:
        UnknownNameError: No variant has that name.
    """
    settings = resolve_variant(plan.variant, plan.settings)
    changes: dict[str, Any] = {}
    if plan.wiring is not None and plan.wiring != settings.wiring:
        changes["wiring"] = plan.wiring
    if plan.num_blocks is not None:
        changes["num_blocks"] = plan.num_blocks
    settings = dataclasses.replace(settings, **changes)
    natural = "num_sources" if settings.wiring in KIMI_WIRINGS else "none"
    scale: Any = plan.depth_output_scale or plan.settings.get("depth_output_scale") or natural
    return dataclasses.replace(settings, depth_output_scale=scale)


def compare(before_TV: Tensor, after_TV: Tensor) -> Deviation:
    """Compare logits [T, V] of two models on one text."""
    difference = (after_TV.double() - before_TV.double()).abs().max()
    agreement = (after_TV.argmax(-1) == before_TV.argmax(-1)).double().mean()
    return Deviation(
        max_logit_difference=(difference / before_TV.abs().max()).item(),
        top1_agreement=agreement.item(),
        num_tokens=len(before_TV),
    )


def _write(model: Any, generation: Any, dtype: Dtype, folder: Path) -> None:
    model.to(pretrained.DTYPES[dtype])
    model.config.dtype = pretrained.DTYPES[dtype]
    model.save_pretrained(folder)
    if generation is not None:
        # As it is: transformers refuses to write some that it reads, and many are in use.
        text = generation.to_json_string()
        (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _probe(tokenizer: PreTrainedTokenizerBase, text: Path | None, context: int | None) -> Tensor:
    """Return the first tokens of the text, [1, T]."""
    path = text or data_folder("tasks") / "text" / "demo.txt"
    ids = corpus.encode(tokenizer, corpus.load_text_file(path).raw(), special_tokens=False)
    ids = ids[: min(PROBE_TOKENS, context or PROBE_TOKENS)]
    if len(ids) < 2:
        raise DataError(f"{path}: {len(ids)} tokens; a comparison needs at least 2")
    return torch.tensor([ids])


@torch.no_grad()
def _logits(model: Any, ids_1T: Tensor) -> Tensor:
    logits_TV: Tensor = model.eval()(input_ids=ids_1T, use_cache=False).logits[0]
    return logits_TV


def _kept(config: OasisConfig) -> str:
    if config.wiring == "residual":
        return "nothing is added to the model"
    return "depth routing starts as the plain residual"
