"""A corpus is the same rows whatever it is read from, and nothing else takes its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from oasis_eval import corpus
from oasis_eval.corpus import Corpus, encode, head_tokens
from oasis_eval.errors import DataError, UnknownNameError
from tests import tiny

LINES = [
    " ",
    " = First Title = ",
    " ",
    " A line , with words . ",
    " = = Section = = ",
    " ",
    " Another line . ",
    " ",
    " = Second = ",
    " Text of the second . ",
]
RAW = "".join(f"{line}\n" for line in LINES)
PUBLISHED = [f"{line}\n" if line.strip() else "" for line in LINES]

Writer = Callable[[Path, Sequence[str]], Path]


def _as_text(path: Path, texts: Sequence[str]) -> Path:
    target = path / "data.raw"
    target.write_bytes("".join(text or " \n" for text in texts).encode())
    return target


def _as_windows_text(path: Path, texts: Sequence[str]) -> Path:
    target = path / "data.txt"
    text = "".join(text or " \n" for text in texts).replace("\n", "\r\n")
    target.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return target


def _as_jsonl(path: Path, texts: Sequence[str]) -> Path:
    return tiny.write_jsonl(path / "data.jsonl", list(texts))


def _as_jsonl_of_raw_lines(path: Path, texts: Sequence[str]) -> Path:
    return tiny.write_jsonl(path / "data.JSONL", [text or " \n" for text in texts])


def _as_parquet(path: Path, texts: Sequence[str]) -> Path:
    table = pyarrow.table({"text": list(texts), "other": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path / "data.parquet")
    return path / "data.parquet"


WRITERS: list[Writer] = [
    _as_text,
    _as_windows_text,
    _as_jsonl,
    _as_jsonl_of_raw_lines,
    _as_parquet,
]


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS, ids=lambda writer: writer.__name__)
def test_wikitext_is_one_corpus_in_every_format(tmp_path: Path, write: Writer) -> None:
    """Raw file (with any line ends), jsonl and parquet: the published rows, one hash."""
    path = write(tmp_path, PUBLISHED)

    found = corpus.load("wikitext2", data=str(path))

    assert found.texts() == PUBLISHED
    assert found.layout == "wikitext"
    assert found.origin == str(path)
    assert found.sha256 == _hash(PUBLISHED)
    assert found.stream() == "\n\n".join(PUBLISHED)
    assert found.raw() == RAW
    assert found.documents() == [
        " \n = First Title = \n \n A line , with words . \n = = Section = = \n \n"
        " Another line . \n \n",
        " = Second = \n Text of the second . \n",
    ]


def _hash(texts: Sequence[str]) -> str:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return hashlib.sha256(("wikitext\n" + "".join(lines)).encode()).hexdigest()


@pytest.mark.parametrize("task", ["wikitext2", "wiki40b", "bookcorpus", "text"])
@pytest.mark.parametrize("write", [_as_jsonl, _as_parquet], ids=lambda writer: writer.__name__)
def test_rows_without_headings_are_documents(tmp_path: Path, task: str, write: Writer) -> None:
    """Rows of any set are documents by themselves, never run together, empty ones kept."""
    texts = ["One document.", "", "Another\nof two lines.", " "]

    found = corpus.load(task, data=str(write(tmp_path, texts)))

    assert found.documents() == texts
    assert found.stream() == "\n\n".join(texts)
    assert found.info.num_rows == 4


@pytest.mark.parametrize(
    "text",
    [
        "Plain.\n\nTwo paragraphs.\n",
        "no line end",
        "\tA\r\nB\r\n",
        " = not a heading\n",
        "é",
    ],
)
def test_a_plain_text_file_is_one_document(tmp_path: Path, text: str) -> None:
    """Byte for byte, as a stream, as the raw file, and as a document."""
    path = tmp_path / "plain.txt"
    path.write_bytes(text.encode())

    found = corpus.load("wikitext2", data=str(path))

    assert found.documents() == [text]
    assert found.stream() == found.raw() == text


@pytest.mark.parametrize("title", [" = A = ", " = Ab = ", " = C=D = ", " = 3 = 4 = "])
@pytest.mark.parametrize("other", [" = = Section = = ", " = = = Sub = = = ", "= X =", " = Open"])
def test_only_level_one_headings_begin_a_document(tmp_path: Path, title: str, other: str) -> None:
    """Titles of one letter and with equals signs do; sections and prose do not."""
    path = tmp_path / "wiki.raw"
    path.write_text(f"{title}\n a \n{other}\n b \n{title}\n c \n")

    found = corpus.load("wikitext2", data=str(path))

    assert found.documents() == [f"{title}\n a \n{other}\n b \n", f"{title}\n c \n"]


def test_gsm8k_rows_keep_their_two_columns(tmp_path: Path) -> None:
    """And no others, so that a file with more columns has the same hash."""
    row = {"question": "How many?", "answer": "1+1\n#### 2"}
    path, more = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text(json.dumps(row) + "\n\n")
    more.write_text(json.dumps({"id": 7, **row}) + "\n")

    found = corpus.load("gsm8k", data=str(path))

    assert found.rows == (row,)
    assert found.sha256 == corpus.load("gsm8k", data=str(more)).sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\t\r\n", "holds no text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b"[" * 10_000, "a.jsonl:1 is not JSON"),
        ("a.jsonl", b'{"content": "a"}', "'text'; found {'content': 'str'}"),
        ("a.jsonl", b'{"text": 3}', "must have text columns 'text'"),
        ("a.jsonl", b'["text"]', "found list"),
        ("a.jsonl", b'{"text": null}', "must have text columns"),
        ("a.jsonl", b'{"text": "\\ud800"}', "row 1 is not text"),
        ("a.json", b'[{"text": "a"}]', "found list"),
        ("a.parquet", b"no parquet", "is not a parquet file"),
        ("a.parquet", b"", "is not a parquet file"),
        ("a.parquet", b"PAR1" + b"\0" * 40 + b"PAR1", "is not a parquet file"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Which names set, file and fault."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError) as caught:
        corpus.load("wikitext2", data=str(path))

    text = str(caught.value)
    assert message in text
    assert text.startswith("wikitext2: ")
    assert str(path) in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["grid.yaml", "GRID.YML", "table.csv", "model.safetensors"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    """Settings and tables are no text to score, though they could be read as one."""
    path = tmp_path / name
    path.write_text("models: [a, b]\n")

    with pytest.raises(DataError, match=r"is no text to read; expected \.txt, \.raw, \.md"):
        corpus.load("mini_ppl", data=str(path))


def test_a_file_without_a_set_is_named_once(tmp_path: Path) -> None:
    """The file's name is not its prefix, too."""
    path = tmp_path / "gone.txt"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DataError) as gone:
        corpus.load_text_file(path)
    with pytest.raises(DataError) as blank:
        corpus.load_text_file(empty)

    assert str(gone.value) == f"{path} is no file; expected a text, jsonl or parquet file"
    assert str(blank.value) == f"{empty} holds no text (0 rows)"


