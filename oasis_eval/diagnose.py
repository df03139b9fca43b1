"""A first look at why a checkpoint breaks or holds: one pass over a short text, one screen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oasis_eval import corpus
from oasis_eval.comparison import Comparison
from oasis_eval.diagnostics.measure import measure
from oasis_eval.diagnostics.verdict import verdict
from oasis_eval.errors import DataError
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.quant import schemes
from oasis_eval.registry import resolve
from oasis_eval.spec import Dtype

_WINDOW = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """What to look at."""

    model: str
    """What `evaluate` takes."""
    scheme: str
    text: Path | None
    """None: the prose that ships with the suite."""
    window: int | None
    """Tokens of a window; None: 512, or as many as the model has positions."""
    num_windows: int
    batch_size: int
    device: str
    dtype: Dtype | None
    """None: fp32 on the CPU, bf16 elsewhere."""


def diagnose(plan: Plan) -> list[str]:
    """Measure a model under one scheme and return the lines of its verdict.

    Raises:
        OasisError: The model or text cannot be had, or the scheme does not fit.
    """
    card, scheme = resolve(plan.model), schemes.resolve(plan.scheme)
    text = corpus.builtin() if plan.text is None else corpus.load_text_file(plan.text)
    dtype: Dtype = plan.dtype or ("fp32" if plan.device == "cpu" else "bf16")
    reference = load(card, dtype=scheme.dtype or dtype, device=plan.device)
    compares = scheme.execution != "none" and reference.applied is None
    window = plan.window or default_window(reference)
    windows = cut(reference, text, window=window, num_windows=plan.num_windows)
    head = corpus.head_tokens(reference.tokenizer)
    comparison = Comparison.of(reference, windows, len(head), dtype) if compares else None
    with prepare(reference, scheme, dtype=dtype, last=comparison is None) as prepared:
        found = measure(prepared, windows, batch_size=plan.batch_size)
        compared = [] if comparison is None else ["", *comparison.lines(prepared)]
    how = dict.fromkeys((scheme.name, prepared.dtype))  # one word where the scheme is the dtype
    number = f"{len(windows)} window{'' if len(windows) == 1 else 's'}"
    return [
        f"{card.label}, {', '.join(how)}: {number} of {window} tokens of {text.name}"
        + (f", {len(head)} of them special" if head else ""),
        "",
        *verdict(found),
        *compared,
        *(f"warning: {text}" for text in found.warnings),
    ]


def default_window(reference: Reference) -> int:
    """Return the tokens of a window where nobody says: 512, or what the model has positions for."""
    return min(_WINDOW, reference.context_length or _WINDOW)


def cut(
    reference: Reference, text: corpus.Corpus, *, window: int, num_windows: int
) -> list[list[int]]:
    """Return the first windows of a text as token ids.

    A model that was trained with a start token sinks into it: every window has its own.

    Raises:
        DataError: The text fills no window.
    """
    head = corpus.head_tokens(reference.tokenizer)
    ids = corpus.encode(reference.tokenizer, text.stream(), special_tokens=False)
    body = window - len(head)
    if body < 1:
        raise DataError(f"a window of {window} tokens has no room beside {len(head)} special ones")
    starts = range(0, len(ids) - body + 1, body)[:num_windows]
    if not starts:
        raise DataError(
            f"{text.name} has {len(ids)} tokens, a window takes {body}; give a longer text or a "
            "smaller --window"
        )
    return [head + ids[start : start + body] for start in starts]
