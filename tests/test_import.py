"""Result files of lm-eval as records: honest about what they do not say, the same number."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oasis_eval import cli
from oasis_eval.errors import RecordError
from oasis_eval.harness.protocols import VERSIONS, parse_protocol
from oasis_eval.harness.results import import_results, read_results
from oasis_eval.record import RunRecord, read_record, read_records
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table
from oasis_eval.spec import HubSource, ImportedRun, NamedSource, TableSpec
from tests import tiny
from tests.report.samples import record, scheme

Json = dict[str, object]

FOREIGN: Json = {
    "results": {
        "arc_easy": {
            "alias": "arc_easy",
            "acc,none": 0.6,
            "acc_stderr,none": 0.022,
            "acc_norm,none": 0.55,
            "acc_norm_stderr,none": "N/A",
        },
        "gsm8k": {
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.06,
            "exact_match,flexible-extract": 0.3,
            "exact_match_stderr,flexible-extract": 0.065,
        },
        "both": {"alias": "both", "acc,none": 0.5},
        "one": {"acc,none": 0.4},
        "two": {"acc,none": 0.6},
        "empty": {"alias": "empty"},
    },
    "group_subtasks": {"both": ["one", "two"]},
    "configs": {
        "arc_easy": {"task": "arc_easy", "doc_to_text": "{{q}}", "metadata": {"version": 1.0}},
        "gsm8k": {
            "task": "gsm8k",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
            "metadata": {"version": 3.0, "pretrained": "owner/llama"},
        },
        "one": {"task": "one"},
        "two": {"task": "two"},
    },
    "versions": {"arc_easy": 1.0, "gsm8k": 3.0, "both": None},
    "n-shot": {"arc_easy": 0, "gsm8k": 5, "one": 0, "two": 0},
    "n-samples": {
        "arc_easy": {"original": 2376, "effective": 500},
        "gsm8k": {"original": 1319, "effective": 500},
    },
    "config": {
        "model": "hf",
        "model_args": {"pretrained": "owner/llama", "load_in_4bit": True},
        "model_dtype": "torch.bfloat16",
        "model_sha": "abc123",
        "batch_size": "auto",
        "device": "cuda:0",
        "limit": 500.0,
        "gen_kwargs": {},
        "random_seed": 0,
        "fewshot_seed": 1234,
    },
    "git_hash": "0000000",
    "date": 1795985265.4,
    "lm_eval_version": "0.4.13",
    "transformers_version": "5.24.0",
    "model_name": "owner/llama",
    "chat_template": None,
    "total_evaluation_time_seconds": "60.5",
}


def ours(name: str = "tiny", preset: str = "w8a8", **config: object) -> Json:
    """What model type `oasis` makes lm-eval write."""
    made = record(name, preset)
    return {
        "results": {
            "oasis_wikitext2": {
                "token_perplexity,none": math.exp(3.0),
                "token_perplexity_stderr,none": "N/A",
                "nll_nats,none": 3.0 * 1023,
                "num_tokens,none": 1023,
            },
            "oasis_gsm8k": {
                "pass@1,none": 0.5,
                "pass@1_stderr,none": 0.25,
                "pass@1_flexible,none": 0.75,
                "unread,none": 0.25,
                "cut,none": 0.5,
            },
            "oasis_gsm8k_answer": {"answer_nll_per_token,none": 2.5},
        },
        "configs": {
            "oasis_wikitext2": {
                "metadata": {"version": 1, "corpus_name": "wikitext2", "protocol": "gptq-1024"}
            },
            "oasis_gsm8k": {"generation_kwargs": {"max_gen_toks": 256}},
            "oasis_gsm8k_answer": {},
        },
        "n-shot": {"oasis_wikitext2": 0, "oasis_gsm8k": 5, "oasis_gsm8k_answer": 5},
        "n-samples": {"oasis_gsm8k": {"original": 4, "effective": 4}},
        "config": {
            "model": "oasis",
            "model_args": {"model": name, "scheme": preset},
            "batch_size": 1,
            "device": "cuda:0",
            "limit": None,
            "random_seed": 0,
            "fewshot_seed": 1234,
            "oasis_version": "0.1.0",
            "oasis_card": made.card.model_dump(mode="json"),
            "oasis_scheme": preset,
            "oasis_scheme_settings": made.spec.scheme.model_dump(mode="json"),
            "oasis_checkpoint_sha256": made.provenance.checkpoint_sha256,  # type: ignore[union-attr]
            "oasis_dtype": "fp32",
            "oasis_device": "cpu",
            "oasis_attention": "sdpa",
            "oasis_warnings": ["weights were quantized before"],
            "oasis_protocol_versions": dict(VERSIONS),
            **config,
        },
        "lm_eval_version": "0.4.13",
    }


Write = Callable[[Json], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(value: Json) -> Path:
        path = tmp_path / "results_2026-01-31.json"
        path.write_text(json.dumps(value))
        return path

    return to_file


def by_task(path: Path) -> dict[str, RunRecord]:
    return {item.spec.task.name: item for item in read_results(path)}


# --- another model type ---------------------------------------------------------------------------


def test_numbers_filters_and_counts(write: Write) -> None:
    """Every number is there once, with its filter, standard error and number of questions."""
    found = by_task(write(FOREIGN))

    assert set(found) == {"arc_easy", "gsm8k", "both", "one", "two"}
    accuracy, normalised = found["arc_easy"].metrics
    assert (accuracy.name, accuracy.value, accuracy.stderr) == ("acc", 0.6, 0.022)
    assert (accuracy.count, accuracy.filter) == (500, None)
    assert (normalised.name, normalised.stderr) == ("acc_norm", None)
    assert [(item.filter, item.value) for item in found["gsm8k"].metrics] == [
        ("flexible-extract", 0.3),
        ("strict-match", 0.25),
    ]


def test_what_is_known_of_a_foreign_model_and_nothing_else(write: Write) -> None:
    """Name, arguments, shots, limit, versions; no batch, device or checkpoint is made up."""
    found = by_task(write(FOREIGN))["gsm8k"]

    assert isinstance(found.spec, ImportedRun)
    assert found.spec.scheme.name == "as lm-eval ran it (load_in_4bit=True)"
    assert found.spec.scheme.execution == "unknown"
    assert (found.spec.dtype, found.spec.batch_size, found.spec.device) == ("bf16", None, None)
    assert (found.spec.task_version, found.spec.num_fewshot) == ("3.0", 5)
    assert (found.spec.task.limit, found.spec.task.max_new_tokens) == (500, 64)
    assert found.card.source == HubSource(repo="owner/llama", revision="abc123")
    assert found.provenance is not None
    assert found.provenance.checkpoint_sha256 is None
    assert found.provenance.git_commit is None
    assert found.provenance.started == "2026-11-29T20:47:45+00:00"
    assert found.data == ()


def test_a_local_folder_is_not_taken_for_a_repository(write: Write) -> None:
    """Without a commit the name is only a name; arguments as text are read too."""
    value = copy.deepcopy(FOREIGN)
    value["config"] |= {"model_args": "pretrained=./my/llama,dtype=float32", "model_sha": ""}  # type: ignore[operator]

    found = by_task(write(value))["arc_easy"]

    assert found.card.source == NamedSource(name="./my/llama")
    assert (found.card.name, found.card.label) == ("./my/llama", "llama")
    assert found.spec.scheme.name == "as lm-eval ran it (dtype=float32)"


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, None), (20, 20), (0.21, 500), (1.0, 1), (500.0, 500)]
)
def test_limits(write: Write, limit: float | None, expected: int | None) -> None:
    """A number of documents, or the number that a share came to."""
    value = copy.deepcopy(FOREIGN)
    value["config"]["limit"] = limit  # type: ignore[index]

    assert by_task(write(value))["arc_easy"].spec.task.limit == expected


def test_how_a_task_was_run_is_in_its_hash(write: Write) -> None:
    """Another prompt is another protocol; another model, path or seed of sampling is not."""

    def hashed(value: Json, task: str = "arc_easy") -> str:
        return by_task(write(value))[task].protocols[0].sha256

    prompt, other = copy.deepcopy(FOREIGN), copy.deepcopy(FOREIGN)
    prompt["configs"]["arc_easy"]["doc_to_text"] = "Q: {{q}}"  # type: ignore[index]
    other["configs"]["arc_easy"]["metadata"]["pretrained"] = "else"  # type: ignore[index]
    other["config"]["model_args"] = {"pretrained": "else"}  # type: ignore[index]
    part = copy.deepcopy(FOREIGN)
    part["configs"]["two"]["doc_to_text"] = "new"  # type: ignore[index]

    assert hashed(FOREIGN) == hashed(other) != hashed(prompt)
    assert hashed(FOREIGN, "both") != hashed(part, "both")


def test_not_a_number_and_infinity_are_numbers(write: Write) -> None:
    """lm-eval writes them as bare tokens; the record is strict JSON."""
    value = copy.deepcopy(FOREIGN)
    value["results"]["one"] = {"acc,none": math.nan, "word_perplexity,none": math.inf}  # type: ignore[index]

    found = by_task(write(value))["one"]

    assert math.isnan(found.metrics[0].value)
    assert found.metrics[1].value == math.inf
    assert RunRecord.model_validate_json(found.model_dump_json()).metrics[1].value == math.inf


# --- our model type -------------------------------------------------------------------------------


def test_ours_is_what_evaluate_would_have_stored(write: Write) -> None:
    """Card, scheme, checkpoint, task, protocol, filters and limits have `evaluate`'s names."""
    found = by_task(write(ours()))
    expected = record("tiny", "w8a8")

    text, questions = found["wikitext2"], found["gsm8k"]
    assert text.card == expected.card
    assert text.spec.scheme == expected.spec.scheme
    assert text.provenance is not None
    assert text.provenance.checkpoint_sha256 == expected.provenance.checkpoint_sha256  # type: ignore[union-attr]
    assert text.spec.task.protocol == "gptq-1024"
    assert text.protocols[0].sha256 == parse_protocol("gptq-1024").sha256
    assert text.protocols[0].details["window"] == 1024
    assert [item.count for item in text.metrics] == [None, None, None]
    assert text.warnings == ("weights were quantized before",)
    assert questions.spec.task.protocol == "gsm8k-5shot"
    assert {item.name: item.filter for item in questions.metrics} == {
        "answer_nll_per_token": None,
        "cut": None,
        "pass@1": "strict",
        "pass@1_flexible": "flexible",
        "unread": None,
    }
    details = questions.protocols[0].details
    assert (details["num_cut"], details["num_unread"], details["shots"]) == (2, 1, 5)


