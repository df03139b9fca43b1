"""Paired differences of two folders: what is paired, what is refused, what is printed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oasis_eval import statistics
from oasis_eval.errors import RecordError, SpecError
from oasis_eval.report.compare import Comparison, Difference, compare
from oasis_eval.report.comparison_table import COMPARISON_FORMATS, render_comparison
from tests.report.comparisons import (
    TOKENS,
    answers,
    question_record,
    store,
    text_record,
    two_folders,
    windows,
)
from tests.report.samples import record, scheme

GOLDEN = Path(__file__).parent / "golden"
SUFFIXES = {"terminal": ".txt", "csv": ".csv", "latex": ".tex", "markdown": ".md"}


def compared(
    first: Path, second: Path, *, a: dict[str, str] | None = None, b: dict[str, str] | None = None
) -> Comparison:
    return compare(
        first,
        second,
        where_first={name: (value,) for name, value in (a or {}).items()},
        where_second={name: (value,) for name, value in (b or {}).items()},
    )


def only(comparison: Comparison) -> Difference:
    (found,) = comparison.differences
    return found


def two_runs(root: Path, **second: object) -> tuple[Path, Path]:
    """One text under fp32 in `a` and, as given, under w8a8 in `b`."""
    first, other = windows(3.0, seed=1), windows(3.0, seed=2, shift=0.02)
    store(root / "a", text_record(first, "tiny", "fp32"), first)
    store(root / "b", text_record(other, "tiny", second.pop("name", "w8a8"), **second), other)
    return root / "a", root / "b"


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", COMPARISON_FORMATS)
def test_comparison_equals_stored_file(tmp_path: Path, format_name: str) -> None:
    """Ties, one window, NaN, infinity, failures, flips and odd names look as agreed."""
    path = GOLDEN / ("comparison" + SUFFIXES[format_name])
    actual = render_comparison(compared(*two_folders(tmp_path)), format=format_name)  # type: ignore[arg-type]
    if os.environ.get("OASIS_REWRITE_GOLDEN") == "1":
        path.write_text(actual, encoding="utf-8")
        pytest.fail(f"{path.name} was rewritten; look at it and run again without the variable")

    if format_name == "csv":
        assert _approximately(path.read_text(encoding="utf-8")) == _approximately(actual)
    else:
        assert path.read_text(encoding="utf-8") == actual


def _approximately(text: str) -> list[list[str]]:
    """Cells with numbers at nine digits: the last ones are the platform's arithmetic."""

    def cell(value: str) -> str:
        try:
            return f"{float(value):.9g}"
        except ValueError:
            return value

    return [[cell(value) for value in row] for row in csv.reader(io.StringIO(text))]


def test_numbers_are_those_of_the_statistics(tmp_path: Path) -> None:
    """The difference, its interval and its p-value come from the paired windows."""
    first, other = windows(3.0, seed=1), windows(3.0, seed=2, shift=0.02)
    losses = [[float(row["nll_nats"]) for row in rows] for rows in (first, other)]  # type: ignore[arg-type]

    found = only(compared(*two_runs(tmp_path)))

    assert found.interval == statistics.log_perplexity_difference(*losses, [TOKENS] * 24)
    assert found.p_value == found.adjusted == statistics.paired_t_test(*losses)
    assert found.change is not None
    assert found.change.percent == pytest.approx(
        (found.second.value / found.first.value - 1) * 100  # type: ignore[operator]
    )


def test_the_two_sides_swapped_give_the_opposite(tmp_path: Path) -> None:
    """B minus A: the sign turns, the p-value stays."""
    first, second = two_runs(tmp_path)

    there, back = only(compared(first, second)), only(compared(second, first))

    assert there.difference == pytest.approx(-back.difference)  # type: ignore[operator]
    assert there.p_value == pytest.approx(back.p_value)


