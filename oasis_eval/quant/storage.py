"""Quantized checkpoints on disk: codes and scales in safetensors, the scheme in `config.json`.

The folder is an ordinary one of transformers but for two things: a quantized layer has the tensors
that its backend names (`backends.Storable`) where its `weight` would be, and `config.json` has a
`quantization_config` with `quant_method: oasis_eval`, which makes every other reader refuse it.
Reading is strict: whatever is missing, too much, misshapen or of another dtype is an error with its
name. Rotations in the forward pass follow from scheme and architecture; that they are those of the
model that was written is checked.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from oasis_eval.errors import CheckpointError, UnsupportedSchemeError
from oasis_eval.parsing import Spec, parse
from oasis_eval.quant.backends import Storable, StoringBackend, backend_for
from oasis_eval.quant.coverage import COPY_NOTE
from oasis_eval.quant.libraries import PACKAGES
from oasis_eval.quant.names import scheme_of
from oasis_eval.quant.stored import StoredLayer
from oasis_eval.quant.support import unsupported
from oasis_eval.quant.targets import select
from oasis_eval.quant.transforms.edits import keep_dtype_, with_kept_dtype
from oasis_eval.quant.transforms.rotation import RotatedInput
from oasis_eval.quant.transforms.stream import rotate_inputs_
from oasis_eval.spec import QuantScheme

METHOD = "oasis_eval"
VERSION = 1
WEIGHTS = "model.safetensors"
SCHEME_FILE = "scheme.yaml"
"""Beside the weights where the scheme is no preset; what `--scheme` is then given."""
_KEY = "quantization_config"


class RotatedModule(Spec):
    """A module whose input is rotated in the forward pass."""

    module: str
    width: int
    inverse: bool
    """Whether a rotation of the residual stream is taken back there."""


class StoredScheme(Spec):
    """`quantization_config` of a checkpoint of ours."""

    quant_method: Literal["oasis_eval"] = "oasis_eval"
    version: int
    """Of the layout of codes and names."""
    scheme: QuantScheme
    library: str | None = None
    """Name and version of the package that made the codes, where another one did."""
    rotated: tuple[RotatedModule, ...] = ()
    fp32: tuple[str, ...] = ()
    """Parameters that have no digits to lose and stay in fp32 in every dtype."""
    notes: tuple[str, ...] = ()
    """Warnings from when it was quantized; they hold for every run of it."""


def stored_scheme(config: Mapping[str, Any], *, origin: str) -> StoredScheme | None:
    """Return what `config.json` says of a quantized checkpoint of ours; None: it is none.

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
    return parse(StoredScheme, settings, origin=f"{origin}: {_KEY}")


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


def refusal(scheme: QuantScheme) -> str | None:
    """Return why no model under `scheme` can be stored; None: its backend has codes to store."""
    if scheme.execution == "real":
        return None
    found = "has no integer codes to store; use one ending in -real, or one of a library ('nf4')"
    return f"scheme {scheme.name!r} {found}"


