"""Two hundred broken inputs: each is one line or two and status 2, never a traceback or a number.

Some changes by chance leave an input right (a description, an optional key): those must run as any
other input does. What is counted is what is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasis_eval import cli
from oasis_eval.record import read_record
from tests import tiny
from tests.campaigns import spoil
from tests.command_line import CommandLine, Result

NUM_INPUTS = {
    "checkpoints": 40, "cards": 30, "schemes": 35, "grids": 35, "corpora": 25, "records": 35
}  # fmt: skip
assert sum(NUM_INPUTS.values()) == 200
_MOST_TRIES = 4
"""Times as many inputs are made at most; the rest turned out to be right."""

SCHEME: dict[str, Any] = {
    "name": "mine",
    "backend": "fake",
    "execution": "fake",
    "weights": {"bits": 4, "granularity": "group", "group_size": 16, "symmetric": True},
    "activations": {"bits": 8, "granularity": "token", "ranges": "dynamic"},
    "regions": ["linear_inputs"],
    "skip": ["*.down_proj"],
}
GRID: dict[str, Any] = {
    "name": "grid",
    "models": ["./tiny"],
    "schemes": ["fp32", "w8a8"],
    "tasks": ["text"],
    "seeds": [0],
    "window": 64,
    "limit": 1,
    "data": {"text": "text.txt"},
    "exclude": [{"schemes": ["w8a8"]}],
    "include": [{"schemes": ["w4a4"], "batch_size": 2}],
}
TEXT = ["--task", "text", "--window", "64", "--limit", "1", "--quiet"]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a text, and records of both."""
    home = tmp_path_factory.mktemp("intact")
    tiny.save(home / "tiny")
    (home / "text.txt").write_text(tiny.prose(200))
    return home


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def home(intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the intact things in it."""
    (tmp_path / "tiny").symlink_to(intact / "tiny")
    (tmp_path / "text.txt").write_text((intact / "text.txt").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


Attempt = Callable[[int, random.Random], tuple[str, Result]]


def campaign(kind: str, attempt: Attempt, *, accepted: tuple[int, ...] = (0,)) -> list[str]:
    """Make inputs until enough were refused; return what was wrong with how that was done."""
    chance = random.Random(kind)
    wrong, num_refused = [], 0
    for number in range(_MOST_TRIES * NUM_INPUTS[kind]):
        if num_refused == NUM_INPUTS[kind]:
            break
        try:
            what, result = attempt(number, chance)
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {str(error)[:300]}")
            continue
        if result.status in accepted:
            continue
        num_refused += 1
        lines = result.err.strip().splitlines()
        if result.status != 2 or not 1 <= len(lines) <= 2 or "Traceback" in result.err:
            wrong.append(f"{number}: {what}: status {result.status}: {result.err[-600:]}")
        elif max(map(len, lines)) > 1000:
            wrong.append(f"{number}: {what}: a line of {max(map(len, lines))} characters")
    if num_refused < NUM_INPUTS[kind]:
        wrong.append(f"only {num_refused} of {number + 1} inputs were refused")
    return wrong


@pytest.mark.slow
def test_checkpoints(call: CommandLine, home: Path, intact: Path) -> None:
    """Every one is unusable, so none has a record with numbers."""

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        what = spoil.checkpoint(intact / "tiny", home / f"bad{number}", chance)
        command = ["evaluate", f"./bad{number}", "--scheme", "fp32", *TEXT]
        result = call([*command, "--data", "text=text.txt", "--out", f"runs{number}"])
        if result.status == 0:
            raise AssertionError(f"{what}: was accepted")
        records = [read_record(path) for path in home.glob(f"runs{number}/*.json")]
        assert all(record.status != "ok" for record in records), what
        return what, result

    assert campaign("checkpoints", attempt) == []


@pytest.mark.slow
def test_cards(call: CommandLine, home: Path) -> None:
    """As values with one thing changed, and as damaged files."""
    card = {
        "name": "mine",
        "family": "llama",
        "variant": "plain",
        "source": {"kind": "dir", "path": "./tiny"},
        "label": "Mine",
        "context_length": 128,
    }

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        what = _write_yaml(home / "card.yaml", card, chance)
        command = ["evaluate", "./card.yaml", "--scheme", "fp32", *TEXT]
        return what, call([*command, "--data", "text=text.txt", "--out", "runs"])

    assert campaign("cards", attempt) == []


@pytest.mark.slow
def test_schemes(call: CommandLine, home: Path) -> None:
    """The same."""

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        what = _write_yaml(home / "mine.yaml", SCHEME, chance)
        command = ["evaluate", "./tiny", "--scheme", "./mine.yaml", *TEXT]
        return what, call([*command, "--data", "text=text.txt", "--out", f"runs{number}"])

    assert campaign("schemes", attempt) == []


@pytest.mark.slow
def test_grids(call: CommandLine, home: Path) -> None:
    """Before anything runs; a text that is not there is a failed cell, status 1."""

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        what = _write_yaml(home / "grid.yaml", GRID, chance)
        result = call(["sweep", "grid.yaml", "--out", "runs", "--dry-run"])
        assert not (home / "runs").exists()
        return what, result

    assert campaign("grids", attempt) == []


@pytest.mark.slow
def test_corpora(call: CommandLine, home: Path) -> None:
    """Text, jsonl and parquet: damaged, empty, or of something else."""
    import pandas as pd

    rows = [{"text": tiny.prose(90, seed=seed)} for seed in range(3)]
    questions = [{"question": f"{n} and 2?", "answer": f"#### {n + 2}"} for n in range(8)]
    pd.DataFrame(rows).to_parquet(home / "whole.parquet")
    whole = {
        "text": tiny.prose(100).encode(),
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "parquet": (home / "whole.parquet").read_bytes(),
        "questions": "".join(json.dumps(row) + "\n" for row in questions).encode(),
    }

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        kind = chance.choice(sorted(whole))
        suffix = {"text": "txt", "questions": "jsonl"}.get(kind, kind)
        path = home / f"corpus{number}.{suffix}"
        if kind == "parquet":
            content, what = whole[kind][: chance.randrange(len(whole[kind]))], "cut"
        elif kind in ("jsonl", "questions") and chance.random() < 0.5:
            lines = [json.loads(line) for line in whole[kind].decode().splitlines()]
            spoiled, what = spoil.value(lines, chance)
            content = "".join(json.dumps(line) + "\n" for line in spoiled).encode()
        else:
            content, what = spoil.text(whole[kind].decode(), chance)
        path.write_bytes(content)
        task = "gsm8k" if kind == "questions" else "text"
        command = ["evaluate", "./tiny", "--scheme", "fp32", "--task", task, "--window", "64",
                   "--limit", "1", "--max-new-tokens", "4", "--protocol",
                   "gsm8k-1shot" if task == "gsm8k" else "gptq-64",
                   "--data", f"{task}={path.name}", "--out", f"runs{number}"]  # fmt: skip
        if task == "gsm8k":
            command += ["--data", f"gsm8k:train={path.name}"]
        result = call([*command, "--quiet"])
        return f"{kind} {what}", result

    assert campaign("corpora", attempt) == []


@pytest.mark.slow
def test_records(call: CommandLine, home: Path) -> None:
    """Tables, reports and comparisons of damaged records and samples."""
    command = ["evaluate", "./tiny", "--scheme", "fp32,w8a8", *TEXT, "--data", "text=text.txt"]
    assert call([*command, "--out", "runs"]).status == 0
    paths = sorted((home / "runs").glob("*.json"))
    whole = {path: path.read_text() for path in sorted((home / "runs").glob("*.json*"))}
    table = call(["table", "runs", "--format", "csv"]).out

    def attempt(number: int, chance: random.Random) -> tuple[str, Result]:
        for path, content in whole.items():
            path.write_text(content)
        command = chance.choice(
            [
                ["table", "runs", "--format", "csv"],
                ["table", "runs", "--format", "csv"],
                ["report", "runs", "--out", "report.html"],
                ["compare", "runs", "runs", "--where-a", "scheme=fp32", "--where-b", "scheme=w8a8"],
            ]
        )
        path = chance.choice(paths)
        if command[0] == "compare" and chance.random() < 0.7:
            path = path.with_suffix(".samples.jsonl")
        if path.suffix == ".json" and chance.random() < 0.6:
            spoiled, what = spoil.value(json.loads(whole[path]), chance)
            path.write_text(json.dumps(spoiled))
        else:
            content, what = spoil.text(whole[path], chance)
            path.write_bytes(content)
        result = call(command)
        if result.status == 0 and command[0] == "table" and path.suffix == ".json":
            # What a table still shows must be what the record still says.
            read_record(path)
            if "metrics" not in what and "value" not in what:
                assert table.count("\n") == result.out.count("\n"), what
        return f"{command[0]}, {path.suffix} {what}", result

    assert campaign("records", attempt) == []


def _write_yaml(path: Path, value: dict[str, Any], chance: random.Random) -> str:
    if chance.random() < 0.7:
        spoiled, what = spoil.value(value, chance)
        path.write_text(yaml.safe_dump(spoiled, allow_unicode=True))
    else:
        content, what = spoil.text(yaml.safe_dump(value), chance)
        path.write_bytes(content)
    return what


def test_the_campaign_sees_a_traceback(call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error that is too long, a status that is not 2, an input that is accepted."""
    monkeypatch.setattr(cli, "main", lambda: print("x"))  # noqa: T201 - stands for a command

    def attempt_with(status: int, err: str) -> list[str]:
        return campaign("corpora", lambda number, chance: ("", Result(status, "", err)))

    assert attempt_with(2, "error: x\n") == []
    assert attempt_with(2, "Traceback (most recent call last)\n")
    assert attempt_with(2, "1\n2\n3\n")
    assert attempt_with(1, "error: x\n")
    assert attempt_with(2, "")
    assert attempt_with(0, "")
