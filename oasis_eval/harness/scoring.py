"""Negative log-likelihood of windows, without ever holding [tokens x vocabulary] in fp32.

The backbone runs once per batch; the head then runs over tiles of its hidden states through the
model's own forward (so soft-capping, logit scaling and a quantized head stay what they are).
Windows of one batch have one length: no padding exists, so none can enter a sum or a range.

Shapes: B batch, T tokens, D width, R scored rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from oasis_eval import ranks
from oasis_eval.harness.protocols import Window
from oasis_eval.positions import bucket_starts

_MIN_TILE_ROWS = 256
_MAX_TILE_ROWS = 4096
_TILE_ELEMENTS = 1 << 24  # 64 MiB of fp32 logits
_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-5


class PositionSum(NamedTuple):
    """Loss of the tokens of one bucket of positions, summed in float64."""

    last: int
    """Last position in the window, at most the bucket's own."""
    nll_nats: float
    num_tokens: int


class WindowScore(NamedTuple):
    """Result of one window, summed in float64."""

    nll_nats: float
    squares: float
    """Sum of squared token losses, for a standard error over tokens."""
    num_tokens: int
    is_greedy: bool
    """Whether every target was the most likely token."""
    by_position: tuple[PositionSum, ...] = ()
    """By bucket of positions, for windows that ask for it."""


class _FixedHidden(nn.Module):
    """Stands in for the backbone and returns given hidden states."""

    def __init__(self, output: ModelOutput, backbone: nn.Module) -> None:
        super().__init__()
        self.output = output
        self._backbone = (backbone,)  # no part of this module

    @property
    def decoder(self) -> nn.Module:
        """What OPT calls of its backbone."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return a number or a setting that the head reads of the backbone, as Falcon-H1's does."""
        value = getattr(self._backbone[0], name)
        if isinstance(value, nn.Module):
            raise AttributeError(name)
        return value

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        return self.output


