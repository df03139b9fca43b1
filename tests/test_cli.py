"""The command line: small, quiet about success, short about mistakes, safe to kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer.main

import oasis_eval
from oasis_eval import cli
from oasis_eval.record import RunRecord, read_records
from tests import tiny
from tests.command_line import INTERRUPTIBLE

OPTIONS = {
    "evaluate": [
        "--scheme",
        "--task",
        "--protocol",
        "--data",
        "--window",
        "--limit",
        "--out",
        "--batch-size",
        "--device",
        "--dtype",
        "--seed",
        "--max-new-tokens",
        "--chat-template",
        "--diagnostics",
        "--json",
        "--quiet",
    ],
    "sweep": [
        "--out",
        "--dry-run",
        "--jobs",
        "--cell-timeout",
        "--retry-failed",
        "--executor",
        "--address",
        "--cell-cpus",
        "--cell-gpus",
    ],
    "table": ["--spec", "--format", "--baseline", "--rows", "--where", "--out"],
    "compare": ["--where-a", "--where-b", "--format", "--out"],
    "report": ["--out", "--title", "--where"],
    "figures": ["--out", "--kind", "--where", "--format"],
    "import": ["--out"],
    "models": [],
    "convert": [
        "--variant",
        "--out",
        "--wiring",
        "--set",
        "--blocks",
        "--depth-output-scale",
        "--dtype",
        "--text",
        "--overwrite",
    ],
    "train": [
        "--variant",
        "--out",
        "--seed",
        "--wiring",
        "--set",
        "--from",
        "--train",
        "--dry-run",
        "--device",
        "--dtype",
        "--data",
        "--tokenizer",
        "--max-steps",
        "--overwrite",
        "--quiet",
    ],
    "quantize": ["--scheme", "--out", "--calibration", "--dtype", "--overwrite"],
    "parity": ["--scheme", "--text", "--window", "--limit", "--device", "--dtype", "--json"],
    "diagnose": [
        "--scheme",
        "--text",
        "--window",
        "--limit",
        "--batch-size",
        "--device",
        "--dtype",
    ],
    "attention": [
        "--layers",
        "--heads",
        "--scheme",
        "--text",
        "--tokens",
        "--out",
        "--format",
        "--device",
        "--dtype",
    ],
    "sensitivity": [
        "--scheme",
        "--by",
        "--all-but-one",
        "--task",
        "--data",
        "--window",
        "--limit",
        "--out",
        "--device",
        "--dtype",
        "--quiet",
    ],
    "tasks": [],
    "schemes": ["--show"],
    "harness": [],
    "theory": ["--out", "--format"],
    "demo": ["--out"],
}


class Result(NamedTuple):
    """What a call of the command line left."""

    status: int
    out: str
    err: str


Call = Callable[[Sequence[object]], Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `oasis-eval ARGUMENTS` in this process."""
    monkeypatch.delenv("OASIS_EVAL_DEBUG", raising=False)

    def run(arguments: Sequence[object]) -> Result:
        monkeypatch.setattr(sys, "argv", ["oasis-eval", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.prose(400))
    return path


Arguments = Callable[..., list[object]]


@pytest.fixture
def arguments(model: Path, text: Path, tmp_path: Path) -> Arguments:
    """A call of `evaluate` that works, with options added or replaced."""

    def make(*more: object, model: object = model, quiet: bool = True) -> list[object]:
        base: dict[object, object] = {
            "--scheme": "fp32,w8a8,w4a4",
            "--window": 64,
            "--data": f"wikitext2={text}",
            "--out": tmp_path / "runs",
        }
        base |= dict(zip(more[::2], more[1::2], strict=True))
        options = [part for item in base.items() if item[1] is not None for part in item]
        return ["evaluate", model, *options, *(["--quiet"] if quiet else [])]

    return make


def _clear(result: Result, *words: str) -> None:
    """Status 2 and one or two lines on standard error, which hold the words; no traceback."""
    lines = result.err.splitlines()
    assert result.status == 2, result
    assert 1 <= len(lines) <= 2, result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# --- shape --------------------------------------------------------------------------------------


def test_every_command_has_these_options_and_at_most_sixteen() -> None:
    """A new option is a decision, made here too."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]

    found = {
        name: [o for p in command.params for o in p.opts if o.startswith("--") and o != "--help"]
        for name, command in commands.items()
    }

    assert found == OPTIONS
    assert max(len(options) for options in OPTIONS.values()) <= 16


LEAN = """
import sys
sys.argv = ["oasis-eval", *{arguments!r}]
from oasis_eval.cli import main
try:
    main()
except SystemExit:
    pass
heavy = {{"torch", "transformers", "lm_eval", "datasets", "pandas", "pyarrow", "scipy", "ray",
          "matplotlib", "bitsandbytes", "optimum", "accelerate", "tokenizers"}}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "line", ["--help", "evaluate --help", "table --help", "train --help", "models", "schemes"]
)
def test_help_and_lists_import_nothing_heavy(line: str) -> None:
    """They answer at once, so no torch and nothing of its size."""
    code = LEAN.format(arguments=line.split())

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "HEAVY []" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["models", "tasks", "schemes"])
def test_lists_show_every_name(call: Call, command: str) -> None:
    """What `evaluate` takes is listed with what it means."""
    from oasis_eval.harness.protocols import DEFAULTS, TASKS
    from oasis_eval.quant.schemes import presets
    from oasis_eval.registry import cards

    result = call([command])

    names = {"models": [*cards()], "tasks": [*TASKS, *DEFAULTS], "schemes": [*presets()]}[command]
    assert result.status == 0
    listed = {line.split()[0] for line in result.out.splitlines() if line.strip()}
    assert set(names) <= listed


