"""What doing nothing costs, with and without a null, drawn from `oasis_eval.theory`."""

from __future__ import annotations

from collections.abc import Sequence

from oasis_eval.report.figures.lines import Panel, Point, Series, draw_panels
from oasis_eval.report.figures.style import TEXT_INCHES, Drawing
from oasis_eval.theory import NoOpOfBranches, NoOpOfTokens


def theory(tokens: Sequence[NoOpOfTokens], branches: Sequence[NoOpOfBranches]) -> Drawing:
    """Return one figure: logits of a head over its tokens, weights of a router over epsilon.

    Args:
        tokens: Every size under each epsilon; the smallest epsilon is drawn.
        branches: Every epsilon of each smallest norm, for one number of branches.
    """
    epsilon = min(item.epsilon for item in tokens)
    heads = [item for item in tokens if item.epsilon == epsilon]
    sizes = [item.num_tokens for item in heads]
    ticks = tuple((float(size), f"{size}") for size in sizes)
    spread = Panel(
        title=f"Logits of a head that outputs {epsilon:g}",
        x_label="tokens",
        y_label="nats",
        series=(
            Series(
                "softmax: gap between sink and others",
                1,
                tuple(Point(float(item.num_tokens), item.gap) for item in heads),
            ),
            Series(
                "softmax1: distance to the null",
                2,
                tuple(Point(float(item.num_tokens), item.null_margin) for item in heads),
            ),
            Series(
                "softmax1: gap between tokens",
                3,
                tuple(Point(float(item.num_tokens), 0.0) for item in heads),
            ),
        ),
        x_ticks=ticks,
        log="no",
        log_x=True,
    )
    norms = sorted({item.smallest_norm for item in branches})
    epsilons = sorted({item.epsilon for item in branches})
    simplex = tuple(
        Series(
            f"simplex, smallest update {norm:g}",
            4 + number,
            tuple(
                Point(item.epsilon, item.dominant_weight)
                for item in sorted(branches, key=lambda item: item.epsilon)
                if item.smallest_norm == norm and item.dominant_weight == item.dominant_weight
            ),
        )
        for number, norm in enumerate(norms)
    )
    null = Series(
        "with a null",
        4 + len(norms),
        tuple(Point(epsilon, 1.0 / branches[0].num_branches) for epsilon in epsilons),
    )
    weight = Panel(
        title=f"Largest weight of a router over {branches[0].num_branches} branches",
        x_label="norm that may be read",
        y_label="weight of the smallest update (%)",
        series=(*simplex, null),
        x_ticks=tuple((epsilon, f"{epsilon:g}") for epsilon in epsilons),
        log="no",
        log_x=True,
        percent=True,
    )
    figure = draw_panels([spread, weight], width=TEXT_INCHES, columns=2, panel_height=2.4)
    return Drawing("theory", figure)
