"""A model ready to be measured: what the harness and the diagnostics are handed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedTokenizerBase

from oasis_eval.quant.backends import Applied
from oasis_eval.record import Coverage
from oasis_eval.spec import Dtype, ModelCard, QuantScheme


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A causal LM under one scheme, in evaluation mode on its device."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    card: ModelCard
    digest: str
    """SHA-256 of the checkpoint's files."""
    scheme: QuantScheme
    dtype: Dtype
    device: str
    context_length: int | None
    """Most positions the model was made for; None where neither card nor configuration says."""
    attention: str
    """Attention implementation that runs."""
    coverage: Coverage | None = None
    warnings: tuple[str, ...] = field(default=())
    applied: Applied | None = None
    """The scheme in effect; None: a reference scheme."""
