"""A folder with weights becomes a model in memory: whole and checked, or not at all.

Our own layout, the public formats of attention residuals, and checkpoints that `quantize` wrote.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ContextManagers
from transformers.utils import logging as transformers_logging

from oasis_eval import checkpoint
from oasis_eval.errors import CheckpointError
from oasis_eval.modeling import experts
from oasis_eval.modeling.formats.folder import read_config, read_public, write_as_ours
from oasis_eval.modeling.registration import register
from oasis_eval.quant import storage
from oasis_eval.quant.backends import Storable
from oasis_eval.quant.integer_layers import fixed_tensors
from oasis_eval.quant.transforms.edits import with_kept_dtype
from oasis_eval.spec import Dtype, ModelCard

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_STORED: dict[str, Dtype] = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_TRANSLATION_VERSION = 1


@dataclass(frozen=True, slots=True)
class Pretrained:
    """What a folder holds, in memory."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    applied: Storable | None
    """The scheme of a checkpoint that is quantized already."""
    warnings: tuple[str, ...]


def read(folder: Path, content: str, *, dtype: Dtype, device: str) -> Pretrained:
    """Read model and tokenizer.

    Args:
        folder: It holds safetensors weights that `checkpoint.verify` let pass.
        content: Digest of the checkpoint, the name of what is kept of a translation.
        dtype: Dtype of the parameters in memory.
        device: `cpu`, `cuda`, `cuda:1`, ...

    Raises:
        CheckpointError: A tensor is missing, misshapen or not what its file holds, the tokenizer
            does not fit, or the checkpoint would run code.
    """
    register()
    folder, notes = _as_ours(folder, content)
    stored = storage.stored_scheme(read_config(folder), origin=str(folder))
    applied = None
    if stored is None:
        model, warnings = _load_model(folder, dtype)
        experts.separate_(model)
        notes += warnings
    else:
        model, applied = _load_quantized(folder, stored, dtype, device)
    tokenizer = load_tokenizer(folder)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, the embedding {vocabulary} rows"
        )
    return Pretrained(_to_device(model, device).eval(), tokenizer, applied, notes)


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


def cast_(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast as `from_pretrained(dtype=...)` would, and return what takes it back exactly.

    Buffers that no checkpoint stores (rotary frequencies) keep their precision, and what the
    architecture wants in a dtype of its own (routers in fp32) gets that.
    """
    stored = set(model.state_dict(keep_vars=True))
    fixed = fixed_tensors(model) | {id(tensor) for tensor in with_kept_dtype(model).values()}
    wanted = _wanted_dtypes(model, dtype)
    kept = _kept_in_fp32(model, dtype)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if name in stored and tensor.is_floating_point() and id(tensor) not in fixed:
            is_kept = kept is not None and kept.search(name)
            before.append((tensor, tensor.data))
            tensor.data = tensor.data.to(torch.float32 if is_kept else wanted.get(name, dtype))

    def undo() -> None:
        for tensor, data in before:
            tensor.data = data

    return undo


def _wanted_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of a new model of `dtype`: some layers are made in another one."""
    if not isinstance(model, PreTrainedModel):
        return {}
    kind, config = type(model), copy.deepcopy(model.config)
    config.dtype = dtype
    with ContextManagers(kind.get_init_context(dtype, False, False, None)):  # without memory
        return {name: tensor.dtype for name, tensor in kind(config).state_dict().items()}


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return what finds the names of tensors that stay in fp32 beside a model of `dtype`.

    Patterns of transformers' are searched anywhere in a name, and one of its two lists is for fp16
    alone.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    return re.compile("|".join(patterns)) if patterns else None


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
    config = read_config(folder)
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
        experts.separate_(model)
        applied = storage.restore_(model, stored, folder, dtype=DTYPES[dtype])
    cast_(model, DTYPES[dtype])
    return model, applied


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


def _to_device(model: nn.Module, device: str) -> nn.Module:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"device {device!r} cannot be used: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _some(names: object) -> str:
    listed = sorted(str(name) for name in names)  # type: ignore[attr-defined]  # set or list of transformers
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
