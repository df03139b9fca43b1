"""The page on checkpoints says what the code does, and its commands run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from oasis_eval.cli import main
from oasis_eval.modeling.formats.folder import FORMATS
from oasis_eval.modeling.formats.open_attnres import WIRINGS
from oasis_eval.registry import cards
from tests.tiny import build_model, prose, save

PAGE = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (oasis-eval .*)$", PAGE, flags=re.MULTILINE)


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shown, with a tiny Llama for the 135M model and a short text for the hub's."""
    save(tmp_path / "plain", model=build_model(initializer_range=0.1))
    (tmp_path / "wiki.txt").write_text(prose(300))
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        words = shlex.split(command.replace("smollm2-135m-instruct", "./plain"))[1:]
        if words[1] in cards():
            continue  # weights on the hub
        if words[0] == "evaluate":
            words += ["--data", "wikitext2=wiki.txt", "--window", "64", "--quiet"]
        monkeypatch.setattr(sys, "argv", ["oasis-eval", *words])

        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, command
    assert sum(command.startswith("oasis-eval convert") for command in COMMANDS) >= 3


def test_page_lists_every_format() -> None:
    """One row per format, under its name."""
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE, flags=re.MULTILINE)

    assert [item.name for item in FORMATS if item.name not in rows] == []


def test_page_lists_every_form_of_open_attnres() -> None:
    """Mode, stored tensors and wiring, as in the code."""
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (yes|no) \| `(\w+)`", PAGE, flags=re.MULTILINE)
    answer = {"yes": True, "no": False}

    assert {
        (mode, answer[biases], answer[final]): wiring for mode, biases, final, wiring in rows
    } == {tuple(stored): wiring for stored, wiring in WIRINGS.items()}
