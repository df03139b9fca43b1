"""From records to figures: what each kind shows, and what it says where it cannot."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oasis_eval.errors import RecordError, UnknownNameError
from oasis_eval.quant import schemes
from oasis_eval.record import (
    LayerStat,
    RunRecord,
    read_records,
    write_record,
    write_samples,
)
from oasis_eval.report.figures.kinds import Sources, draw, read_sources
from oasis_eval.report.figures.perplexity import Place, place_of
from oasis_eval.report.figures.style import Drawing
from tests.command_line import CommandLine
from tests.report.comparisons import store, text_record, windows
from tests.report.figures.drawn import check_nothing_is_clipped, line, marks, texts
from tests.report.figures.test_heat import cells
from tests.report.html_records import NUM_LAYERS, layers
from tests.report.samples import record


def sources(*records: RunRecord, folder: Path | None = None) -> Sources:
    return Sources(records, (folder,) if folder else (), ())


def drawn(kind: str, *records: RunRecord, folder: Path | None = None) -> list[Drawing]:
    return draw(sources(*records, folder=folder), (kind,), where={})[0]


def diagnosed(scheme: str, *more: LayerStat, name: str = "tiny") -> RunRecord:
    found = record(name, scheme, metrics={"token_perplexity": 10.0})
    return found.model_copy(update={"layers": (*layers(scheme), *more)})


# --- perplexity -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("fp32", None),
        ("w8a8", Place("RTN", 8)),
        ("w4a4-g128", Place("g128", 4)),
        ("w6a6-rot-gptq", Place("rot-gptq", 6)),
        ("w4a16", Place("RTN, weights only", 4)),
        ("w16a8", Place("RTN, activations only", 8)),
        ("w4a8", Place("RTN, a8", 4)),
        ("nf4", Place("nf4", 4)),
        ("quanto-w8a8", Place("quanto", 8)),
        ("mxfp4", Place("mxfp4", 4)),
    ],
)
def test_where_a_scheme_stands(name: str, place: Place | None) -> None:
    """One line a method, along the bits of the weights."""
    assert place_of(schemes.resolve(name)) == place


def test_perplexity_over_bits(tmp_path: Path) -> None:
    """Each point is its record's number, its band the paired interval, the dashed line fp32's."""
    values = {}
    for number, (scheme, shift) in enumerate(
        {"fp32": 0.0, "w8a8": 0.02, "w6a6": 0.1, "w4a4": 0.9, "w4a4-rot": 0.3}.items()
    ):
        text = windows(3.0, seed=number, shift=shift)
        found = store(tmp_path, text_record(text, "tiny", scheme), text)
        nats, tokens = found.metric("nll_nats"), found.metric("num_tokens")
        assert nats is not None
        assert tokens is not None
        values[scheme] = math.exp(nats.value / tokens.value)
    (drawing,) = drawn("perplexity", *read_records([tmp_path]), folder=tmp_path)
    (axes,) = drawing.figure.axes

    x, y = line(axes, "RTN")
    assert x == [-8.0, -6.0, -4.0]
    assert y == pytest.approx([values["w8a8"], values["w6a6"], values["w4a4"]])
    assert line(axes, "rot") == ([-4.0], [pytest.approx(values["w4a4-rot"])])
    assert float(axes.lines[0].get_ydata()[0]) == pytest.approx(values["fp32"])
    ticks = {text.get_text(): text.get_position()[0] for text in axes.get_xticklabels()}
    assert ticks == {"8": -8.0, "6": -6.0, "4": -4.0}
    bands = [item for item in axes.collections if item.get_paths()]
    assert len(bands) == 4  # a band and its whiskers, for each of the two lines
    whiskers = bands[1].get_paths()
    for path, scheme in zip(whiskers, ("w8a8", "w6a6", "w4a4"), strict=True):
        low, high = path.vertices[:, 1]
        assert low < values[scheme] < high
    check_nothing_is_clipped(drawing.figure)


def test_failed_and_broken_cells_are_marked() -> None:
    """A failed, an unsupported and an infinite cell stand in the strip at their bits."""
    records = [
        record("tiny", "fp32", metrics={"token_perplexity": 10.0}),
        record("tiny", "w8a8", status="failed", reason="out of memory"),
        record("tiny", "w6a6", status="unsupported", reason="no"),
        record("tiny", "w4a4", metrics={"token_perplexity": math.inf}),
    ]
    (drawing,) = drawn("perplexity", *records)
    (axes,) = drawing.figure.axes

    assert marks(axes) == {"RTN:failed": [-8.0], "RTN:unsupported": [-6.0], "RTN:inf": [-4.0]}
    assert {"failed", "not supported", "infinite"} <= set(texts(drawing.figure))


# --- layers -----------------------------------------------------------------------------------


def test_outliers_over_layers() -> None:
    """The largest tensor of each layer, NaN marked where a scheme broke it."""
    (drawing,) = drawn("outliers", diagnosed("fp32"), diagnosed("w4a4"))
    norm, kurtosis, *_ = drawing.figure.axes

    # Three layers and the final norm; the MLP's tensor is the larger one.
    assert line(norm, "fp32") == ([0.0, 1.0, 2.0, 3.0], [20.0, 200.0, 2000.0, 1.0])
    assert line(norm, "w4a4")[1] == [600.0, 6000.0, 60000.0, 30.0]
    assert norm.get_yscale() == "log"
    assert marks(kurtosis) == {"w4a4:nan": [1.0]}
    assert [text.get_text() for text in norm.get_xticklabels()] == ["0", "1", "2", "norm"]
    check_nothing_is_clipped(drawing.figure)


def test_heads_by_layer() -> None:
    """A row a layer, a column a head."""
    (drawing,) = drawn("sink-mass", diagnosed("fp32"), diagnosed("w8a8"))
    for axes in drawing.figure.axes[:2]:
        assert cells(axes, "sources").tolist() == [[0.2, 0.7]] * NUM_LAYERS
    assert [axes.get_title() for axes in drawing.figure.axes[:2]] == ["fp32", "w8a8"]
    check_nothing_is_clipped(drawing.figure)


def test_null_mass_of_a_model_without_a_null_is_said_not_drawn() -> None:
    """Maps of zeros would tell nothing."""
    with pytest.raises(RecordError, match="null-mass: no record has diagnostics of a model with a"):
        drawn("null-mass", diagnosed("fp32"))
    null = LayerStat(module="model.layers.1.self_attn", name="head.1.null_mass", value=0.25)
    others = [item for item in layers("fp32") if item.name != "head.1.null_mass"]
    found = diagnosed("fp32").model_copy(update={"layers": (*others, null)})
    (drawing,) = drawn("null-mass", found)

    assert cells(drawing.figure.axes[0], "sources")[1, 1] == 0.25


def test_depth_routing_shows_raw_weights_where_a_record_has_them() -> None:
    """Each row of sources and null adds up to one then."""
    raw = [
        LayerStat(module=f"model.layers.{at}.attn_res_mlp", name=f"depth.{name}", value=value)
        for at in range(2)
        for name, value in (
            ("source.0.weight", 0.8),
            ("source.1.weight", 0.2),
            ("source.0.weight_raw", 0.6),
            ("source.1.weight_raw", 0.15),
            ("null_mass", 0.25),
        )
    ]
    found = diagnosed("fp32").model_copy(update={"layers": tuple(raw)})
    (drawing,) = drawn("depth-routing", found)
    axes = drawing.figure.axes[0]

    assert cells(axes, "sources").tolist() == [[0.6, 0.15]] * 2
    assert cells(axes, "null").ravel().tolist() == [0.25, 0.25]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0 mlp", "1 mlp"]
    old = drawn("depth-routing", diagnosed("w8a8"))[0]
    assert "renormalised" in old.stem
    assert "mean weight (of what the null leaves)" in texts(old.figure)


# --- what is lacking ----------------------------------------------------------------------------


def test_a_lack_is_named_with_the_command_that_measures_it() -> None:
    """Model, task and schemes of the very records that lack it."""
    plain = record("other", "w8a8", metrics={"token_perplexity": 9.0})
    drawings, lacking = draw(sources(diagnosed("fp32"), plain), (), where={})

    assert any(item.stem.startswith("outliers") for item in drawings)
    line = next(text for text in lacking if text.startswith("outliers"))
    assert "1 of 2 records of text lack diagnostics" in line
    assert line.endswith("oasis-eval evaluate other --task wikitext2 --scheme w8a8 --diagnostics")


@pytest.mark.parametrize(
    ("positions", "context", "key"),
    [
        (None, "context-256,context-512,context-1024", "passkey-1024"),
        (32768, "context-256,context-512,context-1024", "passkey-1024"),
        (256, "context-64,context-128,context-256", "passkey-256"),
    ],
)
def test_a_command_fits_the_models(positions: int | None, context: str, key: str) -> None:
    """No context that a model has no positions for; the limit of the records where it counts."""
    plain = record("other", "w8a8", metrics={"token_perplexity": 9.0}, limit=8)
    card = plain.card.model_copy(update={"context_length": positions})
    _, lacking = draw(
        sources(diagnosed("fp32"), plain.model_copy(update={"card": card})), (), where={}
    )
    commands = {line.partition(":")[0]: line for line in lacking}

    assert commands["outliers"].endswith("--scheme w8a8 --limit 8 --diagnostics")
    assert commands["context"].endswith(f"--scheme w8a8,fp32 --diagnostics --protocol {context}")
    assert commands["passkey"].endswith(f"--scheme w8a8,fp32 --task passkey --protocol {key}")


def test_a_kind_that_was_asked_for_and_has_nothing_is_an_error() -> None:
    """Not a command that ends well without a file."""
    plain = record("other", "w8a8", metrics={"token_perplexity": 9.0})
    with pytest.raises(
        RecordError, match="outliers: 1 of 1 records of text lack diagnostics; measure"
    ):
        drawn("outliers", plain)
    with pytest.raises(RecordError, match="attention: no attention maps; capture them"):
        drawn("attention", plain)
    with pytest.raises(UnknownNameError, match="unknown figure kind 'outlier'; did you mean"):
        drawn("outlier", plain)
    with pytest.raises(RecordError, match="no records and no attention maps"):
        draw(Sources((), (), ()), (), where={})


def test_figures_with_one_name_are_kept_apart() -> None:
    """Labels that differ in characters that no file name has."""
    records = [
        diagnosed("fp32", name=name).model_copy(
            update={"card": diagnosed("fp32", name=name).card.model_copy(update={"label": label})}
        )
        for name, label in (("a", "x y"), ("b", "x/y"))
    ]
    stems = [item.stem for item in drawn("outliers", *records)]

    assert len(set(stems)) == 2


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of the kinds asked for, their paths on standard output, lacks on standard error."""
    call = CommandLine(monkeypatch, capsys)
    for item in (diagnosed("fp32"), record("tiny", "w8a8", metrics={"token_perplexity": 9.0})):
        write_record(tmp_path / "runs", item)
    done = call(
        [
            "figures",
            tmp_path / "runs",
            "--out",
            tmp_path / "out",
            "--kind",
            "outliers",
            "--format",
            "png",
        ]
    )

    assert done.status == 0
    (path,) = [Path(text) for text in done.out.split()]
    assert path.parent == tmp_path / "out"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert done.err.startswith("not drawn: outliers: 1 of 2 records of text lack diagnostics")
    refused = call(["figures", tmp_path / "runs", "--kind", "maps"])
    assert refused.status == 2
    assert "unknown figure kind 'maps'" in refused.err