def test_word_perplexity_is_compared_per_word(tmp_path: Path) -> None:
    """Where the headline number is per word, so are the difference and its interval."""
    words = {"num_words": 6000.0, "word_perplexity": 0.0}
    for name, seed, shift in (("a", 1, 0.0), ("b", 2, 0.02)):
        rows = windows(3.0, seed=seed, shift=shift)
        total = math.fsum(float(row["nll_nats"]) for row in rows)  # type: ignore[arg-type]
        more = words | {"word_perplexity": math.exp(total / 6000.0)}
        kept = {"protocol_name": "rolling-word", "more": more}
        store(tmp_path / name, text_record(rows, name, "fp32", **kept), rows)

    found = only(compared(tmp_path / "a", tmp_path / "b"))

    assert found.metric == "word_perplexity"
    ratio = found.second.value / found.first.value  # type: ignore[operator]
    assert found.difference == pytest.approx(math.log(ratio))
    assert found.interval is not None
    assert found.interval.low < found.interval.estimate < found.interval.high


def test_holm_is_over_the_whole_table(tmp_path: Path) -> None:
    """Every test of the table is adjusted for all of them, text and answers together."""
    found = compared(*two_folders(tmp_path)).differences

    tested = [item for item in found if item.p_value is not None]
    assert [item.adjusted for item in tested] == statistics.holm(
        [item.p_value for item in tested if item.p_value is not None]
    )
    assert {item.test for item in tested} == {"paired t", "exact McNemar"}


def test_flips_of_answers_are_counted(tmp_path: Path) -> None:
    """Strict and flexible apart, and they give the difference of the shares."""
    right = answers(0.6, seed=3)
    changed = answers(0.2, seed=4, like=right)
    store(tmp_path / "a", question_record(right, "tiny", "fp32"), right)
    store(tmp_path / "b", question_record(changed, "tiny", "w4a4"), changed)

    strict, flexible, loss = compared(tmp_path / "a", tmp_path / "b").differences

    for item, name in ((strict, "strict"), (flexible, "flexible")):
        lost = sum(bool(o[name] and not n[name]) for o, n in zip(right, changed, strict=True))
        gained = sum(bool(n[name] and not o[name]) for o, n in zip(right, changed, strict=True))
        assert (item.only_first, item.only_second) == (lost, gained)
        assert item.difference == pytest.approx((gained - lost) / len(right))
    assert loss.difference == pytest.approx(loss.second.value - loss.first.value)  # type: ignore[operator]


def test_csv_reads_back_to_the_same_numbers(tmp_path: Path) -> None:
    """Full precision; NaN and infinity by name; nothing where nothing is known."""
    comparison = compared(*two_folders(tmp_path))
    lines = list(csv.DictReader(io.StringIO(render_comparison(comparison, format="csv"))))

    assert len(lines) == len(comparison.differences)
    by_place = {(i.first.model, i.first.task, i.metric): i for i in comparison.differences}
    for line in lines:
        item = by_place[line["model_a"], line["task"], line["metric"]]
        for column, value in (("difference", item.difference), ("p_holm", item.adjusted)):
            read = float(line[column]) if line[column] else None
            assert read == value or (math.isnan(read or 0) and math.isnan(value or 0))


def test_order_of_records_changes_nothing(tmp_path: Path) -> None:
    """Two folders with other file names give the same bytes."""
    first, second = two_folders(tmp_path)
    expected = render_comparison(compared(first, second), format="csv")
    for folder in (first, second):
        paths = sorted(folder.glob("*.json"))
        names = random.Random(5).sample(range(len(paths)), len(paths))
        for path, name in zip(paths, names, strict=True):
            path.rename(folder / f"{name}.json")

    assert expected == render_comparison(compared(first, second), format="csv")


# --- pairing ------------------------------------------------------------------------------------


def test_one_folder_with_two_filters(tmp_path: Path) -> None:
    """A and B can be two schemes of the same runs; models pair with themselves."""
    for model in ("tiny", "other"):
        for seed, name in enumerate(("fp32", "w8a8")):
            rows = windows(3.0, seed=seed)
            store(tmp_path, text_record(rows, model, name), rows)

    found = compared(tmp_path, tmp_path, a={"scheme": "fp32"}, b={"scheme": "w8a8"})

    assert [(i.first.model, i.second.model) for i in found.differences] == [
        ("other", "other"),
        ("tiny", "tiny"),
    ]