# --- output -------------------------------------------------------------------------------------


def _strictly(line: str) -> object:
    def refuse(token: str) -> None:
        raise AssertionError(f"bare {token}")

    return json.loads(line, parse_constant=refuse)


def test_a_table_and_records(call: Call, arguments: Arguments, tmp_path: Path) -> None:
    """The table shows the three schemes; the records are where it says."""
    result = call(arguments())

    assert result.status == 0
    assert result.err == ""
    for word in ("tiny", "fp32", "w8a8", "w4a4", f"oasis-eval table {tmp_path / 'runs'}"):
        assert word.lower() in result.out.lower()
    assert len(list(read_records([tmp_path / "runs"]))) == 3


def test_a_window_makes_one_of_protocols_that_differ_in_it_alone(
    call: Call, arguments: Arguments, tmp_path: Path
) -> None:
    """Nothing is measured twice."""
    call(arguments("--protocol", "gptq-2048,gptq-128", "--scheme", "fp32"))

    (record,) = read_records([tmp_path / "runs"])
    assert record.spec.task.protocol == "gptq-64"


def test_a_second_run_says_the_same(call: Call, arguments: Arguments) -> None:
    """From the records, without measuring again."""
    first, again = call(arguments()), call(arguments())

    assert again == first


def test_json_is_records_and_nothing_else(call: Call, arguments: Arguments) -> None:
    """One strict JSON object a line, also for a cell that failed and a perplexity without bound."""
    result = call(
        [*arguments("--protocol", "gptq-64,rolling-word-200", "--window", None), "--json"]
    )

    assert result.status == 2
    records = [RunRecord.model_validate(_strictly(line)) for line in result.out.splitlines()]
    assert [record.status for record in records] == ["ok", "failed"] * 3
    assert result.out.endswith("\n")


