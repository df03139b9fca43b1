"""Pieces of the report against the same numbers made by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_eval.record import LayerStat, read_records
from oasis_eval.report.compare import compare
from oasis_eval.report.html import answers, charts, coverage, figures, layers, runs, verdict
from oasis_eval.report.html.effects import Line, lines
from oasis_eval.report.html.markup import Html, element, escape, markup, visible
from oasis_eval.report.html.routing import heat_map, short_names
from oasis_eval.report.html.selection import Selection, select
from oasis_eval.report.html.sources import without_folders
from tests.report import html_records
from tests.report.comparisons import question_record, store, text_record, windows
from tests.report.samples import loss, record
from tests.report.test_html import Reader

# --- markup -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_a_parser_reads_back_what_is_visible(text: str) -> None:
    """Text and attribute values come out of HTML as they went in, hidden characters spelled."""
    reader = Reader(element("p", text, title=text))
    (value,) = (value for _, name, value in reader.attributes if name == "title")

    assert visible(text) == "".join(reader.texts.get("p", []))
    assert visible(text) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u202eb", "a\\u202eb"),
        ("a\x00b\x1b[0m", "a\\u0000b\\u001b[0m"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("x\r\ny\u2028z\tw", "x\ny\nz\tw"),
        ("שלום – नमस्‍ते", "שלום – नमस्‍ते"),
    ],
)
def test_hidden_characters_are_spelled_out(text: str, shown: str) -> None:
    """What would hide or reorder text is an escape; letters of any script are not."""
    assert shown == visible(text)


def test_markup_is_not_escaped_twice() -> None:
    """Text is escaped on its way in, markup goes through."""
    assert markup(["<", Html("<b>"), None, ["&"]]) == "&lt;<b>&amp;"
    assert escape("'\"") == "&#39;&quot;"
    assert element("input", disabled=True, hidden=False, data_v=None, value="a<b") == (
        '<input disabled value="a&lt;b">'
    )


# --- effects ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of the golden file; read-only."""
    return html_records.write_gallery(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def selection(folder: Path) -> Selection:
    return select(list(read_records([folder])), where={}, folders=[folder])


def line_of(selection: Selection, model: str, task: str) -> Line:
    """Return the one line of a model and task."""
    (line,) = (item for item in lines(selection) if (item.model, item.task) == (model, task))
    return line


def test_change_of_perplexity_is_that_of_the_losses(selection: Selection) -> None:
    """Percent is exp(mean loss) over exp(mean loss), less one."""
    line = line_of(selection, "smollm2-135m", "wikitext2")
    w8a8, w4a4 = line.effects

    assert line.reference is not None
    assert line.reference.value == pytest.approx(math.exp(2.9), rel=1e-12)
    assert w8a8.percent == pytest.approx(100 * (math.exp(2.94 - 2.9) - 1), rel=1e-9)
    assert w4a4.percent == pytest.approx(100 * (math.exp(9.7 - 2.9) - 1), rel=1e-9)
    assert (w8a8.low, w8a8.high) == (None, None)


def test_mean_over_seeds_is_of_perplexities(selection: Selection) -> None:
    """Three finite seeds give their mean; one infinite among three is not averaged away."""
    (line,) = (item for item in lines(selection) if item.model.startswith("a#1"))
    seeds = [math.exp(3.0 + seed / 100) for seed in range(3)]
    (infinite,) = (item for item in line.effects if item.result.value is not None)

    assert line.reference is not None
    assert line.reference.value == pytest.approx(math.fsum(seeds) / 3, rel=1e-12)
    assert infinite.result.value == math.inf
    assert infinite.percent is None


def test_over_seeds_the_interval_is_that_of_their_differences() -> None:
    """Student's t on three differences, by hand: mean 0.4, deviation 0.1, 4.303 at 2 degrees."""
    plain, changed = (10.0, 12.0, 14.0), (10.3, 12.4, 14.5)
    records = [
        record("many", scheme, metrics={"token_perplexity": value}, seed=seed)
        for scheme, values in (("fp32", plain), ("w8a8", changed))
        for seed, value in enumerate(values)
    ]
    (line,) = lines(select(records, where={}))
    (effect,) = line.effects
    reach = 4.302652729911275 * 0.1 / math.sqrt(3)

    assert effect.percent == pytest.approx(100.0 * 0.4 / 12.0)
    assert effect.low == pytest.approx(100.0 * (0.4 - reach) / 12.0)
    assert effect.high == pytest.approx(100.0 * (0.4 + reach) / 12.0)
    assert effect.is_measurable


def test_seeds_that_differ_give_no_interval() -> None:
    """Seed 1 under one scheme and seed 2 under another are no pair."""
    records = [
        record("many", scheme, metrics={"token_perplexity": 10.0 + seed}, seed=seed)
        for scheme, seeds in (("fp32", (0, 1)), ("w8a8", (0, 2)))
        for seed in seeds
    ]
    (line,) = lines(select(records, where={}))

    assert line.effects[0].low is None


def test_intervals_are_those_of_compare(folder: Path, selection: Selection) -> None:
    """The report and `oasis-eval compare` say the same about the same two runs."""
    found = compare(
        folder,
        folder,
        where_first={"scheme": ("fp32",), "model": ("tiny",)},
        where_second={"scheme": ("w4a4",), "model": ("tiny",)},
    )
    by_metric = {item.metric: item for item in found.differences}
    text = next(
        item
        for item in line_of(selection, "tiny", "wikitext2").effects
        if item.result.first.scheme == "w4a4"
    )
    change = by_metric["token_perplexity"].change

    assert change is not None
    assert (text.low, text.high) == (change.low, change.high)
    assert text.percent == pytest.approx(change.percent, rel=1e-9)


def test_flips_are_counted_question_by_question(folder: Path, selection: Selection) -> None:
    """Lost and gained answers, and the change in points, by a loop over both files."""
    import json

    line = line_of(selection, "tiny", "gsm8k")
    assert line.reference is not None
    for effect in line.effects:
        files = [
            folder / f"{result.first.key}.samples.jsonl"
            for result in (line.reference, effect.result)
        ]
        before, after = (
            [json.loads(text)["strict"] for text in file.read_text("utf-8").split("\n") if text]
            for file in files
        )
        lost = sum(a and not b for a, b in zip(before, after, strict=True))
        gained = sum(b and not a for a, b in zip(before, after, strict=True))

        assert (lost, gained) == (effect.lost, effect.gained)
        assert effect.points == pytest.approx(100 * (gained - lost) / len(before))


def test_other_data_is_not_compared() -> None:
    """Another text behind the number: a value without a change, and the reason."""
    found = [
        record("tiny", "fp32", metrics={"token_perplexity": 5.0}),
        record("tiny", "w8a8", metrics={"token_perplexity": 6.0}, data_text="another"),
    ]
    (line,) = lines(select(found, where={}))
    (effect,) = line.effects

    assert effect.percent is None
    assert verdict.say(effect, line).text == "6.00; not measured like the unquantized run"


@pytest.mark.parametrize(
    ("mean", "severity", "text"),
    [
        (2.0, "small", "0.00\u00a0%, to 7.39"),
        (1.9, "better", "-9.52\u00a0%, to 6.69"),
        (2.04, "small", "+4.08\u00a0%, to 7.69"),
        (2.2, "clear", "+22.14\u00a0%, to 9.03"),
        (2.8, "severe", "+122.55\u00a0%, to 16.44"),
        (4.0, "severe", "7.389 times as high, to 54.60"),
        (900.0, "broken", "perplexity is infinite"),
        (math.nan, "broken", "perplexity is not a number"),
    ],
)
def test_words_follow_the_thresholds(mean: float, severity: str, text: str) -> None:
    """Each size of change has its word."""
    found = [
        record("tiny", "fp32", metrics=loss(2.0)),
        record("tiny", "w4a4", metrics=loss(mean)),
    ]
    (line,) = lines(select(found, where={}))
    said = verdict.say(line.effects[0], line)

    assert (severity, text) == (said.severity, said.text)


def test_a_failed_run_is_called_so_and_says_why() -> None:
    """Its tag is the status; the reason holds no folders."""
    found = [
        record("tiny", "fp32", metrics=loss(2.0)),
        record("tiny", "w4a4", status="failed", reason="cannot read /home/me/models/x/w.bin"),
    ]
    (line,) = lines(select(found, where={}))
    said = verdict.say(line.effects[0], line)

    assert (said.word, said.text) == ("failed", "cannot read …/x/w.bin")


def test_lead_stays_short() -> None:
    """Of twelve schemes eight are summed up at the top, of ten models two are folded."""
    found = [
        record(f"m{model}", scheme, metrics=loss(2.0 + at / 10))
        for model in range(10)
        for at, scheme in enumerate(
            ["fp32", *(f"w{a}a{b}" for a in (8, 6, 4) for b in (8, 6, 4, 2))]
        )
    ]
    chosen = select(found, where={})
    text = verdict.render(chosen, lines(chosen))
    lead = text.partition("</ul>")[0]

    assert lead.count("perplexity +") == 8
    assert "4 more schemes: model by model below." in lead
    assert "2 more models" in text
    assert text.count('class="card"') == 10


def test_worst_is_the_largest_of_the_most_severe(selection: Selection) -> None:
    """Broken comes before severe, however large; without anything clear there is no worst."""
    small = [
        record("tiny", "fp32", metrics=loss(2.0)),
        record("tiny", "w8a8", metrics=loss(2.01)),
        record("tiny", "w4a4", metrics=loss(6.0)),
        record("tiny", "w6a6", metrics=loss(3.0)),
    ]
    found = verdict.worst(lines(selection))
    finite = verdict.worst(lines(select(small, where={})))

    assert found is not None
    assert found[2].severity == "broken"
    assert finite is not None
    assert finite[1].result.first.scheme == "w4a4"
    assert verdict.worst(lines(select(small[:2], where={}))) is None


def test_interval_around_zero_is_not_measurable(tmp_path: Path) -> None:
    """A change within the noise of the windows is called that."""
    for scheme, seed in (("fp32", 1), ("w8a8", 2)):
        rows = windows(3.0, seed=seed, noise=0.05)
        store(tmp_path, text_record(rows, "tiny", scheme), rows)
    found = select(list(read_records([tmp_path])), where={}, folders=[tmp_path])
    (line,) = lines(found)
    (effect,) = line.effects

    assert effect.low is not None
    assert effect.high is not None
    assert effect.low < 0 < effect.high
    assert verdict.say(effect, line).severity == "none"


# --- figures ------------------------------------------------------------------------------------


def test_log_axis_places_by_ratio() -> None:
    """Equal ratios are equal distances; the ends hold every value."""
    scale = charts.axis([1.0, 100.0], start=0.0, stop=100.0, log=True)
    places = [scale.at(value) for value in (1.0, 10.0, 100.0)]

    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    assert 0.0 < places[0] < places[2] < 100.0
    assert scale.ticks() == [1.0, 10.0, 100.0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6),
    st.booleans(),
)
def test_axis_holds_any_values(values: list[float], log: bool) -> None:
    """Whatever is drawn lies inside, and there are a few ticks in rising order."""
    scale = charts.axis(values, start=10.0, stop=90.0, log=log)
    ticks = scale.ticks()

    assert all(10.0 <= scale.at(value) <= 90.0 for value in values if math.isfinite(value))
    assert ticks == sorted(ticks)
    assert len(ticks) <= 12


