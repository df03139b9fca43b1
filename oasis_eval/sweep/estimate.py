"""What a cell will probably take, before it starts: seconds and bytes, and where they come from.

Time comes from records of the same checkpoint where there are some, else from its parameters and
the speed of matrix products on this machine. Memory comes from the parameters. Both are estimates
and are shown as such; nothing is decided by them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasis_eval import checkpoint
from oasis_eval.cells import Cell
from oasis_eval.errors import OasisError, RecordError
from oasis_eval.harness.protocols import CONTEXT_UNIT, parse_protocol
from oasis_eval.plan import is_question
from oasis_eval.record import RunRecord, read_record
from oasis_eval.spec import Dtype, RunSpec

_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_CHARACTERS_PER_TOKEN = 4.0
_PROCESS_BYTES = 700 << 20
"""Interpreter and libraries, measured on a tiny model."""
_LOGITS_BYTES = 200 << 20
"""Three tiles of logits, as the scorer cuts them."""
_WIDTHS_PER_TOKEN = 24
"""Hidden sizes that are alive at once for a token: a layer's inputs and outputs."""
_DECODING_COST = 4.0
"""A generated token against one of a prompt, for batches of one."""
_CELL_SECONDS = 1.5
"""What a cell takes besides the model: its scheme, tokenizing, the harness, the record."""
_QUANTIZED_COST, _FULL_GRAPH_COST = 1.3, 2.5
"""A pass against one in floating point, measured on models of 1 to 270 million parameters."""
_MATRIX, _REPEATS = 512, 5


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a checkpoint decides time and memory."""

    num_parameters: int
    hidden_size: int
    num_positions: int | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a cell will probably take."""

    seconds: float | None
    source: str
    """What the seconds come from."""
    num_bytes: int
    obstacle: str | None = None
    """Why it will not run here, where that is to be seen."""


class Estimator:
    """Estimates the cells of one sweep."""

    def __init__(self, out: Path, digests: Iterable[str], *, processes: int) -> None:
        """Read the finished records of `out` that are about these checkpoints.

        Args:
            out: Folder of records; damaged ones are passed over.
            digests: Of the checkpoints in question.
            processes: How many of them share this machine.
        """
        wanted = {digest.encode() for digest in digests}
        self._records: dict[str, list[RunRecord]] = {}
        for record in _read(out, wanted) if wanted else ():
            assert record.provenance is not None
            self._records.setdefault(str(record.provenance.checkpoint_sha256), []).append(record)
        self._processes = processes
        self._shapes: dict[str | None, Shape | None] = {}
        self._speeds: dict[tuple[str, Dtype], float | None] = {}

    def of(self, cell: Cell) -> Estimate | None:
        """Return what a cell will probably take; None where its checkpoint says nothing."""
        if cell.digest not in self._shapes:
            self._shapes[cell.digest] = _shape(cell)
        shape = self._shapes[cell.digest]
        if shape is None or cell.data is None:
            return None
        tokens = _num_tokens(cell)
        found = self._from_records(cell, tokens) or self._from_parameters(cell, shape, tokens)
        num_bytes = _num_bytes(cell.spec, shape)
        return Estimate(*found, num_bytes, self._obstacle(cell, shape, num_bytes))

    def _from_records(self, cell: Cell, tokens: float) -> tuple[float, str] | None:
        run, records = cell.spec, self._records.get(cell.digest or "", [])
        alike = [
            record
            for record in records
            if _task(record.spec) == _task(run)
            and record.data[:1]
            and cell.data is not None
            and record.data[0].sha256 == cell.data.infos[0].sha256
        ]
        same = [item for item in alike if item.spec.scheme == run.scheme] or alike
        if same:
            what = "this scheme" if same[0].spec.scheme == run.scheme else "other schemes"
            return statistics.median(map(_seconds, same)), f"records under {what}"
        if is_question(run.task):
            return None
        rates = [
            _seconds(record) / count.value
            for record in records
            if (count := record.metric("num_tokens")) is not None and count.value > 0
        ]
        if not rates:
            return None
        return statistics.median(rates) * tokens, "records of other texts"

    def _from_parameters(self, cell: Cell, shape: Shape, tokens: float) -> tuple[float | None, str]:
        speed = self._speed(cell.spec)
        if speed is None:
            return None, "parameters"
        seconds = 2.0 * shape.num_parameters * tokens / speed * _cost(cell.spec)
        return _CELL_SECONDS + seconds, "parameters"

    def _speed(self, run: RunSpec) -> float | None:
        place = (run.device, run.scheme.dtype or run.dtype)
        if place not in self._speeds:
            self._speeds[place] = _speed(*place)
        return self._speeds[place]

    def _obstacle(self, cell: Cell, shape: Shape, num_bytes: int) -> str | None:
        window = parse_protocol(cell.spec.task.protocol).window
        if window and shape.num_positions and window > shape.num_positions:
            return f"a window of {window} tokens, the model has {shape.num_positions} positions"
        if self._speed(cell.spec) is None:
            return f"device {cell.spec.device} cannot be used here"
        there = free_bytes(cell.spec.device)
        if there is not None and num_bytes * self._processes > there:
            shared = f" for each of {self._processes}" if self._processes > 1 else ""
            return f"{gib(num_bytes)}{shared}, {gib(there)} free"
        return None