# --- context and passkey ------------------------------------------------------------------------


def context_record(folder: Path, window: int, scheme: str, *, factor: float) -> RunRecord:
    """Two windows with losses by position, and masses of one layer."""
    lasts = [1, 2, 3, 4]
    rows: list[dict[str, object]] = [
        {
            "task": "text",
            "protocol": f"context-{window}",
            "document": 0,
            "window": at,
            "nll_nats": factor * 10.0 * (at + 1),
            "num_tokens": 4,
            "squares": 0.0,
            "position_last": lasts,
            "position_nats": [factor * (at + 1) * last for last in lasts],
            "position_tokens": [1, 1, 1, 1],
        }
        for at in range(2)
    ]
    metrics = {
        "nll_nats": factor * 30.0,
        "num_tokens": 8.0,
        "token_perplexity": math.exp(factor * 30.0 / 8.0),
        "sink_mass": 0.5 / window,
        "null_mass": 0.0,
    }
    found = record("tiny", scheme, "text", protocol_name=f"context-{window}", metrics=metrics)
    masses = tuple(
        LayerStat(
            module=f"model.layers.{layer}.self_attn",
            name=f"position.{last}.sink_mass",
            value=(layer + 1.0) / (10.0 * last),
        )
        for layer in range(2)
        for last in lasts
    )
    found = found.model_copy(update={"layers": masses})
    write_record(folder, found)
    write_samples(folder, found.key, rows)
    return found


