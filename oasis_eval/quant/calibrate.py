"""Static activation ranges from calibration text; padding never enters them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Calibration tokens: ids and a mask that is 1 at real tokens and 0 at padding."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