def test_json_of_an_infinite_perplexity_is_strict(
    call: Call, arguments: Arguments, tmp_path: Path
) -> None:
    """`Infinity` is a string there."""
    broken = tiny.scale_head_(tiny.build_model(), 1e5)
    folder = tiny.save(tmp_path / "broken", model=broken)

    result = call([*arguments("--scheme", "w4a4", model=folder), "--json"])

    assert result.status == 0
    (line,) = result.out.splitlines()
    _strictly(line)
    assert '"Infinity"' in line


def test_progress_goes_to_standard_error(call: Call, arguments: Arguments) -> None:
    """And `--quiet` leaves it out."""
    loud = call([*arguments(quiet=False), "--json"])

    assert loud.status == 0
    assert "scoring" in loud.err
    assert len([_strictly(line) for line in loud.out.splitlines()]) == 3


def test_numbers_of_questions_and_texts_in_one_call(
    call: Call, arguments: Arguments, text: Path, tmp_path: Path
) -> None:
    """Two tasks, several schemes: every cell has a record, every metric of the list is there."""
    row = json.dumps({"question": "How many?", "answer": "one\n#### 1"}) + "\n"
    (tmp_path / "gsm8k.jsonl").write_text(row * 4)
    options = arguments(
        *("--task", "wikitext2,gsm8k", "--protocol", "gptq-64,rolling-word,gsm8k-2shot"),
        *("--window", None, "--limit", 2, "--max-new-tokens", 8, "--scheme", "fp32,w4a4"),
    )
    for name in ("gsm8k", "gsm8k:train"):
        options += ["--data", f"{name}={tmp_path / 'gsm8k.jsonl'}"]

    result = call(options)

    assert result.status == 0, result.err
    records = list(read_records([tmp_path / "runs"]))
    assert len(records) == 6
    names = {metric.name for record in records for metric in record.metrics}
    assert names >= {
        *("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"),
        *("nll_nats", "num_tokens", "pass@1", "pass@1_flexible"),
    }


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scheme", "w8a9b"), ("unknown scheme 'w8a9b'",)),
        (("--scheme", "w8a88"), ("scheme",)),
        (("--scheme", "w3a"), ("scheme 'w3a': expected wXaY", "such as w4a8")),
        (("--scheme", "w3a,fp23"), ("scheme 'w3a'", "unknown scheme 'fp23'")),
        (("--scheme", "w4a16-static"), ("static ranges need", "w4a16")),
        (("--scheme", ","), ("--scheme ','", "separated by commas")),
        (("--scheme", "gone.yaml"), ("gone.yaml", "cannot be read")),
        (("--task", "wikitext"), ("unknown task 'wikitext'", "wikitext2")),
        (("--protocol", "gptq2048"), ("unknown protocol 'gptq2048'; did you mean gptq-2048?",)),
        (("--protocol", "gptq256"), ("did you mean gptq-256?",)),
        (("--protocol", "gptq-0"), ("scores nothing",)),
        (("--data", "wikitext2"), ("expected NAME=FILE",)),
        (("--data", "wikitext2="), ("expected NAME=FILE",)),
        (("--data", "wiki=x"), ("--data key 'wiki'",)),
        (("--data", "text=x.txt"), ("no task reads it", "the tasks are wikitext2")),
        (("--data", "wikitext2=/gone.txt"), ("on wikitext2: /gone.txt is no file",)),
        (("--data", "wikitext2=grid.yaml"), ("grid.yaml is no file",)),
        (("--limit", 0), ("--limit 0: expected 1 or more",)),
        (("--window", 129), ("window of 129 tokens, the model has 128 positions",)),
        (("--window", 100, "--data", None), ("wikitext2", "--data wikitext2=FILE")),
        (("--batch-size", 0), ("--batch-size 0: expected 1 or more",)),
        (("--dtype", "fp8"), ("dtype", "'fp8'")),
        (("--device", "gpu"), ("device", "'gpu'")),
        (("--out", "/proc/none"), ("/proc/none", "--out")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value[0], str) else None,
)
def test_a_mistake_is_one_or_two_lines(
    call: Call, arguments: Arguments, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    """What was found and what is expected; status 2; no traceback."""
    _clear(call(arguments(*options)), *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", ("unknown model 'gone'",)),
        ("./gone", ("./gone: no such folder",)),
        ("smollm2", ("did you mean smollm2-135m-instruct",)),
        ("owner/name", ("owner/name@COMMIT",)),
        ("package:no_such_package", ("pip install no_such_package",)),
        (__file__, ("must be *.gguf",)),
        ("card.yaml", ("card.yaml",)),
    ],
)
def test_a_model_that_is_not_there(
    call: Call, arguments: Arguments, name: str, words: tuple[str, ...]
) -> None:
    """Card, path, hub id or package: each says what to do."""
    _clear(call(arguments(model=name)), *words)


