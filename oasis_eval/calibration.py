"""Calibration text: what fixes static ranges, cut into batches of tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from oasis_eval import corpus
from oasis_eval.errors import DataError
from oasis_eval.quant.calibrate import Batch
from oasis_eval.spec import Calibration


def text_of(settings: Calibration, data: str | None) -> corpus.Corpus:
    """Return the text that fixes static ranges: `data` if given, else what the scheme names."""
    if data is not None:
        return corpus.load_text_file(Path(data).expanduser())
    if settings.corpus == "builtin":
        return corpus.builtin()
    if settings.corpus in corpus.DATA_SETS:
        return corpus.load(settings.corpus, split=settings.split)
    return corpus.load_text_file(Path(settings.corpus).expanduser())


def notes(settings: Calibration, context_length: int | None) -> list[str]:
    """Return what is other than the scheme says: a model may have fewer positions."""
    if context_length is None or settings.length <= context_length:
        return []
    return [
        f"calibration sequences have {context_length} tokens, the positions of the model, not "
        f"{settings.length}"
    ]


def batches(
    tokenizer: PreTrainedTokenizerBase,
    settings: Calibration,
    data: str | None,
    *,
    context_length: int | None,
    device: str,
) -> list[Batch]:
    """Cut a calibration text into token batches, chosen by the scheme's seed.

    Args:
        tokenizer: The model's.
        settings: Of the scheme.
        data: Local file that replaces the scheme's text.
        context_length: Most tokens of a sequence that the model takes; None: any.
        device: Where the model is.

    Raises:
        DataError: The text is too short for the number and length asked for.
    """
    text = text_of(settings, data)
    length = min(settings.length, context_length or settings.length)
    ids = tokenizer(text.stream(), add_special_tokens=False, verbose=False)["input_ids"]
    head = corpus.head_tokens(tokenizer) if settings.special_tokens else []
    body = length - len(head)
    chunks = [ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
    wanted = settings.num_batches * settings.batch_size
    if len(chunks) < wanted:
        raise DataError(
            f"calibration needs {wanted} sequences of {length} tokens; {text.name} has "
            f"{len(chunks)} ({len(ids)} tokens): give a longer text with --data calibration=FILE"
        )
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(chunks), generator=generator)[:wanted].tolist()
    rows = torch.tensor([head + chunks[index] for index in order], device=device)
    return [
        Batch(input_ids_BT=part, attention_mask_BT=torch.ones_like(part))
        for part in rows.split(settings.batch_size)
    ]
