"""A randomised Hadamard rotation of the last dimension, offline on weights and online on inputs.

x -> (x s) H / sqrt(n) with random signs s and H from `hadamard.blocks`. A rotation spreads what is
large in one channel over all of them. H is a Kronecker product of small matrices and is applied
factor by factor, n (a + b + ...) operations instead of n^2; at the order of the factors, small
matrix products are faster than butterflies.

Dimensions: N output channels, K inputs.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn

from oasis_eval.quant.transforms.hadamard import Blocks, blocks, hadamard


class Rotation:
    """One orthogonal matrix R; the same width and seed give the same matrix."""

    def __init__(self, width: int, seed: int) -> None:
        """Choose the matrix.

        Args:
            width: Size of the dimension that is rotated.
            seed: Of the random signs.
        """
        self.blocks: Blocks = blocks(width)
        self.width = width
        generator = torch.Generator().manual_seed(seed * 1_000_003 + width)
        signs = torch.randint(0, 2, (width,), generator=generator)
        self._signs = signs.double() * 2.0 - 1.0
        self._cache: dict[tuple[torch.device, torch.dtype], tuple[Tensor, list[Tensor]]] = {}

    def apply(self, x: Tensor, *, inverse: bool = False) -> Tensor:
        """Return x R, or x R^T, along the last dimension.

        Computed in fp32 or wider and rounded once to the dtype of `x`.
        """
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        signs, factors = self._matrices(work.device, work.dtype)
        if not inverse:
            work = work * signs
        shape = work.shape
        rows = self.blocks.number * math.prod(shape[:-1])
        left, right = 1, self.blocks.size
        for factor in factors:
            order = factor.shape[0]
            right //= order
            if right == 1:
                work = work.reshape(-1, order) @ (factor.T if inverse else factor)
            else:
                work = work.reshape(rows * left, order, right)
                work = (factor if inverse else factor.T) @ work
            left *= order
        work = work.reshape(shape) / math.sqrt(self.blocks.size)
        return (work * signs if inverse else work).to(x.dtype)

    def _matrices(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        key = device, dtype
        if key not in self._cache:
            factors = [hadamard(order).to(dtype).to(device) for order in self.blocks.factors]
            self._cache[key] = self._signs.to(dtype).to(device), factors
        return self._cache[key]


class Rotations:
    """The rotations of one model: one a width, made when first asked for."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made: dict[int, Rotation] = {}

    def of(self, width: int) -> Rotation:
        """Return the rotation of a width."""
        if width not in self._made:
            self._made[width] = Rotation(width, self._seed)
        return self._made[width]

    def notes(self) -> list[str]:
        """Say which widths have blocks, because no Hadamard matrix of theirs is known here."""
        return [
            f"width {width} is rotated in {rotation.blocks.number} blocks of {rotation.blocks.size}"
            for width, rotation in sorted(self._made.items())
            if rotation.blocks.number > 1
        ]


class OnlineInput:
    """The last rotated input, for the next layer that reads the same tensor.

    Returning the same object also lets layers share the quantized input (`SharedInput`).
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rotation: Rotation | None = None
        self._rotated: Tensor | None = None

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return x R, from the layer before where that read the same tensor."""
        if x.is_inference() or torch.is_grad_enabled():
            return rotation.apply(x)
        if (
            self._rotated is not None
            and self._rotation is rotation
            and self._source is not None
            and self._source() is x
            and self._version == x._version
        ):
            return self._rotated
        self.clear()
        rotated = rotation.apply(x)
        self._source = weakref.ref(x, self._drop)
        self._version = x._version
        self._rotation = rotation
        self._rotated = rotated
        return rotated

    def clear(self) -> None:
        """Forget the tensor."""
        self._source = self._rotation = self._rotated = None

    def _drop(self, source: weakref.ref[Tensor]) -> None:
        if self._source is source:
            self.clear()


class RotatedInput:
    """Forward pre-hook: rotates what enters a layer before the layer, or its quantizer, sees it."""

    def __init__(
        self, rotation: Rotation, memory: OnlineInput | None, *, inverse: bool = False
    ) -> None:
        self._rotation = rotation
        self._memory = memory
        self._inverse = inverse

    @property
    def described(self) -> tuple[int, bool]:
        """Width of the rotation, and whether it is taken back instead of made."""
        return self._rotation.width, self._inverse

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the arguments with the first one rotated."""
        x, *rest = args
        if self._memory is None or self._inverse:
            return (self._rotation.apply(x, inverse=self._inverse), *rest)
        return (self._memory.rotate(x, self._rotation), *rest)
