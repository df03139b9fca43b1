"""Taps see the tensors they are named for, cost nothing idle, and act when replaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.normalizers import Normalizer, normalize
from oasis_eval.modeling.taps import AttentionTaps, Tap, is_active
from tests.modeling.attention_calls import (
    CALLS,
    EVERY,
    HEADS,
    SCALING,
    SOFTMAX1,
    make,
    mask_of,
    run,
)


class Shift(nn.Module):
    """Stands in for whatever replaces a tap."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return value + self.by


def test_tap_activity() -> None:
    """A tap is active once hooked or replaced, and idle again when the hook is gone."""
    taps = AttentionTaps()
    idle = is_active(taps.scores)
    handle = taps.scores.register_forward_hook(lambda *_: None)
    hooked = is_active(taps.scores)
    handle.remove()
    removed = is_active(taps.scores)
    taps.scores = Shift(0.0)  # type: ignore[assignment]

    assert (idle, hooked, removed, is_active(taps.scores)) == (False, True, False, True)
    assert not is_active(None)
    assert Tap()(torch.ones(2)) is not None


@pytest.mark.parametrize("normalizer", EVERY, ids=lambda n: n.kind)
@pytest.mark.parametrize("name", ["scores", "probs", "context"])
def test_hooked_taps_see_and_change_nothing(normalizer: Normalizer, name: str) -> None:
    """Watching any tap leaves the result as it is; each sees the tensor it is named for."""
    call = CALLS["left-padded, grouped heads"]
    tensors = make(call)
    mask = mask_of(call)
    logit = torch.linspace(-1, 2, HEADS) if normalizer.kind == "sink" else None
    expected = run(call, tensors, normalizer, eager=True)
    taps = AttentionTaps()
    seen: list[Tensor] = []
    getattr(taps, name).register_forward_hook(lambda *hook: seen.append(hook[2]))

    output = attend(
        *tensors, mask, normalizer=normalizer, scaling=SCALING, null_logit_H=logit, taps=taps
    )

    torch.testing.assert_close(output.context, expected.context)
    raw = SCALING * tensors[0] @ tensors[1].repeat_interleave(2, 1).transpose(-1, -2)
    wanted = {"scores": raw, "probs": expected.probs, "context": expected.context}[name]
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], wanted)


def test_null_mass_tap_keeps_the_fast_path() -> None:
    """The null mass can be watched without weights being formed."""
    call = CALLS["causal"]
    taps = AttentionTaps()
    seen: list[Tensor] = []
    taps.null_mass.register_forward_hook(lambda *hook: seen.append(hook[2]))

    output = attend(*make(call), None, normalizer=SOFTMAX1, scaling=SCALING, taps=taps)

    assert output.null_mass is None
    torch.testing.assert_close(seen[0], run(call, make(call), eager=True).null_mass)


@pytest.mark.parametrize("name", ["scores", "probs", "context"])
def test_replaced_taps_act(name: str) -> None:
    """A replacement changes the tensor on its way: scores before the mask, weights, context."""
    call = CALLS["left-padded"]
    query, key, value = make(call)
    taps = AttentionTaps()
    setattr(taps, name, Shift(0.25))
    mask = mask_of(call)
    assert mask is not None

    output = attend(query, key, value, mask, normalizer=SOFTMAX1, scaling=SCALING, taps=taps)

    scores = SCALING * query @ key.transpose(-1, -2) + (0.25 if name == "scores" else 0.0)
    probs = normalize(scores, mask, SOFTMAX1).probs + (0.25 if name == "probs" else 0.0)
    context = (probs @ value).transpose(1, 2) + (0.25 if name == "context" else 0.0)
    torch.testing.assert_close(output.context, context)
