"""The page on diagnostics: its commands and its reading of results run, its metrics exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oasis_eval.report.numbers import KNOWN_METRICS
from tests import tiny
from tests.command_line import CommandLine

PAGE = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]


def test_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown, one after the other, with TINY and few windows of a short text for the hub's."""
    tiny.save(tmp_path / "my-model")
    (tmp_path / "wiki.txt").write_text(tiny.prose(150))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))
    call = CommandLine(monkeypatch, capsys)
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] == "diagnose":
            words += ["--limit", "1"]
        elif words[0] == "attention":
            words[words.index("0,4")] = "0"  # TINY has no layer 4
        elif words[0] != "figures":
            words += ["--data", "wikitext2=wiki.txt", "--window", "64", "--limit", "2", "--quiet"]
        result = call(words)

        assert result.status == 0, (command, result.err)
    assert {command.split()[1] for command in COMMANDS} == {
        *("diagnose", "evaluate", "sensitivity", "attention", "figures")
    }
    assert list((tmp_path / "figures").glob("attention*.pdf"))
    assert list((tmp_path / "figures").glob("outliers*.pdf"))
    exec(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[-1])
    printed = capsys.readouterr().out
    assert printed.count("w4a4 layer") == printed.count("w4a4-static region") == 1
    assert "('q_proj', " in printed


def test_every_metric_of_the_comparison_is_known() -> None:
    """Named in full, each has a header in tables."""
    section = PAGE.partition("## Fidelity")[2].partition("## Sensitivity")[0]
    names = [
        name
        for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    ]

    assert len(names) == 15
    assert set(names) <= KNOWN_METRICS
