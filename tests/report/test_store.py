"""Records by way of an index: every answer is that of the files, whatever became of either."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from oasis_eval.errors import NoMatchError, OasisError
from oasis_eval.record import RunRecord, read_records, write_record
from oasis_eval.report import store
from oasis_eval.report.html.page import build_report
from oasis_eval.report.index import INDEX_NAME, Index, Stamp, make_row, new_index
from oasis_eval.report.observations import chosen
from oasis_eval.report.render import render
from oasis_eval.report.store import find_records
from oasis_eval.report.tables import build_table, load_spec
from tests.report.html_records import coverage, layers, write_gallery
from tests.report.samples import gallery, loss, record

Where = dict[str, tuple[str, ...]]
FILTERS: tuple[Where, ...] = (
    {},
    {"scheme": ("w8a8",)},
    {"scheme": ("w8*", "fp32"), "model": ("m1", "m2")},
    {"scheme": ("w9a9",)},
    {"scheme": ("w8a8",), "status": ("failed",)},
    {"status": ("failed",)},
    {"metric": ("token_perplexity",)},
    {"limit": ("none",)},
    {"nonsense": ("1",)},
)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder gets an index, from what is settled when the file system's clock moves on."""
    monkeypatch.setattr(store, "MIN_FILES", 1)
    monkeypatch.setattr(store, "SETTLED_NS", 0)
    monkeypatch.setattr(store, "_WORTHWHILE", 1 << 30)


def tick(folder: Path) -> None:
    """Wait until the file system's clock shows another time than that of the files."""
    probe = folder / ".probe"
    probe.write_text("")
    start = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == start:
        time.sleep(0.001)
        probe.write_text("")
    probe.unlink()


def some(model: str, scheme: str, mean: float, *, key: str | None = None) -> RunRecord:
    return record(model, scheme, metrics=loss(mean), key=key).model_copy(
        update={"coverage": coverage(), "layers": layers("w8a8")}
    )


def outcome(read: Callable[[Where], Sequence[RunRecord]], where: Where) -> str:
    """Return everything that `table` says about records, its error included."""
    spec = load_spec("results").model_copy(update={"where": where})
    try:
        table = build_table(read(where), spec)
        return render(table, format="csv-long") + render(table, format="markdown")
    except OasisError as error:
        return f"{type(error).__name__}: {error}"


def check(*folders: Path) -> None:
    """Compare all filters with and without an index."""
    for where in FILTERS:
        expected = outcome(lambda _: list(read_records(folders)), where)
        found = outcome(lambda where: find_records(folders, where=where), where)

        assert expected == found, where


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(3))
def test_any_history_gives_the_same_bytes(tmp_path: Path, seed: int) -> None:
    """Files come, change, go, break, fail, get copied; the table is that of the files."""
    chance = random.Random(seed)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_record(folder, some("m0", "fp32", 3.0))
    for _ in range(8):
        folder = chance.choice(folders)
        files = sorted(folder.glob("*.json"))
        model, scheme = f"m{chance.randrange(4)}", chance.choice(["fp32", "w8a8", "w4a4"])
        match chance.randrange(8):
            case 0 if len(files) > 1:
                chance.choice(files).unlink()
            case 1:
                reason = chance.choice(["out of memory", "=1+1"])
                write_record(folder, record(model, scheme, status="failed", reason=reason))
            case 2 if files:
                other = chance.choice(folders)
                (other / chance.choice(files).name).write_bytes(chance.choice(files).read_bytes())
            case 3 if files and chance.random() < 0.3:
                chance.choice(files).write_text('{"schema_version": 1')
            case 4:
                wrong = (
                    some(model, scheme, 2.0)
                    .metrics[0]
                    .model_copy(update={"name": "token_perplexity", "value": 5.0})
                )
                item = some(model, scheme, 2.0)
                if chance.random() < 0.3:
                    item = item.model_copy(update={"metrics": (*item.metrics, wrong)})
                write_record(folder, item)
            case _:
                write_record(folder, some(model, scheme, chance.choice([2.5, 3.5, 900.0])))
        if chance.random() < 0.7:
            tick(folder)
        check(*folders)


@pytest.mark.usefixtures("eager")
def test_a_failed_attempt_that_was_repeated(tmp_path: Path) -> None:
    """Of one key in two folders the finished record counts, also for a filter on the failed one."""
    first, second = tmp_path / "a", tmp_path / "b"
    write_record(first, record("m0", "fp32", status="failed", reason="x", key="one"))
    write_record(first, record("m1", "fp32", status="unsupported", reason="y"))
    write_record(second, some("m0", "fp32", 2.0, key="one"))
    tick(first)
    tick(second)
    find_records([first, second])

    check(first, second)
    check(second, first)
    check(first)


