"""What README and docs show runs as shown, with a tiny checkpoint as the reader's own."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from oasis_eval.cli import main
from oasis_eval.quant.schemes import resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.report.tables import load_spec
from tests.tiny import build_model, prose, save

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    re.sub(r"\\\n\s+", "", text)
    for text in re.findall(r"^    (oasis-eval (?:.*\\\n)*.*)$", README, flags=re.MULTILINE)
]
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
QUESTIONS = [
    {"question": f"Ann has {n} eggs and gets 2. How many?", "answer": f"{n} + 2.\n#### {n + 2}"}
    for n in range(8)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: a checkpoint, texts, questions, and an lm-eval task for `arc_easy`."""
    home = tmp_path_factory.mktemp("reader")
    save(home / "my-llama", model=build_model(max_position_embeddings=4096))
    (home / "notes.txt").write_text(prose(300))
    (home / "wiki.raw").write_text(f" = Title = \n \n {prose(4500)} \n")
    (home / "tasks" / "text").mkdir(parents=True)
    (home / "tasks" / "text" / "demo.txt").write_text(prose(1100))
    for name in ("test", "train"):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (home / "results" / "sweeps").mkdir(parents=True)
    for grid in (ROOT / "results" / "sweeps").glob("*.yaml"):
        text = grid.read_text().replace("smollm2-135m-instruct", "./my-llama")
        (home / "results" / "sweeps" / grid.name).write_text(text)
    (home / "arc.yaml").write_text(
        yaml.safe_dump(
            {
                "task": "arc_easy",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(home / "test.jsonl")}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": ["2", "3"],
                "doc_to_target": 0,
            }
        )
    )
    return home


def local(command: str, home: Path) -> list[str]:
    """The command with the hub and the 135M model replaced by what is at hand, nothing else."""
    words = shlex.split(command.replace("smollm2-135m-instruct", "./my-llama"))[1:]
    if words[0] == "evaluate" and "wikitext2" in words:
        words += ["--data", f"wikitext2={home / 'wiki.raw'}"]
    if words[0] == "evaluate" and "gsm8k" in words:
        words += ["--max-new-tokens", "8", "--scheme", "w4a4"]
    if words[:2] == ["harness", "run"]:
        index = words.index("--tasks") + 1
        words[index] = words[index].replace("arc_easy", str(home / "arc.yaml"))
        words += ["--metadata", json.dumps({"data": str(home / "wiki.raw")})]
    return words


def test_readme_shows_commands_and_blocks() -> None:
    """The patterns of this file find what the README shows."""
    assert len(COMMANDS) >= 8
    assert len(BLOCKS) == 2


@pytest.mark.slow
def test_readme_commands_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command line of the README ends with status 0, in the order shown."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    for command in COMMANDS:
        words = local(command, home)
        monkeypatch.setattr(sys, "argv", ["oasis-eval", *words])
        status: object = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0

        assert status == 0, f"{command}\n{capsys.readouterr().err}"
    assert (home / "table.tex").read_text().count(r"\toprule") == 1
    assert (home / "numbers.csv").read_text().count("\n") > 3


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_readme_python_runs(block: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the README runs and leaves results."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    names: dict[str, object] = {}

    exec(block.replace('"arc_easy"', repr(str(home / "arc.yaml"))), names)

    assert "results" in names or "report" in names


@pytest.mark.parametrize("page", ["backends", "protocols", "ptq", "tables"])
def test_yaml_of_the_pages_is_valid(page: str, tmp_path: Path) -> None:
    """The specification files that the pages show are accepted."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)

    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        if page == "tables":
            load_spec(str(path))
        else:
            assert unsupported(resolve(str(path))) is None
