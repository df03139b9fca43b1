"""The tokenizer: lossless on any text, a word or number of the corpus is one token."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oasis_eval.corpus import head_tokens
from oasis_eval.errors import CheckpointError
from oasis_eval.minicorpus import mixture, tokenizer
from oasis_eval.minicorpus.chance import SPLITS, Split

NUM_BYTES = 256


@functools.cache
def _loaded() -> PreTrainedTokenizerFast:
    return tokenizer.load()


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    return _loaded()


def test_the_files_are_what_the_corpus_makes() -> None:
    """Whoever changes a word must write them anew."""
    path = tokenizer.folder() / "tokenizer.json"
    made = tokenizer.build()

    assert type(made).from_file(str(path)).to_str() == made.to_str()
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 100_000


def test_size_and_special_tokens(words: PreTrainedTokenizerFast) -> None:
    """536 tokens: three special ones, every byte, 0 to 99, and words; a text starts with `<s>`."""
    assert len(words) == 536
    assert (words.pad_token_id, words.bos_token_id, words.eos_token_id) == (0, 1, 2)
    assert head_tokens(words) == [1]
    assert words.encode("Tom has", add_special_tokens=True) == [
        1,
        *words.encode("Tom has", add_special_tokens=False),
    ]
    for number in range(100):
        assert len(words.encode(f"a {number}", add_special_tokens=False)) == 2
    assert len(words.encode(" 100", add_special_tokens=False)) == 4


@pytest.mark.parametrize("split", SPLITS)
def test_every_document_comes_back_and_needs_no_bytes(
    words: PreTrainedTokenizerFast, split: Split
) -> None:
    """Whole words of every split, so no unseen word waits in the test text."""
    letters = range(3, 3 + NUM_BYTES)
    single = set(words.convert_ids_to_tokens([*letters]))
    allowed = {words.convert_tokens_to_ids(sign) for sign in ".,:?"} | {
        words.convert_tokens_to_ids("\u010a")
    }
    assert len(single) == NUM_BYTES
    for text in mixture.sample(split, seed=9, count=300):
        ids = words.encode(text, add_special_tokens=False)
        assert words.decode(ids) == text
        assert set(ids).intersection(letters) <= allowed
        assert len(ids) == len(re.findall(r" ?\w+|[.,:?]|\n+| ?[-+*=]|#+", text))


@hypothesis.given(st.text())
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    """Byte by byte where it has to be; names of special tokens are those tokens, as everywhere."""
    words = _loaded()
    hypothesis.assume(not re.search(r"<(s|/s|pad)>", text))

    assert words.decode(words.encode(text, add_special_tokens=False)) == text


def test_a_saved_copy_is_the_same(words: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Checkpoints carry it; the automatic class reads it back."""
    words.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Question: Anna has 12 apples.\nAnswer: She has 12 + 3 = 15.\n#### 15\n\nœ"

    assert again(text)["input_ids"] == words(text)["input_ids"]
    assert again.decode(again.encode(text, add_special_tokens=False)) == text


def test_a_missing_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its path."""
    monkeypatch.setattr(tokenizer, "folder", lambda: tmp_path)

    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        tokenizer.load()