@pytest.mark.usefixtures("eager")
def test_a_run_without_numbers_passes_filters_on_metrics(tmp_path: Path) -> None:
    """What it would have measured is not known, with an index as without."""
    write_record(tmp_path, record("m0", "w4a4", status="failed", reason="x"))
    write_record(tmp_path, some("m0", "fp32", 2.0))
    tick(tmp_path)
    find_records([tmp_path])
    found = find_records([tmp_path], where={"metric": ("token_perplexity",)})

    assert sorted(item.status for item in found) == ["failed", "ok"]
    check(tmp_path)


@pytest.mark.usefixtures("eager")
def test_records_are_those_of_the_files(tmp_path: Path) -> None:
    """Every field of every kind of record comes out of the index as it is in its file."""
    write_gallery(tmp_path)
    tick(tmp_path)
    expected = list(read_records([tmp_path]))
    find_records([tmp_path])
    found = find_records([tmp_path], whole=True)

    assert [item.model_dump_json() for item in expected] == [
        item.model_dump_json() for item in found
    ]
    assert len(Index(tmp_path).names) == len(expected)
    assert build_report(expected, folders=[tmp_path]) == build_report(found, folders=[tmp_path])


@pytest.mark.usefixtures("eager")
def test_no_record_file_is_opened_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once indexed, files are not read; of those that a filter leaves out, not even the row."""
    for item in gallery():
        write_record(tmp_path, item)
    tick(tmp_path)
    find_records([tmp_path])
    monkeypatch.setattr(store, "read_record", lambda path: pytest.fail(f"{path} is read"))
    asked: list[int] = []
    original = Index.records

    def watched(
        self: Index, rows: Sequence[int], parts: Sequence[str]
    ) -> Iterator[tuple[int, RunRecord]]:
        asked.extend(rows)
        return original(self, rows, parts)

    monkeypatch.setattr(Index, "records", watched)
    found = find_records([tmp_path], where={"scheme": ("w4a4",), "model": ("smollm2*",)})

    assert {(item.card.name, item.spec.scheme.name) for item in found} == {("smollm2-135m", "w4a4")}
    assert len(asked) == len(found) == 2


@pytest.mark.usefixtures("eager")
def test_same_size_and_same_modification_time(tmp_path: Path) -> None:
    """A file that was rewritten and got its old time back is read again."""
    path = write_record(tmp_path, some("m0", "fp32", 2.0))
    tick(tmp_path)
    find_records([tmp_path])
    before = path.stat()
    path.write_text(path.read_text().replace('"value":', '"value" :').replace('"m0"', '"m9"', 1))
    text = path.read_text()
    path.write_text(text.replace('"value" :', '"value":').replace('"label":"m0"', '"label":"m8"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (expected,) = read_records([tmp_path])
    (found,) = find_records([tmp_path], whole=True)

    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert expected == found
    assert found.spec.model == "m9"


@pytest.mark.parametrize("ahead", [0, 3600])
def test_a_change_within_one_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """What changed just now may change again under the same times: it is not taken for known.

    "Just now" is by the clock of the file system; this machine's may be seconds ahead of it.
    """
    monkeypatch.setattr(store, "MIN_FILES", 1)
    monkeypatch.setattr(store, "_WORTHWHILE", 1 << 30)
    now = time.time_ns() - 1_000_000_000
    monkeypatch.setattr(store.time, "time_ns", lambda: now + (ahead + 1) * 1_000_000_000)
    monkeypatch.setattr(store, "_stamp", lambda path: Stamp(os.stat(path).st_size, now, now))
    write_record(tmp_path, some("m0", "fp32", 2.0, key="one"))
    first = find_records([tmp_path])
    write_record(tmp_path, some("m0", "fp32", 3.0, key="one"))
    second = find_records([tmp_path])

    assert first != second
    assert second[0].metrics == some("m0", "fp32", 3.0).metrics


@pytest.mark.usefixtures("eager")
def test_a_damaged_index_changes_nothing(tmp_path: Path) -> None:
    """Cut, overwritten, flipped anywhere, empty: the answers stay, and it is made anew."""
    for model in ("m0", "m1", "m2"):
        for scheme in ("fp32", "w8a8"):
            write_record(tmp_path, some(model, scheme, 2.5))
    tick(tmp_path)
    check(tmp_path)
    path = tmp_path / INDEX_NAME
    whole = path.read_bytes()
    chance = random.Random(0)
    damages = [b"", b"PAR1", whole[: len(whole) // 2], whole[:-9] + whole[-8:], b"{}" * 99]
    for _ in range(20):
        bytes_ = bytearray(whole)
        for _ in range(3):
            bytes_[chance.randrange(len(bytes_))] ^= 1 << chance.randrange(8)
        damages.append(bytes(bytes_))
    expected = [item.model_dump_json() for item in read_records([tmp_path])]
    for damaged in damages:
        path.write_bytes(damaged)
        found = find_records([tmp_path], whole=True)

        assert expected == [item.model_dump_json() for item in found]
    path.write_bytes(b"")
    check(tmp_path)
    assert len(Index(tmp_path).names) == len(expected)


@pytest.mark.usefixtures("eager")
def test_an_index_of_other_code_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row made by another version may say something else of the same file."""
    path = write_record(tmp_path, some("m0", "fp32", 2.0))
    tick(tmp_path)
    other = some("m0", "fp32", 9.0)
    with monkeypatch.context() as patch:
        patch.setattr("oasis_eval.report.index._fingerprint", lambda: b"another")
        patch.setattr("oasis_eval.report.index._schema", _fresh_schema())
        with new_index(tmp_path) as (writer, _):
            stamp = store._stamp(str(path))
            assert stamp is not None
            writer.add(make_row(path.name, stamp, other))
    (found,) = find_records([tmp_path])

    assert found.metrics == some("m0", "fp32", 2.0).metrics


