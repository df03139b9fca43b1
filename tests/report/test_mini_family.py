"""The page on the mini family: tables and intervals, recomputed from the values of each seed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

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


@pytest.mark.parametrize("wiring", ["", "-repo"])
def test_changes_against_vanilla_are_paired_by_seed(wiring: str) -> None:
    """Each interval of the table of claims, in its own column."""
    (head,) = re.findall(r"^\| claim of the paper .*$", PAGE, flags=re.MULTILINE)
    table = PAGE.split(head)[1].split("\n\n")[0]
    column = 2 + bool(wiring)
    said = " ".join(line.split("|")[column] for line in table.splitlines() if "|" in line)
    found = [
        [float(number) for number in item]
        for item in re.findall(
            r"([+-][\d.]+)(?: %| points)? \(([+-][\d.]+) to ([+-][\d.]+)\)", said
        )
    ]
    pairs = [("fp32", name) for name in (*OUTLIERS[:4:2], *OUTLIERS[1:4:2])]
    pairs += [(scheme, "token_perplexity") for scheme in ("w8a8", "w8a8-static")]
    expected = [
        percents((of(f"oasis{wiring}", *pair) / of(f"vanilla{wiring}", *pair)).to_numpy())
        for pair in pairs
    ]
    if not wiring:
        for scheme in ("w4a4", "w4a4-static"):
            points = of("oasis", scheme, "pass@1") - of("vanilla", scheme, "pass@1")
            expected.append([100.0 * end for end in interval(points.to_numpy())])

    assert len(found) == len(expected)
    for shown, values in zip(found, expected, strict=True):
        assert shown == pytest.approx(values, abs=0.5001)
    for change, (_, low, _) in zip((-84.0, -84.0, -97.0, -97.0), expected, strict=False):
        assert change < low  # what the page says is ruled out


def test_depth_routing_against_none() -> None:
    """Eight pairs of one variant, seed 1."""

    def ratios(scheme: str, metric: str) -> np.ndarray:
        return np.array(
            [
                of(f"residual-{name}", scheme, metric)[1] / of(name, scheme, metric)[1]
                for name in VARIANTS
            ]
        )

    for metric, scheme, text in (
        ("max_inf_norm_outputs", "fp32", "2.04 times as large (95 % interval 1.77 to 2.34"),
        ("max_inf_norm_linear_inputs", "fp32", "1.38 times (1.12 to 1.69)"),
        ("token_perplexity", "w4a4-static", "3.2 times (1.5 to 7.1"),
    ):
        assert text in TEXT
        shown = [float(number) for number in re.findall(r"\d+\.\d+", text)]
        values = [float(np.exp(end)) for end in interval(np.log(ratios(scheme, metric)))]
        assert shown == pytest.approx(values, abs=0.05 if shown[0] == 3.2 else 0.005)
    assert (ratios("fp32", "max_inf_norm_outputs") > 1.0).all()
    assert (ratios("w4a4-static", "token_perplexity") > 1.0).sum() == 7
    alike = [("fp32", name) for name in OUTLIERS[1:4:2]]
    alike += [(scheme, "token_perplexity") for scheme in SCHEMES[:4]]
    for scheme, metric in alike:
        _, low, high = interval(np.log(ratios(scheme, metric)))
        assert low < 0.0 < high


def test_no_model_has_a_sink() -> None:
    """Which is why the first claim cannot be tested."""
    assert "no head of any model has a sink (rate 0)" in PAGE
    assert (VALUES.xs("sink_rate", level="metric")["value"] == 0.0).all()