def test_a_table_mixes_both(write: Write) -> None:
    """An imported number stands beside one of `evaluate` under one header."""
    measured = record("tiny", "fp32", metrics={"nll_nats": 2.9 * 1023, "num_tokens": 1023.0})
    info = measured.protocols[0].model_copy(update={"sha256": parse_protocol("gptq-1024").sha256})
    measured = measured.model_copy(update={"protocols": (info,)})

    table = build_table([measured, by_task(write(ours()))["wikitext2"]], TableSpec())

    (row,) = table.cells
    assert [cell.value for cell in row] == pytest.approx([math.exp(2.9), math.exp(3.0)])
    assert [line.place[-1] for line in table.columns] == ["fp32", "w8a8"]


def test_another_version_of_a_protocol_is_not_mixed(write: Write) -> None:
    """A file of an older suite stays apart from what this one measures."""
    measured = record("tiny", "fp32", metrics={"token_perplexity": 18.0})
    old = by_task(write(ours(oasis_protocol_versions=dict.fromkeys(VERSIONS, 0))))["wikitext2"]

    with pytest.raises(RecordError, match="protocol_version"):
        build_table([measured, old], TableSpec())


def test_a_foreign_model_on_our_questions(write: Write) -> None:
    """The task is ours, the model is not: the protocol's version is not known and not claimed."""
    value = ours()
    value["config"] = {"model": "hf", "model_args": {"pretrained": "owner/llama"}}
    del value["results"]["oasis_wikitext2"]  # type: ignore[attr-defined]

    found = by_task(write(value))["gsm8k"]

    assert found.protocols == ()
    assert found.spec.scheme == scheme(
        "fp32",
        name="as lm-eval ran it",
        description="model type hf of lm-eval, precision as its arguments say",
        backend="lm-eval",
        execution="unknown",
        dtype=None,
        regions=(),
    )


