"""Records and samples on disk: what was measured reads back, whatever a model may have said."""

from __future__ import annotations

from pathlib import Path

from oasis_eval.record import read_samples, write_samples


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    """A completion cut inside a character is stored, and reads back as it was."""
    rows: list[dict[str, object]] = [{"completion": "72 \ud83d", "right": True}]
    write_samples(tmp_path, "key", rows)

    assert read_samples(tmp_path, "key") == rows
