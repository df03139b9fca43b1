"""Doing nothing under a softmax: closed forms against the normalizers and a linear program."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog

from oasis_eval import theory
from oasis_eval.errors import SpecError
from oasis_eval.modeling import normalizers
from tests.command_line import CommandLine

PAGE = (Path(__file__).parents[1] / "docs" / "theory.md").read_text(encoding="utf-8")

SIZES = st.integers(2, 4096)
EPSILONS = st.floats(1e-6, 0.5)


def _output(kind: str, logits: list[float], norms: list[float]) -> float:
    """Norm of a head's output by the suite's own normalizer, in fp64."""
    row = torch.tensor([logits], dtype=torch.float64)
    normalize = normalizers.softmax if kind == "softmax" else normalizers.softmax1
    probs = normalize(row, None).probs
    return float(probs[0] @ torch.tensor(norms, dtype=torch.float64))


@given(SIZES, EPSILONS)
def test_gap_is_where_softmax_reaches_epsilon(size: int, epsilon: float) -> None:
    """Found by bisection over the real softmax."""
    found = theory.tokens(size, epsilon)
    norms = [0.0] + [1.0] * (size - 1)

    def excess(gap: float) -> float:
        return _output("softmax", [gap] + [0.0] * (size - 1), norms) - epsilon

    if excess(0.0) <= 0.0:  # two tokens and half the output: equal logits do it
        assert found.gap <= 1e-9
        return
    assert found.gap == pytest.approx(brentq(excess, 0.0, 60.0, xtol=1e-12), abs=1e-7)
    assert found.sink_mass == pytest.approx(1.0 - epsilon)


@given(SIZES, EPSILONS)
def test_margin_is_where_softmax1_reaches_epsilon(size: int, epsilon: float) -> None:
    """Equal logits under the null, no token with more than its share."""
    found = theory.tokens(size, epsilon)
    reached = _output("softmax1", [-found.null_margin] * size, [1.0] * size)

    assert reached == pytest.approx(epsilon, rel=1e-9)
    assert found.largest_mass == pytest.approx(epsilon / size)


@given(SIZES, EPSILONS)
def test_both_grow_with_log_n_and_log_one_over_epsilon(size: int, epsilon: float) -> None:
    """Twice the tokens cost log 2 more, a tenth of epsilon log 10 more, under either."""
    here, more, less = (
        theory.tokens(n, e) for n, e in ((size, epsilon), (2 * size, epsilon), (size, epsilon / 10))
    )

    assert more.null_margin - here.null_margin == pytest.approx(math.log(2))
    assert more.gap - here.gap == pytest.approx(math.log((2 * size - 1) / (size - 1)))
    shift = math.log(10) + math.log1p(-epsilon / 10) - math.log1p(-epsilon)
    assert less.gap - here.gap == pytest.approx(shift)
    assert less.null_margin - here.null_margin == pytest.approx(shift)


@given(st.integers(2, 40), st.floats(0.0, 0.9), st.floats(0.01, 0.95))
def test_dominant_weight_is_the_least_there_is(size: int, norm: float, epsilon: float) -> None:
    """By a linear program: the least largest weight on the simplex that reads at most epsilon."""
    found = theory.branches(size, norm, epsilon)
    norms = np.array([norm] + [1.0] * (size - 1))
    # Variables: the weights, and a bound on all of them.
    solved = linprog(
        c=[0.0] * size + [1.0],
        A_ub=np.vstack([np.append(norms, 0.0), np.hstack([np.eye(size), -np.ones((size, 1))])]),
        b_ub=np.append(epsilon, np.zeros(size)),
        A_eq=[[1.0] * size + [0.0]],
        b_eq=[1.0],
        bounds=[(0.0, 1.0)] * (size + 1),
    )
    if norm > epsilon:
        assert solved.status == 2  # infeasible
        assert math.isnan(found.dominant_weight)
    elif found.dominant_weight > 1.0 / size + 1e-9:
        assert solved.fun == pytest.approx(found.dominant_weight, abs=1e-7)
    else:
        assert solved.fun == pytest.approx(1.0 / size, abs=1e-7)


@given(st.integers(2, 40), st.floats(0.0, 0.9), st.floats(0.01, 0.95))
def test_a_null_makes_every_epsilon_feasible(size: int, norm: float, epsilon: float) -> None:
    """Equal weights and the null's mass add up to 1 and read at most epsilon."""
    found = theory.branches(size, norm, epsilon)
    each = (1.0 - found.null_mass) / size
    read = each * (norm + size - 1)

    assert 0.0 <= found.null_mass < 1.0
    assert read <= epsilon + 1e-12
    assert found.null_mass == 0.0 or read == pytest.approx(epsilon)
    assert found.dominant_weight_null == pytest.approx(1.0 / size)
    assert not found.dominant_weight < found.dominant_weight_null


def test_a_router_of_ours_needs_the_same() -> None:
    """Depth weights by the suite's softmax1: equal logits under the null read epsilon."""
    size, epsilon = 6, 0.02
    found = theory.branches(size, 0.5, epsilon)
    total = 1.0 - found.null_mass
    logit = math.log(total / (size * (1.0 - total)))

    assert _output("softmax1", [logit] * size, [0.5] + [1.0] * 5) == pytest.approx(epsilon)


@pytest.mark.parametrize(("size", "epsilon"), [(1, 0.1), (4, 0.0), (4, 1.0), (4, math.nan)])
def test_impossible_settings_are_refused(size: int, epsilon: float) -> None:
    with pytest.raises(SpecError, match="expected 2 or more"):
        theory.tokens(size, epsilon)
    with pytest.raises(SpecError, match="expected 2 or more"):
        theory.branches(size, 0.0, epsilon)


def test_grids_have_every_combination() -> None:
    assert [(r.num_tokens, r.epsilon) for r in theory.token_grid([4, 8], [0.1, 0.01])] == [
        *((4, 0.1), (8, 0.1), (4, 0.01), (8, 0.01))
    ]
    assert len(list(theory.branch_grid([2, 4], [0.0, 0.1], [0.2, 0.3]))) == 8


def test_the_command_prints_and_writes_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both tables; the file has every number whole, NaN where nothing is feasible."""
    call = CommandLine(monkeypatch, capsys)
    result = call(["theory", "--out", tmp_path, "--format", "png"])
    with (tmp_path / "theory.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))

    assert result.status == 0
    assert (tmp_path / "theory.png").is_file()
    assert re.search(r"^1024 +0\.01 +11\.53 +0\.990 +11\.53", result.out, flags=re.MULTILINE)
    assert re.search(r"^0\.05 +0\.01 +infeasible", result.out, flags=re.MULTILINE)
    by_place = {(line["setting"], line["quantity"]): float(line["value"]) for line in lines}
    expected = theory.tokens(1024, 0.01).gap
    assert by_place["num_tokens=1024 epsilon=0.01", "gap"] == expected
    place = ("num_branches=9 smallest_norm=0.05 epsilon=0.01", "dominant_weight")
    assert math.isnan(by_place[place])


def test_a_folder_that_cannot_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes alone, not below two tables."""
    (tmp_path / "file").write_text("")
    done = CommandLine(monkeypatch, capsys)(["theory", "--out", tmp_path / "file" / "folder"])

    assert (done.status, done.out) == (2, "")
    assert "cannot be written" in done.err


def test_the_page_is_right() -> None:
    """Its Python runs."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(block, {})
