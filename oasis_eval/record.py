"""What came out: one JSON file per cell, written whole or not at all.

A record is keyed by the content of everything that its numbers depend on, so that a finished cell
is never computed again and a changed one is never taken for it. NaN and infinity are results;
they are written as the strings "NaN", "Infinity", "-Infinity", so every strict parser reads them.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from oasis_eval.errors import OutputError, RecordError
from oasis_eval.parsing import explain
from oasis_eval.spec import Granularity, ImportedRun, ModelCard, Region, RunSpec

SCHEMA_VERSION = 1
Status = Literal["ok", "failed", "unsupported"]
MAX_LOG = math.log(1.7976931348623157e308)


class Outcome(BaseModel):
    """Base of all result types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True
    )


class Metric(Outcome):
    """One number and what it was measured on."""

    task: str
    name: str
    """For example `token_perplexity`, `nll_nats`, `pass@1`."""
    value: float
    stderr: float | None = None
    """Standard error, in the unit of `value`."""
    count: int | None = None
    """Windows, documents or questions behind the number."""
    protocol: str
    filter: str | None = None
    """Answer filter of a generative task."""


class LayerStat(Outcome):
    """One statistic of one module."""

    module: str
    name: str
    value: float


class ModuleCoverage(Outcome):
    """What happened to one Linear (or other region)."""

    module: str
    quantized: bool
    region: Region | None = None
    """None: what was left alone, or an ordinary Linear."""
    reason: str | None = None
    """Why it was left alone."""
    note: str | None = None
    """What is particular about how it was quantized, for example a short last group."""
    weight_bits: int | None = None
    weight_granularity: Granularity | None = None
    weight_group_size: int | None = None
    """Group size really used; a row shorter than a group is one group."""
    activation_bits: int | None = None
    activation_granularity: Granularity | None = None
    activation_group_size: int | None = None
    """Group size really used, as for weights."""
    activation_static: bool | None = None


class Coverage(Outcome):
    """What a scheme really did to a model."""

    modules: tuple[ModuleCoverage, ...]
    num_linear: int
    """Linear layers in the model, the LM head included."""
    num_quantized: int
    """Of them, quantized."""
    num_sites: int = 0
    """Places outside of layers where activations are quantized, such as attention scores."""
    absent_regions: tuple[Region, ...] = ()
    """Regions of the scheme that this model does not have."""
    effective_weight_bits: float
    """Mean bits per parameter, scales, head and embeddings included."""
    bytes_before: int
    bytes_after: int
    """Bytes that the codes and scales would take in storage."""


class DataInfo(Outcome):
    """The text behind a number."""

    name: str
    origin: str
    """Path of the local file or `repository@revision`."""
    split: str | None = None
    sha256: str
    """Of the rows as read, before tokenization."""
    num_rows: int


class ProtocolInfo(Outcome):
    """How a number was measured, as far as it changes the number."""

    name: str
    version: int
    sha256: str
    summary: str
    """One line for footnotes."""
    details: dict[str, str | int | float | bool | None]
    """Window, prefix token, shots and whatever else the run decided."""


class Provenance(Outcome):
    """Who measured, with what; None is what an imported result does not say."""

    checkpoint_sha256: str | None
    versions: dict[str, str]
    """Library versions."""
    git_commit: str | None = None
    device: str | None
    dtype: str | None
    attention: str | None
    """Attention implementation that ran."""
    started: str | None
    """UTC, ISO 8601."""
    seconds: float | None
    num_threads: int | None
    num_processes: int = 1
    """Processes that shared the batches of this cell."""


def _kind_of_run(value: object) -> str:
    """Tell which type a record's `spec` is, so that an error is about that one alone."""
    if isinstance(value, dict):
        return "import" if "importer" in value else "run"
    return "import" if isinstance(value, ImportedRun) else "run"


