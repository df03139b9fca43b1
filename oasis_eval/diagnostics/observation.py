"""A model under observation: everything that is measured in one forward pass, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oasis_eval.diagnostics.attention import AttentionCall, HeadSums
from oasis_eval.diagnostics.attention_hooks import watch_attention
from oasis_eval.diagnostics.capture import ActivationWatch
from oasis_eval.diagnostics.routing import RoutingWatch


class Observation:
    """Sums over the passes that were run while a model was observed."""

    def __init__(self, model: Any, *, by_position: bool = False) -> None:
        self.activations = ActivationWatch()
        self.routing = RoutingWatch()
        self.heads: dict[str, HeadSums] = {}
        """By attention module."""
        self.num_sequences = self.num_tokens = 0
        self.longest = 0
        """Tokens of the longest sequence."""
        self._model = model
        self._by_position = by_position
        self._real_BT: Tensor | None = None

    @torch.no_grad()
    def run(self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None = None) -> Any:
        """Run the model without its head and take everything in.

        Args:
            input_ids_BT: Token ids.
            attention_mask_BT: 0 for padding, on either side; None: no padding.

        Returns:
            What the backbone returns, which is what it returns unobserved.
        """
        real_BT = None if attention_mask_BT is None else attention_mask_BT.bool()
        if real_BT is not None and bool(real_BT.all()):
            real_BT = attention_mask_BT = None
        self._real_BT = self.activations.real_BT = self.routing.real_BT = real_BT
        self.activations.num_sequences, self.activations.num_tokens = input_ids_BT.shape
        model = backbone(self._model)
        try:
            output = model(
                input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False
            )
            self.activations.end_pass()
        finally:
            self.activations.drop_pass()
            self.routing.end_pass()
        lengths_B = (
            [input_ids_BT.shape[1]] * len(input_ids_BT)
            if real_BT is None
            else real_BT.sum(dim=-1).tolist()
        )
        self.num_sequences += len(lengths_B)
        self.num_tokens += sum(lengths_B)
        self.longest = max(self.longest, *lengths_B)
        return output

    def look(self, name: str, call: AttentionCall) -> None:
        """Take in one attention call."""
        self.heads.setdefault(name, HeadSums(self._by_position)).add(call, self._real_BT)


@contextmanager
def observe(model: nn.Module, *, by_position: bool = False) -> Iterator[Observation]:
    """Observe `model` for the length of the block; nothing of it stays behind, whatever happens.

    Args:
        model: A causal LM.
        by_position: Whether attention is also summed up by position of the query.
    """
    observation = Observation(model, by_position=by_position)
    with ExitStack() as undo:
        undo.enter_context(observation.activations.watching(model))
        undo.enter_context(observation.routing.watching(model))
        undo.enter_context(watch_attention(model, observation.look))
        yield observation


def backbone(model: Any) -> Any:
    """Return a causal LM without its head."""
    prefix = getattr(model, "base_model_prefix", "")
    return model._modules.get(prefix, model) if prefix else model
