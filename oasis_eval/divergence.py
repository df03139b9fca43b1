"""How far the logits of one execution of a model are from those of another, on the same tokens.

`token_changes` is the arithmetic of one tile; what follows compares executions of one scheme.

Hidden states are kept, logits are not: the heads run over the same rows of both, a tile at a time.
One of the executions is the same model with its matrix products summed in another order, which is
what floating point alone can change.

Shapes: T tokens, D width, R rows of a tile, V vocabulary; M rows, N outputs, K inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from oasis_eval.harness.scoring import Scorer
from oasis_eval.quant.integer_layers import prepared_bytes

_TILE_ELEMENTS = 1 << 22  # 32 MiB of float64 logits
_BLOCK_ELEMENTS = 1 << 18  # 1 MiB of fp32
_FAR = 40.0
"""Change of a logit against the mean change from which its exponential is taken another way."""


class TokenChanges(NamedTuple):
    """What happened to the prediction after each token, [R] each."""

    kl: Tensor
    """KL(base || other), nats."""
    nll: Tensor
    """Change of the loss, nats."""
    base_nll: Tensor
    """Loss under the base, nats, float64."""
    same_top: Tensor
    """Boolean: whether the base's most likely token is the other's; of equal ones the first is."""


def token_changes(
    base_RV: Tensor, other_RV: Tensor, targets_R: Tensor, top_R: Tensor
) -> TokenChanges:
    """Compare logits row by row in their dtype, fp32 or float64.

    Equal logits give exactly 0. The sums over the vocabulary cancel up to the second order of the
    differences, so that small divergences keep their digits in fp32.

    Args:
        base_RV: Logits of the model that the other is compared with.
        other_RV: The other's.
        targets_R: The tokens that follow.
        top_R: The base's most likely tokens.
    """
    rows = len(base_RV)
    if base_RV.device.type == "cpu":  # intermediate results stay in the cache
        rows = max(1, _BLOCK_ELEMENTS // base_RV.shape[-1])
    parts = (tensor.split(rows) for tensor in (base_RV, other_RV, targets_R, top_R))
    blocks = [_changes_of_block(*block) for block in zip(*parts, strict=True)]
    return TokenChanges(*(torch.cat(values) for values in zip(*blocks, strict=True)))


def _changes_of_block(
    base_RV: Tensor, other_RV: Tensor, targets_R: Tensor, top_R: Tensor
) -> TokenChanges:
    target_R = base_RV.gather(-1, targets_R[:, None])[:, 0]
    peak_R1 = base_RV.gather(-1, top_R[:, None])
    there_R1 = other_RV.gather(-1, top_R[:, None])
    same_top_R = other_RV.argmax(-1) == top_R
    # What all logits of a row have in common is taken off first, or it would cost digits.
    weight_RV = base_RV - peak_R1
    change_RV = (other_RV - there_R1).sub_(weight_RV)
    moved_R = change_RV.gather(-1, targets_R[:, None])[:, 0]
    weight_RV.exp_()
    total_R = weight_RV.sum(-1)
    mean_R = (weight_RV * change_RV).sum(-1) / total_R
    # log sum p exp(d) - sum p d, around the mean of d so that small differences survive.
    change_RV -= mean_R[:, None]
    is_far_R = change_RV.amax(-1) > _FAR
    excess_R = change_RV.expm1_().mul_(weight_RV).sum(-1) / total_R
    kl_R = torch.log1p(excess_R)
    if bool(is_far_R.any()):  # p underflows where exp(d) matters, or exp(d) overflows
        other_R = (other_RV - there_R1)[is_far_R].double().logsumexp(-1)
        base_R = (base_RV - peak_R1)[is_far_R].double().logsumexp(-1)
        kl_R[is_far_R] = (other_R - base_R - mean_R[is_far_R].double()).to(kl_R.dtype)
    base_nll_R = peak_R1[:, 0].double() - target_R.double() + total_R.double().log()
    return TokenChanges(kl_R, kl_R + mean_R - moved_R, base_nll_R, same_top_R)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far logits are from those of fake execution, over all tokens."""

    kl_nats: float
    """Mean of KL(fake || other)."""
    nll_nats: float
    """Mean size of the change of a token's loss."""
    flips: int
    """Tokens whose most likely next token changed."""
    logit: float
    """Largest change of a logit, relative to the largest logit."""
    mean_nll_nats: float
    """Change of the mean loss, signed."""


@dataclass(frozen=True, slots=True)
class Execution:
    """What one way of execution takes."""

    tokens_per_second: float
    """Of the backbone, on this machine."""
    num_bytes: int
    """Parameters, buffers, and what kernels hold beside them."""