class Scorer:
    """Scores windows with one model."""

    def __init__(self, model: Any, *, device: str) -> None:
        """Find out, on a few tokens, whether the head can run apart from the backbone.

        Args:
            model: A causal LM in evaluation mode.
            device: Where its inputs go.
        """
        self._model = model
        self._device = device
        self._output_kind: type[ModelOutput] = BaseModelOutputWithPast
        self.tiled = self._head_runs_apart()
        """Whether the head runs over tiles; if not, whole logits are computed window by window."""

    @torch.no_grad()  # not inference_mode, under which layers cannot share a quantized input
    def score(
        self,
        windows: Sequence[Window],
        *,
        batch_size: int,
        on_batch: Callable[[int], object] = lambda count: None,
    ) -> list[WindowScore]:
        """Score windows; the result does not depend on their order.

        Args:
            windows: What to score.
            batch_size: Most windows of one forward pass; only equal lengths share one.
            on_batch: Called with the number of windows just done.

        Returns:
            One score a window, in the order given.
        """
        batches = list(_batches(windows, batch_size))
        found = ranks.current().share(
            batches,
            lambda indices: self._score_batch([windows[index] for index in indices]),
            on_done=lambda indices: on_batch(len(indices)),
        )
        scores = {
            index: score
            for indices, batch in zip(batches, found, strict=True)
            for index, score in zip(indices, batch, strict=True)
        }
        return [scores[index] for index in range(len(windows))]

    def _score_batch(self, batch: list[Window]) -> list[WindowScore]:
        ids_BT = torch.tensor([window.input_ids for window in batch], device=self._device)
        targets_R = torch.tensor(
            [token for window in batch for token in window.targets], device=self._device
        )
        losses, hits = [], []
        for logits_RV, part_R in self._logits(ids_BT, batch, targets_R):
            nll_R, hit_R = _nll_(logits_RV.float(), part_R)
            losses.append(nll_R)
            hits.append(hit_R)
        loss_R = torch.cat(losses).double().cpu()
        greedy_R = torch.cat(hits).cpu()
        result, start = [], 0
        for window in batch:
            rows = slice(start, start + len(window.targets))
            loss = loss_R[rows]
            result.append(
                WindowScore(
                    nll_nats=float(loss.sum()),
                    squares=float((loss * loss).sum()),
                    num_tokens=len(window.targets),
                    is_greedy=bool(greedy_R[rows].all()),
                    by_position=tuple(_by_position(window, loss)) if window.by_position else (),
                )
            )
            start = rows.stop
        return result

    def _logits(
        self, ids_BT: Tensor, batch: list[Window], targets_R: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and their targets, tile by tile."""
        if not self.tiled:
            start = 0
            for row, window in enumerate(batch):
                logits_TV = self._model(input_ids=ids_BT[row : row + 1], use_cache=False).logits[0]
                end = start + len(window.targets)
                yield logits_TV[window.offset : window.offset + end - start], targets_R[start:end]
                start = end
            return
        hidden_BTD = self.hidden_states(ids_BT)
        rows = [
            hidden_BTD[row, window.offset : window.offset + len(window.targets)]
            for row, window in enumerate(batch)
        ]
        hidden_RD = torch.cat(rows)
        size = self.tile_rows()
        for start in range(0, len(hidden_RD), size):
            yield self.head(hidden_RD[start : start + size]), targets_R[start : start + size]

    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        """Return what the head reads, [B, T, D]; only where it runs apart (`tiled`)."""
        hidden_BTD: Tensor = self._backbone(ids_BT).last_hidden_state
        return hidden_BTD

    def _backbone(self, ids_BT: Tensor) -> Any:
        backbone = self._model.get_submodule(self._model.base_model_prefix)
        return backbone(input_ids=ids_BT, use_cache=False)

    def head(self, hidden_RD: Tensor) -> Tensor:
        """Run what the model's forward does after its backbone; returns logits [R, V]."""
        view = copy.copy(self._model)  # shares every parameter; only the backbone is exchanged
        backbone = self._model.get_submodule(self._model.base_model_prefix)
        output = self._output_kind(last_hidden_state=hidden_RD[None])
        stand_in = _FixedHidden(output, backbone)
        view._modules = {**self._model._modules, self._model.base_model_prefix: stand_in}
        dummy = torch.zeros(1, len(hidden_RD), dtype=torch.long, device=self._device)
        logits: Tensor = view(input_ids=dummy, use_cache=False).logits
        return logits[0]

    def tile_rows(self) -> int:
        """Return how many tokens the head runs over at a time."""
        vocabulary: int = self._model.get_output_embeddings().weight.shape[0]
        return max(_MIN_TILE_ROWS, min(_MAX_TILE_ROWS, _TILE_ELEMENTS // vocabulary))

    @torch.no_grad()
    def _head_runs_apart(self) -> bool:
        prefix = getattr(self._model, "base_model_prefix", "")
        if not prefix or prefix not in self._model._modules:
            return False
        if self._model.get_output_embeddings() is None:
            return False
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        ids_1T = (torch.arange(_PROBE_TOKENS, device=self._device) * 7 % vocabulary)[None]
        whole_TV = self._model(input_ids=ids_1T, use_cache=False).logits[0].float()
        output = self._backbone(ids_1T)
        if not isinstance(output, ModelOutput) or "last_hidden_state" not in output:
            return False
        self._output_kind = type(output)  # a model's forward may read fields of its own
        hidden_TD = output.last_hidden_state[0]
        half = _PROBE_TOKENS // 2
        try:
            parts = [self.head(hidden_TD[:half]), self.head(hidden_TD[half:])]
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            return False  # the forward needs more of its backbone than hidden states
        apart_TV = torch.cat(parts).float()
        if apart_TV.shape != whole_TV.shape:
            return False
        bound = _PROBE_TOLERANCE * float(whole_TV.abs().max())
        if whole_TV.dtype != self._model.dtype:
            bound = max(bound, float(whole_TV.abs().max()) * torch.finfo(self._model.dtype).eps)
        same = (apart_TV - whole_TV).abs() <= bound
        return bool((same | (apart_TV.isnan() & whole_TV.isnan())).all())


def _nll_(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp minus the target logit, and whether greedy decoding picks the target.

    fp32 log_softmax is biased by 3e-5 nats at a vocabulary of 262k; this is not. The logits are
    overwritten: the exponentials take their place, so no second copy is ever held.
    """
    target_R = logits_RV.gather(-1, targets_R[:, None])[:, 0]
    top_R = logits_RV.amax(dim=-1)
    hit_R = target_R == top_R
    if bool(hit_R.any()):  # of equal logits the first is picked
        hit_R[hit_R.clone()] = logits_RV[hit_R].argmax(dim=-1) == targets_R[hit_R]
    shift_R = top_R.masked_fill(top_R.isinf(), 0.0)
    total_R = logits_RV.sub_(shift_R[:, None]).exp_().sum(dim=-1)
    return total_R.log() + shift_R - target_R, hit_R


def _by_position(window: Window, loss_R: Tensor) -> Iterator[PositionSum]:
    first = window.offset + 1
    starts = bucket_starts(first, window.offset + len(window.targets))
    for start, stop in pairwise([*starts, len(window.targets)]):
        yield PositionSum(first + stop - 1, float(loss_R[start:stop].sum()), stop - start)


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[int]]:
    """Yield indices of windows of one length, longest first so that memory peaks at the start."""
    by_length: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        by_length.setdefault(len(window.input_ids), []).append(index)
    for length in sorted(by_length, reverse=True):
        indices = by_length[length]
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]
