"""Quantized checkpoints on disk: codes and scales in safetensors, the scheme in `config.json`.

The folder is an ordinary one of transformers but for two things: a quantized layer has
`weight_codes`, `weight_scale` (and `weight_zero_point`, `input_limits`) where its `weight` would
be, and `config.json` has a `quantization_config` with `quant_method: oasis_eval`, which makes every
other reader refuse it. Reading is strict: whatever is missing, too much, misshapen or of another
dtype is an error with its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from oasis_eval.errors import CheckpointError, UnsupportedSchemeError
from oasis_eval.parsing import Spec, parse
from oasis_eval.quant.coverage import report
from oasis_eval.quant.integer import (
    IntegerApplied,
    kernel_for,
    layout_for,
    noted,
    state_for,
)
from oasis_eval.quant.integer_layers import become_integer_, integer_layers
from oasis_eval.quant.names import scheme_of
from oasis_eval.quant.packing import Layout, StoredWeight
from oasis_eval.quant.support import unsupported
from oasis_eval.quant.targets import select
from oasis_eval.spec import QuantScheme

METHOD = "oasis_eval"
VERSION = 1
WEIGHTS = "model.safetensors"
SCHEME_FILE = "scheme.yaml"
"""Beside the weights where the scheme is no preset; what `--scheme` is then given."""
_KEY = "quantization_config"


class StoredScheme(Spec):
    """`quantization_config` of a checkpoint of ours."""

    quant_method: Literal["oasis_eval"] = "oasis_eval"
    version: int
    """Of the layout of codes and names."""
    scheme: QuantScheme


def stored_scheme(config: Mapping[str, Any], *, origin: str) -> QuantScheme | None:
    """Return the scheme of a quantized checkpoint of ours; None: it is none.

    Args:
        config: Content of `config.json`.
        origin: For messages.

    Raises:
        CheckpointError: It is one of another version.
        SpecError: Its scheme cannot be read.
    """
    settings = config.get(_KEY)
    if not isinstance(settings, dict) or settings.get("quant_method") != METHOD:
        return None
    if settings.get("version") != VERSION:
        raise CheckpointError(
            f"{origin}: a quantized checkpoint of version {settings.get('version')!r}; this "
            f"version of oasis-eval reads {VERSION}: quantize the original checkpoint again"
        )
    return parse(StoredScheme, settings, origin=f"{origin}: {_KEY}").scheme


def check(stored: QuantScheme, asked: QuantScheme, *, name: str) -> None:
    """Refuse another scheme than the one that a checkpoint is quantized with.

    Args:
        stored: The checkpoint's.
        asked: What it is to be run as.
        name: The checkpoint's, for the message.

    Raises:
        UnsupportedSchemeError: They differ; the message says which one to give.
    """
    unnamed = {"description"}
    if stored.model_dump(exclude=unnamed) == asked.model_dump(exclude=unnamed):
        return
    if stored.name == asked.name:
        left, right = stored.model_dump(exclude=unnamed), asked.model_dump(exclude=unnamed)
        fields = ", ".join(key for key in left if left[key] != right[key])
        raise UnsupportedSchemeError(
            f"{name}: config.json calls its scheme {stored.name!r}, but its settings differ from "
            f"that scheme's in {fields}: quantize the original checkpoint again"
        )
    is_named = scheme_of(stored.name.lower()) is not None
    hint = stored.name if is_named else f"the file {SCHEME_FILE} in its folder"
    raise UnsupportedSchemeError(
        f"{name}: the checkpoint is quantized already, as {stored.name!r}, and cannot be run as "
        f"{asked.name!r}; give --scheme {hint}"
    )


def refusal(model: nn.Module, scheme: QuantScheme) -> str | None:
    """Return why a model under `scheme` cannot be stored; None: it can."""
    if scheme.backend != "torch":
        return (
            f"only integer codes can be stored (schemes that end in -real), and {scheme.name!r} "
            f"runs on backend {scheme.backend!r}"
        )
    for name, module in model.named_modules():
        if module._forward_pre_hooks or module._forward_hooks:
            return f"{name} is transformed in the forward pass, which a checkpoint cannot hold"
    return None


def write(model: nn.Module, scheme: QuantScheme, folder: Path) -> None:
    """Write weights and configuration of a model whose layers are integer ones.

    Args:
        model: Quantized under `scheme`.
        scheme: What was applied.
        folder: Where; it exists.

    Raises:
        UnsupportedSchemeError: Something of the model cannot be stored.
    """
    reason = refusal(model, scheme)
    if reason is not None:
        raise UnsupportedSchemeError(f"scheme {scheme.name!r} cannot be stored: {reason}")
    tensors = {
        name: tensor.detach().contiguous().cpu() for name, tensor in _distinct(model).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = model.config
    config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    settings = StoredScheme(version=VERSION, scheme=scheme).model_dump(mode="json")
    content[_KEY] = settings
    content["dtype"] = str(_float_dtype(model)).removeprefix("torch.")
    if _is_untied(model):  # by a transform that treats the two ends differently
        content["tie_word_embeddings"] = False
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """Return a plain model of the checkpoint's architecture with any values."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def restore_(
    model: nn.Module, scheme: QuantScheme, folder: Path, *, dtype: torch.dtype
) -> IntegerApplied:
    """Give a model of the checkpoint's architecture the checkpoint's codes and parameters.

    Args:
        model: Plain and with any values, on the device where it will run.
        scheme: The checkpoint's.
        folder: The checkpoint.
        dtype: What the model will compute in once its caller has cast it.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of another shape or dtype.
        UnsupportedSchemeError: This version cannot run the scheme.
        QuantizationError: The scheme does not fit the model.
    """
    reason = unsupported(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    device = next(model.parameters()).device
    selection = select(model, scheme)
    coverage = report(scheme, selection, list(model.parameters()))
    applied = IntegerApplied(
        scheme=scheme,
        coverage=noted(coverage, scheme, kernel_for(scheme, device)),
        weights_changed=True,
    )
    empty: dict[int, StoredWeight] = {}
    weights = [target.weight for target in selection.targets]
    for target, weight in zip(selection.targets, weights, strict=True):
        layout = layout_for(target, scheme)
        state = state_for(target, scheme, applied.session)
        if id(weight) not in empty:
            empty[id(weight)] = _empty(layout, device)
        span = torch.empty(2, device=device) if scheme.is_static else None
        become_integer_(target.module, state, empty[id(weight)], span)
    _fill_(model, load_file(folder / WEIGHTS), origin=str(folder))
    applied.compute_in_(model, dtype)
    return applied


def _fill_(model: nn.Module, found: dict[str, Tensor], *, origin: str) -> None:
    """Put the tensors of a file into the parameters and buffers of their names."""
    expected = _distinct(model)
    fixed = {
        f"{name}.{key}" for name, layer in integer_layers(model).items() for key in layer._buffers
    }
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("not part of the model", found.keys() - expected.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(f"{origin}: tensors {what}: {listed}")
    for name, tensor in expected.items():
        value = found.pop(name)  # so that no second copy of the weights is held
        if value.shape != tensor.shape:
            shapes = [list(item.shape) for item in (value, tensor)]
            raise CheckpointError(f"{origin}: {name} is {shapes[0]}, expected {shapes[1]}")
        is_right = value.dtype == tensor.dtype
        if name not in fixed and tensor.is_floating_point():
            is_right = value.is_floating_point() and value.element_size() > 1
        if not is_right:
            raise CheckpointError(
                f"{origin}: {name} is stored as {_named(value.dtype)}, "
                f"expected {_named(tensor.dtype)}"
            )
        if name in fixed:
            _check_values(name, value, origin=origin)
        with torch.no_grad():
            tensor.data = value.to(tensor.device)


def _check_values(name: str, value: Tensor, *, origin: str) -> None:
    """Refuse codes, scales and ranges that no quantizer makes."""
    kind = name.rpartition(".")[2]
    found = None
    if kind == "weight_scale" and not bool((torch.isfinite(value) & (value > 0)).all()):
        found = "a scale that is not a positive number"
    elif kind == "weight_codes" and value.dtype == torch.int8 and bool((value == -128).any()):
        found = "code -128, and symmetric codes end at -127"
    elif kind == "input_limits" and not bool(torch.isfinite(value).all() and value[0] <= value[1]):
        found = f"the range {value.tolist()}"
    if found is not None:
        raise CheckpointError(f"{origin}: {name} holds {found}: the file is damaged")


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, each under the first of its names."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            distinct[name] = tensor
    return distinct


def _empty(layout: Layout, device: torch.device) -> StoredWeight:
    return StoredWeight(
        codes=torch.empty(layout.code_shape, dtype=layout.code_dtype, device=device),
        scale=torch.empty(layout.scale_shape, device=device),
        zero_point=None
        if layout.symmetric
        else torch.empty(layout.scale_shape, dtype=torch.uint8, device=device),
    )


def _float_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's own parameters."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _is_untied(model: Any) -> bool:
    """Return whether a head that the configuration ties to the embedding has its own values."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head = model.get_output_embeddings()
    if head is None or any(head is layer for layer in integer_layers(model).values()):
        return False
    return head.weight is not model.get_input_embeddings().weight


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
