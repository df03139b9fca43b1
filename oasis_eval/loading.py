"""The only way from a card to a model, and to that model under a scheme and back.

`load` reads a checkpoint once; `prepare` puts that one model under a scheme for the length of a
`with` block and takes it back bit for bit, so several schemes cost one load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from oasis_eval import calibration, checkpoint, pretrained
from oasis_eval.errors import CardMismatchError, UnsupportedSchemeError
from oasis_eval.modeling.formats.folder import read_config
from oasis_eval.modeling.instrumentation import Point, fast_path, instrumented
from oasis_eval.prepared import PreparedModel
from oasis_eval.pretrained import DTYPES, cast_
from oasis_eval.quant import storage
from oasis_eval.quant.backends import Applied, Storable, quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import Dtype, ModelCard, QuantScheme, Region

_POINTS: dict[Region, Point] = {
    "attention_scores": "attention",
    "attention_probs": "attention",
    "attention_context": "attention",
    "kv_cache": "kv_cache",
    "residual": "residual",
}
"""What a plain model needs taps for."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(slots=True)
class Reference:
    """A checkpoint in memory, as its files have it."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    card: ModelCard
    digest: str
    dtype: Dtype
    device: str
    warnings: tuple[str, ...]
    applied: Storable | None = None
    """The scheme of a checkpoint that is quantized already."""

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, from the card or the configuration."""
        if self.card.context_length is not None:
            return self.card.context_length
        return positions(self.model)


def load(card: ModelCard, *, dtype: Dtype, device: str = "cpu") -> Reference:
    """Load a checkpoint whole, or not at all.

    Args:
        card: Where it is.
        dtype: Dtype of its parameters in memory.
        device: `cpu`, `cuda`, `cuda:1`, ...

    Raises:
        CheckpointError: A file or tensor is missing, cut off, misshapen, or would run code.
        CardMismatchError: The checkpoint is of another family than its card says.
    """
    place = checkpoint.locate(card)
    content = checkpoint.digest(place)
    folder = checkpoint.as_safetensors(place, content=content)
    checkpoint.verify(folder)
    stored_type = read_config(folder).get("model_type")
    found = pretrained.read(folder, content, dtype=dtype, device=device)
    model_type = getattr(found.model.config, "model_type", None)
    if card.family not in ("any", stored_type, model_type):
        raise CardMismatchError(
            f"{card.name}: the card says family {card.family!r}, the checkpoint is {stored_type!r}"
        )
    return Reference(
        model=found.model,
        tokenizer=found.tokenizer,
        card=card,
        digest=content,
        dtype=dtype,
        device=device,
        warnings=found.warnings,
        applied=found.applied,
    )


def positions(model: nn.Module) -> int | None:
    """Return the positions a model's configuration allows, never a tokenizer's or generation's."""
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _POSITIONS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


@contextmanager
def prepare(
    reference: Reference,
    scheme: QuantScheme,
    *,
    dtype: Dtype,
    calibration_data: str | None = None,
    last: bool = False,
) -> Iterator[PreparedModel]:
    """Put the reference model under a scheme for the length of the block.

    Args:
        reference: What `load` returned; its model is changed in place and restored afterwards.
        scheme: What to do to it.
        dtype: Compute dtype of quantized schemes; a reference scheme brings its own.
        calibration_data: Local file that replaces the scheme's calibration text.
        last: Whether the reference is not needed again, so that no second copy of the weights is
            kept while the scheme is on.

    Raises:
        UnsupportedSchemeError: The backend cannot do the scheme.
        QuantizationError: The scheme changed nothing.
    """
    reason = unsupported(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    model = reference.model
    attention = str(getattr(model.config, "_attn_implementation", "unknown"))
    compute = scheme.dtype or dtype
    with ExitStack() as undo:
        if reference.applied is not None:
            storage.check(reference.applied.scheme, scheme, name=reference.card.name)
        if compute != reference.dtype:
            undo.callback(cast_(model, DTYPES[compute]))
            if reference.applied is not None:
                stored = reference.applied
                stored.compute_in_(model, DTYPES[compute])
                undo.callback(stored.compute_in_, model, DTYPES[reference.dtype])
        coverage = None
        warnings = list(reference.warnings)
        applied: Applied | None = reference.applied
        if scheme.execution != "none":
            if applied is None:
                attention = undo.enter_context(_taps_of(model, scheme))
                batches: list[Batch] = []
                if scheme.calibration is not None:
                    warnings += calibration.notes(scheme.calibration, reference.context_length)
                    batches = calibration.batches(
                        reference.tokenizer,
                        scheme.calibration,
                        calibration_data,
                        context_length=reference.context_length,
                        device=reference.device,
                    )
                applied = quantize_(model, scheme, batches, keep_reference=not last)
                if not last:
                    undo.callback(applied.undo)
            coverage = applied.coverage
            with torch.no_grad():  # a scheme without effect must not reach an evaluation
                model(input_ids=torch.arange(8, device=reference.device)[None], use_cache=False)
            warnings += applied.verify()
        yield PreparedModel(
            model=model,
            tokenizer=reference.tokenizer,
            card=reference.card,
            digest=reference.digest,
            scheme=scheme,
            dtype=compute,
            device=reference.device,
            context_length=reference.context_length,
            attention=attention,
            coverage=coverage,
            warnings=tuple(warnings),
            applied=applied,
        )


@contextmanager
def _taps_of(model: Any, scheme: QuantScheme) -> Iterator[str]:
    """Give a plain model the taps that a scheme's regions need; yield the attention that will run.

    Raises:
        UnsupportedSchemeError: The model has no place for a region.
    """
    regions = scheme.regions if scheme.backend == "fake" and scheme.activations else ()
    wanted = {region: _POINTS[region] for region in regions if region in _POINTS}
    with instrumented(model, set(wanted.values())) as missing:
        for region, point in wanted.items():
            if point in missing:
                raise UnsupportedSchemeError(
                    f"scheme {scheme.name!r}: region {region} cannot be quantized in "
                    f"{type(model).__name__}: {missing[point]}; leave it out of 'regions' of a "
                    "YAML scheme, or quantize linear layers alone (w8a8, w8a8-static-linear)"
                )
        # Scores and weights exist on the explicit path alone.
        is_explicit = {"attention_scores", "attention_probs"} & set(regions)
        yield "eager" if is_explicit else fast_path(model)
