"""Errors that a user can cause. Each says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class OasisError(Exception):
    """Base of every error that is the input's fault, not the program's.

    The command line prints its text in one or two lines and exits with status 2.
    """


class SpecError(OasisError):
    """A specification (card, scheme, task, recipe, option) is not valid."""


class UnknownNameError(SpecError):
    """A name that is in no registry; the message lists the nearest known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """Build the message.

        Args:
            kind: What the name should have named, for example ``"scheme"``.
            name: The name that was given.
            known: Every name that would have been accepted.
        """
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


@contextmanager
def named(origin: str) -> Iterator[None]:
    """Let errors begin with what they are about; their kind stays."""
    try:
        yield
    except OasisError as error:
        error.args = (f"{origin}: {error}",)
        raise


class CheckpointError(OasisError):
    """A checkpoint is missing, incomplete, damaged or of a refused kind."""


class CardMismatchError(CheckpointError):
    """A checkpoint is not what its card says."""


class UnsupportedSchemeError(OasisError):
    """A backend cannot do what a scheme asks for."""


class QuantizationError(OasisError):
    """Quantizing failed or had no effect."""


class DataError(OasisError):
    """A data set is missing, unreadable, empty or too short."""


class MissingExtraError(OasisError):
    """An optional package is not installed."""

    def __init__(self, package: str, install: str) -> None:
        """Build the message.

        Args:
            package: The package that could not be imported.
            install: The command that installs it.
        """
        super().__init__(f"package {package!r} is not installed; run: {install}")


class TimeLimitError(OasisError):
    """A cell took longer than it was allowed to."""


class RecordError(OasisError):
    """A stored record cannot be read or does not fit the request."""


class NoMatchError(RecordError):
    """Filters leave nothing of the records that are there."""


class OutputError(RecordError):
    """A result cannot be written: whatever is computed from here on would be lost."""
