"""Which tokens a step reads: every block in turn, none that is kept out, the same for all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from oasis_eval.errors import DataError, SpecError
from oasis_eval.modeling.variants import VARIANT_NAMES
from oasis_eval.spec import TextSource
from oasis_eval.training import tokens
from oasis_eval.training.blocks import TrainingBlocks, draw_order
from oasis_eval.training.run import build_model, load_tokenizer, start_tokens
from tests import tiny
from tests.training.tiny import STEPS, plan, recipe


def blocks(folder: Path, *, steps: int = STEPS, seed: int = 0, **changes: object) -> TrainingBlocks:
    """The sequences of a run of the tiny recipe."""
    tiny = recipe(folder, **changes)
    data = {"prose": str(folder / "text.jsonl"), "more": str(folder / "text.jsonl")}
    texts = [tokens.load(text, load_tokenizer(plan(folder)), data=data) for text in tiny.data]
    return TrainingBlocks(tiny, texts, steps=steps, seed=seed)


def all_ids(found: TrainingBlocks) -> list[list[int]]:
    return [found[index]["input_ids"][0].tolist() for index in range(len(found))]


def test_a_text_is_read_once_before_again() -> None:
    """In every run of as many draws as there are blocks, each block occurs once."""
    order = draw_order([7], [1.0], 30, seed=3)
    rounds = [order.blocks[start : start + 7].tolist() for start in (0, 7, 14, 21)]

    assert all(sorted(part) == list(range(7)) for part in rounds)
    assert len({tuple(part) for part in rounds}) == 4
    assert set(order.blocks[28:]) <= set(range(7))


def test_shares_are_kept() -> None:
    """Three texts of very different sizes, by their shares, within four standard deviations."""
    shares = [0.5, 0.3, 0.2]
    order = draw_order([5, 1000, 40], shares, 10_000, seed=0)
    counts = np.bincount(order.sources)

    for count, share in zip(counts, shares, strict=True):
        assert abs(count - 10_000 * share) < 4 * (10_000 * share * (1 - share)) ** 0.5
    for source, size in enumerate([5, 1000, 40]):
        drawn = Counter(order.blocks[order.sources == source].tolist())
        assert max(drawn.values()) - min(drawn.get(b, 0) for b in range(size)) <= 1


def test_order_follows_from_the_seed() -> None:
    first, again, other = (draw_order([50], [1.0], 40, seed=seed).blocks for seed in (1, 1, 2))

    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_longer_run_begins_the_same(place: Path) -> None:
    """More steps change nothing of what was read before, over many passes and two texts."""
    two = [{"name": "prose", "share": 0.75}, {"name": "more", "max_tokens": 500, "share": 0.25}]
    short, long = (blocks(place, steps=steps, data=two) for steps in (100, 300))

    assert all_ids(long)[: len(short)] == all_ids(short)


def test_order_does_not_depend_on_the_variant(place: Path) -> None:
    """Building any variant between changes nothing: the order is drawn from a stream of its own."""
    expected = all_ids(blocks(place))
    for variant in VARIANT_NAMES:
        asked = plan(place, variant=variant)
        build_model(asked, load_tokenizer(asked), None)

        assert all_ids(blocks(place)) == expected, variant


def test_blocks_are_the_packed_text_by_hand(place: Path) -> None:
    """Every document with start and end token, end to end, cut every 16 tokens."""
    tokenizer = load_tokenizer(plan(place))
    source = TextSource(name="prose")
    text = tokens.load(source, tokenizer, data={"prose": str(place / "text.jsonl")})
    stream = []
    for line in (place / "text.jsonl").read_text().splitlines():
        characters = line.removeprefix('{"text": "').removesuffix('"}')
        stream += [1, *(tokenizer.convert_tokens_to_ids(sign) for sign in characters), 2]

    assert text.ids.tolist() == stream
    assert text.info.num_tokens == len(stream)
    assert text.info.num_documents == 12

    found = blocks(place)
    by_hand = [stream[start : start + 16] for start in range(0, len(stream) - 15, 16)]

    assert found.held_out_NT.tolist() == by_hand[-3:]
    assert {tuple(ids) for ids in all_ids(found)} <= {tuple(ids) for ids in by_hand[:-3]}
    assert found.num_blocks == [len(by_hand) - 3]


def test_held_out_windows_come_from_every_text(place: Path) -> None:
    """Three windows of two texts: two and one; no step reads any of them."""
    two = [{"name": "prose", "share": 0.75}, {"name": "more", "max_tokens": 500, "share": 0.25}]
    found = blocks(place, data=two)

    assert found.held_out_NT.shape == (3, 16)
    assert found.shares == [0.75, 0.25]
    assert found.num_blocks[1] == 500 // 16 - 2
    assert (found.order.blocks[found.order.sources == 1] < found.num_blocks[1]).all()


def test_batch_is_its_sequences(place: Path) -> None:
    """Fetched whole or one by one; labels are the inputs, the model shifts them."""
    found = blocks(place)
    batch = found.__getitems__([4, 0, 9])

    assert batch["input_ids"].tolist() == [all_ids(found)[index] for index in (4, 0, 9)]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()


def test_blocks_can_begin_with_the_start_token(place: Path) -> None:
    """One token, then 15 of the text, in steps of 15; held-out windows too."""
    asked = plan(place, recipe=recipe(place, start_each_block=True))
    tokenizer = load_tokenizer(asked)
    text = tokens.load(TextSource(name="prose"), tokenizer, data=asked.data)
    head = start_tokens(asked.recipe, tokenizer)
    found = TrainingBlocks(asked.recipe, [text], steps=STEPS, seed=0, head=head)
    stream = text.ids.tolist()
    by_hand = [[1, *stream[start : start + 15]] for start in range(0, len(stream) - 14, 15)]

    assert found.held_out_NT.tolist() == by_hand[-3:]
    assert {tuple(ids) for ids in all_ids(found)} <= {tuple(ids) for ids in by_hand[:-3]}
    with pytest.raises(SpecError, match="puts no token before a text"):
        start_tokens(asked.recipe, tiny.build_tokenizer())


def test_short_text_is_refused(place: Path) -> None:
    with pytest.raises(DataError, match="prose: 60 tokens; a block has 16 and 3 blocks are kept"):
        blocks(place, data=[{"name": "prose", "max_tokens": 60}])


def test_tokens_are_made_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reads the cache; another length or tokenizer does not."""
    source, data = TextSource(name="prose"), {"prose": str(place / "text.jsonl")}
    tokenizer = load_tokenizer(plan(place))
    first = tokens.load(source, tokenizer, data=data)

    def refuse(*_: object, **__: object) -> None:
        raise TypeError("tokenized again")

    monkeypatch.setattr(tokens, "_write", refuse)

    assert tokens.load(source, tokenizer, data=data).info == first.info
    shorter = TextSource(name="prose", max_tokens=99)
    with pytest.raises(TypeError):
        tokens.load(shorter, tokenizer, data=data)


