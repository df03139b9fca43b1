"""What doing nothing costs under a softmax, with and without a null: the paper's lemmas as numbers.

The setting is the smallest in which the statements can be checked by hand. Every real entry (token
or branch) adds a vector of norm r_i along one direction, the worst case, so the output's norm is
sum_i w_i r_i, and doing nothing to within e means sum_i w_i r_i <= e.

*Tokens* (Lemmas 5.1 and 5.2). n tokens, one of them a sink of norm 0 whose logit is g above the
equal others of norm 1. Under softmax the others' mass is (n - 1) / (n - 1 + exp g), so

    g >= log(n - 1) + log((1 - e) / e)

and the sink holds 1 - e. Under softmax1 no sink is needed: n equal logits x have the mass
n exp x / (1 + n exp x), so

    -x >= log n + log((1 - e) / e).

The size of the logits grows alike; what goes is the spread among real tokens (0 instead of g) and
the mass on a single one (e / n instead of 1 - e).

*Branches* (Theorems 5.1 and 5.2). S branches, one of the small norm q < e, the others of norm 1.
On the simplex w_small >= (1 - e) / (1 - q): the smallest update gets nearly all the weight, and
nothing is feasible below e = q. With a null, equal weights of total mass e / mean(r) do it: no
branch dominates, and every e > 0 is feasible.

The module is plain arithmetic; tests solve the same problems by bisection over the suite's own
normalizers and by linear programming.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from oasis_eval.errors import SpecError


@dataclass(frozen=True, slots=True)
class NoOpOfTokens:
    """What a head needs to output at most `epsilon`."""

    num_tokens: int
    epsilon: float
    gap: float
    """softmax: nats between the sink's logit and the others'."""
    sink_mass: float
    """softmax: mass on the sink."""
    null_margin: float
    """softmax1: nats by which every logit lies under the null's; the logits are equal."""
    largest_mass: float
    """softmax1: mass on any one token."""


@dataclass(frozen=True, slots=True)
class NoOpOfBranches:
    """What a router needs to read at most `epsilon`."""

    num_branches: int
    smallest_norm: float
    epsilon: float
    dominant_weight: float
    """Simplex: least weight on the smallest branch; NaN where no weights do it."""
    dominant_weight_null: float
    """With a null: the same share of the real mass, all branches alike."""
    null_mass: float
    """With a null: what the null takes then."""


def tokens(num_tokens: int, epsilon: float) -> NoOpOfTokens:
    """Return the logits of a head that does nothing.

    Args:
        num_tokens: At least 2.
        epsilon: Norm of the output, between 0 and 1 without its ends.

    Raises:
        SpecError: They are not.
    """
    if num_tokens < 2 or not 0.0 < epsilon < 1.0:
        raise SpecError(f"{num_tokens} tokens, epsilon {epsilon}: expected 2 or more, and 0 to 1")
    odds = math.log1p(-epsilon) - math.log(epsilon)
    return NoOpOfTokens(
        num_tokens,
        epsilon,
        gap=math.log(num_tokens - 1) + odds,
        sink_mass=1.0 - epsilon,
        null_margin=math.log(num_tokens) + odds,
        largest_mass=epsilon / num_tokens,
    )


def branches(num_branches: int, smallest_norm: float, epsilon: float) -> NoOpOfBranches:
    """Return the weights of a router that reads nothing.

    Args:
        num_branches: At least 2.
        smallest_norm: Of one branch, from 0 to under 1; the others have norm 1.
        epsilon: Norm of what is read, between 0 and 1 without its ends.

    Raises:
        SpecError: They are not.
    """
    if num_branches < 2 or not 0.0 <= smallest_norm < 1.0 or not 0.0 < epsilon < 1.0:
        raise SpecError(
            f"{num_branches} branches, smallest norm {smallest_norm}, epsilon {epsilon}: expected "
            "2 or more, 0 to 1, and 0 to 1"
        )
    feasible = smallest_norm <= epsilon
    needed = (1.0 - epsilon) / (1.0 - smallest_norm) if feasible else math.nan
    # Where much may be read, equal weights do it without any pressure.
    mean_norm = (num_branches - 1 + smallest_norm) / num_branches
    return NoOpOfBranches(
        num_branches,
        smallest_norm,
        epsilon,
        dominant_weight=max(needed, 1.0 / num_branches),
        dominant_weight_null=1.0 / num_branches,
        null_mass=max(0.0, 1.0 - epsilon / mean_norm),
    )


def token_grid(sizes: Sequence[int], epsilons: Sequence[float]) -> Iterator[NoOpOfTokens]:
    """Yield every combination, by epsilon and then by size."""
    for epsilon in epsilons:
        for size in sizes:
            yield tokens(size, epsilon)


def branch_grid(
    sizes: Sequence[int], norms: Sequence[float], epsilons: Sequence[float]
) -> Iterator[NoOpOfBranches]:
    """Yield every combination, by size, norm and then epsilon."""
    for size in sizes:
        for norm in norms:
            for epsilon in epsilons:
                yield branches(size, norm, epsilon)


def to_csv(tokens: Sequence[NoOpOfTokens], branches: Sequence[NoOpOfBranches]) -> str:
    """Return all of it at full precision, one line a number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["level", "setting", "quantity", "value"])
    for level, items, names in (
        ("tokens", tokens, ("num_tokens", "epsilon")),
        ("branches", branches, ("num_branches", "smallest_norm", "epsilon")),
    ):
        for item in items:
            values = asdict(item)
            setting = " ".join(f"{name}={values.pop(name)!r}" for name in names)
            for name, value in values.items():
                writer.writerow([level, setting, name, repr(value)])
    return text.getvalue()