@pytest.mark.parametrize("format_name", ["terminal", "markdown", "latex", "csv", "csv-long"])
def test_every_format_shows_imported_numbers(write: Write, format_name: str) -> None:
    """Fields that are not known are empty there, not an error."""
    spec = TableSpec(metrics=("acc",), columns=("task", "protocol", "metric"), rows=("model",))
    table = build_table(read_results(write(FOREIGN)), spec)

    text = render(table, format=format_name)  # type: ignore[arg-type]

    assert "llama" in text
    assert "None" not in text


# --- files ----------------------------------------------------------------------------------------


def test_importing_twice_changes_nothing(write: Write, tmp_path: Path) -> None:
    """Same keys, same files, not even written again."""
    path, out = write(FOREIGN), tmp_path / "runs"
    first = import_results(path, out)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}

    again = import_results(path, out)

    assert all(item.is_new for item in first)
    assert not any(item.is_new for item in again)
    assert before == {file: file.stat().st_mtime_ns for file in out.iterdir()}
    assert [read_record(item.path).key for item in again] == [item.path.stem for item in first]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[1, 2]", "not a results file of lm-eval"),
        ('{"results": {}}', "not a results file of lm-eval"),
        ('{"results": {}, "configs": {}, "config": {"model": "hf"}}', "results"),
        ('{"results": {"a": 3}, "configs": {}, "config": {"model": "hf"}}', r"results\.a"),
        ('{"results": {"a": {}}, "configs": {}, "config": {}}', r"config\.model"),
        ('{"results": {"a": {}}, "configs": {}, "config": {"model": "hf"}}', "has a number"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, words: str) -> None:
    """One line that names the file and what is wrong with it."""
    path = tmp_path / "other.json"
    path.write_text(content)

    with pytest.raises(RecordError, match=words) as caught:
        read_results(path)

    assert "other.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_of_ours_is_not_imported(tmp_path: Path) -> None:
    """Nor is a missing file, or a folder without results."""
    path = tmp_path / "record.json"
    path.write_text(record(metrics={"token_perplexity": 3.0}).model_dump_json())
    for place in (path, tmp_path / "gone.json", tmp_path):
        with pytest.raises(RecordError):
            import_results(place, tmp_path / "runs")


