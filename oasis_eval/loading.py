"""The only place where a checkpoint becomes a (quantized) model.

`load` reads a checkpoint once; `prepare` puts that one model under a scheme for the length of a
`with` block and takes it back bit for bit, so several schemes cost one load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from oasis_eval import calibration, checkpoint
from oasis_eval.errors import CardMismatchError, CheckpointError, UnsupportedSchemeError
from oasis_eval.modeling.formats.folder import read_config, read_public, write_as_ours
from oasis_eval.modeling.instrumentation import Point, fast_path, instrumented
from oasis_eval.modeling.registration import register
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import storage
from oasis_eval.quant.backends import Applied, Storable, quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.integer_layers import fixed_tensors
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import Dtype, ModelCard, QuantScheme, Region

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_STORED: dict[str, Dtype] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_TRANSLATION_VERSION = 1
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
    register()
    place = checkpoint.locate(card)
    content = checkpoint.digest(place)
    folder = checkpoint.as_safetensors(place, content=content)
    checkpoint.verify(folder)
    stored_type = read_config(folder).get("model_type")
    folder, notes = _as_ours(folder, content)
    stored = storage.stored_scheme(_read_config(folder), origin=str(folder))
    applied = None
    if stored is None:
        model, warnings = _load_model(folder, dtype)
    else:
        model, applied = _load_quantized(folder, stored, dtype, device)
        warnings = ()
    model_type = getattr(model.config, "model_type", None)
    if card.family not in ("any", stored_type, model_type):
        raise CardMismatchError(
            f"{card.name}: the card says family {card.family!r}, the checkpoint is {stored_type!r}"
        )
    tokenizer = load_tokenizer(folder)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the embedding {vocabulary} rows"
        )
    return Reference(
        model=_to_device(model, device).eval(),
        tokenizer=tokenizer,
        card=card,
        digest=content,
        dtype=dtype,
        device=device,
        warnings=notes + warnings,
        applied=applied,
    )


def stored_dtype(card: ModelCard) -> Dtype:
    """Return the widest dtype of a checkpoint's tensors as they are stored.

    Raises:
        CheckpointError: The checkpoint is not there.
    """
    place = checkpoint.locate(card)
    folder = checkpoint.as_safetensors(place, content=checkpoint.digest(place))
    found = set()
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
    return next((dtype for name, dtype in _STORED.items() if name in found), "fp32")


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
            undo.callback(_cast_(model, DTYPES[compute]))
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
                    f"{type(model).__name__}: {missing[point]}; leave it out of 'regions'"
                )
        # Scores and weights exist on the explicit path alone.
        is_explicit = {"attention_scores", "attention_probs"} & set(regions)
        yield "eager" if is_explicit else fast_path(model)


# --- reading ----------------------------------------------------------------------------------


def _as_ours(folder: Path, content: str) -> tuple[Path, tuple[str, ...]]:
    """Return a folder in our layout, and what to know about a public format it came from."""
    public = read_public(folder)
    if public is None:
        return folder, ()
    config = public.translation.config.to_json_string(use_diff=False)
    settings = hashlib.sha256(config.encode()).hexdigest()
    ours = checkpoint.cached_folder(
        f"formats/v{_TRANSLATION_VERSION}-{content[:32]}-{settings[:8]}",
        lambda work: write_as_ours(public, work),
        origin=str(folder),
    )
    return ours, public.translation.notes


def _load_model(folder: Path, dtype: Dtype) -> tuple[Any, tuple[str, ...]]:
    # transformers prints a load report of its own; what matters of it is checked below.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = _read_config(folder)
    if "quantization_config" in config:
        raise CheckpointError(
            f"{folder}: the checkpoint is quantized already (quantization_config in config.json); "
            "expected floating-point weights: measure the checkpoint that it was made from"
        )
    with checkpoint.as_checkpoint_error(f"{folder}: cannot be loaded"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that their names are known; refused below
        )
    if info["missing_keys"]:
        raise CheckpointError(f"{folder}: tensors missing: {_some(info['missing_keys'])}")
    if info["mismatched_keys"]:
        names = [item[0] if isinstance(item, tuple) else item for item in info["mismatched_keys"]]
        raise CheckpointError(f"{folder}: tensors of the wrong shape: {_some(names)}")
    _compare_with_files(model, folder)
    warnings = []
    if info["unexpected_keys"]:
        extra = _some(info["unexpected_keys"])
        warnings.append(f"tensors in the checkpoint that the model has not: {extra}")
    if "auto_map" in config:
        warnings.append(
            "config.json names code of the checkpoint's own (auto_map), which is never run; "
            f"this is transformers' {config.get('model_type')}"
        )
    return model, tuple(warnings)


def _load_quantized(
    folder: Path, stored: storage.StoredScheme, dtype: Dtype, device: str
) -> tuple[Any, Storable]:
    """Load a quantized checkpoint of ours."""
    transformers_logging.set_verbosity_error()
    with checkpoint.as_checkpoint_error(f"{folder}: cannot be loaded"):
        model = _to_device(storage.skeleton(folder, DTYPES[dtype]), device)
        applied = storage.restore_(model, stored, folder, dtype=DTYPES[dtype])
    _cast_(model, DTYPES[dtype])
    return model, applied


def _read_config(folder: Path) -> dict[str, Any]:
    with checkpoint.as_checkpoint_error(f"{folder}: config.json cannot be read"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _compare_with_files(model: nn.Module, folder: Path) -> None:
    """Check that every parameter holds its file's values.

    A custom model whose initializer runs after the loader keeps random weights without a word.
    """
    parameters = dict(model.named_parameters())
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                loaded = parameters.get(name)
                if loaded is None:
                    continue
                stored = file.get_tensor(name)
                if loaded.is_floating_point() and not stored.is_floating_point():
                    kind = str(stored.dtype).removeprefix("torch.")
                    raise CheckpointError(
                        f"{folder}: {name} is stored as {kind}; expected floating-point weights"
                    )
                if stored.shape == loaded.shape and not _same(stored, loaded):
                    raise CheckpointError(f"{folder}: {name} does not hold its file's values")


def _same(stored: torch.Tensor, loaded: torch.Tensor) -> bool:
    return torch.allclose(stored.to(loaded.dtype), loaded, rtol=0.0, atol=0.0, equal_nan=True)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: It has none that can be used.
    """
    with checkpoint.as_checkpoint_error(f"{folder}: no usable tokenizer"):
        return AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
            clean_up_tokenization_spaces=False,
        )


def _to_device(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"device {device!r} cannot be used: {_one_line(error)}") from error


def _cast_(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast as `from_pretrained(dtype=...)` would, and return what takes it back exactly.

    Buffers that no checkpoint stores (rotary frequencies) keep their precision, and so do the
    modules that the architecture wants in fp32.
    """
    kept = {
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    }
    stored = set(model.state_dict(keep_vars=True))
    fixed = fixed_tensors(model)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        is_kept = bool(kept & set(name.split("."))) or id(tensor) in fixed
        if name in stored and tensor.is_floating_point() and not is_kept:
            before.append((tensor, tensor.data))
            tensor.data = tensor.data.to(dtype)

    def undo() -> None:
        for tensor, data in before:
            tensor.data = data

    return undo


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _some(names: object) -> str:
    listed = sorted(str(name) for name in names)  # type: ignore[attr-defined]  # set or list of transformers
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
