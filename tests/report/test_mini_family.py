"""The page on the mini family: tables and intervals, recomputed from the values of each seed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from oasis_eval import registry
from oasis_eval.spec import DirSource, TrainRecipe
from oasis_eval.training import recipes

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
PAGE = (REFERENCE / "mini-family.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
KEYS = ["model", "scheme", "metric", "seed"]
VALUES = pd.read_csv(REFERENCE / "mini-seeds.csv").set_index(KEYS).sort_index()
SCHEMES = ("fp32", "w8a8", "w8a8-static", "w4a4", "w4a4-static")
OUTLIERS = (
    "max_inf_norm_outputs",
    "avg_kurtosis_outputs",
    "max_inf_norm_linear_inputs",
    "avg_kurtosis_linear_inputs",
    "sink_rate",
    "null_mass",
)
COLUMNS = {
    "perplexity": [(scheme, "token_perplexity", 1.0) for scheme in SCHEMES],
    "Pass@1, %": [(scheme, "pass@1", 100.0) for scheme in SCHEMES],
    "": [("fp32", name, 1.0) for name in OUTLIERS],
}
VARIANTS = (
    *("vanilla", "outeffhop", "oasis-adaptive", "clipped"),
    *("gated", "gated-g1", "sparsemax", "entmax15"),
)


def of(model: str, scheme: str, metric: str) -> pd.Series:
    """Values by seed."""
    found: pd.Series = VALUES.loc[(f"mini-{model}", scheme, metric), "value"]
    return found


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % interval of Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return values.mean(), values.mean() - half, values.mean() + half


def percents(ratios: np.ndarray) -> list[float]:
    """Mean of logarithms and its interval as changes in percent."""
    return [100.0 * (float(np.exp(end)) - 1.0) for end in interval(np.log(ratios))]


def rows() -> list[tuple[str, str, list[str], bool]]:
    """Kind, label and cells of every row of a table of models, and whether seed 1 alone counts."""
    found = []
    kind, only_first = None, False
    for line in PAGE.splitlines():
        if line.startswith("## "):
            only_first, kind = line == "## Ablations", None
        if not line.startswith("|"):
            kind = None
            continue
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if kind is None:
            kind = first
        elif kind in COLUMNS and not first.startswith("--"):
            found.append((kind, first, cells, only_first))
    return found


def test_every_cell_of_the_tables_is_its_seeds() -> None:
    """Means and standard deviations, as rounded as they are printed."""
    names = VALUES.reset_index().groupby("label")["model"].unique()
    checked = set()
    for kind, label, cells, only_first in rows():
        (model,) = names[label]
        for text, (scheme, metric, scale) in zip(cells, COLUMNS[kind], strict=True):
            values = of(model.removeprefix("mini-"), scheme, metric) * scale
            values = values[[1]] if only_first else values
            shown = text.split(" ± ")
            expected = [values.mean(), *([values.std(ddof=1)] if len(values) > 1 else [])]
            assert len(shown) == len(expected), (label, text)
            for part, value in zip(shown, expected, strict=True):
                unit = 10.0 ** -len(part.partition(".")[2])
                assert abs(float(part) - value) <= unit * 0.5001, (label, scheme, metric, text)
        checked.add((model, kind))
    assert checked == {(model, kind) for model in VALUES.index.unique("model") for kind in COLUMNS}


def table(corner: str) -> list[list[str]]:
    """Cells of the one table that begins so, without its head."""
    (head,) = re.findall(rf"^\| {re.escape(corner)} \|.*$", PAGE, flags=re.MULTILINE)
    lines = PAGE.split(head)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


NAMES = {
    "infinity norm, outputs": "max_inf_norm_outputs",
    "infinity norm, Linear inputs": "max_inf_norm_linear_inputs",
    "kurtosis, outputs": "avg_kurtosis_outputs",
    "kurtosis, Linear inputs": "avg_kurtosis_linear_inputs",
    "perplexity": "token_perplexity",
    "Pass@1": "pass@1",
}
HEADS = dict(
    zip(("fp32", "W8A8", "W8A8 static", "W4A4", "W4A4 static"), SCHEMES, strict=True),
)


def meant(name: str) -> tuple[str, str]:
    """Scheme and metric of a row."""
    if name in NAMES:
        return "fp32", NAMES[name]
    metric, _, head = name.partition(", ")
    return HEADS[head], NAMES[metric]


def numbers(cell: str) -> list[tuple[float, float]]:
    """Numbers of a cell and half the unit of their last digit."""
    return [
        (float(text), 0.5001 * 10.0 ** -len(text.partition(".")[2]))
        for text in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)
    ]


def test_changes_against_vanilla_are_paired_by_seed() -> None:
    """Every mean and interval of the table of claims; no change as large as the abstract's."""
    rows = table("OASIS against vanilla")
    assert len(rows) == 14
    claimed = {"max_inf_norm_outputs": -84.0, "avg_kurtosis_outputs": -97.0}
    for name, said, *cells in rows:
        scheme, metric = meant(name)
        claim = claimed.get(metric.replace("linear_inputs", "outputs"))
        if metric in claimed:
            assert numbers(said)[0][0] == claim
        for wiring, cell in zip(("", "-repo"), cells, strict=True):
            after, before = (of(f"{of_}{wiring}", scheme, metric) for of_ in ("oasis", "vanilla"))
            if metric == "pass@1":
                expected = [100.0 * end for end in interval((after - before).to_numpy())]
            else:
                expected = percents((after / before).to_numpy())
            shown = numbers(cell)
            assert len(shown) == 3
            for (number, half), value in zip(shown, expected, strict=True):
                assert abs(number - value) <= half, (name, wiring)
            if claim is not None:
                assert claim < expected[1]  # ruled out, as the page says


