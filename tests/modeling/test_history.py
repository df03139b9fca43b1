"""Block bookkeeping: pure properties of the plan and the state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_eval.modeling.history import DepthHistory, DepthState, plan_steps
from oasis_eval.modeling.routing import Source
from tests.modeling.tiny import CASES, tiny_config


@given(layers=st.integers(1, 12), data=st.data())
def test_blocks_partition_the_sublayers(layers: int, data: st.DataObject) -> None:
    """N blocks of floor(L / N) sublayers, the last one with the rest."""
    count = 2 * layers
    blocks = data.draw(st.integers(1, count))

    steps = plan_steps("attnres_block", layers, blocks)

    ends = [index for index, step in enumerate(steps) if step.joins == "after"]
    sizes = [end - start for start, end in zip([-1, *ends], ends, strict=False)]
    assert len(ends) == blocks
    assert ends[-1] == count - 1
    assert set(sizes[:-1]) <= {count // blocks}
    assert sum(sizes) == count


@given(layers=st.integers(1, 12))
def test_full_is_as_many_blocks_as_sublayers(layers: int) -> None:
    """`attnres_full` plans what N = L plans."""
    assert plan_steps("attnres_full", layers, None) == plan_steps(
        "attnres_block", layers, 2 * layers
    )


def test_attention_sublayers_are_counted_within_a_block() -> None:
    """Three layers in two blocks: [attention, MLP, attention], [MLP, attention, MLP]."""
    steps = plan_steps("attnres_block", 3, 2)

    assert [step.num_attention for step in steps] == [1, 1, 2, 0, 1, 1]


@pytest.mark.parametrize(
    ("wiring", "joins"),
    [
        ("cumulative", {3: "after", 7: "after"}),
        ("reset", {4: "before", 8: "before"}),
        ("residual", {}),
        ("delta", {}),
        ("oasis_repo", {}),
    ],
)
def test_states_join_at_layer_boundaries(wiring: str, joins: dict[int, str]) -> None:
    """Five layers in three blocks of two layers."""
    steps = plan_steps(wiring, 5, 3)

    found = {index: step.joins for index, step in enumerate(steps) if step.joins != "never"}
    assert found == joins


def test_cumulative_sums_never_restart() -> None:
    """The stream of `cumulative` keeps every attention sublayer."""
    steps = plan_steps("cumulative", 3, 2)

    assert [step.num_attention for step in steps] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("case", CASES)
def test_flattened_state_comes_back(case: str) -> None:
    """Checkpointing sees plain tensors; the layout tells which is which."""
    history = DepthHistory.of(tiny_config("llama", case))

    def source(value: float) -> Source:
        return Source(
            torch.full((1, 2, 3), value),
            torch.full((1, 2), value) if history.keeps_rms else None,
            torch.full((1, 2), value) if history.keeps_psi else None,
        )

    for state in (
        DepthState((source(1.0), source(2.0)), None, None),
        DepthState((), torch.zeros(1, 2, 3), None),
        DepthState((source(1.0),), torch.ones(1, 2, 3), source(3.0)),
    ):
        layout, tensors = state.flatten()

        assert history.unflatten(layout, tensors) == state