def test_a_damaged_record_is_explained_as_what_it_is(tmp_path: Path) -> None:
    """An error in a run's settings says nothing of imported runs."""
    value = json.loads(record(metrics={"token_perplexity": 3.0}).model_dump_json())
    value["spec"]["batch_size"] = 0
    path = tmp_path / "record.json"
    path.write_text(json.dumps(value))

    with pytest.raises(RecordError, match=r"if it is damaged, .* Found: .*batch_size.* found 0"):
        read_record(path)


def _oasis_eval(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["oasis-eval", *map(str, words)])
    status: object = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code or 0

    assert status == 0


def test_questions_of_two_tasks_are_two_records(write: Write) -> None:
    """Each with its own answers' loss, shots and budget."""
    value = ours()
    for field, name, entry in (
        ("results", "oasis_mini_gsm", {"pass@1,none": 0.75}),
        ("results", "oasis_mini_gsm_answer", {"answer_nll_per_token,none": 0.5}),
        ("configs", "oasis_mini_gsm", {"generation_kwargs": {"max_gen_toks": 64}}),
        ("n-shot", "oasis_mini_gsm", 0),
        ("n-samples", "oasis_mini_gsm", {"original": 500, "effective": 500}),
    ):
        value[field][name] = entry  # type: ignore[index]
    found = by_task(write(value))

    numbers = {
        task: {item.name: item.value for item in found[task].metrics}
        for task in ("gsm8k", "mini_gsm")
    }
    assert numbers["mini_gsm"] == {"pass@1": 0.75, "answer_nll_per_token": 0.5}
    assert numbers["gsm8k"]["answer_nll_per_token"] == 2.5
    assert found["mini_gsm"].spec.task.protocol == "gsm8k-0shot"
    assert found["mini_gsm"].spec.task.max_new_tokens == 64
    assert {item.task for item in found["mini_gsm"].metrics} == {"mini_gsm"}