def _cost(run: RunSpec) -> float:
    """Return how many plain passes a pass of this cell counts for."""
    if run.scheme.execution != "fake":
        return 1.0
    return _FULL_GRAPH_COST if len(run.scheme.regions) > 1 else _QUANTIZED_COST


def free_bytes(device: str) -> int | None:
    """Return the memory that is free on a device; None where that is not known."""
    if device.startswith("cuda"):
        import torch

        try:
            return int(torch.cuda.mem_get_info(device)[0])
        except (RuntimeError, AssertionError):
            return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None
    return min([*found, *_group_limit()], default=None)


def gib(num_bytes: int) -> str:
    """Return a number of bytes for reading."""
    return f"{num_bytes / 2**30:.1f} GiB"


def _group_limit() -> list[int]:
    """Return what is left of a container's memory, where it has a limit (cgroup v2)."""
    folder = Path("/sys/fs/cgroup")
    try:
        most = int((folder / "memory.max").read_text(encoding="ascii"))
        return [most - int((folder / "memory.current").read_text(encoding="ascii"))]
    except (OSError, ValueError):
        return []


def _read(out: Path, digests: set[bytes]) -> Iterable[RunRecord]:
    for file in sorted(out.glob("*.json")):
        try:
            content = file.read_bytes()
            if not any(digest in content for digest in digests):
                continue
            record = read_record(file)
        except (OSError, RecordError):
            continue
        if record.status == "ok" and record.provenance and record.provenance.seconds:
            yield record


def _seconds(record: RunRecord) -> float:
    assert record.provenance is not None
    return float(record.provenance.seconds or 0.0)


def _task(run: Any) -> tuple[object, ...]:
    task = run.task
    device = getattr(run, "device", None)
    diagnostics = getattr(run, "diagnostics", False)
    return (task.name, task.protocol, task.limit, task.max_new_tokens, device, diagnostics)


def _shape(cell: Cell) -> Shape | None:
    """Read a checkpoint's sizes from the headers of its files."""
    try:
        place = checkpoint.locate(cell.card)
        if place.is_file():
            return Shape(_gguf_parameters(place), 0, cell.card.context_length)
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        positions = next(
            (
                text[name]
                for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
                if isinstance(text.get(name), int)
            ),
            None,
        )
        hidden = text.get("hidden_size") or text.get("n_embd") or 0
        return Shape(_parameters(place), int(hidden), cell.card.context_length or positions)
    except (OasisError, OSError, ValueError, AttributeError, TypeError):
        return None  # whatever is wrong with it is said when it is loaded


def _parameters(folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        for shard in folder.glob("*.safetensors"):
            with safe_open(shard, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    size = 1
                    for length in file.get_slice(name).get_shape():
                        size *= length
                    total += size
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return total


def _gguf_parameters(path: Path) -> int:
    from gguf import GGUFReader

    with checkpoint.as_checkpoint_error(f"{path}: GGUF cannot be read"):
        return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def _num_tokens(cell: Cell) -> float:
    """Return how many tokens pass through the model, about, from the length of the text."""
    assert cell.data is not None
    task, protocol = cell.spec.task, parse_protocol(cell.spec.task.protocol)
    rows = cell.data.corpora[0].rows
    if protocol.kind == "passkey":
        prompts = [length for _ in rows for length in protocol.lengths][: task.limit]
        return 2.0 * sum(prompts) + len(prompts) * (task.max_new_tokens or 0) * _DECODING_COST
    if protocol.kind == "gsm8k":
        questions = rows[: task.limit]
        examples = cell.data.corpora[1].rows if len(cell.data.corpora) > 1 else ()
        shot = _mean_length(examples) * protocol.shots
        prompt = (shot + _mean_length(questions)) / _CHARACTERS_PER_TOKEN
        answer = (task.max_new_tokens or 0) * _DECODING_COST
        return len(questions) * (2.0 * prompt + answer)
    if protocol.per_document:
        rows = rows[: task.limit]
    tokens = sum(len(row["text"]) for row in rows) / _CHARACTERS_PER_TOKEN
    if task.limit and protocol.window and not protocol.per_document:
        unit = CONTEXT_UNIT if protocol.kind == "context" else protocol.window
        tokens = min(tokens, task.limit * unit)
    return tokens * (2.0 if cell.spec.diagnostics else 1.0)


def _mean_length(rows: Sequence[dict[str, str]]) -> float:
    return sum(len(text) for row in rows for text in row.values()) / max(1, len(rows))


def _num_bytes(run: RunSpec, shape: Shape) -> int:
    """Return weights, their second copy under a scheme, and what a batch needs."""
    scheme, window = run.scheme, parse_protocol(run.task.protocol).window
    compute = _BYTES[scheme.dtype or run.dtype]
    weights = shape.num_parameters * compute
    copies = 2 if scheme.weights is not None else 1
    length = window or shape.num_positions or 2048
    batch = run.batch_size * length * shape.hidden_size * _WIDTHS_PER_TOKEN * compute
    return _PROCESS_BYTES + copies * weights + batch + _LOGITS_BYTES


def _speed(device: str, dtype: Dtype) -> float | None:
    """Return the operations a second of a matrix product on a device; None where it is not."""
    import torch

    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    try:
        left = torch.ones(_MATRIX, _MATRIX, dtype=kinds[dtype], device=device)
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            (left @ left)[0, 0].item()
            times.append(time.perf_counter() - start)
    except (RuntimeError, AssertionError):
        return None
    return 2.0 * _MATRIX**3 / statistics.median(times)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
