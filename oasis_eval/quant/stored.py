"""What a backend says of its layers on disk; `storage.py` writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class StoredLayer(NamedTuple):
    """What a checkpoint holds of a quantized layer in place of its weight, by name within it."""

    tensors: Mapping[str, Tensor]
    """The layer's own: reading a checkpoint puts its values into them."""
    constants: Mapping[str, Tensor]
    """What follows from the scheme: written for other readers, and compared when read."""