class OtherOrder(TorchFunctionMode):
    """Cuts the inputs of every linear layer in two and adds the halves' products."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `linear` and `addmm` in another order, everything else as it is."""
        given = kwargs or {}
        if func is F.linear and not given:
            x, weight_NK, bias = (*args, None)[:3]
            cut_at = max(1, int(self._share * x.shape[-1]))
            first = F.linear(x[..., :cut_at], weight_NK[:, :cut_at], bias)
            return first + F.linear(x[..., cut_at:], weight_NK[:, cut_at:])
        if func is torch.addmm and not given:
            bias, x, weight_KN = args
            cut_at = max(1, int(self._share * x.shape[-1]))
            first = torch.addmm(bias, x[:, :cut_at], weight_KN[:cut_at])
            return first + x[:, cut_at:] @ weight_KN[cut_at:]
        return func(*args, **given)


class Run:
    """One way of execution: its logits tile by tile, its time, its memory."""

    def __init__(self, model: nn.Module, device: str, *, share: float | None = None) -> None:
        self._model: Any = model
        self._device = device
        self._scorer = Scorer(model, device=device)
        self._share = share
        self._seconds = 0.0
        self._num_tokens = 0
        self._states_TX = torch.empty(0)
        """Hidden states [T, D], or logits [T, V] of a head that cannot run apart."""

    def start(self, window: list[int]) -> None:
        """Run the backbone over a window."""
        ids_1T = torch.tensor([window], device=self._device)
        self._synchronize()
        start = time.perf_counter()
        with self._order():
            if self._scorer.tiled:
                self._states_TX = self._scorer.hidden_states(ids_1T)[0]
            else:
                self._states_TX = self._model(input_ids=ids_1T, use_cache=False).logits[0]
        self._synchronize()
        self._seconds += time.perf_counter() - start
        self._num_tokens += len(window)

    def logits(self, rows: slice) -> Tensor:
        """Return logits [R, V] of some tokens of the window."""
        if not self._scorer.tiled:
            return self._states_TX[rows]
        with self._order():
            return self._scorer.head(self._states_TX[rows])

    def execution(self) -> Execution:
        """Return speed and memory so far."""
        tensors = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}
        held = sum(tensor.nbytes for tensor in tensors.values()) + prepared_bytes(self._model)
        return Execution(self._num_tokens / self._seconds, held)

    def _order(self) -> Any:
        return nullcontext() if self._share is None else OtherOrder(self._share)

    def _synchronize(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)


class _Sums:
    """Differences of one execution from the first, added up in float64."""

    def __init__(self) -> None:
        self.kl = self.nll = self.signed = 0.0
        self.flips = self.num_tokens = 0
        self.largest = self.logit = 0.0

    def add(self, base_RV: Tensor, other_RV: Tensor, targets_R: Tensor) -> None:
        """Take in logits in float64 and the tokens that follow."""
        self.largest = max(self.largest, float(base_RV.abs().max()))
        # A NaN must not be lost to the comparison of `max`.
        change = float((other_RV - base_RV).abs().max())
        self.logit = change if math.isnan(change) else max(self.logit, change)
        changes = token_changes(base_RV, other_RV, targets_R, base_RV.argmax(-1))
        self.kl += float(changes.kl.sum())
        self.nll += float(changes.nll.abs().sum())
        self.signed += float(changes.nll.sum())
        self.flips += int((~changes.same_top).sum())
        self.num_tokens += len(targets_R)

    def difference(self) -> Difference:
        """Return means and extremes."""
        count = self.num_tokens
        relative = self.logit / self.largest if self.largest else self.logit
        return Difference(
            kl_nats=max(0.0, self.kl / count) if not math.isnan(self.kl) else self.kl,
            nll_nats=self.nll / count,
            flips=self.flips,
            logit=relative,
            mean_nll_nats=self.signed / count,
        )


def differences(runs: Sequence[Run], windows: Sequence[list[int]]) -> list[Difference]:
    """Return how far every run but the first is from the first; two tiles are held at a time."""
    sums = [_Sums() for _ in runs[1:]]
    for window in windows:
        for run in runs:
            run.start(window)
        step = 0
        first = 0
        while first < len(window) - 1:
            rows = slice(first, min(first + max(1, step or 1), len(window) - 1))
            base_RV = runs[0].logits(rows).double()
            targets_R = torch.tensor(window[rows.start + 1 : rows.stop + 1], device=base_RV.device)
            for run, total in zip(runs[1:], sums, strict=True):
                total.add(base_RV, run.logits(rows).double(), targets_R)
            first = rows.stop
            step = max(1, _TILE_ELEMENTS // base_RV.shape[-1])
    return [total.difference() for total in sums]


def largest(floors: Sequence[Difference]) -> Difference:
    """Return the largest of each kind of difference; of the signed one the largest in size."""
    return Difference(
        kl_nats=max(floor.kl_nats for floor in floors),
        nll_nats=max(floor.nll_nats for floor in floors),
        flips=max(floor.flips for floor in floors),
        logit=max(floor.logit for floor in floors),
        mean_nll_nats=max((floor.mean_nll_nats for floor in floors), key=abs),
    )