def test_context_by_length_and_position(tmp_path: Path) -> None:
    """Perplexity and first-token mass: a point a record, and the longest context by position."""
    records = [
        context_record(tmp_path, window, "fp32", factor=f) for window, f in ((2, 0.2), (4, 0.1))
    ]
    (drawing,) = drawn("context", *records, folder=tmp_path)
    over, along, sinks, sinks_along = drawing.figure.axes

    assert line(over, "fp32") == (
        [2.0, 4.0],
        [pytest.approx(math.exp(f * 30 / 8)) for f in (0.2, 0.1)],
    )
    # At position p both windows: (0.1 p + 0.2 p) / 2 tokens.
    assert line(along, "fp32") == (
        [1.0, 2.0, 3.0, 4.0],
        [pytest.approx(math.exp(0.15 * p)) for p in (1, 2, 3, 4)],
    )
    assert line(sinks, "fp32") == ([2.0, 4.0], [25.0, 12.5])
    assert line(sinks_along, "fp32")[1] == [pytest.approx(15.0 / p) for p in (1, 2, 3, 4)]
    assert "null mass over context" not in texts(drawing.figure)
    check_nothing_is_clipped(drawing.figure)


def test_passkey_by_length_and_depth() -> None:
    """A cell a length and depth, the shortest context left, the key's beginning on top."""
    metrics = {
        f"exact_match_{length}_depth_{depth}": share
        for length, depth, share in (
            (256, "0", 1.0),
            (256, "0.5", 0.5),
            (1024, "0", 0.25),
            (1024, "0.5", 0.0),
        )
    }
    found = record(
        "tiny",
        "w8a8",
        "passkey",
        protocol_name="passkey-1024",
        metrics={**metrics, "exact_match": 0.4},
    )
    (drawing,) = drawn("passkey", found)
    axes = drawing.figure.axes[0]

    assert cells(axes, "sources").tolist() == [[1.0, 0.25], [0.5, 0.0]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["256", "1024"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "50"]
    written = {text.get_position(): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "100", (1, 0): "25", (0, 1): "50", (1, 1): "0"}
    check_nothing_is_clipped(drawing.figure)


def test_seeds_are_not_mixed(tmp_path: Path) -> None:
    """Each has its own figure, or the one that is drawn is named; none where there is one."""

    def titles(kind: str, *found: RunRecord) -> list[tuple[str, str]]:
        drawings = drawn(kind, *found, folder=tmp_path)
        return [(item.stem, " ".join(texts(item.figure))) for item in drawings]

    metrics = {"exact_match": 0.4, "exact_match_256_depth_0": 1.0}
    keys = [
        record("tiny", "w8a8", "passkey", protocol_name="passkey-256", metrics=metrics, seed=seed)
        for seed in (1, 2)
    ]
    (one,) = titles("passkey", keys[0])
    assert "seed" not in "".join(one)
    pair = titles("passkey", *keys)
    assert ["seed-1" in stem for stem, _ in pair] == [True, False]
    assert ["seed 2" in text for _, text in pair] == [False, True]

    plain = context_record(tmp_path, 4, "fp32", factor=0.1)
    other = plain.model_copy(
        update={"key": "other", "spec": plain.spec.model_copy(update={"seed": 7})}
    )
    assert ["seed 7" in text for _, text in titles("context", plain, other)] == [False, True]
    assert "seed" not in "".join(titles("context", plain)[0])

    first, second = diagnosed("fp32"), diagnosed("w4a4")
    later = first.model_copy(
        update={"key": "later", "spec": first.spec.model_copy(update={"seed": 7})}
    )
    (shown,) = titles("outliers", first, second, later)
    assert "seed 0" in shown[1]
    assert "seed" not in titles("outliers", first, second)[0][1]


def test_kinds_of_their_own_protocol_say_how_to_measure_them() -> None:
    """Nobody has such records by the way."""
    plain = record("other", "w8a8", metrics={"token_perplexity": 9.0})
    with pytest.raises(
        RecordError, match=r"context: .*evaluate other --task wikitext2 --scheme w8a8 --diag"
    ):
        drawn("context", plain)
    with pytest.raises(
        RecordError, match=r"passkey: .*evaluate other --scheme w8a8 --task passkey"
    ):
        drawn("passkey", plain)


# --- sensitivity --------------------------------------------------------------------------------


def test_sensitivities_are_drawn_from_their_table(tmp_path: Path) -> None:
    """As `oasis-eval sensitivity` writes it: bars, intervals, and what is no number on top."""
    path = tmp_path / "tiny_w4a4-12345678.csv"
    path.write_text(
        "rank,name,effect_nats,low,high,kl_nats\n"
        "1,layer 1,nan,,,0.5\n2,layer 0,0.5,0.25,0.75,0.4\n3,layer 2,-0.125,,,0.1\n"
    )
    (drawing,), lacking = draw(read_sources([path]), (), where={})
    (axes,) = drawing.figure.axes

    assert lacking == []
    assert drawing.stem == "sensitivity-tiny-w4a4-12345678"
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["layer 1", "layer 0", "layer 2"]
    assert {item.get_gid(): item.get_width() for item in axes.patches} == {
        "layer 0": 0.5,
        "layer 2": -0.125,
    }
    assert [list(item.get_xdata()) for item in axes.lines if item.get_marker() == "|"] == [
        [0.25, 0.75]
    ]
    check_nothing_is_clipped(drawing.figure)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "not a table of sensitivities"),
        ("name,effect_nats,low,high\nx,much,,\n", "not a table of sensitivities"),
        ("name,effect_nats,low,high\n", "without a row"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, words: str) -> None:
    """By the file's name."""
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(RecordError, match=words):
        read_sources([path])
