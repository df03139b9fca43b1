"""Reading numbers out of answers: a number is right whatever it is dressed in."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation

FILTERS = {"pass@1": "strict", "pass@1_flexible": "flexible"}
"""How each metric reads an answer."""

# A number with optional thousands separators. A full stop belongs to it between digits, and before
# one where nothing stands in front: not that of a sentence, an abbreviation or an ellipsis.
_ANY = re.compile(
    r"(?<!\w)(?<!\d\.)[-\u2212]?[$€£]?\s?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)
_STRICT = re.compile(r"####\s*(.+)")


def strict_number(text: str) -> Decimal | None:
    """Return the first number of the first line after `####`, or None."""
    match = _STRICT.search(text)
    if match is None:
        return None
    found = _ANY.search(match[1].replace("*", ""))
    return _value(found[0]) if found else None


def flexible_number(text: str) -> Decimal | None:
    """Return the last number of the text, or None."""
    found = _ANY.findall(text.replace("*", ""))
    return _value(found[-1]) if found else None


def _value(text: str) -> Decimal | None:
    cleaned = re.sub(r"[\s,$€£]", "", text).replace("\u2212", "-")
    try:
        return Decimal(cleaned)
    except InvalidOperation:
        return None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1.

    Args:
        num_samples: Completions n of one question.
        num_correct: Right ones c among them.
        k: Completions one may look at; at most n.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