@pytest.mark.parametrize("content", ["", " \n\n", "too short"])
def test_a_text_without_enough_to_score(
    call: Call, arguments: Arguments, text: Path, content: str
) -> None:
    """Empty, blank or short: one line for all schemes together."""
    text.write_text(content)

    result = call(arguments())

    _clear(result, "wikitext2", "fp32, w8a8, w4a4")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "hint"),
    [("bit", "known: activations"), ("weight", "'weights'?"), ("weights.bots", "'bits'?")],
)
def test_a_wrong_key_of_a_yaml_scheme(
    call: Call, arguments: Arguments, tmp_path: Path, key: str, hint: str
) -> None:
    """Is named with the key that was meant, or with those that there are."""
    path = tmp_path / "mine.yaml"
    outer, _, inner = key.partition(".")
    more = f", {inner}: 3" if inner else ""
    weights = f"weights: {{bits: 4, granularity: channel{more}}}\n"
    path.write_text(f"name: mine\n{weights}" + ("" if inner else f"{outer}: 4\n"))

    _clear(call(arguments("--scheme", path)), "mine.yaml", f"unknown key '{key}'", hint)


def test_a_truncated_shard_keeps_what_is_finished(
    call: Call, arguments: Arguments, model: Path, tmp_path: Path
) -> None:
    """The other model's cells are measured and shown; the damaged one is one line."""
    bad = tmp_path / "bad"
    shutil.copytree(model, bad)
    shard = next(bad.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])

    result = call(["evaluate", bad, *arguments()[1:]])

    _clear(result, shard.name, "incomplete")
    assert len(list(read_records([tmp_path / "runs"]))) == 3
    assert "tiny" in result.out.lower()


def test_a_mistake_in_the_second_task_keeps_the_first(
    call: Call, arguments: Arguments, text: Path, tmp_path: Path
) -> None:
    """A finished cell stays finished."""
    (tmp_path / "short.txt").write_text("short")
    options = [*arguments("--task", "wikitext2,bookcorpus", "--scheme", "fp32")]

    result = call([*options, "--data", f"bookcorpus={tmp_path / 'short.txt'}"])

    _clear(result, "bookcorpus", "needs 64")
    status = [record.status for record in read_records([tmp_path / "runs"])]
    assert sorted(status) == ["failed", "ok"]


def test_a_name_given_twice_is_refused(call: Call, arguments: Arguments) -> None:
    """The last one would win in silence."""
    _clear(call([*arguments(), "--data", "wikitext2=other.txt"]), "wikitext2 is given twice")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["table", "gone"], ("gone: no such file or folder of records",)),
        (["table", ".", "--format", "html5"], ("--format 'html5'", "latex")),
        (["table", ".", "--spec", "gone.yaml"], ("gone.yaml",)),
    ],
)
def test_mistakes_of_table(call: Call, line: list[str], words: tuple[str, ...]) -> None:
    """As those of `evaluate`."""
    _clear(call(line), *words)


def test_a_table_that_cannot_be_written(call: Call, arguments: Arguments, tmp_path: Path) -> None:
    """A folder in the file's place is a mistake like any other."""
    call(arguments("--scheme", "fp32"))

    _clear(
        call(["table", tmp_path / "runs", "--out", tmp_path]), str(tmp_path), "cannot be written"
    )


