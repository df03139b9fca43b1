"""bitsandbytes: LLM.int8() with outlier columns, and 4-bit weights in its code books.

- `Linear8bitLt`: weights int8 per output channel; inputs are cast to fp16 and quantized per token;
  input columns with a value beyond the threshold, in any token of the pass, stay in floating
  point. So a score depends on what shares a pass (the batch, and whether tokens come one by one),
  and inputs beyond fp16's largest number cannot be run: both are said, the second by an error.
- `Linear4bit`: weights are looked up in nf4 or fp4, by the block; the product is in the compute
  dtype. Blocks run through the weight row after row, so one may hold the end of a row and the
  start of the next.

Sources: Dettmers et al., "LLM.int8()", NeurIPS 2022; "QLoRA", NeurIPS 2023.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from oasis_eval.errors import MissingExtraError, QuantizationError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.replacement import (
    Complaint,
    Facts,
    LibraryApplied,
    check_product,
    replace_,
    replace_empty_,
)
from oasis_eval.quant.stored import StoredLayer
from oasis_eval.quant.weights import WeightCodes
from oasis_eval.record import ModuleCoverage
from oasis_eval.spec import QuantScheme

_LARGEST_FP16 = float(torch.finfo(torch.float16).max)
_LEAST_ROW = 127 * 2.0**-24
"""A weight row below it has less than 8 bits in fp16, which its values are cast to first."""
_SCALE_BITS = 32


class BitsAndBytesBackend:
    """Runs `llm-int8` (with or without outlier columns), `nf4` and `fp4`."""

    def apply_(
        self,
        model: nn.Module,
        scheme: QuantScheme,
        batches: Sequence[Batch] | None,
        *,
        codes: Mapping[str, WeightCodes],
        keep_reference: bool,
    ) -> LibraryApplied:
        """Quantize `model` in place; see `backends.Backend.apply_`.

        Raises:
            MissingExtraError: bitsandbytes is not installed.
        """
        assert not codes, "support.unsupported refuses transforms"
        library = _library_for(scheme, next(model.parameters()).device)
        return replace_(
            model, scheme, library, keep_reference=keep_reference, warnings=library.warnings
        )

    def empty_(self, model: nn.Module, scheme: QuantScheme, dtype: torch.dtype) -> LibraryApplied:
        """Put layers with any codes in; see `backends.StoringBackend.empty_`.

        Raises:
            MissingExtraError: bitsandbytes is not installed.
        """
        library = _library_for(scheme, next(model.parameters()).device)
        return replace_empty_(model, scheme, library, dtype, warnings=library.warnings)


def _library_for(scheme: QuantScheme, device: torch.device) -> EightBit | FourBit:
    bnb = _library()
    assert scheme.weights is not None
    if scheme.weights.bits == 4:
        assert scheme.weights.group_size is not None
        kind = "nf4" if scheme.weights.type == "nf4" else "fp4"
        return FourBit(bnb, kind, scheme.weights.group_size)
    check_product("bitsandbytes", torch.ops.bitsandbytes.int8_linear_matmul, device)
    return EightBit(bnb, scheme.outlier_threshold or 0.0)


class EightBit:
    """`Linear8bitLt` for a Linear."""

    name = "bitsandbytes"

    def __init__(self, bnb: ModuleType, threshold: float) -> None:
        self._bnb = bnb
        self._threshold = threshold
        _quieten()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        if self._threshold == 0.0:
            return ()
        return (
            f"bitsandbytes: input columns where any token reaches {self._threshold:g} stay in "
            "floating point, so scores depend on which tokens share a forward pass",
        )

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the int8 layer of a Linear."""
        largest_N = linear.weight.abs().amax(-1).float()
        if bool((largest_N > _LARGEST_FP16).any()):
            raise QuantizationError(
                f"{name}: a weight of {float(largest_N.max()):g} is beyond fp16, in which "
                "bitsandbytes quantizes; use backend 'fake' or 'torch'"
            )
        lost = (largest_N > 0) & (largest_N < _LEAST_ROW)
        if bool(lost.any()):
            raise QuantizationError(
                f"{name}: {int(lost.sum())} of {len(lost)} weight rows are too small for fp16 "
                f"(below {_LEAST_ROW:.2g}), in which bitsandbytes quantizes; use backend 'fake' "
                "or 'torch'"
            )
        # Quantizing happens on the way from the CPU to the device.
        weight = self._bnb.nn.Int8Params(
            linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False
        ).to(linear.weight.device)
        return self._layer(linear, weight)

    def _layer(self, linear: nn.Linear, weight: Tensor) -> nn.Module:
        """Return the layer of an int8 weight."""
        layer = self._bnb.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
            threshold=self._threshold,
            device="meta",
        )
        layer.weight = weight
        layer.bias = linear.bias
        layer.init_8bit_state()
        assert isinstance(layer, nn.Module)
        return layer

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what an int8 layer is."""
        codes_NK, scales_N = _int8_state(layer)
        if codes_NK.dtype != torch.int8 or len(scales_N) != len(codes_NK):
            raise QuantizationError(
                f"{name}: bitsandbytes did not quantize it (weight {codes_NK.dtype})"
            )
        covered = ModuleCoverage(
            module=name,
            quantized=True,
            weight_bits=8,
            weight_granularity="channel",
            activation_bits=8,
            activation_granularity="token",
            activation_static=False,
        )
        return Facts(covered, 8 * codes_NK.numel() + _SCALE_BITS * len(scales_N))

    def dequantize(self, layer: nn.Module) -> Tensor:
        """Return the weight in fp32."""
        codes_NK, scales_N = _int8_state(layer)
        return codes_NK.float() * (scales_N / 127)[:, None]

    def check_input(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Refuse training mode, in which inputs stay as they are, and what fp16 cannot hold."""
        if layer.training:
            raise QuantizationError(
                f"{name}: in training mode bitsandbytes leaves inputs in floating point; call "
                "eval() on the model"
            )
        largest = float(x.detach().abs().amax()) if x.numel() else 0.0
        if _LARGEST_FP16 < largest < float("inf"):
            raise QuantizationError(
                f"{name}: an input of {largest:g} overflows fp16, in which bitsandbytes quantizes "
                f"(at most {_LARGEST_FP16:g}); use backend 'fake' or 'torch'"
            )

    def empty(self, linear: nn.Linear) -> nn.Module:
        """Return an int8 layer with any codes."""
        codes_NK = torch.empty_like(linear.weight, dtype=torch.int8)
        largest_N = torch.empty(len(codes_NK), device=codes_NK.device)
        weight = self._bnb.nn.Int8Params(
            codes_NK, requires_grad=False, has_fp16_weights=False, CB=codes_NK, SCB=largest_N
        )
        return self._layer(linear, weight)

    def stored(self, name: str, layer: nn.Module) -> StoredLayer:
        """Return codes and largest magnitudes, and that codes lie row after row."""
        codes_NK, largest_N = _int8_state(layer)
        row_by_row = {"weight_format": torch.tensor(0, dtype=torch.uint8)}
        return StoredLayer({"weight": codes_NK, "SCB": largest_N}, row_by_row)

    def filled_(self, layer: nn.Module) -> Complaint | None:
        """Take over codes, whose parameter is another tensor than the one that is computed with."""
        codes_NK, largest_N = _int8_state(layer)
        layer.weight.data = codes_NK
        if bool((codes_NK == -128).any()):
            return Complaint("weight", "code -128, and codes of bitsandbytes end at -127")
        if not _are_magnitudes(largest_N):
            return Complaint("SCB", "a largest magnitude that is negative or not finite")
        return None

    def compute_in_(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Nothing depends on it: inputs are cast to fp16 and outputs back."""


class FourBit:
    """`Linear4bit` for a Linear."""

    name = "bitsandbytes"

    def __init__(self, bnb: ModuleType, kind: str, block: int) -> None:
        self._bnb = bnb
        self._kind = kind
        self._block = block

    warnings: tuple[str, ...] = ()
    """What a reader of the numbers must know."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the 4-bit layer of a Linear."""
        weight = self._weight(linear.weight.detach())
        return self._layer(linear, weight.to(linear.weight.device))

    def _weight(self, data: Tensor, **settings: object) -> Any:
        return self._bnb.nn.Params4bit(
            data,
            requires_grad=False,
            blocksize=self._block,
            compress_statistics=False,
            quant_type=self._kind,
            **settings,
        )

    def _layer(self, linear: nn.Linear, weight: Any) -> nn.Module:
        """Return the layer of a 4-bit weight."""
        layer = self._bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=linear.weight.dtype,
            compress_statistics=False,
            quant_type=self._kind,
            device="meta",
        )
        layer.weight, layer.quant_state, layer.bias = weight, weight.quant_state, linear.bias
        # The kernel of these processors computes in bf16 whatever the model's dtype is.
        layer.support_avx512bf16_for_cpu = False
        assert isinstance(layer, nn.Module)
        return layer

    def facts(self, name: str, layer: nn.Module) -> Facts:
        """Return what a 4-bit layer is."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        state = getattr(weight, "quant_state", None)
        if state is None or weight.dtype != torch.uint8 or state.quant_type != self._kind:
            raise QuantizationError(
                f"{name}: bitsandbytes did not quantize it (weight {weight.dtype})"
            )
        width = state.shape[-1]
        notes = []
        if width % state.blocksize:
            notes.append(f"blocks of {state.blocksize} run on over the ends of rows of {width}")
        covered = ModuleCoverage(
            module=name,
            quantized=True,
            note="; ".join(notes) or None,
            weight_bits=4,
            weight_granularity="group",
            weight_group_size=state.blocksize,
        )
        return Facts(covered, 8 * weight.numel() + _SCALE_BITS * state.absmax.numel())

    def dequantize(self, layer: nn.Module) -> Tensor:
        """Return the weight in the model's dtype."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        values: Tensor = self._bnb.functional.dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
        return values

    def check_input(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Nothing enters that the compute dtype cannot hold."""

    def empty(self, linear: nn.Linear) -> nn.Module:
        """Return a 4-bit layer with any codes."""
        count, device = linear.weight.numel(), linear.weight.device
        functional = self._bnb.functional
        state = functional.QuantState(
            absmax=torch.empty(math.ceil(count / self._block), device=device),
            shape=linear.weight.shape,
            code=functional.get_4bit_type(self._kind, device=device),
            blocksize=self._block,
            quant_type=self._kind,
            dtype=linear.weight.dtype,
        )
        codes = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=device)
        return self._layer(linear, self._weight(codes, quant_state=state, bnb_quantized=True))

    def stored(self, name: str, layer: nn.Module) -> StoredLayer:
        """Return packed codes and magnitudes of blocks; the code book and settings follow."""
        weight: Any = layer.weight
        tensors = {"weight": weight, "weight.absmax": weight.quant_state.absmax}
        described = weight.quant_state.as_dict(packed=True)
        constants = {f"weight.{key}": value for key, value in described.items() if key != "absmax"}
        return StoredLayer(tensors, constants)

    def filled_(self, layer: nn.Module) -> Complaint | None:
        """Find magnitudes that no block has; each of the 16 codes means something."""
        weight: Any = layer.weight
        if not _are_magnitudes(weight.quant_state.absmax):
            return Complaint("weight.absmax", "a largest magnitude that is negative or not finite")
        return None

    def compute_in_(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """Look weights up in another dtype."""
        weight: Any = layer.weight
        weight.quant_state.dtype = dtype
        layer.compute_dtype = dtype  # type: ignore[assignment]  # no Tensor, no Module


def _int8_state(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] and largest magnitudes [N] of an int8 layer."""
    state = layer.state
    codes_NK, largest_N = getattr(state, "CB", None), getattr(state, "SCB", None)
    assert isinstance(codes_NK, Tensor)
    assert isinstance(largest_N, Tensor)
    return codes_NK, largest_N


def _are_magnitudes(values: Tensor) -> bool:
    return bool((torch.isfinite(values) & (values >= 0)).all())


def _library() -> ModuleType:
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtraError("bitsandbytes", "pip install bitsandbytes") from error
    assert isinstance(bitsandbytes, ModuleType)
    return bitsandbytes


def _quieten() -> None:
    """Drop the warning about the cast to fp16 that each layer makes in each pass."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in str(record.msg)
