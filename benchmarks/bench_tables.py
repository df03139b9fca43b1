"""Time, memory and bytes of tables and reports of many records, in this process and in new ones.

    python benchmarks/bench_tables.py [--records 1000] [--folder FOLDER]

The records are made up: models x schemes x tasks, with coverage as real ones have; about 32 kB
each, so 100,000 take 3 GB of disk. They are written to FOLDER, or used if it has as many, and each
step is timed by a process of its own: the first one makes the index of a folder that has one.
Budgets for 1,000 records: 3 seconds for a table in a new process, 10 MB for a report.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oasis_eval.record import (
    Coverage,
    DataInfo,
    Metric,
    ModuleCoverage,
    ProtocolInfo,
    Provenance,
    RunRecord,
    read_records,
    record_text,
    write_text_atomically,
)
from oasis_eval.report.index import INDEX_NAME
from oasis_eval.report.render import FORMATS, render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import DirSource, ModelCard, QuantScheme, RunSpec, TaskRef, TensorFormat

BUDGET_SECONDS = 3.0
BUDGET_BYTES = 10_000_000
MOST_IN_A_REPORT = 2000
LINEARS = 85
BITS = (8, 6, 5, 4, 3)
TASKS = ("wikitext2", "wiki40b", "bookcorpus", "ptb")

NEW_PROCESS = """
import resource, sys, time
start = time.perf_counter()
from oasis_eval.cli import main
sys.argv = ["oasis-eval", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
loaded = sorted({"torch", "transformers", "pandas"} & set(sys.modules))
print(f"{time.perf_counter() - start:.2f} {time.process_time():.2f} {peak:.2f} {loaded}")
"""


def in_new_process(what: str, *arguments: str) -> float:
    """Run the command line in a process of its own, print what it took, and return seconds."""
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, *arguments], capture_output=True, text=True, check=True
    )
    seconds, processor, peak, loaded = done.stdout.split("\n")[-2].split(" ", 3)
    print(f"{what:<34} {seconds:>7} s  {processor:>7} s CPU  {peak:>5} GB  loaded: {loaded}")
    return float(seconds)


def made_record(number: int) -> RunRecord:
    """Return the record of one cell of the grid models x schemes x tasks."""
    task = TASKS[number % len(TASKS)]
    bits = BITS[number // len(TASKS) % len(BITS)]
    model = f"model-{number // (len(TASKS) * len(BITS))}"
    scheme = QuantScheme(
        name=f"w{bits}a{bits}",
        weights=TensorFormat(bits=bits, granularity="channel"),
        activations=TensorFormat(bits=bits, granularity="token", ranges="dynamic"),
    )
    modules = tuple(
        ModuleCoverage(
            module=f"model.layers.{index // 7}.linear_{index % 7}", quantized=True, weight_bits=bits
        )
        for index in range(LINEARS)
    )
    tokens = 8184.0
    loss = (2.5 + number % 97 / 100 + 8.0 / bits) * tokens
    return RunRecord(
        key=f"{number:064x}",
        spec=RunSpec(
            model=model, scheme=scheme, task=TaskRef(name=task, protocol="gptq-1024"), dtype="fp32"
        ),
        card=ModelCard(
            name=model, family="llama", source=DirSource(path=f"/models/{model}"), label=model
        ),
        status="ok",
        metrics=tuple(
            Metric(task=task, name=name, value=value, count=8, protocol="gptq-1024")
            for name, value in (("nll_nats", loss), ("num_tokens", tokens))
        ),
        coverage=Coverage(
            modules=modules,
            num_linear=LINEARS,
            num_quantized=LINEARS,
            effective_weight_bits=float(bits),
            bytes_before=1,
            bytes_after=1,
        ),
        protocols=(
            ProtocolInfo(
                name="gptq-1024",
                version=1,
                sha256="0" * 64,
                summary="non-overlapping windows of 1024 tokens",
                details={"window": 1024},
            ),
        ),
        data=(DataInfo(name=task, origin=f"owner/{task}@1", sha256="1" * 64, num_rows=10),),
        provenance=Provenance(
            checkpoint_sha256=f"{number // 20:064x}",
            versions={"torch": "2.13.0"},
            device="cpu",
            dtype="fp32",
            attention="sdpa",
            started="2026-01-01T00:00:00Z",
            seconds=1.0,
            num_threads=1,
        ),
    )


def main() -> None:
    """Print seconds, memory and bytes by step, and whether the budgets are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(options.records, options.folder or Path(name) / "runs", Path(name))


def measure(number: int, folder: Path, results: Path) -> None:
    """Write that many records, where they are not there, and time what is made of them."""
    there = len(list(folder.glob("*.json"))) if folder.is_dir() else 0
    if there != number:
        for index in range(number):
            record = made_record(index)
            write_text_atomically(folder / f"{record.key}.json", record_text(record))
        time.sleep(2.5)  # what changed just now is not taken into an index
    (folder / INDEX_NAME).unlink(missing_ok=True)
    runs = str(folder)
    if number <= MOST_IN_A_REPORT:
        steps_in_this_process(folder)
    to_csv = ("--format", "csv-long", "--out", str(results / "long.csv"))
    of_one = ("--where", "model=model-7")
    first = in_new_process("table of one model, first time", "table", runs, *to_csv, *of_one)
    if (folder / INDEX_NAME).exists():
        print(f"index: {(folder / INDEX_NAME).stat().st_size / 1e6:.1f} MB")
    in_new_process("table --where of one model", "table", runs, *to_csv, *of_one)
    in_new_process("table --where of one scheme", "table", runs, *to_csv, "--where", "scheme=w4a4")
    latex = ("--format", "latex", "--out", str(results / "table.tex"))
    seconds = max(first, in_new_process("table of all, LaTeX", "table", runs, *latex))
    if number <= 1000:
        print(f"{'within' if seconds <= BUDGET_SECONDS else 'OVER'} {BUDGET_SECONDS} s")
    in_new_process("table of all, csv-long", "table", runs, *to_csv)
    long = ("--format", "parquet", "--out", str(results / "long.parquet"))
    in_new_process("table of all, parquet", "table", runs, *long)
    page = results / "report.html"
    chosen = () if number <= MOST_IN_A_REPORT else ("--where", "model=model-7*")
    in_new_process(" ".join(("report", *chosen)), "report", runs, "--out", str(page), *chosen)
    size = page.stat().st_size
    print(f"report: {size / 1e6:.2f} MB", end="")
    print(f"  {'within' if size <= BUDGET_BYTES else 'OVER'} {BUDGET_BYTES / 1e6:.0f} MB")


def steps_in_this_process(folder: Path) -> None:
    """Print seconds of reading every file, building the table and rendering it."""
    start = time.perf_counter()
    records = list(read_records([folder]))
    print(f"read {len(records)} files without an index {time.perf_counter() - start:6.2f} s")
    start = time.perf_counter()
    table = build_table(records, load_spec("results"))
    seconds = time.perf_counter() - start
    print(f"build {len(table.rows)} x {len(table.columns)}            {seconds:6.2f} s")
    for format_name in FORMATS:
        start = time.perf_counter()
        render(table, format=format_name)  # type: ignore[arg-type]  # one of FORMATS
        print(f"render {format_name:<16} {time.perf_counter() - start:6.2f} s")


if __name__ == "__main__":
    main()