def test_debug_shows_the_traceback(
    call: Call, arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever looks for the fault in the program."""
    from oasis_eval.errors import UnknownNameError

    monkeypatch.setenv("OASIS_EVAL_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["oasis-eval", "evaluate", "no-such-card"])

    with pytest.raises(UnknownNameError):
        cli.main()


# --- processes ----------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _start(arguments: Sequence[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )


def _numbers(records: Sequence[RunRecord]) -> dict[str, dict[str, float]]:
    return {
        record.spec.scheme.name: {metric.name: metric.value for metric in record.metrics}
        for record in records
    }


def test_killed_in_the_second_scheme_and_run_again(
    call: Call, arguments: Arguments, text: Path, tmp_path: Path
) -> None:
    """The first scheme is not measured again; the table is that of an uninterrupted run."""
    text.write_text(tiny.prose(12_000))
    runs, whole = tmp_path / "runs", tmp_path / "whole"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    process = _start(arguments())
    deadline = time.monotonic() + 300
    while not list(runs.glob("*.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (first,) = runs.glob("*.json")
    before = first.stat().st_mtime_ns, first.read_bytes()
    assert RunRecord.model_validate_json(before[1]).spec.scheme.name == "fp32"

    again = call([*arguments(), "--json"])
    uninterrupted = call([*arguments("--out", whole), "--json"])
    torch.set_num_threads(threads)

    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    assert (again.status, uninterrupted.status) == (0, 0)
    records = [RunRecord.model_validate_json(line) for line in again.out.splitlines()]
    others = [RunRecord.model_validate_json(line) for line in uninterrupted.out.splitlines()]
    assert [record.key for record in records] == [record.key for record in others]
    assert _numbers(records) == _numbers(others)
    assert call(["table", runs]).out == call(["table", whole]).out


def test_a_run_in_a_process_of_its_own_is_quiet_and_clean(
    arguments: Arguments, tmp_path: Path
) -> None:
    """No warnings or reports of libraries reach the user, on success or failure."""
    process = _start(arguments("--window", None, "--protocol", "gptq-64,rolling-word-200"))

    out, err = process.communicate(timeout=300)

    assert process.returncode == 2
    assert "W4A4" in out.upper()
    assert len(err.splitlines()) == 1, err
    assert "window of 200 tokens" in err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(arguments: Arguments) -> None:
    """`| head -1` ends the output, not in a traceback."""
    command = [sys.executable, "-c", "from oasis_eval.cli import main; main()", "schemes"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()

    assert "Traceback" not in err
    assert re.search(r"[Ee]rror", err) is None


@pytest.mark.slow
def test_interrupting_keeps_finished_cells(
    arguments: Arguments, text: Path, tmp_path: Path
) -> None:
    """Control-C: one line, status 130, the first scheme's record is there."""
    text.write_text(tiny.prose(60_000))
    process = _start(arguments())
    while not list((tmp_path / "runs").glob("*.json")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)

    _, err = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "finished cells are kept" in err
    assert "Traceback" not in err
    assert len(list(read_records([tmp_path / "runs"]))) >= 1


def test_version(call: Call) -> None:
    """`--version` prints the package's version."""
    assert call(["--version"]).out == f"oasis-eval {oasis_eval.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model_args", "model=x,schem=w4a4", "--tasks", "oasis_text"], "schem"),
        (["--model_args", "model=x", "--tasks", "nope"], "nope"),
    ],
)
def test_harness_mistakes_are_one_line(call: Call, arguments: list[str], named: str) -> None:
    """What lm-eval would answer with a traceback is one line and status 2."""
    result = call(["harness", "run", "--model", "oasis", *arguments])

    assert result.status == 2
    assert result.err.splitlines()[-1].startswith("error: ")
    assert named in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