def write(model: nn.Module, applied: Storable, folder: Path, *, notes: Sequence[str] = ()) -> None:
    """Write weights and configuration of a quantized model.

    Args:
        model: Under a scheme.
        applied: The scheme in effect on it.
        folder: Where; it exists.
        notes: Warnings that every reader of its numbers must have.

    Raises:
        UnsupportedSchemeError: Something of the model cannot be stored.
    """
    scheme = applied.scheme
    layers = applied.stored(model)
    reason = _hooked(model, layers.keys())
    if reason is not None:
        raise UnsupportedSchemeError(f"scheme {scheme.name!r} cannot be stored: {reason}")
    tensors = {**_plain(model, layers.keys()), **_own(layers)}
    saved = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    # Layers may share a constant, and each has its own in the file.
    saved |= {name: tensor.detach().cpu().clone() for name, tensor in _constants(layers).items()}
    save_file(saved, folder / WEIGHTS, metadata={"format": "pt"})
    config: Any = model.config
    config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    settings = StoredScheme(
        version=VERSION,
        scheme=scheme,
        library=_library_of(scheme),
        rotated=_rotated(model),
        fp32=tuple(with_kept_dtype(model)),
        notes=tuple(notes),
    )
    content[_KEY] = settings.model_dump(mode="json")
    content["dtype"] = _named(_float_dtype(model, layers.keys()))
    if _is_untied(model, applied):  # by a transform that treats the two ends differently
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
    model: nn.Module, stored: StoredScheme, folder: Path, *, dtype: torch.dtype
) -> Storable:
    """Give a model of the checkpoint's architecture the checkpoint's codes and parameters.

    Args:
        model: Plain and with any values, on the device where it will run.
        stored: What `stored_scheme` returned for the checkpoint.
        folder: The checkpoint.
        dtype: What the model will compute in once its caller has cast it.

    Raises:
        CheckpointError: A tensor is missing, unknown, of another shape or dtype, or damaged.
        UnsupportedSchemeError: This version cannot run the scheme, or not in `dtype`.
        QuantizationError: The scheme does not fit the model.
    """
    scheme = stored.scheme
    reason = unsupported(scheme) or refusal(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    _widen_(model, stored.fp32, origin=str(folder))
    for transform in scheme.transforms:
        if transform.kind == "hadamard":
            rotate_inputs_(model, transform, select(model, scheme))
    if _rotated(model) != stored.rotated:
        raise CheckpointError(
            f"{folder}: the rotated inputs in config.json ({len(stored.rotated)}) are not those "
            f"that {scheme.name!r} has in this version of oasis-eval ({len(_rotated(model))}): "
            "quantize the original checkpoint again"
        )
    backend = backend_for(scheme)
    assert isinstance(backend, StoringBackend)
    applied = backend.empty_(model, scheme, _stored_dtype(folder))
    _fill_(model, applied.stored(model), load_file(folder / WEIGHTS), stored, origin=str(folder))
    complaint = applied.filled_(model)
    if complaint is not None:
        raise CheckpointError(f"{folder}: {complaint}: the file is damaged")
    applied.compute_in_(model, dtype)
    applied.notes = (*stored.notes, *_other_version(stored))
    return applied


def _fill_(
    model: nn.Module,
    layers: Mapping[str, StoredLayer],
    found: dict[str, Tensor],
    stored: StoredScheme,
    *,
    origin: str,
) -> None:
    """Put the tensors of a file into the parameters and buffers of their names."""
    own, constants = _own(layers), _constants(layers)
    expected = {**_plain(model, layers.keys()), **own}
    names = expected.keys() | constants.keys()
    for what, listed in (
        ("missing", names - found.keys()),
        ("not part of the model", found.keys() - names),
    ):
        if listed:
            some = ", ".join(sorted(listed)[:3]) + (", ..." if len(listed) > 3 else "")
            raise CheckpointError(f"{origin}: tensors {what}: {some}")
    for name, constant in constants.items():
        value = found.pop(name)
        if value.dtype != constant.dtype or not torch.equal(value, constant.to("cpu")):
            raise CheckpointError(
                f"{origin}: {name} is not what {_library_of(stored.scheme)} makes of "
                f"{stored.scheme.name!r}: the file is damaged, or what wrote it "
                f"({stored.library}) is another library"
            )
    for name, tensor in expected.items():
        value = found.pop(name)  # so that no second copy of the weights is held
        if value.shape != tensor.shape:
            shapes = [list(item.shape) for item in (value, tensor)]
            raise CheckpointError(f"{origin}: {name} is {shapes[0]}, expected {shapes[1]}")
        is_right = value.dtype == tensor.dtype
        if name not in own and tensor.is_floating_point() and name not in stored.fp32:
            is_right = value.is_floating_point() and value.element_size() > 1
        if not is_right:
            raise CheckpointError(
                f"{origin}: {name} is stored as {_named(value.dtype)}, "
                f"expected {_named(tensor.dtype)}"
            )
        with torch.no_grad():
            tensor.data = value.to(tensor.device)


def _widen_(model: nn.Module, names: Collection[str], *, origin: str) -> None:
    """Give parameters that stay in fp32 in every dtype that dtype for good."""
    parameters = dict(model.named_parameters())
    for name in names:
        if name not in parameters:
            raise CheckpointError(
                f"{origin}: config.json keeps {name} in fp32, which the model does not have: "
                "quantize the original checkpoint again"
            )
        parameters[name].data = parameters[name].data.float()
        keep_dtype_(parameters[name])


def _own(layers: Mapping[str, StoredLayer]) -> dict[str, Tensor]:
    """Return the tensors of quantized layers, each under the first of its names."""
    return _distinct(
        (f"{name}.{key}", tensor)
        for name, layer in layers.items()
        for key, tensor in layer.tensors.items()
    )


def _constants(layers: Mapping[str, StoredLayer]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor
        for name, layer in layers.items()
        for key, tensor in layer.constants.items()
    }


def _plain(model: nn.Module, quantized: Collection[str]) -> dict[str, Tensor]:
    """Return what is stored of everything else: parameters, persistent buffers, biases."""
    return _distinct(
        (f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, module in model.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
        and key not in module._non_persistent_buffers_set
        and (prefix not in quantized or key == "bias")
    )


def _distinct(named: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return each tensor under the first of its names."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            distinct[name] = tensor
    return distinct


def _hooked(model: nn.Module, quantized: Collection[str]) -> str | None:
    """Return what a model does in the forward pass and no checkpoint can hold."""
    for name, module in model.named_modules():
        if name in quantized:
            continue  # its backend's own, which has refused others
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if any(not isinstance(hook, RotatedInput) for hook in hooks):
            return f"{name} is changed in the forward pass, which a checkpoint cannot hold"
    return None


def _rotated(model: nn.Module) -> tuple[RotatedModule, ...]:
    """Return the rotations in the forward pass of a model."""
    found = []
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, RotatedInput):
                width, inverse = hook.described
                found.append(RotatedModule(module=name, width=width, inverse=inverse))
    return tuple(found)


def _library_of(scheme: QuantScheme) -> str | None:
    """Return name and version of the package that runs a scheme; None: this one."""
    package = PACKAGES.get(scheme.backend)
    return None if package is None else f"{package} {importlib.metadata.version(package)}"


def _other_version(stored: StoredScheme) -> tuple[str, ...]:
    running = _library_of(stored.scheme)
    if stored.library == running:
        return ()
    return (f"the codes were made by {stored.library}, and {running} computes with them",)


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the parameters that were quantized."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = content.get("dtype")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if name == _named(dtype):
            return dtype
    raise CheckpointError(
        f"{folder}: config.json gives dtype {name!r}; expected float32, bfloat16 or float16"
    )


def _float_dtype(model: nn.Module, quantized: Collection[str]) -> torch.dtype:
    """Return the dtype of the model's own parameters."""
    plain = _plain(model, quantized).values()
    return next(tensor.dtype for tensor in plain if tensor.is_floating_point())


def _is_untied(model: Any, applied: Storable) -> bool:
    """Return whether a head that the configuration ties to the embedding has its own values."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head = model.get_output_embeddings()
    if head is None:
        return False
    name = next(name for name, module in model.named_modules() if module is head)
    for item in applied.coverage.modules:
        if item.module == name and item.quantized:  # it has no weight that could be compared
            return COPY_NOTE not in (item.note or "")
    return head.weight is not model.get_input_embeddings().weight


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