def test_layer_takes_its_largest_tensor_and_the_mean_of_heads() -> None:
    """By hand: two modules a layer, two heads; NaN is the largest there is."""
    by_name = {item.name: item for item in layers.QUANTITIES}
    stats = html_records.layers("w4a4")
    norms = layers.by_layer(stats, by_name["outputs.max_inf_norm"])
    kurtosis = layers.by_layer(stats, by_name["outputs.kurtosis"])
    sinks = layers.by_layer(stats, by_name["sink_mass"])

    assert [item.layer for item in norms] == ["0", "1", "2", "norm"]
    assert [item.value for item in norms] == [600.0, 6000.0, 60000.0, 30.0]
    assert norms[0].where == "model.layers.0.mlp"
    assert [math.isnan(item.value) for item in kurtosis] == [False, True, False, False]
    assert [item.value for item in sinks] == pytest.approx([0.45] * 3)
    assert "most in head 1: 0.7" in sinks[0].where


def test_layers_are_ordered_by_number() -> None:
    """Layer 10 comes after layer 9."""
    stats = [
        LayerStat(module=f"h.{at}.mlp", name="outputs.kurtosis", value=1.0) for at in (10, 2, 9)
    ]
    found = layers.by_layer(stats, layers.QUANTITIES[1])

    assert [item.layer for item in found] == ["2", "9", "10"]


