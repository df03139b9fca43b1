"""Which tokens of the running forward pass are padding.

A Linear sees activations and no mask. Ranges over tokens (calibration, dynamic ranges per tensor
or per channel) must leave padding out and keep sequences apart, so the mask that the model was
called with is noted here for as long as the call lasts.

Dimensions: B sequences, T tokens, K inputs.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError


class Tokens(NamedTuple):
    """Shape of the tokens in a forward pass and which of them are real."""

    num_sequences: int
    num_tokens: int
    real_BT: Tensor | None  # noqa: N815 - shape suffix
    """Boolean; None when there is no padding."""
    unreadable: str | None = None
    """Why padding is not known, if it is not."""


class PaddingContext:
    """The tokens of the forward pass that is running, innermost last."""

    def __init__(self) -> None:
        self._running: list[Tokens] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def enter(self, tokens: Tokens) -> None:
        """Note the tokens of a pass that begins."""
        self._running.append(tokens)

    def leave(self) -> None:
        """Forget the tokens of the pass that ends."""
        self._running.pop()

    def watch(self, module: nn.Module) -> None:
        """Note the tokens of every forward pass of `module` from its own arguments."""
        signature = inspect.signature(module.forward)

        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            # Keyword arguments may be swallowed by the signature's own **kwargs.
            given = signature.bind_partial(*args, **kwargs).arguments | kwargs
            source = given.get("input_ids")
            if source is None:
                source = given.get("inputs_embeds")
            self.enter(_read(source, given.get("attention_mask")))

        def after(*_: object) -> None:
            self.leave()

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def unwatch(self) -> None:
        """Remove what `watch` installed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def tokens(self, name: str) -> Tokens:
        """Return the tokens of the running pass.

        Raises:
            QuantizationError: No pass is running, or its padding is not known.
        """
        if not self._running:
            raise QuantizationError(
                f"{name}: called outside of the model's forward pass, so padding is not known; "
                "a range over tokens needs it (use granularity 'token' or static ranges)"
            )
        tokens = self._running[-1]
        if tokens.unreadable is not None:
            raise QuantizationError(f"{name}: padding is not known: {tokens.unreadable}")
        return tokens

    def sequences(
        self, x: Tensor, name: str, rows: tuple[Tensor, int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """View activations as [B, T, K] beside the mask [B, T] of real tokens.

        Args:
            x: Activations of the running pass: [B, T, K], [B * T, K], [B, 1, T, K] (a head that all
                share), or [R, K] with `rows`.
            name: Module for error messages.
            rows: Which of the B * T tokens the rows of `x` are, each once at most, and B * T; the
                tokens that are not there count as padding.

        Returns:
            The view, and the mask or None when nothing is padding.

        Raises:
            QuantizationError: It cannot be told which rows belong to which token.
        """
        tokens = self.tokens(name)
        if rows is not None and rows[1] == tokens.num_sequences * tokens.num_tokens:
            return _scatter(x, rows[0], tokens)
        if x.dim() == 2 and x.shape[0] == tokens.num_sequences * tokens.num_tokens:
            x = x.unflatten(0, (tokens.num_sequences, tokens.num_tokens))
        shared = (tokens.num_sequences, 1, tokens.num_tokens)
        if x.dim() == 4 and tuple(x.shape[:-1]) == shared:
            x = x[:, 0]
        fits = tuple(x.shape[:-1]) == (tokens.num_sequences, tokens.num_tokens)
        # Without padding a pass may hand on a part of its tokens, as generation does to the head.
        part = x.dim() == 3 and x.shape[0] == tokens.num_sequences and tokens.real_BT is None
        if not (fits or part):
            raise QuantizationError(
                f"{name}: input of shape {tuple(x.shape)} does not show which of "
                f"{tokens.num_sequences} x {tokens.num_tokens} tokens a row belongs to, so "
                "padding cannot be left out of its range (skip the module, or use granularity "
                "'token' with dynamic ranges)"
            )
        return x, tokens.real_BT


def _scatter(x_RK: Tensor, row_R: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Put some tokens' rows where they belong in [B, T, K], beside the mask of real ones."""
    shape = (tokens.num_sequences, tokens.num_tokens)
    x_NK = x_RK.new_zeros(shape[0] * shape[1], x_RK.shape[-1])
    x_NK[row_R] = x_RK
    is_there_N = torch.zeros(len(x_NK), dtype=torch.bool, device=x_RK.device)
    is_there_N[row_R] = True
    there_BT = is_there_N.unflatten(0, shape)
    if tokens.real_BT is not None:
        there_BT &= tokens.real_BT.to(x_RK.device)
    return x_NK.unflatten(0, shape), there_BT


def _read(source: object, mask: object) -> Tokens:
    """Make `Tokens` of a causal language model's token ids or embeddings, and its mask."""
    if not isinstance(source, Tensor):
        return Tokens(0, 0, None, "the model was called with neither input_ids nor inputs_embeds")
    num_sequences, num_tokens = source.shape[:2]
    if mask is None:
        return Tokens(num_sequences, num_tokens, None)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != num_sequences:
        shown = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        reason = f"attention_mask is not [sequences, tokens] but of {shown}"
        return Tokens(num_sequences, num_tokens, None, reason)
    # With a key/value cache the mask also covers earlier tokens.
    real_BT = mask[:, -num_tokens:].bool()
    return Tokens(num_sequences, num_tokens, None if bool(real_BT.all()) else real_BT)
