"""The page on figures says what the code does; its commands and those on long context run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oasis_eval.report.figures.kinds import NAMES
from tests.command_line import CommandLine
from tests.tiny import build_model, prose, save

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "figures.md").read_text(encoding="utf-8")
PROTOCOLS = (DOCS / "protocols.md").read_text(encoding="utf-8")


def commands(page: str) -> list[str]:
    joined = re.sub(r" \\\n\s+", " ", page)
    return re.findall(r"^    (oasis-eval .*)$", joined, flags=re.MULTILINE)


def test_the_page_names_every_kind() -> None:
    """Each in a row of its own."""
    assert tuple(re.findall(r"^\| `([a-z-]+)` \| [^`]", PAGE, flags=re.MULTILINE))[-9:] == NAMES


@pytest.mark.slow  # a dozen figures and passes over a thousand tokens: half a minute
def test_commands_and_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown, one after the other, with TINY as the reader's model."""
    save(tmp_path / "my-llama", model=build_model(max_position_embeddings=512))
    (tmp_path / "notes.txt").write_text(prose(1300))
    monkeypatch.chdir(tmp_path)
    call = CommandLine(monkeypatch, capsys)
    shown = [*commands(PAGE), *commands(PROTOCOLS)]
    for command in shown:
        result = call(shlex.split(command)[1:])

        assert result.status == 0, (command, result.err)
    assert {command.split()[1] for command in shown} == {"evaluate", "figures", "attention"}
    stems = {path.name.split("-")[0] for path in (tmp_path / "figures").glob("*.pdf")}
    assert {"perplexity", "outliers", "sink", "context", "passkey", "attention"} <= stems
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, {})
