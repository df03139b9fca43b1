"""The pages on the command line, on lm-eval and on tables: their commands run, their lists hold."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sysconfig
from pathlib import Path

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from oasis_eval import registry
from oasis_eval.harness.lm import OasisLM
from oasis_eval.harness.plugin import PluginLM
from oasis_eval.loading import load, prepare
from oasis_eval.paths import data_folder
from oasis_eval.quant.schemes import resolve
from oasis_eval.record import read_records
from tests.command_line import CommandLine
from tests.test_readme import QUESTIONS
from tests.tiny import build_model, build_tokenizer, prose, save

DOCS = Path(__file__).parents[1] / "docs"


def _page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def _commands(page: str) -> list[list[str]]:
    """The commands that a page shows, as words after `oasis-eval`."""
    joined = re.sub(r" \\\n\s+", " ", _page(page))
    shown = re.findall(r"^    (oasis-eval .*)$", joined, flags=re.MULTILINE)
    return [shlex.split(command)[1:] for command in shown]


def _rows(page: str, header: str) -> dict[str, str]:
    """First and second column of the table with that header."""
    lines = _page(page).split(f"| {header} |", 1)[1].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {cell[0]: cell[1] for cell in cells}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, in which commands run, with a checkpoint, a text and `arc_easy`."""
    save(tmp_path / "my-llama", model=build_model())
    (tmp_path / "notes.txt").write_text(prose(600))
    (tmp_path / "arc.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tmp_path / "arc.yaml").write_text(
        yaml.safe_dump(
            {
                "task": "arc_easy",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "arc.jsonl")}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": ["2", "3"],
                "doc_to_target": 0,
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.slow  # a dozen evaluations and what reads them: half a minute
def test_commands_of_the_command_line_page_run(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown, one after the other; what was measured once is not measured again."""
    call = CommandLine(monkeypatch, capsys)
    commands = _commands("command-line")
    for words in commands:
        before = {p: p.stat().st_mtime_ns for p in (reader / "results/runs").glob("*.json")}
        result = call(words)

        assert result.status == 0, (words, result.err)
        if "w4a4-smooth" in " ".join(words):
            after = {p: p.stat().st_mtime_ns for p in (reader / "results/runs").glob("*.json")}
            assert before.items() <= after.items()
            assert len(after) == len(before) + 1
        if "--json" in words:
            (line,) = result.out.splitlines()
            assert json.loads(line)["spec"]["scheme"]["name"] == "w4a4"
    shown = {words[0] for words in commands}
    assert shown >= {"evaluate", "diagnose", "sensitivity", "quantize", "compare"}


@pytest.mark.slow  # lm-eval reads all of its task files at every start: half a minute
def test_commands_of_the_lm_eval_page_run(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown, with a local task for the hub's; the number of `harness` is that of `evaluate`."""
    packages = reader / "packages"
    packages.mkdir()
    call = CommandLine(monkeypatch, capsys)
    for words in _commands("lm-eval"):
        local = ["./arc.yaml" if word == "arc_easy" else word for word in words]
        with monkeypatch.context() as patch:
            if "hook" in words[-1]:
                patch.setattr(sysconfig, "get_path", lambda _: str(packages))
            result = call([*local, *(["--quiet"] if words[0] == "evaluate" else [])])

        assert result.status == 0, (words, result.err)
    assert not list(packages.iterdir())
    (imported,), (evaluated,) = (
        list(read_records([reader / "results" / name])) for name in ("imported", "runs")
    )
    name = "token_perplexity"
    assert imported.metric(name).value == evaluated.metric(name).value


@pytest.mark.slow  # as above
def test_python_of_the_lm_eval_page_runs(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a program; the number that it prints is that of `evaluate`."""
    (block,) = re.findall(r"```python\n(.*?)```", _page("lm-eval"), flags=re.DOTALL)
    exec(block, {})
    printed = float(capsys.readouterr().out.splitlines()[-1])
    cell = ["--task", "mini_ppl", "--window", "64", "--limit", "2", "--scheme", "w4a4"]
    CommandLine(monkeypatch, capsys)(["evaluate", "./my-llama", *cell, "--quiet"])
    (record,) = read_records([reader / "results" / "runs"])

    assert printed == record.metric("token_perplexity").value


def test_every_task_and_group_is_on_the_page() -> None:
    """With the tasks of each group, in their order."""
    folder = data_folder("tasks")
    tasks = {path.stem for path in folder.glob("oasis_*.yaml")}
    named = set(re.findall(r"`(oasis_\w+)`", " ".join(_rows("lm-eval", "task | what it is"))))
    words = {f"{name}_word" for name in named if f"{name}_word" in tasks}
    groups = {
        loaded["group"]: loaded["task"]
        for loaded in map(yaml.safe_load, map(Path.read_text, (folder / "groups").glob("*.yaml")))
    }

    assert named | words == tasks
    assert {
        name.strip("`"): re.findall(r"`(\w+)`", members)
        for name, members in _rows("lm-eval", "group | its tasks").items()
    } == groups


def test_every_argument_of_the_model_type_is_on_the_page() -> None:
    """Those of lm-eval's own options are named in the text."""
    named = {name.strip("`") for name in _rows("lm-eval", "`--model_args` | what it is | default")}
    taken = set(inspect.signature(PluginLM.__init__).parameters)

    assert named == taken - {"self", "unknown", "batch_size", "max_batch_size", "device"}


def test_every_table_that_ships_is_on_the_page() -> None:
    """By its name."""
    shipped = {path.stem for path in (data_folder("results") / "tables").glob("*.yaml")}
    named = {name.strip("`") for name in _rows("tables", "name | what it shows")}

    assert shipped <= named


@pytest.mark.parametrize("adds_start", [False, True])
def test_loglikelihoods_are_those_of_model_type_hf(tmp_path: Path, adds_start: bool) -> None:
    """Of the same requests, in fp32, whether or not the tokenizer adds a start token."""
    folder = save(tmp_path / "tiny", tokenizer=build_tokenizer(adds_start=adds_start))
    pairs = [("How many eggs?", " three"), ("etaoin", " shrdlu."), ("", "a text without context")]
    requests = [
        Instance("loglikelihood", {}, pair, index, metadata=("t", index, 1))
        for index, pair in enumerate(pairs)
    ]
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    reference = load(registry.resolve(str(folder)), dtype="fp32")
    with prepare(reference, resolve("fp32"), dtype="fp32") as prepared:
        ours = OasisLM(prepared, quiet=True).loglikelihood(requests, disable_tqdm=True)
    expected = theirs.loglikelihood(requests, disable_tqdm=True)

    assert [score for score, _ in ours] == pytest.approx([s for s, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
