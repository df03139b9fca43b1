"""Attention maps of several checkpoints on the same first tokens of one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oasis_eval import corpus
from oasis_eval.attention_maps import AttentionMaps
from oasis_eval.diagnose import cut
from oasis_eval.diagnostics.maps import capture_maps
from oasis_eval.errors import SpecError
from oasis_eval.loading import load, prepare
from oasis_eval.quant import schemes
from oasis_eval.registry import resolve
from oasis_eval.spec import Dtype


@dataclass(frozen=True, slots=True)
class Plan:
    """Which maps are captured."""

    models: tuple[str, ...]
    """What `evaluate` takes."""
    schemes: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    text: Path | None
    """None: the prose that ships with the suite."""
    num_tokens: int
    """First tokens of the text, special ones included."""
    device: str
    dtype: Dtype | None
    """None: fp32 on the CPU, bf16 elsewhere."""


def capture(plan: Plan) -> Iterator[AttentionMaps]:
    """Yield the maps of every model under every scheme, one model in memory at a time.

    Raises:
        OasisError: A model or text cannot be had, a scheme does not fit, or a layer or head is
            not there.
        SpecError: The models read the text as different tokens.
    """
    cards = [resolve(name) for name in plan.models]
    chosen = [schemes.resolve(name) for name in plan.schemes]
    text = corpus.builtin() if plan.text is None else corpus.load_text_file(plan.text)
    dtype: Dtype = plan.dtype or ("fp32" if plan.device == "cpu" else "bf16")
    first: AttentionMaps | None = None
    for card in cards:
        wanted: set[Dtype] = {scheme.dtype or dtype for scheme in chosen}
        start: Dtype = wanted.pop() if len(wanted) == 1 else "fp32"
        reference = load(card, dtype=start, device=plan.device)
        (ids,) = cut(reference, text, window=plan.num_tokens, num_windows=1)
        for scheme in chosen:
            with prepare(reference, scheme, dtype=dtype, last=scheme is chosen[-1]) as prepared:
                maps = capture_maps(
                    prepared, ids, layers=plan.layers, heads=plan.heads, text_sha256=text.sha256
                )
            first = first or maps
            if maps.info.tokens != first.info.tokens:
                raise SpecError(
                    f"{card.name} reads the text as other tokens than {first.info.label}; maps "
                    "side by side need one tokenizer: give models that share it"
                )
            yield maps
