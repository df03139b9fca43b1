"""Training text as packed tokens: read once, tokenized once, then mapped into memory.

The one idea: whatever the text, a file, a data set or generated, it becomes one array of token ids
in the cache, under the hash of everything that decides its content. Every process of a run maps
the same file, and every variant reads the same tokens.

A document is the tokenizer's default start tokens, its text and the end token. Data sets of single
sentences, which do not say where a book ends, are one stream without end tokens inside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oasis_eval import checkpoint, corpus
from oasis_eval.errors import DataError
from oasis_eval.minicorpus import mixture
from oasis_eval.parsing import content_hash
from oasis_eval.spec import TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1
"""Raised when a change of the code changes tokens."""
_MINI_SEED = 0
_AT_ONCE = 1000
"""Documents that are tokenized together, and sentences that are joined."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What a run stores about one of its texts."""

    name: str
    origin: str
    """Path of the file, `repository@revision`, or how the text is generated."""
    split: str | None
    sha256: str
    """Of the documents that were used, before tokenization."""
    num_documents: int
    num_tokens: int
    tokens_sha256: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """One text, tokenized and packed."""

    info: TokenInfo
    ids: NDArray[np.unsignedinteger]
    """[N], read-only, mapped from the cache."""


@dataclass(frozen=True, slots=True)
class _Text:
    origin: str
    split: str | None
    identity: object
    """What the documents depend on, as JSON has it."""
    documents: Iterable[str]
    ends: bool = True
    """Whether a document ends where its text does."""


