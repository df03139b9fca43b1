"""Text of options into values, each checked with the option's name in the message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from oasis_eval.errors import SpecError

if TYPE_CHECKING:
    from oasis_eval.spec import Dtype


RECORDS = Path("results/runs")
"""Where records go and come from unless told otherwise."""
SETTINGS = typer.Option(
    "--set",
    metavar="SETTING=VALUE",
    help="Another value than the variant's: coupling_beta=fixed, token_log_n=2; a wrong name lists "
    "all. Repeatable.",
)
"""The option that `settings` reads."""


def names(text: str, option: str) -> tuple[str, ...]:
    """Return the distinct names of a comma-separated list, in order."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise SpecError(f"{option} {text!r}: expected names separated by commas")
    return names


def at_least(*numbers: tuple[str, int | None, int]) -> None:
    """Refuse the first number that is below its least value: option, number, least value."""
    for name, value, least in numbers:
        if value is not None and value < least:
            raise SpecError(f"{name} {value}: expected {least} or more")


def dtype_named(name: str | None) -> Dtype | None:
    """Return the dtype of that name."""
    from oasis_eval.spec import Dtype

    if name is not None and name not in get_args(Dtype):
        raise SpecError(f"--dtype {name!r}: expected one of {', '.join(get_args(Dtype))}")
    return name  # type: ignore[return-value]  # checked above


def mapping(items: list[str]) -> dict[str, str]:
    """Return the files of repeated `--data NAME=FILE`."""
    mapping = {}
    for item in items:
        name, sign, path = item.partition("=")
        if not sign or not path:
            raise SpecError(f"--data {item!r}: expected NAME=FILE")
        if name in mapping:
            raise SpecError(f"--data {item!r}: {name} is given twice")
        mapping[name] = path
    return mapping


def filters(items: list[str], option: str) -> dict[str, tuple[str, ...]]:
    """Return the patterns of repeated FIELD=PATTERN, by field."""
    filters: dict[str, tuple[str, ...]] = {}
    for item in items:
        name, sign, pattern = item.partition("=")
        if not sign or not name:
            raise SpecError(f"{option} {item!r}: expected FIELD=PATTERN")
        filters[name] = (*filters.get(name, ()), pattern)
    return filters


def settings(items: list[str]) -> dict[str, object]:
    """Return the values of repeated `--set SETTING=VALUE`, each in the type of its setting."""
    from typing import get_type_hints

    from pydantic import TypeAdapter, ValidationError

    from oasis_eval.errors import UnknownNameError
    from oasis_eval.modeling.config import SETTING_NAMES, OasisSettings

    types = get_type_hints(OasisSettings)
    values: dict[str, object] = {}
    for item in items:
        name, sign, text = item.partition("=")
        if not sign:
            raise SpecError(f"--set {item!r}: expected SETTING=VALUE")
        if name not in SETTING_NAMES:
            raise UnknownNameError("setting", name, SETTING_NAMES)
        if name in values:
            raise SpecError(f"--set {item!r}: {name} is given twice")
        try:
            values[name] = TypeAdapter(types[name]).validate_strings(text)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise SpecError(f"--set {item!r}: expected {expected}") from None
    return values
