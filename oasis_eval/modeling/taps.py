"""Named identity modules: the points of a model where others may look or replace.

A tap returns its input. Whoever wants to see a tensor hooks the tap; whoever wants to change it
replaces the tap by another module. The model knows neither, it only asks `is_active` where an
observer costs something, such as attention probabilities that a fused kernel never forms.
"""

from __future__ import annotations

from torch import Tensor, nn


class Tap(nn.Module):
    """Identity on one tensor of any shape."""

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return `value` itself.

        Args:
            value: The tensor.
            mask: What of it is visible, where the tap's description names a mask.
        """
        return value


def is_active(tap: nn.Module | None) -> bool:
    """Whether somebody watches or replaced `tap`: its values must then really be computed."""
    if tap is None:
        return False
    return type(tap) is not Tap or bool(
        tap._forward_hooks
        or tap._forward_pre_hooks
        or tap._backward_hooks
        or tap._backward_pre_hooks
    )


class AttentionTaps(nn.Module):
    """The observable tensors of one attention sublayer (B batch, T queries, S keys, H heads)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Tap()
        """[B, H, T, S] after scaling and soft capping, before the mask; activates eager mode.
        Called with the mask, boolean and broadcastable (True: visible), or None: all is visible."""
        self.probs = Tap()
        """[B, H, T, S] after the normalizer, before dropout; activates eager mode. Called with the
        mask too."""
        self.context = Tap()
        """[B, T, H, Dh] weighted values, before any gate and the output projection."""
        self.null_mass = Tap()
        """[B, H, T] fp32, only under normalizers with a null; costs nothing to watch."""


class KeyValueTaps(AttentionTaps):
    """Those of `attend`, and what goes into the KV cache (K key heads, C head width)."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Tap()
        """[B, K, T, C] after the rotary embedding, as it is written to the cache."""
        self.value = Tap()
        """[B, K, T, C] as it is written to the cache."""