def load(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, *, data: Mapping[str, str]
) -> Tokens:
    """Return the tokens of one text, from the cache where it has them.

    Args:
        source: The text.
        tokenizer: With its Rust backend.
        data: Local files by name of a text.

    Raises:
        DataError: The text cannot be had or is empty.
        CheckpointError: The cache cannot be written.
    """
    text = _find(source, data)
    key = content_hash(
        {
            "version": _VERSION,
            "text": text.identity,
            "max_tokens": source.max_tokens,
            "tokenizer": tokenizer_sha256(tokenizer),
        }
    )
    build = partial(_write, source=source, text=text, tokenizer=tokenizer)
    folder = checkpoint.cached_folder(f"tokens/v{_VERSION}-{key[:32]}", build, origin=text.origin)
    stored = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    info = TokenInfo(name=source.name, origin=text.origin, split=text.split, **stored["info"])
    ids = np.memmap(folder / "tokens.bin", dtype=stored["dtype"], mode="r")
    return Tokens(info, ids)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of everything that decides which tokens a text becomes."""
    content: str = tokenizer.backend_tokenizer.to_str()
    ends = [tokenizer.eos_token_id, corpus.head_tokens(tokenizer)]
    return hashlib.sha256(f"{content}\n{ends}".encode()).hexdigest()


def pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, ends: bool
) -> Iterator[tuple[str, list[int]]]:
    """Yield each document and its token ids with special tokens.

    Args:
        documents: Texts.
        tokenizer: Its default start tokens go before a document, its end token behind it.
        ends: Whether documents end; else they are parts of one stream, without special tokens.
    """
    end = tokenizer.eos_token_id
    for group in _groups(documents):
        encoded = tokenizer(group, add_special_tokens=ends, verbose=False)["input_ids"]
        for document, ids in zip(group, encoded, strict=True):
            if ends and end is not None and (not ids or ids[-1] != end):
                yield document, [*ids, end]
            else:
                yield document, list(ids)


def _write(
    folder: Path, *, source: TextSource, text: _Text, tokenizer: PreTrainedTokenizerBase
) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    of_text, of_tokens = hashlib.sha256(), hashlib.sha256()
    num_documents = num_tokens = 0
    with (folder / "tokens.bin").open("wb") as file:
        for document, ids in pack(text.documents, tokenizer, ends=text.ends):
            of_text.update(json.dumps(document).encode() + b"\n")
            num_documents += 1
            left = len(ids) if source.max_tokens is None else source.max_tokens - num_tokens
            part = np.asarray(ids[:left], dtype=dtype)
            file.write(part.tobytes())
            of_tokens.update(part.tobytes())
            num_tokens += len(part)
            if num_tokens == source.max_tokens:
                break
    if num_tokens == 0:
        raise DataError(f"{source.name}: {text.origin} holds no text")
    info = {
        "sha256": of_text.hexdigest(),
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "tokens_sha256": of_tokens.hexdigest(),
    }
    content = json.dumps({"dtype": dtype.str, "info": info})
    (folder / "info.json").write_text(content, encoding="utf-8")


# --- texts ------------------------------------------------------------------------------------


def _find(source: TextSource, data: Mapping[str, str]) -> _Text:
    path = data.get(source.name)
    if source.name == "mini":
        if path is not None:
            raise DataError("mini: the suite generates this text; it takes no --data file")
        return _generated(source)
    if path is not None:
        return _of_corpus(_load_file(source.name, Path(path).expanduser()))
    if source.name == "builtin":
        return _of_corpus(corpus.builtin())
    hub = corpus.DATA_SETS.get(source.name)
    if hub is None or not hub.repo:
        raise DataError(f"{source.name}: no known data set; give --data {source.name}=FILE")
    if hub.generated is not None:
        raise DataError(f"{source.name}: a set that models are measured on; train on 'mini'")
    if hub.columns != ("text",):
        raise DataError(f"{source.name}: questions are no training text; give one in a recipe")
    return _of_hub(source, hub)


def _generated(source: TextSource) -> _Text:
    asked = source.model_dump(include={"problem_share", "repeat_share"}, exclude_none=True)
    settings = replace(mixture.DEFAULTS, **asked)
    identity = {
        "mini": mixture.VERSION,
        "split": source.split,
        "seed": _MINI_SEED,
        "settings": asdict(settings),
    }
    if source.split != "train":
        raise DataError(f"mini: split {source.split!r} is for measuring; train on 'train'")
    return _Text(
        origin=f"oasis-eval:mini v{mixture.VERSION}",
        split=source.split,
        identity=identity,
        documents=mixture.documents("train", seed=_MINI_SEED, settings=settings),
    )


def _load_file(name: str, path: Path) -> corpus.Corpus:
    hub = corpus.DATA_SETS.get(name)
    if hub is not None and hub.columns == ("text",):
        return corpus.load(name, data=str(path))
    return corpus.load_text_file(path)


def _of_corpus(text: corpus.Corpus) -> _Text:
    sentences = text.layout == "sentences"
    return _Text(
        origin=text.origin,
        split=text.split,
        identity={"sha256": text.sha256, "layout": text.layout},
        documents=_joined(text.texts()) if sentences else text.documents(),
        ends=not sentences,
    )


def _of_hub(source: TextSource, hub: corpus.HubData) -> _Text:
    """Stream a data set: books and encyclopedias do not fit into memory as Python strings."""
    import datasets

    try:
        rows = datasets.load_dataset(
            hub.repo, hub.config, split=source.split, revision=hub.revision
        )
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"{source.name}: {hub.repo} ({source.split}) could not be loaded: {cause}; give a "
            f"local text, jsonl or parquet file with --data {source.name}=FILE"
        ) from error
    texts = (str(row["text"]) for row in rows)
    if hub.held_out:  # what the task of that name is measured on
        texts = (text for text in texts if not corpus.is_held_out(text))
    sentences = hub.layout == "sentences"
    return _Text(
        origin=f"{hub.repo}@{hub.revision}",
        split=source.split,
        identity={
            "hub": [hub.repo, hub.config, hub.revision, source.split],
            "num_rows": len(rows),
            "fingerprint": getattr(rows, "_fingerprint", None),
        },
        documents=_joined(texts) if sentences else texts,
        ends=not sentences,
    )


def _joined(sentences: Iterable[str]) -> Iterator[str]:
    for number, group in enumerate(_groups(sentences)):
        text = " ".join(group)
        yield text if number == 0 else f" {text}"


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while group := list(islice(rest, _AT_ONCE)):
        yield group
