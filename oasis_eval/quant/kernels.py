"""Exact products of integer codes, and the choice among the ways to compute them.

Fast integer kernels are not exact everywhere: on x86 CPUs without VNNI, oneDNN adds pairs of
products in 16 bits with saturation, so a W8A8 product of like signs comes out at half its value.
So each candidate is probed once per device and width with inputs that would saturate, and the
first exact one of a fixed order is taken. Three things make products exact:

- oneDNN without VNNI: weight codes beyond +-64 are split into pieces that are not, which stand
  side by side as further inputs; 2 x 255 x 64 stays below 2^15.
- Sums that fp32 carries: inputs are cut into chunks whose sum of products cannot pass 2^24, by the
  weight's own codes and not by the worst case; more than one chunk is added up in int32.
- int8 where the operation takes nothing wider (`torch._int_mm`): pieces of +-127 likewise.

Dimensions: M rows (tokens), N output channels, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_eval.errors import QuantizationError

EXACT_IN_FP32 = 2**24
"""Integers up to here, and sums that stay below, are exact in fp32."""
EXACT_IN_INT32 = 2**31 - 1
_PROBE_ROWS = (1, 17, 130)
_PROBE_INPUTS = (1, 5, 64, 519, 1041, 4096)
_PROBE_OUTPUTS = 40


class Prepared(Protocol):
    """A weight in the form that a kernel wants."""

    @property
    def num_bytes(self) -> int:
        """Memory beyond the stored codes."""
        ...

    def __call__(self, codes_MK: Tensor) -> Tensor:
        """Multiply.

        Args:
            codes_MK: int8.

        Returns:
            The exact integers [M, N]: fp32 where none can pass 2^24, else int32.
        """
        ...


class Kernel(NamedTuple):
    """One way to multiply integers."""

    name: str
    prepare: Callable[[Tensor, int], Prepared]
    """Takes weight codes [N, K] (int8 or int16) and the largest magnitude of what they will meet.

    int8 codes may be kept as they are, so they must not change afterwards.
    """


# --- oneDNN -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OneDnn:
    """u8 x s8 matrix products of oneDNN; int8 activations go in with zero point 128."""

    chunks: tuple[tuple[slice, int, Tensor], ...]
    """Inputs, pieces, and the packed weight of each chunk."""
    ones_N: Tensor  # noqa: N815 - shape suffix
    zeros_N: Tensor  # noqa: N815 - shape suffix
    num_bytes: int

    def __call__(self, codes_MK: Tensor) -> Tensor:
        shifted_MK = codes_MK.view(torch.uint8).bitwise_xor(128)
        return _total(self._products(shifted_MK))

    def _products(self, shifted_MK: Tensor) -> Iterator[Tensor]:
        for inputs, num_pieces, packed in self.chunks:
            part = shifted_MK[:, inputs]
            part = part.repeat(1, num_pieces) if num_pieces > 1 else part.contiguous()
            yield torch.ops.onednn.qlinear_pointwise(
                *(part, 1.0, 128, packed, self.ones_N, self.zeros_N, None, 1.0, 0),
                *(torch.float32, "none", [], ""),
            )


def _prepare_onednn(weight_NK: Tensor, largest: int, limit: int) -> Prepared:
    num_outputs = weight_NK.shape[0]
    chunks = []
    for inputs in _chunks(weight_NK, largest):
        pieces = _pieces(weight_NK[:, inputs], limit)
        joined_NK = torch.cat(pieces, dim=-1).contiguous()  # the packing ignores strides
        packed = torch.ops.onednn.qlinear_prepack(joined_NK, None)
        chunks.append((inputs, len(pieces), packed))
    num_bytes = sum(packed.numel() for _, _, packed in chunks)
    return _OneDnn(
        tuple(chunks),
        ones_N=torch.ones(num_outputs),
        zeros_N=torch.zeros(num_outputs, dtype=torch.int32),
        num_bytes=num_bytes,
    )


# --- integers in floating point ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Carried:
    """Integers as fp32 numbers in an ordinary matrix product; the weight is converted each time."""

    weight_NK: Tensor  # noqa: N815 - shape suffix
    chunks: tuple[slice, ...]
    num_bytes: int

    def __call__(self, codes_MK: Tensor) -> Tensor:
        return _total(
            F.linear(codes_MK[:, inputs].float(), self.weight_NK[:, inputs].float())
            for inputs in self.chunks
        )


def _prepare_carried(weight_NK: Tensor, largest: int) -> Prepared:
    kept_NK = _narrow(weight_NK)
    return _Carried(kept_NK, tuple(_chunks(weight_NK, largest)), _held(kept_NK, weight_NK))


# --- torch._int_mm ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _IntMm:
    """int8 x int8 products with int32 sums; CUDA wants more than 16 rows and multiples of 8."""

    weight_NK: Tensor  # noqa: N815 - shape suffix
    num_pieces: int
    num_outputs: int
    padding: int
    """Inputs of zeros at the end."""
    pads_rows: bool
    num_bytes: int

    def __call__(self, codes_MK: Tensor) -> Tensor:
        num_rows = codes_MK.shape[0]
        wide_MK = codes_MK.repeat(1, self.num_pieces) if self.num_pieces > 1 else codes_MK
        missing = max(0, 17 - num_rows) if self.pads_rows else 0
        if self.padding or missing:
            wide_MK = F.pad(wide_MK, (0, self.padding, 0, missing))
        sums_MN: Tensor = torch._int_mm(wide_MK.contiguous(), self.weight_NK.t())
        return sums_MN[:num_rows, : self.num_outputs]


def _prepare_int_mm(weight_NK: Tensor, largest: int) -> Prepared:
    _check_int32(weight_NK, largest)
    pieces = [weight_NK] if weight_NK.dtype == torch.int8 else _pieces(weight_NK, 127)
    joined_NK = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
    num_outputs, width = joined_NK.shape
    padding, missing = -width % 8, -num_outputs % 8
    if padding or missing:
        joined_NK = F.pad(joined_NK, (0, padding, 0, missing))
    joined_NK = joined_NK.contiguous()
    return _IntMm(
        joined_NK,
        num_pieces=len(pieces),
        num_outputs=num_outputs,
        padding=padding,
        pads_rows=weight_NK.device.type == "cuda",
        num_bytes=_held(joined_NK, weight_NK),
    )


# --- choice -----------------------------------------------------------------------------------


def _onednn(limit: int) -> Callable[[Tensor, int], Prepared]:
    return lambda weight_NK, largest: _prepare_onednn(weight_NK, largest, limit)


ONEDNN = Kernel("oneDNN u8s8", _onednn(127))
ONEDNN_SPLIT = Kernel("oneDNN u8s8, split weights", _onednn(64))
CARRIED = Kernel("integers in fp32", _prepare_carried)
INT_MM = Kernel("torch._int_mm", _prepare_int_mm)


def candidates(device: torch.device) -> tuple[Kernel, ...]:
    """Return the kernels of a device, fastest first as measured."""
    if device.type == "cpu":
        return (ONEDNN, ONEDNN_SPLIT, CARRIED, INT_MM)
    return (INT_MM,) if device.type == "cuda" else (CARRIED,)


@lru_cache(maxsize=64)
def choose(
    device: torch.device,
    largest_weight: int,
    largest_activation: int,
    among: tuple[Kernel, ...] | None = None,
) -> Kernel:
    """Return the first exact kernel of a device, found once per process.

    Args:
        device: Where products are computed.
        largest_weight: Largest magnitude of weight codes.
        largest_activation: Largest magnitude of activation codes.
        among: Kernels in the order of preference; None: the device's.

    Raises:
        QuantizationError: No kernel is exact.
    """
    tried = []
    for kernel in candidates(device) if among is None else among:
        reason = inexact(kernel, device, largest_weight, largest_activation)
        if reason is None:
            return kernel
        tried.append(f"{kernel.name}: {reason}")
    raise QuantizationError(f"no exact integer kernel on {device}: {'; '.join(tried)}")


def inexact(
    kernel: Kernel, device: torch.device, largest_weight: int, largest_activation: int
) -> str | None:
    """Return how a kernel fails on saturating and random inputs, None if it is exact."""
    generator = torch.Generator().manual_seed(0)
    for num_inputs in _PROBE_INPUTS:
        for weight_NK, codes_MK in _probes(
            num_inputs, largest_weight, largest_activation, generator
        ):
            # float64 carries every sum of the probe exactly.
            expected_MN = codes_MK.double() @ weight_NK.double().T
            try:
                prepared = kernel.prepare(weight_NK.to(device), largest_activation)
                for num_rows in _PROBE_ROWS:
                    found_MN = prepared(codes_MK[:num_rows].to(device)).double().cpu()
                    if not torch.equal(found_MN, expected_MN[:num_rows]):
                        return f"wrong sums at {num_rows} x {num_inputs}"
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                # This build of torch lacks the kernel: it is rejected like a wrong one, by name.
                return " ".join(str(error).split())[:100]
    return None


def _probes(
    num_inputs: int, largest_weight: int, largest_activation: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights [N, K] and activation codes [M, K]: of one sign, alternating, random."""
    highest = min(largest_activation, 127)
    lowest = -128 if largest_activation > 127 else -highest
    rows = max(_PROBE_ROWS)
    signs_N1 = torch.ones(_PROBE_OUTPUTS, 1, dtype=torch.int16)
    signs_N1[1::2] = -1
    full_NK = (largest_weight * signs_N1).expand(-1, num_inputs).contiguous()
    alternating_K = torch.ones(num_inputs, dtype=torch.int16)
    alternating_K[1::2] = -1
    for value in (highest, lowest):
        yield full_NK, torch.full((rows, num_inputs), value, dtype=torch.int8)
    mixed_MK = torch.where(alternating_K > 0, highest, lowest).expand(rows, -1)
    yield full_NK, mixed_MK.to(torch.int8)
    yield full_NK * alternating_K, mixed_MK.to(torch.int8)
    shape = (_PROBE_OUTPUTS, num_inputs)
    random_NK = torch.randint(-largest_weight, largest_weight + 1, shape, generator=generator)
    random_MK = torch.randint(lowest, highest + 1, (rows, num_inputs), generator=generator)
    yield random_NK.to(torch.int16), random_MK.to(torch.int8)