def test_command_says_what_it_wrote(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line a record; the second time that it is there."""
    words = ("import", write(FOREIGN), "--out", tmp_path / "runs")
    _oasis_eval(monkeypatch, *words)
    first = capsys.readouterr().out
    _oasis_eval(monkeypatch, *words)
    again = capsys.readouterr().out

    assert first.count(".json") == again.count("there already") == 5
    assert f"oasis-eval table {tmp_path / 'runs'}" in first


@pytest.mark.slow
def test_evaluate_harness_and_import_give_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same perplexity to the last bit, and one table shows both without a warning."""
    model = tiny.save(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(tiny.prose(700))
    runs, output = tmp_path / "runs", tmp_path / "lm-eval"
    common = ("--task", "wikitext2", "--protocol", "gptq-64", "--scheme", "w8a8,fp32")
    _oasis_eval(
        monkeypatch,
        *("evaluate", model, *common, "--data", f"wikitext2={text}", "--out", runs, "--quiet"),
    )
    arguments = ("--model", "oasis", "--model_args", f"model={model},scheme=w8a8")
    metadata = json.dumps({"data": str(text), "protocol": "gptq-64"})
    _oasis_eval(
        monkeypatch,
        *("harness", "run", *arguments, "--tasks", "oasis_wikitext2", "--batch_size", 1),
        *("--device", "cpu", "--metadata", metadata, "--output_path", output),
    )
    (results,) = output.rglob("results_*.json")
    imported = tmp_path / "imported"
    _oasis_eval(monkeypatch, "import", output, "--out", imported)

    (found,) = read_records([imported])
    by_scheme = {item.spec.scheme.name: item for item in read_records([runs])}
    measured = by_scheme["w8a8"]
    stored = json.loads(results.read_text())["results"]["oasis_wikitext2"]
    for name in ("token_perplexity", "nll_nats", "num_tokens"):
        values = [item.metric(name).value for item in (measured, found)]  # type: ignore[union-attr]
        assert values == [stored[f"{name},none"]] * 2
    assert found.card == measured.card
    assert found.spec.scheme == measured.spec.scheme
    assert found.protocols[0].sha256 == measured.protocols[0].sha256
    table = build_table([by_scheme["fp32"], found], TableSpec())
    assert [cell.status for row in table.cells for cell in row] == ["ok", "ok"]


def test_passkey_is_one_record_with_its_limit(write: Write) -> None:
    """As `evaluate` has it: completions and the key's loss together, prompts counted."""
    value = ours(limit=10.0)
    metadata = {"metadata": {"version": 1, "corpus_name": "passkey", "protocol": "passkey-1024"}}
    value["results"] = {
        "oasis_passkey": {"exact_match,none": 0.4, "unread,none": 0.1},
        "oasis_passkey_answer": {"answer_nll_per_token,none": 1.5, "greedy_match,none": 0.3},
    }
    value["configs"] = {
        "oasis_passkey": metadata | {"generation_kwargs": {"max_gen_toks": 16}},
        "oasis_passkey_answer": metadata,
    }
    names = ("oasis_passkey", "oasis_passkey_answer")
    value["n-shot"] = dict.fromkeys(names, 0)
    value["n-samples"] = {name: {"original": 150, "effective": 10} for name in names}

    (found,) = read_results(write(value))

    task = found.spec.task
    assert (task.name, task.protocol) == ("passkey", "passkey-1024")
    assert (task.limit, task.max_new_tokens) == (10, 16)
    assert {item.name: item.count for item in found.metrics} == dict.fromkeys(
        ("answer_nll_per_token", "exact_match", "greedy_match", "unread"), 10
    )
    assert found.protocols[0].sha256 == parse_protocol("passkey-1024").sha256
    assert found.protocols[0].details == {
        "limit": 10,
        "batch_size": 1,
        "window": 1024,
        "lengths": "256, 512, 1024",
        "max_new_tokens": 16,
    }


def test_the_seed_is_that_of_the_training(write: Write) -> None:
    """That of the card, which `evaluate` takes too; the harness's own draws the examples."""
    value = ours(random_seed=7)
    assert {item.spec.seed for item in read_results(write(value))} == {7}
    value["config"]["oasis_card"]["seed"] = 3  # type: ignore[index]

    assert {item.spec.seed for item in read_results(write(value))} == {3}
