"""The generated corpus's tokenizer: one token a word, bytes for everything else.

The one idea: it is a byte-level tokenizer whose words are looked up whole and that has no merges.
A word or number of the corpus is one token with the space before it; any other text is its UTF-8
bytes, so every text can be scored and comes back as it was.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from oasis_eval.errors import CheckpointError
from oasis_eval.minicorpus.mixture import sample
from oasis_eval.paths import data_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<s>", "</s>"
LARGEST_NUMBER = 99
"""Numbers from 0 up to this are one token."""
_PATTERN = r"'s| ?\p{L}+| ?\p{N}+| ?#+| ?[^\s\p{L}\p{N}#]|\n+|\s"
_NUM_DOCUMENTS = 500


def folder() -> Path:
    """Return where the tokenizer's files are."""
    return data_folder("models") / "mini" / "tokenizer"


def load() -> PreTrainedTokenizerFast:
    """Return the tokenizer that ships with the suite; it puts `<s>` before a text by default.

    Raises:
        CheckpointError: Its files are missing.
    """
    from transformers import PreTrainedTokenizerFast

    path = folder() / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected with every installation: reinstall")
    return PreTrainedTokenizerFast.from_pretrained(folder())


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers has it, with its special tokens declared."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def build() -> Tokenizer:
    """Make the tokenizer anew from the corpus; the result is the one that ships."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cutting = pre_tokenizers.Sequence([split, to_bytes])
    seen: Counter[str] = Counter()
    for text in sample("train", seed=0, count=_NUM_DOCUMENTS):
        seen.update(word for word, _ in cutting.pre_tokenize_str(text))
    numbers = [f"{_space()}{number}" for number in range(LARGEST_NUMBER + 1)]
    words = sorted(set(seen).difference(numbers))
    names = [PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *numbers, *words]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.pre_tokenizer = cutting
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
    )
    return tokenizer


def _space() -> str:
    """Return the sign that stands for a space in byte-level vocabularies."""
    return "\u0120"
