"""Text for training, calibration, perplexity and diagnostics: files or data sets become rows.

The one idea: whatever the origin (hub data set, local file, the suite's own generator), a corpus
is the same rows in the same order, with the hash of exactly what was read and of what its rows are.
How rows become a stream or documents is decided here once, so no two uses of a text can differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from oasis_eval.errors import DataError, UnknownNameError
from oasis_eval.minicorpus import mixture, passkey
from oasis_eval.minicorpus.chance import SPLITS
from oasis_eval.paths import data_folder
from oasis_eval.record import DataInfo
from oasis_eval.rows import Layout, Row, as_published, is_heading, read_file, row_of

Generated = mixture.Name | Literal["passkey"]

_HELD_OUT_PER_MILLE = 1


@dataclass(frozen=True, slots=True)
class HubData:
    """Where a named data set lives on the hub, or what makes it."""

    repo: str
    config: str | None
    split: str
    revision: str
    columns: tuple[str, ...]
    layout: Layout
    held_out: bool = False
    """Keep only our own held-out rows, for sets that have no test split."""
    generated: Generated | None = None
    """What `minicorpus` calls it, for sets that the suite makes itself."""
    num_rows: int = 0
    """Of each split of a generated set."""


def _made_here(generated: Generated, columns: tuple[str, ...], *, num_rows: int) -> HubData:
    """Return a data set that the suite generates."""
    is_passkey = generated == "passkey"
    return HubData(
        repo="oasis-eval:passkey" if is_passkey else "oasis-eval:minicorpus",
        config=None,
        split="test",
        revision=str(passkey.VERSION if is_passkey else mixture.VERSION),
        columns=columns,
        layout="documents",
        generated=generated,
        num_rows=num_rows,
    )


DATA_SETS: dict[str, HubData] = {
    "wikitext2": HubData(
        repo="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        split="test",
        revision="b08601e04326c79dfdd32d625aee71d232d685c3",
        columns=("text",),
        layout="wikitext",
    ),
    "wiki40b": HubData(
        repo="google/wiki40b",
        config="en",
        split="validation",
        revision="main",
        columns=("text",),
        layout="documents",
    ),
    "bookcorpus": HubData(
        repo="rojagtap/bookcorpus",
        config=None,
        split="train",
        revision="main",
        columns=("text",),
        layout="sentences",
        held_out=True,
    ),
    "text": HubData(
        repo="", config=None, split="", revision="", columns=("text",), layout="documents"
    ),
    "gsm8k": HubData(
        repo="openai/gsm8k",
        config="main",
        split="test",
        revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
        columns=("question", "answer"),
        layout="documents",
    ),
    "mini_ppl": _made_here("mini_ppl", ("text",), num_rows=300),
    "mini_gsm": _made_here("mini_gsm", ("question", "answer"), num_rows=500),
    "passkey": _made_here("passkey", ("number", "key", "depth"), num_rows=50),
}
_GENERATED_SEED = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows of one data set or file."""

    name: str
    origin: str
    """Path of the file, or `repository@revision`."""
    split: str | None
    layout: Layout
    rows: tuple[Row, ...]
    sha256: str

    @property
    def info(self) -> DataInfo:
        """What a record stores about the text."""
        return DataInfo(
            name=self.name,
            origin=self.origin,
            split=self.split,
            sha256=self.sha256,
            num_rows=len(self.rows),
        )

    def texts(self) -> list[str]:
        """Return the `text` of every row."""
        return [row["text"] for row in self.rows]

    def raw(self) -> str:
        """Return the text as the file has it."""
        return "".join(self._lines()) if self.layout == "wikitext" else "\n".join(self.texts())

    def stream(self) -> str:
        """Return one string: rows joined with two newlines, empty rows kept (GPTQ's convention)."""
        return "\n\n".join(self.texts())

    def documents(self) -> list[str]:
        """Return whole documents.

        WikiText rows are lines: a document runs from one level-one heading to the next. Every
        other row is a document by itself.
        """
        if self.layout != "wikitext":
            return self.texts()
        documents = [""]
        for line in self._lines():
            if is_heading(line) and documents[-1].strip():
                documents.append("")
            documents[-1] += line
        return documents

    def _lines(self) -> list[str]:
        """Return WikiText lines as in the file: published rows drop an empty line's one space."""
        return [line or " \n" for line in self.texts()]