def test_mini_text_is_that_of_its_package() -> None:
    """Documents between start and end tokens, cut off at the number that was asked for."""
    from oasis_eval.minicorpus import mixture, tokenizer

    mini = tokenizer.load()
    source = TextSource(name="mini", max_tokens=2000, problem_share=0.25, repeat_share=0.75)
    found = tokens.load(source, mini, data={})
    settings = mixture.Settings(problem_share=0.25, repeat_share=0.75)
    expected: list[int] = []
    for text in mixture.sample("train", seed=0, count=60, settings=settings):
        expected += [1, *mini.encode(text, add_special_tokens=False), 2]

    assert len(expected) > 2000
    assert found.ids.tolist() == expected[:2000]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TextSource(name="gsm8k"), "questions are no training text"),
        (TextSource(name="mini_ppl"), "train on 'mini'"),
        (TextSource(name="mini", max_tokens=9, split="test"), "train on 'train'"),
        (TextSource(name="novel"), "give --data novel=FILE"),
        (TextSource(name="wiki40b"), "--data wiki40b=FILE"),
    ],
)
def test_text_that_cannot_be_had(place: Path, source: TextSource, words: str) -> None:
    """A set that models are measured on, a name without a file, a hub without network."""
    with pytest.raises(DataError, match=words):
        tokens.load(source, load_tokenizer(plan(place)), data={})