def _fresh_schema() -> Callable[[], object]:
    from oasis_eval.report import index

    return index._schema.__wrapped__


@pytest.mark.usefixtures("eager")
def test_names_in_an_index_lead_nowhere(tmp_path: Path) -> None:
    """A row whose name is no file of the folder is no record, wherever the name points."""
    folder = tmp_path / "runs"
    inside = write_record(folder, some("m0", "fp32", 2.0))
    outside = write_record(tmp_path, some("m1", "fp32", 2.0))
    with new_index(folder) as (writer, _):
        for name in (f"../{outside.name}", str(outside)):
            stamp = store._stamp(str(outside))
            assert stamp is not None
            writer.add(make_row(name, stamp, some("m1", "fp32", 2.0)))

    assert [item.card.name for item in find_records([folder])] == ["m0"]
    assert inside.exists()


@pytest.mark.usefixtures("eager")
def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Without an index (here its name is taken) tables and filters are the same."""
    (tmp_path / INDEX_NAME).mkdir()
    for scheme in ("fp32", "w8a8"):
        write_record(tmp_path, some("m0", scheme, 2.5))
    tick(tmp_path)
    check(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [
        INDEX_NAME
    ]


@pytest.mark.usefixtures("eager")
def test_many_at_once(tmp_path: Path) -> None:
    """Readers that renew the index of a changing folder at the same time see whole records."""
    for number in range(8):
        write_record(tmp_path, some(f"m{number}", "fp32", 2.0))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                assert len(find_records([tmp_path])) >= 8
        except BaseException as error:  # the thread's own end says nothing
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(8, 24):
        write_record(tmp_path, some(f"m{number}", "fp32", 2.0))
    for thread in threads:
        thread.join()

    assert errors == []
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    check(tmp_path)


def test_a_small_folder_gets_none(tmp_path: Path) -> None:
    """Reading a few files costs less than an index, and leaves the folder as it is."""
    write_record(tmp_path, some("m0", "fp32", 2.0))
    find_records([tmp_path])

    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_that_matches_says_what_there_is(tmp_path: Path) -> None:
    """The message is one line with the values that a filter could have had."""
    for scheme in ("w8a8", "fp32"):
        write_record(tmp_path, some("m0", scheme, 2.0))
    with pytest.raises(NoMatchError) as single:
        find_records([tmp_path], where={"scheme": ("w9a9",)})
    with pytest.raises(NoMatchError) as listed:
        find_records([tmp_path], where={"scheme": ("w8*,fp32",)})
    write_record(tmp_path, some("m1", "w4a4", 2.0))
    where = {"scheme": ("w4a4",), "model": ("m0",)}
    with pytest.raises(NoMatchError) as both:
        chosen(find_records([tmp_path], where=where), where)

    assert str(single.value) == "no record has scheme=w9a9; found: fp32, w8a8"
    assert str(listed.value).endswith("; for any of them: --where scheme=w8* --where scheme=fp32")
    assert str(both.value) == "no record has scheme=w4a4 and model=m0 together"


def test_no_heavy_library_is_loaded(tmp_path: Path) -> None:
    """Reading by way of an index loads neither torch nor pandas."""
    path = write_record(tmp_path, some("m0", "fp32", 2.0))
    with new_index(tmp_path) as (writer, _):
        stamp = store._stamp(str(path))
        assert stamp is not None
        writer.add(make_row(path.name, stamp, some("m0", "fp32", 2.0)))
    code = (
        "import sys; from pathlib import Path; from oasis_eval.report import store; "
        "store.MIN_FILES = 1; store.find_records([Path(sys.argv[1])]); "
        "print(sorted({'torch', 'pandas', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )

    assert done.stdout.strip() == "[]"
