"""How a process ended, in one line."""

from __future__ import annotations

from typing import IO


def last_words(status: int, errors: IO[str]) -> str:
    """Return how a process ended, and the last line that it wrote.

    Args:
        status: As `subprocess` has it; a signal is negative.
        errors: What it wrote.
    """
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    how = f"signal {-status}" if status < 0 else f"status {status}"
    hint = "; not enough memory is the usual cause" if status == -9 else ""
    return f"its process ended with {how}{hint}" + (f": {lines[-1][:200]}" if lines else "")