def load(name: str, *, split: str | None = None, data: str | None = None) -> Corpus:
    """Load a named data set from the hub, generate it, or read the file that stands in for it.

    Args:
        name: Key of `DATA_SETS`.
        split: Another split than the data set's default; ignored for a local file.
        data: Local `.txt`, `.raw`, `.jsonl` or `.parquet` file.

    Raises:
        DataError: The data cannot be had, is empty, or lacks a column. One line, naming the set,
            the cause and the local-file option.
        UnknownNameError: No such data set.
    """
    if name not in DATA_SETS:
        raise UnknownNameError("data set", name, DATA_SETS)
    hub = DATA_SETS[name]
    if data is not None:
        return _load_file(name, Path(data).expanduser(), hub, split)
    if hub.generated is not None:
        return _generate(name, hub, hub.generated, split or hub.split)
    if not hub.repo:
        raise DataError(f"{name}: stands for a file of yours; give it with --data {name}=FILE")
    return _load_hub(name, hub, split or hub.split)


def load_text_file(path: Path) -> Corpus:
    """Load a text, jsonl or parquet file that stands for no named data set.

    Raises:
        DataError: The file is missing, empty, or has no `text`.
    """
    return _load_file(path.name, path, DATA_SETS["text"], None)


def builtin() -> Corpus:
    """Return the prose that ships with the suite, used for calibration when no other is named."""
    path = data_folder("tasks") / "text" / "calibration.txt"
    corpus = load_text_file(path)
    return Corpus(
        name="builtin",
        origin="oasis-eval:calibration.txt",
        split=None,
        layout=corpus.layout,
        rows=corpus.rows,
        sha256=corpus.sha256,
    )


def _corpus(
    name: str, origin: str, split: str | None, layout: Layout, rows: Iterable[Row]
) -> Corpus:
    kept = tuple(rows)
    place = origin if Path(origin).name == name else f"{name}: {origin}"
    if not any(value.strip() for row in kept for value in row.values()):
        raise DataError(f"{place} holds no text ({len(kept)} rows)")
    # The same rows as lines of WikiText make other documents, and so other numbers.
    digest = hashlib.sha256(b"wikitext\n" if layout == "wikitext" else b"")
    for number, row in enumerate(kept, start=1):
        try:
            digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
        except UnicodeEncodeError as error:
            raise DataError(f"{place} row {number} is not text: {error.reason}") from error
        digest.update(b"\n")
    return Corpus(
        name=name,
        origin=origin,
        split=split,
        layout=layout,
        rows=kept,
        sha256=digest.hexdigest(),
    )


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turning text into tokens needs."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Mapping[str, list[int]]:
        """Tokenize one string."""
        ...


def encode(tokenizer: Tokenizer, text: str, *, special_tokens: bool) -> list[int]:
    """Return the token ids of `text`, with or without the tokenizer's default special tokens."""
    return list(tokenizer(text, add_special_tokens=special_tokens, verbose=False)["input_ids"])


def head_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text by default."""
    plain = encode(tokenizer, "a", special_tokens=False)
    full = encode(tokenizer, "a", special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


# --- origins ----------------------------------------------------------------------------------


def _load_file(name: str, path: Path, hub: HubData, split: str | None) -> Corpus:
    layout, rows = read_file(path, hub.columns, hub.layout, name=name)
    return _corpus(name, str(path), split, layout, rows)


def _generate(name: str, hub: HubData, generated: Generated, split: str) -> Corpus:
    known = (hub.split,) if generated == "passkey" else SPLITS
    if split not in known:
        raise DataError(f"{name}: no split {split!r}; expected one of {', '.join(known)}")
    if generated == "passkey":
        rows = passkey.rows(_GENERATED_SEED, hub.num_rows)
    else:
        rows = mixture.rows(generated, split, _GENERATED_SEED, hub.num_rows)  # type: ignore[arg-type]  # checked above
    return _corpus(name, f"{hub.repo}@{hub.revision}", split, hub.layout, rows)


def _load_hub(name: str, hub: HubData, split: str) -> Corpus:
    import datasets

    try:
        data = datasets.load_dataset(hub.repo, hub.config, split=split, revision=hub.revision)
        rows = [row_of(f"{name}: {hub.repo}", dict(row), hub.columns) for row in data]
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        # datasets reports a missing network, a dropped loading script and a wrong split through
        # these; the user needs the set, the cause and the way out, not a traceback.
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        option = f"--data {name}=FILE" if split == hub.split else f"--data {name}:{split}=FILE"
        raise DataError(
            f"{name}: {hub.repo} ({split}) could not be loaded: {cause}; "
            f"give a local text, jsonl or parquet file with {option}"
        ) from error
    if hub.held_out:
        rows = [row for row in rows if is_held_out(row["text"])]
        split = f"oasis-heldout-{_HELD_OUT_PER_MILLE}-per-mille"
    if hub.layout == "wikitext":
        rows = as_published(rows)
    return _corpus(name, f"{hub.repo}@{hub.revision}", split, hub.layout, rows)


def is_held_out(line: str) -> bool:
    """Whether a line is in our held-out split: the first eight hash digits, modulo 1000."""
    return int(hashlib.sha256(line.encode()).hexdigest()[:8], 16) % 1000 < _HELD_OUT_PER_MILLE
