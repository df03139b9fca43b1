"""Which tokens each step of a run reads.

Packed tokens are cut into blocks of the training context. The last blocks of every text are kept
out, for probes. The order of the others is drawn once, before training, from the seed alone, and
written down as two arrays: sequence i of the run is block `blocks[i]` of text `sources[i]`. So
the order does not depend on the variant, on the number of devices or on where a run was resumed.

Shapes: I sequences of the run, S texts, N windows, T tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from oasis_eval.errors import DataError
from oasis_eval.spec import TrainRecipe
from oasis_eval.training.tokens import Tokens

Batch = dict[str, torch.Tensor]


class Order(NamedTuple):
    """The sequences of a run, first to last."""

    sources: NDArray[np.int64]
    """[I], which text."""
    blocks: NDArray[np.int64]
    """[I], which block of it."""


def draw_order(num_blocks: Sequence[int], shares: Sequence[float], count: int, seed: int) -> Order:
    """Draw the sequences of a run.

    Each sequence comes from a text at random by the shares; within a text, all blocks are read
    once in random order before any is read again.

    Args:
        num_blocks: Blocks of each text.
        shares: Part of the sequences that each text gets; they add up to 1.
        count: I.
        seed: Of the run.
    """
    # One stream of draws a purpose: a longer run begins with the sequences of a shorter one.
    source_I = _chance(seed, 0).choice(
        len(num_blocks), size=count, p=np.asarray(shares, dtype=np.float64)
    )
    block_I = np.empty(count, dtype=np.int64)
    for source, size in enumerate(num_blocks):
        chance = _chance(seed, 1 + source)
        places = np.flatnonzero(source_I == source)
        rounds = [chance.permutation(size) for _ in range(-(-len(places) // size))]
        if rounds:
            block_I[places] = np.concatenate(rounds)[: len(places)]
    return Order(source_I, block_I)


def _chance(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, purpose]))


class TrainingBlocks(Dataset[Batch]):
    """The sequences of a run in their order, each a block of T tokens."""

    def __init__(
        self,
        recipe: TrainRecipe,
        texts: Sequence[Tokens],
        *,
        steps: int,
        seed: int,
        head: Sequence[int] = (),
    ) -> None:
        """Cut texts into blocks and draw the order.

        Args:
            recipe: Context, batch size and shares.
            texts: One for each of the recipe's, in its order.
            steps: Optimizer steps of the run.
            seed: Of the run.
            head: Token ids that every block begins with.

        Raises:
            DataError: A text is too short.
        """
        self._texts = [text.ids for text in texts]
        self._head = np.asarray(head, dtype=np.int64)
        self._length = recipe.context - len(head)
        """Tokens of the text in a block."""
        if self._length < 1:
            raise DataError(f"context {recipe.context} has no room beside {len(head)} start tokens")
        kept_out = -(-recipe.probe_windows // len(texts))
        self.num_blocks = [len(ids_N) // self._length - kept_out for ids_N in self._texts]
        for text, left in zip(texts, self.num_blocks, strict=True):
            if left < 1:
                raise DataError(
                    f"{text.info.name}: {text.info.num_tokens} tokens; a block has "
                    f"{self._length} and {kept_out} blocks are kept for probes: give more text"
                )
        total = sum(self.num_blocks)
        self.shares = [
            left / total if source.share is None else source.share
            for source, left in zip(recipe.data, self.num_blocks, strict=True)
        ]
        count = steps * recipe.batch_size
        self.order = draw_order(self.num_blocks, self.shares, count, seed)
        windows = [
            self._block(source, left + index)
            for index in range(kept_out)
            for source, left in enumerate(self.num_blocks)
        ]
        self.held_out_NT = torch.from_numpy(np.stack(windows[: recipe.probe_windows]))
        """Windows that no step reads, in turn from each text."""

    def __len__(self) -> int:
        return len(self.order.sources)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch whole, which spares collating it from single sequences."""
        source_I, block_I = self.order
        rows = [self._block(int(source_I[i]), int(block_I[i])) for i in indices]
        ids_BT = torch.from_numpy(np.stack(rows))
        return {"input_ids": ids_BT, "labels": ids_BT}

    @property
    def passes(self) -> list[float]:
        """How often each text is read in the run."""
        counts = np.bincount(self.order.sources, minlength=len(self.num_blocks))
        return [int(n) / blocks for n, blocks in zip(counts, self.num_blocks, strict=True)]

    def _block(self, source: int, block: int) -> NDArray[np.int64]:
        start = block * self._length
        ids_T = self._texts[source][start : start + self._length].astype(np.int64)
        return np.concatenate([self._head, ids_T]) if len(self._head) else ids_T


def keep(batch: Batch) -> Batch:
    """Collate a batch that is one already."""
    return batch
