"""What the registered functions do with arguments: masks, windows, constants, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from oasis_eval.errors import SpecError
from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.interface import attention_forward, visible_keys_mask
from oasis_eval.modeling.normalizers import Normalizer, NormalizerName


class Plain(nn.Module):
    """An attention module without parameters."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=8, hidden_size=32, num_attention_heads=4)


def states(num_queries: int = 6, num_keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, num_queries, 8, generator=random)
    key, value = (torch.randn(1, 2, num_keys, 8, generator=random) for _ in range(2))
    return query, key, value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clipped_softmax", "needs the training length, as 'clip_train_length' of LlamaConfig"),
        ("sink", "as 'sinks' or 'null_logit' of Plain; found neither"),
    ],
)
def test_missing_constants(name: NormalizerName, message: str) -> None:
    """What has no place in the model and no default is asked for by name."""
    with pytest.raises(SpecError, match=message):
        attention_forward(name, Plain(), *states(), None)


@pytest.mark.parametrize(
    "argument", ["position_bias", "cu_seq_lens_q", "indices", "seq_idx", "new"]
)
def test_unsupported_arguments(argument: str) -> None:
    """What would change the numbers is refused by name; None and harmless requests pass."""
    extra: dict[str, Any] = {argument: torch.zeros(1)}
    with pytest.raises(SpecError, match=f"argument '{argument}' is not supported"):
        attention_forward("softmax1", Plain(), *states(), None, **extra)

    passed: dict[str, Any] = {argument: None, "use_cache": True, "position_ids": torch.arange(6)}
    attention_forward("softmax1", Plain(), *states(), None, **passed)


def test_additive_masks() -> None:
    """A caller's additive mask of 0 and minus infinity counts; a bias in it is refused."""
    visible = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    expected, _ = attention_forward("softmax1", Plain(), *states(), visible)
    for low in (float("-inf"), torch.finfo(torch.float32).min):
        additive = torch.zeros(1, 1, 6, 6).masked_fill(~visible, low)
        context, _ = attention_forward("softmax1", Plain(), *states(), additive)
        assert torch.equal(context, expected)

    with pytest.raises(SpecError, match="found other values"):
        attention_forward("softmax1", Plain(), *states(), torch.full((1, 1, 6, 6), -1.5))
    with pytest.raises(SpecError, match="found other values"):
        attention_forward("softmax1", Plain(), *states(), visible.long())


@pytest.mark.parametrize("num_queries", [1, 3, 6])
def test_sliding_window_without_mask(num_queries: int) -> None:
    """A window that comes without a mask is applied, not dropped."""
    query, key, value = states(num_queries)
    context, _ = attention_forward("softmax1", Plain(), query, key, value, None, sliding_window=2)

    visible = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)[-num_queries:]
    expected = attend(
        query, key, value, visible, normalizer=Normalizer("softmax1"), scaling=8**-0.5
    )
    torch.testing.assert_close(context, expected.context)
    module = Plain()
    module.is_causal = False
    with pytest.raises(SpecError, match="needs an explicit mask"):
        attention_forward("softmax1", module, query, key, value, None, sliding_window=2)


@pytest.mark.parametrize(
    ("arguments", "skipped"),
    [
        ({"q_length": 6, "kv_length": 6}, True),
        ({"q_length": 1, "kv_length": 6, "q_offset": 5}, True),
        ({"q_length": 6, "kv_length": 20}, False),
        ({"q_length": 1, "kv_length": 20, "q_offset": 5}, False),
        ({"q_length": 3, "kv_length": 6, "q_offset": 3}, False),
        ({"q_length": 6, "kv_length": 6, "local_size": 4}, False),
        ({"q_length": 6, "kv_length": 6, "allow_is_causal_skip": False}, False),
        ({"q_length": 6, "kv_length": 6, "q_offset": torch.tensor(0)}, False),
    ],
)
def test_mask_is_skipped_only_where_none_is_clear(arguments: dict[str, Any], skipped: bool) -> None:
    """No mask means "the last queries, causal"; an unused cache end or a window needs one."""
    mask = visible_keys_mask(batch_size=2, **arguments)

    assert (mask is None) == skipped
    if mask is not None:
        assert mask.dtype == torch.bool
        assert mask.shape == (2, 1, arguments["q_length"], arguments["kv_length"])