def test_depth_routing_against_none() -> None:
    """Eight pairs of one variant, seed 1."""
    rows = table("depth routing")
    assert len(rows) == 9
    for name, cell, higher in rows:
        scheme, metric = meant(name)
        ratios = np.array(
            [
                of(f"residual-{variant}", scheme, metric)[1] / of(variant, scheme, metric)[1]
                for variant in VARIANTS
            ]
        )
        expected = [float(np.exp(end)) for end in interval(np.log(ratios))]
        for (number, half), value in zip(numbers(cell), expected, strict=True):
            assert abs(number - value) <= half, name
        assert higher == f"{(ratios > 1.0).sum()} of 8"


def test_no_model_has_a_sink() -> None:
    """Which is why the first claim cannot be tested."""
    assert "no head of any model has a sink (rate 0)" in TEXT
    assert (VALUES.xs("sink_rate", level="metric")["value"] == 0.0).all()


# --- the script behind it -------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Loads `benchmarks/mini_family.py`."""
    path = REFERENCE.parents[1] / "benchmarks" / "mini_family.py"
    spec = importlib.util.spec_from_file_location("mini_family", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_its_models_are_those_of_the_page(script: ModuleType) -> None:
    """Names, labels and seeds of the values, each once."""
    made = [
        (f"mini-{member.name}", member.label, seed)
        for member in script.MEMBERS
        for seed in member.seeds
    ]

    assert len(set(made)) == len(made)
    rows = VALUES.reset_index()[["model", "label", "seed"]].drop_duplicates()
    assert set(made) == set(rows.itertuples(index=False, name=None))


@pytest.mark.parametrize(
    "section", ["block", "authors", "residual", "ablations", "claims", "depth"]
)
def test_it_writes_the_tables_of_the_page(script: ModuleType, section: str) -> None:
    """From the values by seed, whose cells the tests above have recomputed."""
    values: dict[tuple[str, str, str], dict[int, float]] = {}
    for (model, scheme, metric, seed), value in VALUES["value"].items():
        values.setdefault((model.removeprefix("mini-"), scheme, metric), {})[seed] = value

    if section in script.SECTIONS:
        text = script.section_of(values, *script.SECTIONS[section])
    else:
        text = getattr(script, section)(values)
    assert f"<!-- tables: {section} -->\n\n{text}\n<!-- end: {section} -->\n" in PAGE


def test_what_ships_was_trained_by_its_commands(script: ModuleType) -> None:
    """Same recipe as the one that ships, and variant, wiring and seed of the member."""
    members = {f"mini-{member.name}": member for member in script.MEMBERS}
    cards = {name: card for name, card in registry.cards().items() if name.startswith("mini-")}
    for name, card in cards.items():
        assert isinstance(card.source, DirSource)
        text = (Path(card.source.path) / "training.json").read_text(encoding="utf-8")
        identity = json.loads(text)["identity"]
        words = members[name].arguments.split()
        asked = dict(zip(words[::2], words[1::2], strict=True))

        assert TrainRecipe.model_validate(identity["recipe"]) == recipes.resolve("mini")
        assert (card.label, card.seed, identity["seed"]) == (members[name].label, 1, 1)
        assert identity["variant"] == asked.pop("--variant")
        assert identity["wiring"] == asked.pop("--wiring", "attnres_block") or "residual" in name
        assert (asked, identity.get("settings", {})) == ({}, {})


def test_all_that_is_no_ablation_ships(script: ModuleType) -> None:
    """One seed of each."""
    ablations = {*script.ABLATIONS} | {
        member for member in script.AUTHORS if len(member.seeds) == 1
    }
    expected = {f"mini-{item.name}" for item in script.MEMBERS if item not in ablations}
    assert len(expected) == 20
    assert {name for name in registry.cards() if name.startswith("mini-")} == expected


def test_seed_1_of_all_comes_first(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every model is trained, called by its label, and measured under that card."""
    calls: list[tuple[str, ...]] = []

    def call(*words: str) -> None:
        calls.append(words)
        if words[0] == "train":
            (out,) = (Path(word.partition("=")[2]) for word in words if word.startswith("--out="))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_name(f"{out.name}.yaml").write_text("name: x\nlabel: y\n")

    monkeypatch.setattr(script, "call", call)
    script.run(script.MEMBERS, tmp_path, jobs=1)

    trained = [words for words in calls if words[0] == "train"]
    seeds = [int(words[-2].removeprefix("--seed=")) for words in trained]
    assert seeds == sorted(seeds)
    assert len(trained) == sum(len(member.seeds) for member in script.MEMBERS)
    assert len(calls) == 4 * len(trained)
    for at in range(0, len(calls), 4):
        card = Path(calls[at][-1].removeprefix("--out=")).with_suffix(".yaml")
        assert {words[:2] for words in calls[at + 1 : at + 4]} == {("evaluate", str(card))}
    found = yaml.safe_load((tmp_path / "s1" / "mini-gated-g1.yaml").read_text())
    assert found == {"name": "x", "label": "gated G1"}


def test_a_job_that_fails_ends_the_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not begun is not begun."""
    begun: list[str] = []

    def make(member: object, seed: int, out: Path) -> None:
        begun.append(member.name)  # type: ignore[attr-defined]
        if len(begun) == 2:
            raise RuntimeError("out of disk")

    monkeypatch.setattr(script, "make", make)
    with pytest.raises(RuntimeError, match="out of disk"):
        script.run(script.MEMBERS, tmp_path, jobs=1)
    assert len(begun) == 2
