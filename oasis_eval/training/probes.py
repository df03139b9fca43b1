"""What is watched while a model trains: held-out loss, sinks and outliers on a few windows.

One pass gives both: the diagnostics observe the decoder, and its output goes through the head. The
numbers are those of `diagnose`, on text that no step reads.

Shapes: N windows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oasis_eval.diagnostics.measure import summarize
from oasis_eval.diagnostics.observation import observe

METRICS = (
    "sink_rate",
    "sink_mass",
    "null_mass",
    "max_logit",
    "max_inf_norm_outputs",
    "avg_kurtosis_outputs",
    "max_inf_norm_linear_inputs",
    "avg_kurtosis_linear_inputs",
)
"""Diagnostics that the log keeps, where a model has them."""


@torch.no_grad()
def probe(model: Any, windows_NT: Tensor, *, batch_size: int) -> dict[str, float]:
    """Return the held-out loss, nats a token, and `METRICS`.

    Args:
        model: A causal LM, in any mode; left in the mode it was in.
        windows_NT: Token ids on any device.
        batch_size: Most windows of one pass.
    """
    was_training = model.training
    model.eval()
    nll = 0.0
    try:
        with observe(model) as observation:
            for ids_BT in windows_NT.to(model.device).split(batch_size):
                hidden_BTD = observation.run(ids_BT).last_hidden_state
                logits_BTV = model.lm_head(hidden_BTD[:, :-1]).float()
                targets = ids_BT[:, 1:].flatten()
                nll += F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="sum").item()
    finally:
        model.train(was_training)
    found = summarize(observation).metrics
    num_targets = windows_NT.shape[0] * (windows_NT.shape[1] - 1)
    return {
        "held_out_loss": nll / num_targets,
        **{name: found[name] for name in METRICS if name in found},
    }