def test_one_cell_against_many(tmp_path: Path) -> None:
    """A single record of one side is compared with each of the other, but not with itself."""
    for seed, name in enumerate(("fp32", "w8a8", "w4a4")):
        rows = windows(3.0, seed=seed)
        store(tmp_path, text_record(rows, "tiny", name), rows)

    found = compared(tmp_path, tmp_path, a={"scheme": "fp32"})

    assert [item.second.scheme for item in found.differences] == ["w8a8", "w4a4"]


def test_a_pairing_that_is_not_unique_is_refused(tmp_path: Path) -> None:
    """Two schemes against two others: which with which is the user's to say."""
    for seed, name in enumerate(("fp32", "bf16", "w8a8", "w4a4")):
        rows = windows(3.0, seed=seed)
        folder = tmp_path / ("a" if seed < 2 else "b")
        store(folder, text_record(rows, "tiny", name), rows)

    with pytest.raises(RecordError, match="nothing to compare"):
        compared(tmp_path / "a", tmp_path / "b")
    rows = windows(3.0, seed=9)
    store(tmp_path / "b", text_record(rows, "tiny", "fp32", seed=1), rows)
    store(tmp_path / "a", text_record(rows, "tiny", "fp32", seed=2), rows)
    with pytest.raises(RecordError, match=r"several records of wikitext2 .* --where-a"):
        compared(tmp_path / "a", tmp_path / "b", a={"scheme": "fp32"}, b={"scheme": "w*"})


def test_the_same_records_twice_are_nothing_to_compare(tmp_path: Path) -> None:
    """The message says how to choose two sides."""
    first, _ = two_runs(tmp_path)
    with pytest.raises(RecordError, match="--where-a and --where-b"):
        compared(first, first)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"limit": 8}, "limit is none in A .* and 8 in B"),
        ({"data_text": "other"}, "data_sha256 is"),
        ({"protocol_name": "gptq-2048"}, "protocol is gptq-1024 in A .* gptq-2048 in B"),
        ({"details": {"window": 512}}, "window is 1024 in A .* 512 in B"),
        ({"batch_size": 4}, "batch_size is 1 .* under dynamic activation ranges"),
    ],
)
def test_two_ways_of_measuring_are_refused(
    tmp_path: Path, second: dict[str, object], words: str
) -> None:
    """The field that differs is named with both values."""
    first, other = two_runs(tmp_path, **second)
    with pytest.raises(RecordError, match=words):
        compared(first, other)


def test_batch_size_is_told_where_it_changes_nothing(tmp_path: Path) -> None:
    """Without dynamic ranges another batch size is a note beside the difference."""
    found = only(compared(*two_runs(tmp_path, name="bf16", batch_size=4)))

    assert found.notes == ("The runs also differ in batch_size 1 in A, 4 in B.",)


def test_missing_samples_are_refused_by_name(tmp_path: Path) -> None:
    """Without per-window losses there is no paired difference."""
    first, second = two_runs(tmp_path)
    next(second.glob("*.samples.jsonl")).unlink()
    with pytest.raises(RecordError, match=r"record \w+ \(tiny, w8a8, wikitext2\) has no samples"):
        compared(first, second)