class RunRecord(Outcome):
    """The result of one cell."""

    schema_version: int = SCHEMA_VERSION
    key: str = Field(pattern=r"^[\w-]+$")
    """Content hash; the name of its file and of what lies beside it."""
    spec: Annotated[
        Annotated[RunSpec, Tag("run")] | Annotated[ImportedRun, Tag("import")],
        Discriminator(_kind_of_run),
    ]
    card: ModelCard
    status: Status
    reason: str | None = None
    """One line, when the status is not `ok`."""
    traceback: str | None = None
    metrics: tuple[Metric, ...] = ()
    layers: tuple[LayerStat, ...] = ()
    coverage: Coverage | None = None
    protocols: tuple[ProtocolInfo, ...] = ()
    data: tuple[DataInfo, ...] = ()
    warnings: tuple[str, ...] = ()
    provenance: Provenance | None = None

    def metric(self, name: str) -> Metric | None:
        """Return the metric called `name`, or None."""
        return next((item for item in self.metrics if item.name == name), None)


def perplexity(nll_nats: float, count: float) -> float:
    """Return exp(nll / count); infinite above 709 nats a unit, NaN for NaN or an empty count."""
    if math.isnan(nll_nats) or count <= 0:
        return math.nan
    mean = nll_nats / count
    return math.inf if mean > MAX_LOG else math.exp(mean)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` is at every moment either the old file or the whole new one.

    Raises:
        OutputError: It cannot be written there.
    """
    try:
        _write_and_rename(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


def _write_and_rename(path: Path, text: str) -> None:
    # Half a surrogate pair in a completion becomes the escape that JSON has for it.
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside `path` that takes its place, whole and on disk, where nothing fails.

    Raises:
        OSError: It cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's own mode is for the owner alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_record(folder: Path, record: RunRecord) -> Path:
    """Write `record` as `<key>.json` in `folder`, atomically, and return the path."""
    path = folder / f"{record.key}.json"
    write_text_atomically(path, record_text(record))
    return path


def record_text(record: RunRecord) -> str:
    """Return what a record's file holds."""
    return record.model_dump_json(indent=1) + "\n"


def read_record(path: Path) -> RunRecord:
    """Read one record.

    Raises:
        RecordError: The file is unreadable, cut off, or of another schema version.
    """
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise RecordError(
            f"{path}: not a result record; if it is damaged, delete it and run again. Found: "
            f"{explain(error, RunRecord)}"
        ) from error
    if record.schema_version != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: record schema {record.schema_version}, this version reads {SCHEMA_VERSION}"
        )
    return record


def read_records(paths: Iterable[Path]) -> Iterator[RunRecord]:
    """Read the records of files and folders (`*.json` directly inside), sorted by file name.

    Raises:
        RecordError: A path does not exist or a file is no record.
    """
    for path in paths:
        if path.is_dir():
            for name in record_names(path):
                yield read_record(path / name)
        elif path.exists():
            yield read_record(path)
        else:
            raise RecordError(f"{path}: no such file or folder of records")


def record_names(folder: Path) -> list[str]:
    """Return the names of a folder's record files, sorted.

    Raises:
        RecordError: The folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise RecordError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(name for name in names if name.endswith(".json") and not name.startswith("."))


def write_samples(folder: Path, key: str, rows: Iterable[dict[str, object]]) -> Path:
    """Write per-window or per-question values beside a record, one JSON object a line."""
    lines = [json.dumps(_strict(row), ensure_ascii=False) for row in rows]
    path = folder / f"{key}.samples.jsonl"
    write_text_atomically(path, "".join(line + "\n" for line in lines))
    return path


def read_samples(folder: Path, key: str) -> list[dict[str, object]]:
    """Read the values that `write_samples` wrote; an absent file is an empty list.

    Raises:
        RecordError: The file is damaged.
    """
    path = folder / f"{key}.samples.jsonl"
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not readable as samples ({error})") from error


def _strict(row: dict[str, object]) -> dict[str, object]:
    """Replace non-finite floats by the strings that records use."""
    return {key: _strict_value(value) for key, value in row.items()}


def _strict_value(value: object) -> object:
    if isinstance(value, list):
        return [_strict_value(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
