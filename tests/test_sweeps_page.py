"""The page on sweeps: its grid and commands run, its tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from oasis_eval.parsing import parse
from oasis_eval.record import read_records
from oasis_eval.spec import Exclusion, Settings, SweepSpec
from oasis_eval.sweep.grid import MAX_CELLS, read_grid
from tests.command_line import CommandLine
from tests.tiny import prose, save

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (oasis-eval .*)$", PAGE, flags=re.MULTILINE)
(GRID,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the grid of the page, with a tiny checkpoint as the reader's own."""
    save(tmp_path / "my-llama")
    (tmp_path / "notes.txt").write_text(prose(300))
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    call = CommandLine(monkeypatch, capsys)
    for command in COMMANDS:
        result = call(shlex.split(command)[1:])
        assert result.status == 0, (command, result.err)

    kinds = {
        (record.spec.scheme.name, record.spec.task.protocol)
        for record in read_records([tmp_path / "results" / "runs"])
    }
    names = ("fp32", "w8a8", "w4a4", "w4a4-gptq")
    expected = {(name, protocol) for name in names for protocol in ("gptq-64", "llamacpp-64")}
    assert kinds == expected - {("w8a8", "llamacpp-64")}
    assert len(COMMANDS) == 4


def test_page_names_every_key() -> None:
    """Of grids and of exclusions."""
    rows = re.findall(r"^\| (`.+?) \| ", PAGE, flags=re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"`(\w+)`", row)}

    assert named >= set(SweepSpec.model_fields)
    (exclude,) = re.findall(r"^\| `exclude` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", exclude)) == set(Exclusion.model_fields)
    assert f"at most {MAX_CELLS:,} cells" in PAGE


def test_options_of_evaluate_are_settings_of_a_grid() -> None:
    """None of them is forgotten on the page."""
    (row,) = re.findall(r"^\| (`protocols`.*?) \| the options", PAGE, flags=re.MULTILINE)

    assert set(re.findall(r"`(\w+)`", row)) == set(Settings.model_fields)


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "sweeps").glob("*.yaml")))
def test_grids_that_ship_are_grids(path: Path) -> None:
    """With a comment on top and the name of their file."""
    assert path.read_text().startswith("# ")
    assert read_grid(path).name == path.stem


def test_the_grid_of_the_page_is_one() -> None:
    """As YAML of any reader."""
    parse(SweepSpec, yaml.safe_load(GRID), origin="page")
