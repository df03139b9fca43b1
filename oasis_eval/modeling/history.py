"""Bookkeeping of depth: what each sublayer reads and what becomes of its output.

Every wiring is a history of sources, a running sum (the stream) and a rule when the sum joins the
history. With f the sublayer's output and e the embedding:

    wiring           starts with        read                      after the sublayer
    residual         stream e           stream                    stream += f
    attnres_block    [e], no stream     history + stream          stream += f; at the end of a
                                                                  block it joins and starts anew
    attnres_full     the same with one sublayer a block
    cumulative       [e], stream e      history + stream          stream += f; every few layers a
                                                                  copy joins, the sum goes on
    cumulative_full  the same after every sublayer
    reset            [e], stream e      history + stream          at the first sublayer of a block
                                                                  the old sum joins, then f starts
                                                                  a new one
    delta            [], stream e       stream + read(history)    stream += f; f joins
    oasis_repo       [e], stream e      stream                    stream = read(history + (stream
                                                                  + f)); one entry a layer joins

`attnres_block`, `attnres_full` and `reset` end with one more read, the others with the stream.

Sources: AttnRes, arXiv 2603.15031 (`attnres_*`); the open-attention-residuals release
(`cumulative`, `cumulative_full`, `reset`, `delta`); the OASIS authors' code (`oasis_repo`).
Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oasis_eval.modeling.config import FINAL_READ_WIRINGS, OasisConfig, Wiring
from oasis_eval.modeling.routing import (
    DepthPort,
    DepthRead,
    DepthRouter,
    DepthTaps,
    Source,
    inverse_rms,
)


@dataclass(frozen=True, slots=True)
class Step:
    """What one sublayer does to the history."""

    is_attention: bool
    joins: Literal["never", "before", "after"]
    """When the running sum joins the history, seen from this sublayer's addition to it."""
    restarts: bool
    """Whether the sum starts anew when it joins."""
    num_attention: int
    """Attention sublayers in the sum, this one included."""


class DepthLayout(NamedTuple):
    """What the tensors of a flattened state are."""

    num_sources: int
    has_stream: bool
    has_stream_source: bool


class DepthState(NamedTuple):
    """Everything later sublayers can see. Per token, so decoding needs no cache of it."""

    sources: tuple[Source, ...]
    stream: Tensor | None
    """[B, T, D], the running sum; None where a block starts from nothing."""
    stream_source: Source | None
    """The running sum as a source, where reads see it."""

    def flatten(self) -> tuple[DepthLayout, tuple[Tensor, ...]]:
        """Return the state as plain tensors, the form that checkpointing can differentiate."""
        tensors = [tensor for source in self.sources for tensor in _tensors_of(source)]
        if self.stream is not None:
            tensors.append(self.stream)
        if self.stream_source is not None:
            tensors.extend(_tensors_of(self.stream_source))
        layout = DepthLayout(
            len(self.sources), self.stream is not None, self.stream_source is not None
        )
        return layout, tuple(tensors)


