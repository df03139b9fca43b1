"""What a layer is told about the padding of the running pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.padding import PaddingContext


class Model(nn.Module):
    """Hands a tensor of a given shape to a layer that asks for its padding."""

    def __init__(self, context: PaddingContext, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.context, self.shape = context, shape

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        return self.context.sequences(torch.zeros(self.shape), "layer")


def ask(shape: tuple[int, ...], **given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return what a layer with input of `shape` is told in a pass with these arguments."""
    context = PaddingContext()
    model = Model(context, shape)
    context.watch(model)
    answer: tuple[Tensor, Tensor | None] = model(**given)
    return answer


IDS_BT = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("source", ["input_ids", "inputs_embeds"])
def test_padding_is_read_from_the_mask(source: str, shape: tuple[int, ...]) -> None:
    """Whole or flattened, by ids or embeddings, a layer gets [B, T, K] and the mask."""
    given = {source: IDS_BT if source == "input_ids" else torch.zeros(2, 3, 4)}
    x_BTK, real_BT = ask(shape, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), **given)

    assert x_BTK.shape == (2, 3, 4)
    assert real_BT is not None
    assert real_BT.tolist() == [[False, True, True], [True, True, True]]


def test_with_a_cache_the_mask_ends_with_the_new_tokens() -> None:
    """A mask over cached and new tokens is cut to the new ones."""
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    _, real_BT = ask((2, 3, 4), input_ids=IDS_BT, attention_mask=mask)

    assert real_BT is not None
    assert real_BT.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("mask", [None, torch.ones(2, 3), torch.ones(2, 9)])
def test_no_padding_is_no_mask(mask: Tensor | None) -> None:
    """A mask of ones and an absent one are the same."""
    assert ask((2, 3, 4), input_ids=IDS_BT, attention_mask=mask)[1] is None


def test_a_part_of_the_tokens_is_fine_without_padding() -> None:
    """The head of a generating model sees the last token only."""
    assert ask((2, 1, 4), input_ids=IDS_BT)[0].shape == (2, 1, 4)


@pytest.mark.parametrize("shape", [(2, 1, 4), (5, 4), (1, 3, 4), (2, 3, 3, 4)])
def test_rows_of_unknown_tokens_are_refused(shape: tuple[int, ...]) -> None:
    """With padding, a part of the tokens could be anybody's."""
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])

    with pytest.raises(QuantizationError, match="does not show which of 2 x 3 tokens"):
        ask(shape, input_ids=IDS_BT, attention_mask=mask)


def test_a_pass_without_tokens_is_refused() -> None:
    """Neither ids nor embeddings: nothing is known."""
    with pytest.raises(QuantizationError, match="neither input_ids nor inputs_embeds"):
        ask((2, 3, 4))


def test_an_interrupted_pass_is_forgotten() -> None:
    """After an error inside the model the next layer call is outside of any pass."""
    context = PaddingContext()
    model = Model(context, (7, 4))
    context.watch(model)
    with pytest.raises(QuantizationError, match="does not show"):
        model(input_ids=IDS_BT)

    with pytest.raises(QuantizationError, match="outside of the model's forward pass"):
        context.sequences(torch.zeros(2, 3, 4), "layer")


def test_unwatch_removes_the_hooks() -> None:
    """Nothing is left on the model."""
    context = PaddingContext()
    model = Model(context, (2, 3, 4))
    context.watch(model)
    context.unwatch()

    assert not model._forward_pre_hooks
    assert not model._forward_hooks
