"""The order of rows and columns: by meaning where there is one, else natural (7b before 13b)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from oasis_eval.spec import QuantScheme

SortKey = tuple[object, ...]

_DTYPES = ("fp32", "bf16", "fp16")
_UNQUANTIZED_BITS = 16
_KNOWN: dict[str, tuple[str, ...]] = {
    "task": ("wikitext2", "wiki40b", "bookcorpus", "gsm8k", "mini_ppl", "mini_gsm", "passkey"),
    "variant": (
        "plain",
        "vanilla",
        "aos",
        "outeffhop",
        "clipped",
        "gated",
        "gated_g1",
        "sparsemax",
        "entmax15",
        "oasis",
        "oasis_adaptive",
    ),
}


def natural_key(text: str) -> SortKey:
    """Return a key under which numbers inside `text` compare as numbers."""
    parts = re.split(r"([0-9]+)", text.casefold())
    return (*((int(part), "") if part.isdecimal() else (-1, part) for part in parts), (-2, text))


def scheme_key(scheme: QuantScheme) -> SortKey:
    """Return a key: unquantized dtypes, weight and activation bits downwards, what is unknown."""
    if scheme.execution == "unknown":
        return (2, 0, 0, natural_key(scheme.name))
    if scheme.execution == "none":
        rank = _DTYPES.index(scheme.dtype) if scheme.dtype else len(_DTYPES)
        return (0, rank, 0, natural_key(scheme.name))
    weights = scheme.weights.bits if scheme.weights else _UNQUANTIZED_BITS
    activations = scheme.activations.bits if scheme.activations else _UNQUANTIZED_BITS
    return (1, -weights, -activations, natural_key(scheme.name))


def ranks(
    dimension: str,
    values: Iterable[str],
    *,
    first: tuple[str, ...],
    schemes: Mapping[str, QuantScheme],
) -> dict[str, int]:
    """Return the position of each of `values` in its dimension.

    Args:
        dimension: Name of the dimension.
        values: The values that occur; order and repetition do not matter.
        first: Values that come before all others, in this order.
        schemes: Definition of every scheme name.
    """
    known = first + _KNOWN.get(dimension, ())

    def key(value: str) -> SortKey:
        if value in known:
            return (0, known.index(value))
        if dimension == "scheme":
            return (1, scheme_key(schemes[value]))
        return (1, natural_key(value))

    return {value: position for position, value in enumerate(sorted(set(values), key=key))}