@dataclass(frozen=True, slots=True)
class DepthHistory:
    """The rules of one configuration; the state they act on is passed in and returned."""

    wiring: Wiring
    steps: tuple[Step, ...]
    """One per sublayer."""
    eps: float
    keeps_rms: bool
    keeps_psi: bool
    block_psi: Literal["mean", "last", "max"]
    mlp_psi: Literal["attention", "zero"]
    psi_flows: bool
    """Whether gradients reach attention through psi."""

    @classmethod
    def of(cls, config: OasisConfig) -> DepthHistory:
        """Derive the rules from a checked configuration."""
        return cls(
            wiring=config.wiring,
            steps=plan_steps(config.wiring, config.num_hidden_layers, config.num_blocks),
            eps=config.rms_norm_eps,
            keeps_rms=config.wiring != "residual" and config.depth_router == "pseudo_query",
            keeps_psi=config.null_coupling,
            block_psi=config.coupling_block_psi,
            mlp_psi=config.coupling_mlp_psi,
            psi_flows=config.coupling_psi_gradient == "flows",
        )

    def start(self, embedding_BTD: Tensor, taps: DepthTaps) -> DepthState:
        """Return the state before the first sublayer."""
        stream_BTD = taps.residual(embedding_BTD)
        if self.wiring in ("residual", "delta"):
            return DepthState((), stream_BTD, None)
        psi_BT = None
        if self.keeps_psi:
            psi_BT = embedding_BTD.new_zeros(embedding_BTD.shape[:-1], dtype=torch.float32)
        embedding = self._source(stream_BTD, psi_BT, taps)
        if self.wiring in ("attnres_block", "attnres_full"):
            return DepthState((embedding,), None, None)
        stream_source = None if self.wiring == "oasis_repo" else embedding
        return DepthState((embedding,), stream_BTD, stream_source)

    def enter(self, state: DepthState, port: DepthPort) -> tuple[Tensor, DepthRead | None]:
        """Return what a sublayer reads, [B, T, D], and the depth read behind it."""
        if self.wiring in ("residual", "oasis_repo"):
            return _stream_of(state), None
        if self.wiring == "delta":
            stream_BTD = _stream_of(state)
            if not state.sources:
                return stream_BTD, None
            read = _read(port, state.sources)
            return stream_BTD + read.hidden, read
        newest = () if state.stream_source is None else (state.stream_source,)
        read = _read(port, state.sources + newest)
        return read.hidden, read

    def leave(
        self,
        state: DepthState,
        output_BTD: Tensor,
        psi_BT: Tensor | None,
        *,
        step: Step,
        port: DepthPort,
    ) -> tuple[DepthState, DepthRead | None]:
        """Take in a sublayer's output.

        Args:
            state: Before the sublayer.
            output_BTD: Its output.
            psi_BT: Null mass of this layer's attention, where it is needed.
            step: The sublayer's step.
            port: The sublayer's router or port.

        Returns:
            The new state, and the depth read if this wiring reads after the sublayer.
        """
        if self.wiring == "oasis_repo":
            return self._leave_repo(state, output_BTD, psi_BT, step=step, port=port)
        sources, stream_BTD, stream_source = state
        if step.joins == "before":
            assert stream_source is not None
            sources, stream_BTD, stream_source = (*sources, stream_source), None, None
        stream_BTD = output_BTD if stream_BTD is None else stream_BTD + output_BTD
        stream_BTD = port.taps.residual(stream_BTD)
        if self.wiring == "residual":
            return DepthState((), stream_BTD, None), None
        if self.wiring == "delta":
            source = self._source(output_BTD, self._own_psi(psi_BT, step), port.taps)
            return DepthState((*sources, source), stream_BTD, None), None
        old_psi_BT = None if stream_source is None else stream_source.psi
        joint_psi_BT = self._joint_psi(old_psi_BT, psi_BT, step)
        stream_source = self._source(stream_BTD, joint_psi_BT, port.taps)
        if step.joins != "after":
            return DepthState(sources, stream_BTD, stream_source), None
        sources = (*sources, stream_source)
        if step.restarts:
            return DepthState(sources, None, None), None
        return DepthState(sources, stream_BTD, stream_source), None

    def finish(self, state: DepthState, port: DepthPort) -> tuple[Tensor, DepthRead | None]:
        """Return what the final norm sees, [B, T, D], and the depth read behind it."""
        if self.wiring in FINAL_READ_WIRINGS:
            return self.enter(state, port)
        return _stream_of(state), None

    def unflatten(self, layout: DepthLayout, tensors: tuple[Tensor, ...]) -> DepthState:
        """Undo `DepthState.flatten`."""
        rest = iter(tensors)
        sources = tuple(self._take_source(rest) for _ in range(layout.num_sources))
        stream_BTD = next(rest) if layout.has_stream else None
        stream_source = self._take_source(rest) if layout.has_stream_source else None
        return DepthState(sources, stream_BTD, stream_source)

    def _take_source(self, rest: Iterator[Tensor]) -> Source:
        value_BTD = next(rest)
        inverse_rms_BT = next(rest) if self.keeps_rms else None
        return Source(value_BTD, inverse_rms_BT, next(rest) if self.keeps_psi else None)

    def _leave_repo(
        self,
        state: DepthState,
        output_BTD: Tensor,
        psi_BT: Tensor | None,
        *,
        step: Step,
        port: DepthPort,
    ) -> tuple[DepthState, DepthRead]:
        candidate_BTD = _stream_of(state) + output_BTD
        candidate = self._source(candidate_BTD, self._own_psi(psi_BT, step), port.taps)
        read = _read(port, (*state.sources, candidate))
        stream_BTD = port.taps.residual(read.hidden)
        if step.is_attention:
            # Only the MLP router of the same layer sees this entry.
            return DepthState((*state.sources, candidate), stream_BTD, None), read
        entry = self._source(stream_BTD, psi_BT, port.taps)
        return DepthState((*state.sources[:-1], entry), stream_BTD, None), read

    def _source(self, value_BTD: Tensor, psi_BT: Tensor | None, taps: DepthTaps) -> Source:
        value_BTD = taps.depth_sources(value_BTD)
        rms_BT = inverse_rms(value_BTD, self.eps) if self.keeps_rms else None
        return Source(value_BTD, rms_BT, psi_BT if self.keeps_psi else None)

    def _own_psi(self, psi_BT: Tensor | None, step: Step) -> Tensor | None:
        """Psi of a source that is one sublayer's output."""
        if psi_BT is None or step.is_attention or self.mlp_psi == "attention":
            return psi_BT
        return torch.zeros_like(psi_BT)

    def _joint_psi(
        self, old_psi_BT: Tensor | None, psi_BT: Tensor | None, step: Step
    ) -> Tensor | None:
        """Psi of a running sum: over its attention sublayers; if it has none, the MLP's."""
        if not self.keeps_psi or psi_BT is None:
            return None
        if step.num_attention == 0:
            return self._own_psi(psi_BT, step)
        if not step.is_attention:
            return old_psi_BT
        if step.num_attention == 1 or old_psi_BT is None or self.block_psi == "last":
            return psi_BT
        if self.block_psi == "max":
            return torch.maximum(old_psi_BT, psi_BT)
        return old_psi_BT + (psi_BT - old_psi_BT) / step.num_attention