def _changed(folder: Path, line: int, **values: object) -> None:
    path = next(folder.glob("*.samples.jsonl"))
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line] |= values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"window": 77}, "do not line up at document 0, window 5: window is 5 in A and 77 in B"),
        ({"document": 3}, "document is 0 in A and 3 in B"),
        ({"num_tokens": 9}, "do not add up to its num_tokens"),
        ({"nll_nats": 9.0}, "do not add up to its nll_nats"),
        ({"nll_nats": None}, "without a number 'nll_nats'"),
    ],
)
def test_samples_that_do_not_line_up_are_refused(
    tmp_path: Path, values: dict[str, object], words: str
) -> None:
    """Another window, document, count or loss than the record's or the partner's."""
    first, second = two_runs(tmp_path)
    _changed(second, 5, **values)
    with pytest.raises(RecordError, match=words):
        compared(first, second)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Windows of other lengths are not the same windows."""
    rows = windows(3.0, seed=1)
    store(tmp_path / "a", text_record(rows, "tiny", "fp32"), rows)
    other = [{**row, "num_tokens": 900} for row in rows]
    store(tmp_path / "b", text_record(other, "big", "fp32"), other)
    with pytest.raises(RecordError, match="same tokenizer"):
        compared(tmp_path / "a", tmp_path / "b")
    fewer = rows[:-1]
    shutil.rmtree(tmp_path / "b")
    store(tmp_path / "b", text_record(fewer, "big", "fp32"), fewer)
    with pytest.raises(RecordError, match="24 and 23 windows"):
        compared(tmp_path / "a", tmp_path / "b")


def test_damaged_samples_are_one_line(tmp_path: Path) -> None:
    """A cut file is named."""
    first, second = two_runs(tmp_path)
    path = next(second.glob("*.samples.jsonl"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RecordError, match="not readable as samples"):
        compared(first, second)


def test_filters_are_checked(tmp_path: Path) -> None:
    """A field that does not exist, and a filter that nothing matches."""
    first, second = two_runs(tmp_path)
    with pytest.raises(SpecError, match="unknown field 'schema'"):
        compared(first, second, a={"schema": "fp32"})
    with pytest.raises(RecordError, match=r"B .*no record has scheme="):
        compared(first, second, b={"scheme": "w2a2"})


def test_other_tasks_are_named(tmp_path: Path) -> None:
    """What only one side has stands below the table."""
    first, second = two_runs(tmp_path)
    rows = windows(3.0, seed=4)
    store(first, text_record(rows, "tiny", "fp32", "wiki40b"), rows)

    assert compared(first, second).notes == ("Only in A: wiki40b.",)


def test_two_schemes_of_one_name_on_one_side_are_refused(tmp_path: Path) -> None:
    """As in a table."""
    first, second = two_runs(tmp_path)
    other = scheme("w8a8", regions=("linear_inputs", "lm_head"))
    store(second, record("else", other, metrics={"token_perplexity": 3.0}), [])
    with pytest.raises(RecordError, match="scheme 'w8a8' mixes scheme_sha256"):
        compared(first, second)


# --- command line -------------------------------------------------------------------------------


def test_command_writes_a_file_and_imports_no_torch(tmp_path: Path) -> None:
    """Status 0, nothing on the screen, no heavy library."""
    first, second = two_runs(tmp_path)
    arguments = ["compare", str(first), str(second), "--where-b", "scheme=w8a8"]
    arguments += ["--format", "csv", "--out", str(tmp_path / "out.csv")]
    code = (
        f"import sys; sys.argv = ['oasis-eval', *{arguments!r}]\n"
        "from oasis_eval.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print({'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"
    assert (tmp_path / "out.csv").read_text().startswith("model_a,model_b,")


def test_a_loss_per_token_of_another_tokenizer_is_not_compared(tmp_path: Path) -> None:
    """Right and wrong answers are."""
    first = answers(0.5, seed=1)
    other = [
        {**row, "answer_tokens": 2 * float(row["answer_tokens"])}  # type: ignore[arg-type]
        for row in answers(0.6, seed=2, like=first)
    ]
    store(tmp_path / "a", question_record(first, "tiny", "fp32"), first)
    store(tmp_path / "b", question_record(other, "tiny", "w8a8"), other)
    found = {item.metric: item for item in compared(tmp_path / "a", tmp_path / "b").differences}

    loss = found["answer_nll_per_token"]
    assert (loss.difference, loss.interval, loss.p_value, loss.change) == (None,) * 4
    tokens = round(sum(float(row["answer_tokens"]) for row in first))  # type: ignore[arg-type]
    assert f"{tokens} tokens in A and {2 * tokens} in B" in loss.notes[-1]
    assert found["pass@1"].p_value is not None
    for format_name in COMPARISON_FORMATS:
        assert (
            "Not compared"
            in render_comparison(compared(tmp_path / "a", tmp_path / "b"), format=format_name)
            or format_name == "csv"
        )
