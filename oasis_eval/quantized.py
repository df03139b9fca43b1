"""Writing a quantized checkpoint: quantize, write, read it back, compare, and only then keep it.

What is written is a folder that `evaluate` takes under the one scheme it was made with, and a card
beside it. The folder is read again before it gets its name, and its logits must be those of the
model that was written, bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from oasis_eval import checkpoint, loading, pretrained
from oasis_eval.errors import CheckpointError, SpecError, UnsupportedSchemeError
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import storage
from oasis_eval.quant.backends import AppliedTransformed, Storable
from oasis_eval.quant.names import scheme_of
from oasis_eval.quant.support import unsupported
from oasis_eval.record import Coverage, write_text_atomically
from oasis_eval.spec import DirSource, Dtype, ModelCard, QuantScheme

_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to write, and how."""

    scheme: QuantScheme
    dtype: Dtype | None = None
    """Of what is not quantized, and of calibration; None: as stored in the source."""
    calibration: str | None = None
    """Text that replaces the scheme's own."""
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A quantized checkpoint on disk."""

    folder: Path
    card_file: Path
    scheme: QuantScheme
    coverage: Coverage
    dtype: Dtype
    """Of what is not quantized."""
    bytes_weights: int
    """Of the file of weights."""
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Describe it for a reader, a line at a time."""
        coverage = self.coverage
        # The default of a CPU is fp32, in which some libraries' layers cannot run.
        dtype = "" if self.dtype == "fp32" else f" --dtype {self.dtype}"
        return [
            f"Written: {self.folder} ({self.scheme.name}, {coverage.num_quantized} of "
            f"{coverage.num_linear} linear layers, {self.bytes_weights / 2**20:.1f} MiB; "
            f"{coverage.bytes_before / 2**20:.1f} MiB before)",
            "Read back: logits are equal bit for bit",
            f"Card: {self.card_file}   Evaluate: oasis-eval evaluate {self.card_file} "
            f"--scheme {scheme_argument(self.scheme, self.folder)}{dtype}",
        ]


def scheme_argument(scheme: QuantScheme, folder: Path) -> str:
    """Return what `--scheme` takes for the scheme of a quantized checkpoint."""
    is_named = scheme_of(scheme.name.lower()) is not None
    return scheme.name if is_named else str(folder / storage.SCHEME_FILE)


def quantize(card: ModelCard, plan: Plan, *, out: Path) -> Written:
    """Quantize a checkpoint and write it, its tokenizer and a card.

    The folder appears whole or not at all. The card is `<out>.yaml`, beside the folder.

    Args:
        card: The source, in floating point.
        plan: What to make of it.
        out: Folder to write.

    Raises:
        SpecError: `out` exists.
        UnsupportedSchemeError: The scheme cannot be run or stored.
        CheckpointError: The source cannot be loaded, is quantized already, or what was written
            does not come back as it was.
        QuantizationError: The scheme does not fit the model.
    """
    out = out.expanduser().resolve()
    card_file = out.with_name(f"{out.name}.yaml")
    for path in (out, card_file):
        if path.exists() and not plan.overwrite:
            raise SpecError(f"{path} exists; choose another --out, or add --overwrite")
    scheme = plan.scheme
    reason = unsupported(scheme) or storage.refusal(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    dtype = plan.dtype or pretrained.stored_dtype(card)
    reference = loading.load(card, dtype=dtype)
    if reference.applied is not None:
        raise CheckpointError(
            f"{card.name}: the checkpoint is quantized already, as "
            f"{reference.applied.scheme.name!r}; quantize the one that it was made from"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    work = scratch / "new"  # a folder of its own: mkdtemp's is closed to others
    work.mkdir()
    try:
        with loading.prepare(
            reference, scheme, dtype=dtype, calibration_data=plan.calibration, last=True
        ) as prepared:
            model: Any = prepared.model
            applied, notes = _storable(prepared)
            storage.write(model, applied, work, notes=notes)
            _write_sides(model, reference.tokenizer, scheme, work)
            before = _logits(model)
            coverage, warnings = prepared.coverage, prepared.warnings
        assert coverage is not None
        written = ModelCard(
            name=out.name,
            family=model.config.model_type,
            variant=card.variant,
            source=DirSource(path=str(work)),
            dtype=dtype,
            label=f"{card.label}, {scheme.name}",
            context_length=card.context_length,
            seed=card.seed,
        )
        del model, prepared, reference, applied
        _check_same(before, coverage, written, dtype)
        bytes_weights = (work / storage.WEIGHTS).stat().st_size
        checkpoint.replace_folder(out, work, old=scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    final = written.model_copy(update={"source": DirSource(path=out.name)})
    content = final.model_dump(mode="json", exclude_none=True)
    write_text_atomically(card_file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return Written(out, card_file, scheme, coverage, dtype, bytes_weights, warnings)


def _storable(prepared: PreparedModel) -> tuple[Storable, list[str]]:
    """Return the scheme in effect, and the warnings that a checkpoint of it must carry.

    What the scheme will say for itself when it is read again is not among them.
    """
    applied = prepared.applied
    if isinstance(applied, AppliedTransformed):
        applied = applied.applied
    assert isinstance(applied, Storable), "storage.refusal has found nothing against it"
    said = applied.verify()
    return applied, [warning for warning in prepared.warnings if warning not in said]


def _write_sides(model: Any, tokenizer: Any, scheme: QuantScheme, folder: Path) -> None:
    """Write what stands beside the weights: tokenizer, sampling settings, a scheme of one's own."""
    tokenizer.save_pretrained(folder)
    if model.generation_config is not None:
        # As it is: transformers refuses to write some that it reads, and many are in use.
        text = model.generation_config.to_json_string()
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    if scheme_of(scheme.name.lower()) is None:
        content = scheme.model_dump(mode="json", exclude_none=True)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (folder / storage.SCHEME_FILE).write_text(text, encoding="utf-8")


def _check_same(before_TV: Tensor, coverage: Coverage, written: ModelCard, dtype: Dtype) -> None:
    """Read the checkpoint back and compare."""
    again = loading.load(written, dtype=dtype)
    after_TV = _logits(again.model)
    covered = None if again.applied is None else again.applied.coverage
    if covered != coverage:
        raise CheckpointError(
            f"{written.name}: what was written does not come back as it was (other layers are "
            "quantized, or in another way); nothing was kept"
        )
    if not torch.equal(before_TV, after_TV):
        difference = float((after_TV.double() - before_TV.double()).abs().max())
        raise CheckpointError(
            f"{written.name}: what was written does not come back as it was (a logit differs by "
            f"{difference:.2g}); nothing was kept"
        )


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    positions = loading.positions(model) or _PROBE_TOKENS
    ids_1T = (torch.arange(min(_PROBE_TOKENS, positions)) * 7 % vocabulary)[None]
    logits_TV: Tensor = model(input_ids=ids_1T, use_cache=False).logits[0]
    return logits_TV