def plan_steps(wiring: Wiring, num_layers: int, num_blocks: int | None) -> tuple[Step, ...]:
    """Return what each of the 2 x `num_layers` sublayers does to the history.

    A block of `attnres_block` has floor(L / N) sublayers and the last one takes the rest. A block
    of `cumulative` and `reset` has ceil(layers / N) decoder layers.
    """
    num_sublayers = 2 * num_layers
    joins: dict[int, Literal["before", "after"]] = {}
    restarts = wiring in ("attnres_block", "attnres_full", "reset")
    if wiring in ("attnres_full", "cumulative_full"):
        joins = dict.fromkeys(range(num_sublayers), "after")
    elif wiring == "attnres_block":
        assert num_blocks is not None
        size = num_sublayers // num_blocks
        ends = [(block + 1) * size - 1 for block in range(num_blocks - 1)] + [num_sublayers - 1]
        joins = dict.fromkeys(ends, "after")
    elif wiring in ("cumulative", "reset"):
        assert num_blocks is not None
        size = -(-num_layers // num_blocks)
        if wiring == "cumulative":
            joins = dict.fromkeys(range(2 * size - 1, num_sublayers, 2 * size), "after")
        else:
            joins = dict.fromkeys(range(2 * size, num_sublayers, 2 * size), "before")
    steps = []
    num_attention = 0
    for index in range(num_sublayers):
        join: Literal["never", "before", "after"] = joins.get(index, "never")
        num_attention = 0 if join == "before" else num_attention
        num_attention += index % 2 == 0
        steps.append(Step(index % 2 == 0, join, restarts, num_attention))
        num_attention = 0 if join == "after" and restarts else num_attention
    return tuple(steps)


def _read(port: DepthPort, sources: tuple[Source, ...]) -> DepthRead:
    assert isinstance(port, DepthRouter)
    read: DepthRead = port(sources)
    return read


def _stream_of(state: DepthState) -> Tensor:
    assert state.stream is not None
    return state.stream


def _tensors_of(source: Source) -> list[Tensor]:
    return [tensor for tensor in source if tensor is not None]
