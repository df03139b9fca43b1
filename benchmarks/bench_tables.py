"""Time to make a table of many records: read, build, render, in this process and in a new one.

    python benchmarks/bench_tables.py [--records 1000]

The records are made up: models x schemes x tasks, with layers and coverage as real ones have.
Budget: 3 seconds for 1,000 records in a new process.
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
    write_text_atomically,
)
from oasis_eval.report.render import FORMATS, render
from oasis_eval.report.tables import build_table, load_spec
from oasis_eval.spec import DirSource, ModelCard, QuantScheme, RunSpec, TaskRef, TensorFormat

BUDGET_SECONDS = 3.0
LINEARS = 85
BITS = (8, 6, 5, 4, 3)
TASKS = ("wikitext2", "wiki40b", "bookcorpus", "ptb")

NEW_PROCESS = """
import sys, time
from pathlib import Path
start = time.perf_counter()
from oasis_eval.record import read_records
from oasis_eval.report.render import render
from oasis_eval.report.tables import build_table, load_spec
records = list(read_records([Path(sys.argv[1])]))
text = render(build_table(records, load_spec("results")), format="latex")
print(len(records), len(text), sorted({"torch", "transformers"} & set(sys.modules)))
"""


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
    """Print seconds by step, and whether the budget is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1000)
    number = parser.parse_args().records
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index in range(number):
            record = made_record(index)
            write_text_atomically(folder / f"{record.key}.json", record.model_dump_json(indent=1))
        start = time.perf_counter()
        records = list(read_records([folder]))
        print(f"read {number} records       {time.perf_counter() - start:6.2f} s")
        start = time.perf_counter()
        table = build_table(records, load_spec("results"))
        print(
            f"build {len(table.rows)} x {len(table.columns)}            "
            f"{time.perf_counter() - start:6.2f} s"
        )
        for format_name in FORMATS:
            start = time.perf_counter()
            render(table, format=format_name)  # type: ignore[arg-type]  # one of FORMATS
            print(f"render {format_name:<16} {time.perf_counter() - start:6.2f} s")
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", NEW_PROCESS, name], check=True, capture_output=True, text=True
        )
        seconds = time.perf_counter() - start
    verdict = "within" if seconds <= BUDGET_SECONDS else "OVER"
    print(f"all, in a new process     {seconds:6.2f} s  {verdict} {BUDGET_SECONDS} s")
    print(f"(records, characters, heavy libraries loaded: {done.stdout.strip()})")


if __name__ == "__main__":
    main()