def test_gsm8k_from_a_text_file_is_refused(tmp_path: Path) -> None:
    """Questions have two columns, which a text file has not."""
    path = tmp_path / "a.txt"
    path.write_text("Question")

    with pytest.raises(DataError, match="must be jsonl or parquet with 'question' and 'answer'"):
        corpus.load("gsm8k", data=str(path))


@pytest.mark.parametrize("name", ["gone.txt", "folder"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    """A folder is no file either."""
    (tmp_path / "folder").mkdir()

    with pytest.raises(DataError, match="is no file; expected a text, jsonl or parquet file"):
        corpus.load("wiki40b", data=str(tmp_path / name))


def test_an_unknown_set_is_refused() -> None:
    """With the nearest known names."""
    with pytest.raises(UnknownNameError, match="did you mean wikitext2"):
        corpus.load("wikitext")


# --- hub ----------------------------------------------------------------------------------------

FAULTS = {
    "script": RuntimeError("Dataset scripts are no longer supported, but found wiki40b.py"),
    "network": ConnectionError("Couldn't reach the Hub\nthree times"),
    "builder": TypeError("'NoneType' object is not callable"),
    "absent": FileNotFoundError("Couldn't find any data file"),
    "split": ValueError('Unknown split "test". Should be one of [...]'),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("task", ["wikitext2", "wiki40b", "bookcorpus", "gsm8k"])
def test_a_set_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, task: str, fault: str
) -> None:
    """Set, repository, cause and the local-file option; no other set takes its place."""
    asked: list[object] = []

    def load_dataset(repo: str, *args: object, **kwargs: object) -> None:
        asked.append(repo)
        raise FAULTS[fault]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    with pytest.raises(DataError) as caught:
        corpus.load(task)

    text = str(caught.value)
    assert text.startswith(f"{task}: {corpus.DATA_SETS[task].repo} ")
    assert " ".join(str(FAULTS[fault]).split()) in text
    assert text.endswith(f"--data {task}=FILE")
    assert "\n" not in text
    assert asked == [corpus.DATA_SETS[task].repo]


def test_training_questions_name_their_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of GSM8K are another split, given by another option."""

    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    with pytest.raises(DataError, match="--data gsm8k:train=FILE"):
        corpus.load("gsm8k", split="train")


def test_a_set_from_the_hub_names_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pinned revision is asked for and stored; the rows hash as those of a file."""
    asked: dict[str, object] = {}

    def load_dataset(repo: str, config: str, **kwargs: object) -> datasets.Dataset:
        asked.update(kwargs, repo=repo, config=config)
        return datasets.Dataset.from_list([{"text": text} for text in PUBLISHED])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    found = corpus.load("wikitext2")

    hub = corpus.DATA_SETS["wikitext2"]
    assert asked == {
        "repo": hub.repo,
        "config": hub.config,
        "split": "test",
        "revision": hub.revision,
    }
    assert found.origin == f"{hub.repo}@{hub.revision}"
    assert found.split == "test"
    assert found.sha256 == corpus.load("wikitext2", data=str(_as_text(tmp_path, PUBLISHED))).sha256


def test_the_held_out_books_are_chosen_by_their_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own split: about one line in a thousand, whatever the order, and named as ours."""
    texts = [f"line number {i}" for i in range(20_000)]

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"text": order})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    order = texts
    forward = corpus.load("bookcorpus")
    order = texts[::-1]
    backward = corpus.load("bookcorpus")

    assert 5 <= len(forward.rows) <= 40
    assert sorted(forward.texts()) == sorted(backward.texts())
    assert forward.split == "oasis-heldout-1-per-mille"


def test_the_hash_sees_what_the_rows_are(tmp_path: Path) -> None:
    """The same rows as lines of WikiText and as documents are scored as other documents."""
    rows = [{"text": text} for text in PUBLISHED]
    lines, documents = tmp_path / "w.raw", tmp_path / "w.jsonl"
    lines.write_text(RAW)
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    as_lines, as_documents = (corpus.load("text", data=str(path)) for path in (lines, documents))

    assert as_lines.rows == as_documents.rows
    assert (as_lines.layout, as_documents.layout) == ("wikitext", "documents")
    assert len(as_lines.documents()) < len(as_documents.documents())
    assert as_lines.sha256 != as_documents.sha256


# --- text to tokens -----------------------------------------------------------------------------


def test_the_hash_sees_every_row_and_its_place() -> None:
    """Other text, another order and another division into rows are other corpora."""

    def sha256(texts: list[str]) -> str:
        made = corpus._corpus("n", "o", None, "documents", [{"text": text} for text in texts])
        return made.sha256

    hashes = [sha256(texts) for texts in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""], ["a"])]
    assert len(set(hashes)) == 5
    assert sha256(["a", "b"]) == hashes[0]


@pytest.mark.parametrize("adds_start", [False, True])
def test_head_tokens_are_the_tokenizers_default(adds_start: bool) -> None:
    """What it puts before a text by itself, and nothing that we would add."""
    tokenizer = tiny.build_tokenizer(adds_start=adds_start)

    assert head_tokens(tokenizer) == ([1] if adds_start else [])
    assert encode(tokenizer, "", special_tokens=False) == []
    assert encode(tokenizer, "", special_tokens=True) == head_tokens(tokenizer)


def test_a_text_for_calibration_ships_with_the_suite() -> None:
    """Calibration's default text needs no file and no network, and its name no path."""
    found: Corpus = corpus.builtin()

    assert len(found.stream()) > 9000
    assert found.origin == "oasis-eval:calibration.txt"
