"""Bytes that a forward and backward pass needs, counted without allocating them.

The real model code runs on tensors that have shapes, dtypes and devices but no content, while a
dispatch mode adds up the storages that are alive. What is counted is what the allocator is asked
for; its own waste, and what kernels use inside, come on top.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that are made inside, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


def peak_bytes(model: Any, ids_BT: Tensor, *, dtype: torch.dtype) -> int:
    """Return the most bytes that are alive in a forward and backward pass above the parameters.

    Without content, attention on the CPU is counted as its formula, which forms one matrix of
    scores at a time where the fused kernel forms none.

    Args:
        model: A causal LM with parameters that learn, without gradients so far.
        ids_BT: A micro-batch.
        dtype: Compute dtype; parameters are cast to it where it is not theirs.
    """
    kind = ids_BT.device.type
    with LiveBytes() as live:
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
    peak: int = live.peak
    return peak