def test_routing_is_router_by_source() -> None:
    """A source that does not exist yet is nothing, not zero."""
    found = layers.routing(html_records.layers("fp32"))

    assert found is not None
    assert found.routers == tuple(f"model.layers.{at}.router" for at in range(3))
    third = 1.0 / 3.0
    assert found.weights == (
        (0.5, 0.5, None, None),
        (third, third, third, None),
        (0.25, 0.25, 0.25, 0.25),
    )
    assert layers.routing(()) is None


def test_heat_map_has_a_cell_for_each_weight() -> None:
    """Colours follow the bounds, values stand in titles, infinity has a colour of its own."""
    found = layers.routing(html_records.layers("w4a4"))
    assert found is not None
    text = heat_map(found, title="x", record=record("tiny", "w4a4"))

    assert text.count("<rect") == 2 + 3 + 4
    assert text.count('class="cell nan"') == 1
    assert text.count('class="cell h5"') == 4
    assert ">1.router, source 2: 0.3333<" in text
    assert [charts.heat_step(value) for value in (0.0, 0.01, 0.5, 1.0, 1.5)] == [
        "h0",
        "h1",
        "h7",
        "h9",
        "h9",
    ]


def test_heat_maps_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for one map: the other schemes are said to be left out."""
    found = [
        record("tiny", scheme, metrics=loss(2.0)).model_copy(
            update={"layers": html_records.layers(scheme)}
        )
        for scheme in html_records.SHIFTS
    ]
    chosen = select(found, where={})
    monkeypatch.setattr(figures, "MAX_ROUTING_BYTES", 5_000)
    text = figures.render(chosen, lines(chosen))

    assert 0 < text.count('class="chart heat"') < 3
    assert re.search(r"[12] of 3 schemes are left out; keep some with --where scheme=", text)
    assert text.count("<figure") > 5


def test_short_names_differ() -> None:
    """The common beginning goes, never the last part."""
    assert short_names(("a.b.0.x", "a.b.1.x")) == ["0.x", "1.x"]
    assert short_names(("a.b",)) == ["b"]


def test_values_that_are_not_finite_stand_apart() -> None:
    """NaN and infinity are marks in a strip, and no part of the line."""
    points = tuple(
        charts.Point(at, value, str(value))
        for at, value in enumerate((1.0, math.nan, math.inf, 2.0))
    )
    text = charts.over_categories(
        [charts.Series("w4a4", 1, points)], list("0123"), title="x", log=True, below="layer"
    )

    assert text.count('class="mark c1"') == 4
    assert "NaN, inf" in text
    assert "nan" not in text.replace("<title>nan</title>", "")
    (path,) = re.findall(r'd="(M[^"]*)" class="line c1"', text)
    assert path.count("L") == 1


# --- answers ------------------------------------------------------------------------------------


def test_flips_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    """Of 100 questions 40 are shown: all that flip, then the others; 60 are left out."""
    rows = [
        {
            "question": at,
            "text": f"Q{at}",
            "reference": "A",
            "completion": "C" * (5000 if at == 99 else 5),
            "strict": True,
            "flexible": True,
            "answer_nll_nats": 1.0,
            "answer_tokens": 1,
        }
        for at in range(100)
    ]
    flipped = [{**row, "strict": row["question"] != 99} for row in rows]
    for scheme, found in (("fp32", rows), ("w4a4", flipped)):
        store(tmp_path, question_record(found, "tiny", scheme), found)
    chosen = select(list(read_records([tmp_path])), where={}, folders=[tmp_path])
    text = answers.render(chosen, lines(chosen))
    titles = [item for item in Reader(text).texts["h4"] if item.startswith("Question")]

    assert titles[:2] == ["Question 99", "Question 0"]
    assert len(titles) == answers.MAX_QUESTIONS
    assert "1 of 100 questions flip under some scheme. 40 are shown, flips first; 60 are" in text
    assert "(0 of them flips)" in text
    assert "… 1000 more characters" in text
    assert text.count("right → wrong") == 1
    assert text.count("data-flips") == 1


def test_samples_of_other_questions_are_not_put_side_by_side(tmp_path: Path) -> None:
    """Question 0 of another set is another question."""
    rows = html_records.answers(0.5, seed=1, num=4)
    other = [{**row, "text": f"other {row['text']}"} for row in rows]
    for scheme, found in (("fp32", rows), ("w4a4", other)):
        store(tmp_path, question_record(found, "tiny", scheme), found)
    chosen = select(list(read_records([tmp_path])), where={}, folders=[tmp_path])
    text = answers.render(chosen, lines(chosen))

    assert "w4a4: its samples are of other questions." in text
    assert text.count('class="answer"') == 4


# --- coverage and paths -------------------------------------------------------------------------


def test_modules_that_differ_in_numbers_are_one_line() -> None:
    """Two alike layers are one line, the one with a note and the head have their own."""
    found = coverage.alike(html_records.coverage().modules)
    what = "weights 8 bit per channel; activations 8 bit per token, dynamic"

    assert found == [
        ("model.layers.*.mlp.up_proj", 2, what),
        ("model.layers.2.mlp.up_proj", 1, f"{what} (a short last group)"),
        ("lm_head", 1, "left alone: the head stays"),
    ]
    assert coverage.summary(html_records.coverage()) == (
        "3 of 4 Linear layers quantized, 8.25 bits per parameter, 4 MB to 1.04 MB"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (999_600, "1 MB"), (1_234_000_000, "1.23 GB")],
)
def test_sizes(size: int, text: str) -> None:
    """Three digits and a unit."""
    assert text == coverage.bytes_text(size)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('File "/home/me/.venv/lib/torch/nn.py"', 'File "…/torch/nn.py"'),
        ("see https://host/a/b/c.html", "see https://host/a/b/c.html"),
        ("and/or a/b/c", "and/or a/b/c"),
        ("/tmp/x", "/tmp/x"),
    ],
)
def test_absolute_paths_lose_their_folders(text: str, shown: str) -> None:
    """The last two parts stay; what is no absolute path stays whole."""
    assert shown == without_folders(text)


def test_the_batch_is_the_one_that_ran() -> None:
    """Memory may not have sufficed for what was asked for."""
    asked = record("tiny", "w8a8", metrics={"token_perplexity": 9.0}, batch_size=8)
    halved = record(
        "tiny", "w8a8", metrics={"token_perplexity": 9.0}, batch_size=8, details={"batch_size": 2}
    )

    assert [dict(runs._settings(item))["batch size"] for item in (asked, halved)] == ["8", "2"]