# --- arithmetic that kernels share ------------------------------------------------------------


def _chunks(weight_NK: Tensor, largest: int) -> list[slice]:
    """Cut the inputs so that no sum over a chunk can pass 2^24, into as few as halving gives."""
    _check_int32(weight_NK, largest)
    magnitude_NK = weight_NK.int().abs()
    num_inputs = weight_NK.shape[1]
    num_chunks = 1
    while True:
        width = math.ceil(num_inputs / num_chunks)
        chunks = [slice(i, min(i + width, num_inputs)) for i in range(0, num_inputs, width)]
        worst = max(int(magnitude_NK[:, chunk].sum(-1).max()) for chunk in chunks)
        if worst * largest <= EXACT_IN_FP32:
            return chunks
        num_chunks *= 2


def _check_int32(weight_NK: Tensor, largest: int) -> None:
    worst = int(weight_NK.int().abs().sum(-1, dtype=torch.int64).max()) * largest
    if worst > EXACT_IN_INT32:
        raise QuantizationError(
            f"a sum over {weight_NK.shape[1]} inputs can reach {worst}, beyond 32 bits"
        )


def _pieces(weight_NK: Tensor, limit: int) -> list[Tensor]:
    """Split codes into int8 pieces within +-limit that add up to them and share their sign."""
    pieces, rest_NK = [], weight_NK
    while True:
        piece_NK = rest_NK.clamp(-limit, limit)
        pieces.append(piece_NK.to(torch.int8))
        rest_NK = rest_NK - piece_NK
        if not bool(rest_NK.any()):
            return pieces


def _narrow(weight_NK: Tensor) -> Tensor:
    """Return codes in int8 where they fit."""
    if weight_NK.dtype == torch.int8:
        return weight_NK
    low, high = torch.aminmax(weight_NK)
    return weight_NK.to(torch.int8) if int(low) >= -128 and int(high) <= 127 else weight_NK


def _held(kept: Tensor, given: Tensor) -> int:
    """Return the memory of what is kept, none where it is what was given."""
    return 0 if kept.data_ptr() == given.data_ptr() else kept.nbytes


def _total(products: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """Add the exact sums of chunks; one chunk stays fp32."""
    total: Tensor | None = None
    for product_MN in products:
        if total is None:
            total = product_MN
        elif total.dtype == torch.float32:
            total = total.int().add_(product_MN.int())
        else:
            total.add_(product_MN.int())
    assert total is not None
    return total
