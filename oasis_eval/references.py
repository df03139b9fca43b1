"""Passes of the unquantized model, kept on disk: what its head reads, window by window.

Every scheme is compared with the same reference, so it runs once. Hidden states are kept, logits
are not; the reference's own head, kept beside the model that is quantized in place, makes logits of
them tile by tile. A file is named by the content of everything that its numbers depend on: a
folder for the model and how it computes, and in it a file for the tokens of a window.

Shapes: R scored tokens of a window, D width, V vocabulary, T tokens.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from oasis_eval.errors import OutputError, RecordError
from oasis_eval.harness.protocols import Window
from oasis_eval.harness.scoring import Scorer
from oasis_eval.parsing import content_hash
from oasis_eval.paths import cache_folder
from oasis_eval.prepared import PreparedModel

STATES_VERSION = 1
"""Raised when a change of the code changes what is stored."""
_LEAST_ROWS = 256
"""Matrix products of fewer rows are slower."""


class States(NamedTuple):
    """The reference's pass over a window, as far as it is scored."""

    hidden: Tensor
    """[R, D], in the dtype of the backbone's output."""
    top: Tensor
    """Most likely tokens, [R]."""


class Store:
    """A folder of passes of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, window: Window) -> Path:
        """Return the file of a window, which may not be there."""
        scored = [window.offset, len(window.targets)]
        return self.folder / f"{content_hash([window.input_ids, *scored])[:40]}.safetensors"

    def read(self, window: Window) -> States | None:
        """Return what is stored of a window; None where there is no file, or no whole one."""
        path = self.path(window)
        try:
            with safe_open(path, framework="pt") as file:
                states = States(file.get_tensor("hidden"), file.get_tensor("top"))
                metadata = file.metadata() or {}
        except (OSError, SafetensorError):
            return None
        whole = metadata.get("crc32") == _checksum(states)
        return states if whole and len(states.top) == len(window.targets) else None

    def write(self, window: Window, states: States) -> None:
        """Keep a pass; the file is there as a whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """
        content = save(states._asdict(), metadata={"crc32": _checksum(states)})
        path = self.path(window)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".states-", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise OutputError(
                f"{path}: the reference's hidden states cannot be kept ({error.strerror}); make "
                "room, or name another folder by OASIS_EVAL_CACHE"
            ) from error


class Reference:
    """The unquantized model on any window: from the store, or run and kept there."""

    def __init__(self, prepared: PreparedModel, *, versions: Mapping[str, str]) -> None:
        """Keep the model's head aside.

        Args:
            prepared: The model under a scheme that quantizes nothing.
            versions: Of the libraries that can change a number.
        """
        assert prepared.scheme.execution == "none"
        self.dtype = prepared.dtype
        self._device = prepared.device
        self._scorer = Scorer(_with_own_head(prepared.model), device=prepared.device)
        self._store = Store(_folder(prepared, versions))
        self.num_run = 0
        """Windows that were run since, not found in the store."""

    @property
    def is_usable(self) -> bool:
        """Whether the head runs apart from the backbone, so that hidden states say everything."""
        return self._scorer.tiled

    def fill(self, window: Window) -> None:
        """See that a window is in the store; the model must be unquantized where it is not."""
        if self._store.read(window) is None:
            self._run(window)

    def states(self, window: Window) -> States:
        """Return the reference's pass over a window that `fill` has seen.

        Raises:
            RecordError: It has gone since.
        """
        states = self._store.read(window)
        if states is None:
            raise RecordError(
                f"{self._store.path(window)}: was removed or damaged while it was needed; run again"
            )
        return States(states.hidden.to(self._device), states.top.to(self._device))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the reference's logits [R, V] in its dtype."""
        return self._scorer.head(hidden_RD)

    def tiles(self, num_tokens: int) -> list[slice]:
        """Cut the scored tokens of a window into what two heads run over at a time.

        The two take what one head takes in scoring, as long as that is two tiles of useful size.
        """
        most = min(self._scorer.tile_rows(), num_tokens)
        size = max(min(_LEAST_ROWS, most), math.ceil(most / 2), 1)  # a window may score nothing
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

    @torch.no_grad()
    def _run(self, window: Window) -> None:
        ids_1T = torch.tensor([window.input_ids], device=self._device)
        scored = slice(window.offset, window.offset + len(window.targets))
        hidden_RD = self._scorer.hidden_states(ids_1T)[0, scored]
        tops = [hidden_RD.new_empty(0, dtype=torch.long)]
        tops += [
            self._scorer.head(hidden_RD[rows]).argmax(-1) for rows in self.tiles(len(hidden_RD))
        ]
        states = States(hidden_RD.cpu().contiguous(), torch.cat(tops).cpu())
        self._store.write(window, states)
        self.num_run += 1


def _folder(prepared: PreparedModel, versions: Mapping[str, str]) -> Path:
    key = content_hash(
        {
            "states": STATES_VERSION,
            "checkpoint": prepared.digest,
            "dtype": prepared.dtype,
            "device": prepared.device.partition(":")[0],
            "attention": prepared.attention,
            "versions": dict(versions),
        }
    )
    return cache_folder() / "references" / key[:40]


def _with_own_head(model: Any) -> nn.Module:
    """Return the model with everything but its backbone a copy that nobody else changes.

    The copy shares the storage of its parameters: schemes put other parameters in their place, and
    casts give them other storage, but nothing writes into it.
    """
    view = copy.copy(model)
    view._parameters = {name: _alias(item) for name, item in model._parameters.items()}
    view._buffers = {name: _alias(item) for name, item in model._buffers.items()}
    view._modules = dict(model._modules)
    for name, module in model._modules.items():
        if name != model.base_model_prefix and module is not None:
            tensors = (*module.parameters(), *module.buffers())
            known = {id(tensor): _alias(tensor) for tensor in tensors}
            view._modules[name] = copy.deepcopy(module, known)
    own: nn.Module = view
    return own


def _alias(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    alias = tensor.detach()
    return nn.Parameter(alias, requires_grad=False) if isinstance(tensor, nn.Parameter) else alias


def _checksum(states: States) -> str:
    total = 0
    for tensor in states:
        total = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, total)
    kinds = [[str(tensor.dtype), list(tensor.shape)] for tensor in states]
    return f"{zlib.crc32(json.dumps(kinds).encode(), total):08x}"
