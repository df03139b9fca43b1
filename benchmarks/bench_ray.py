"""What a cell on a Ray cluster costs beside itself, and where a cluster stops being of use.

First the real thing without models: a sweep of 240 cells whose hosts say at once what a process
would say, a record of 60 kB and its samples included. Everything else is as in use: Ray, claims,
locks, supplies, and records that are written to disk. Its time by cell is what the sweep's machine
has to do for a cell, however many nodes there are, and it does so for one after the other.

Then a simulation with that figure, by the code that places cells in a sweep: 20 checkpoints of 50
cells (10 schemes on 5 tasks), cells of 30 seconds (log-normal, sigma 0.5), 20 seconds to load a
checkpoint, 15 to start a process. It says how much of the workers' time goes into cells.

    OMP_NUM_THREADS=1 python benchmarks/bench_ray.py [--model-only MILLISECONDS] [--cell 30]
"""

from __future__ import annotations

import argparse
import heapq
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

from oasis_eval.sweep import cluster
from oasis_eval.sweep.placement import Placement

OVERHEAD_BUDGET = 0.05
RECORD_BYTES = 60_000
SAMPLE_ROWS = 200
NUM_CHECKPOINTS, NUM_SCHEMES, NUM_TASKS = 20, 10, 5
LOAD_SECONDS, START_SECONDS, SIGMA = 20.0, 15.0, 0.5
WORKERS = (1, 8, 16, 32, 64, 128, 256, 512)


class EchoHost:
    """A host that does nothing and says all that a process would."""

    def __init__(self, folder: str, num_threads: int) -> None:
        self._events: Iterator[dict[str, object]] = iter(())
        self._answer = ""

    def objection(self, versions: dict[str, str]) -> None:
        """Be content."""

    def hear(self, lines: Sequence[str], *, stop: bool = False) -> list[str]:
        """Go on until an answer is needed."""
        for line in lines:
            if "requests" in line[:200] or '"requests":' in line:
                self._events = self._say(json.loads(line))
            else:
                self._answer = line
        found = []
        for event in self._events:
            found.append(json.dumps(event))
            if event["kind"] in ("claim", "finished", "done"):
                break
        return found

    def _say(self, share: dict) -> Iterator[dict[str, object]]:
        samples = '{"nll_nats": 1.25}\n' * SAMPLE_ROWS
        for at, (request, key) in enumerate(zip(share["requests"], share["keys"], strict=True)):
            yield {"kind": "claim", "cells": [at]}
            if not json.loads(self._answer)["granted"]:
                continue
            yield {"kind": "started", "cells": [at]}
            record = {
                "key": key,
                "spec": request["spec"],
                "card": request["card"],
                "status": "ok",
                "warnings": ["x" * RECORD_BYTES],
            }
            text = json.dumps(record)
            yield {"kind": "finished", "cells": [at], "record": text, "samples": samples}
        yield {"kind": "done", "cells": []}


def measure() -> tuple[float, int]:
    """Return the seconds that a cell costs, and how many cells it was measured on."""
    import ray

    from oasis_eval.parsing import parse
    from oasis_eval.spec import SweepSpec
    from oasis_eval.sweep.run import Plan, sweep

    cluster.Host = EchoHost  # type: ignore[assignment,misc]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        _write_checkpoints(5)
        Path("text.txt").write_text("A text of words. " * 200)
        grid = parse(
            SweepSpec,
            {
                "models": [f"./m{number}" for number in range(5)],
                "schemes": ["fp32", *(f"w{bits}a{bits}" for bits in (4, 5, 6, 7, 8)), "w8a8-g16",
                            "w4a4-g16", "w8a8-g32", "w4a4-g32", "w4a8", "w8a8-g64"],
                "tasks": ["wikitext2", "bookcorpus"],
                "protocols": ["gptq-64", "llamacpp-64"],
                "data": {"wikitext2": "text.txt", "bookcorpus": "text.txt"},
            },
            origin="benchmark",
        )  # fmt: skip
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        warm = grid.model_copy(update={"models": ("./m0",), "schemes": ("fp32",)})
        plan = Plan(Path("warm"), resources=cluster.Resources())
        sweep(warm, plan, io.StringIO())
        started = time.perf_counter()
        plan = Plan(Path("runs"), resources=cluster.Resources())
        ledger = sweep(grid, plan, io.StringIO())
        seconds = time.perf_counter() - started
        ray.shutdown()
        assert ledger.count("ok") == len(ledger.entries)
        return seconds / len(ledger.entries), len(ledger.entries)


def _write_checkpoints(number: int) -> None:
    """Write checkpoints of different content; nothing of them is loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from oasis_eval.minicorpus import tokenizer as mini_tokenizer

    tokenizer = mini_tokenizer.load()
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained("m0")
    tokenizer.save_pretrained("m0")
    for at in range(1, number):
        shutil.copytree("m0", f"m{at}")
        Path(f"m{at}", "special.json").write_text(json.dumps(at))


# --- simulation ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """A worker of the simulation."""

    node: str
    pile: int | None = None
    loaded: int | None = None
    todo: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated sweep took."""

    seconds: float
    share_in_cells: float
    """Of the workers' time."""
    num_loads: int
    driver_load: float
    """Share of the time in which the sweep's machine was busy."""


def simulate(num_workers: int, driver_seconds: float, cell_seconds: float) -> Outcome:
    """Play a sweep through: 8 workers a node, one queue for the sweep's machine."""
    rng = random.Random(7)
    per_pile = NUM_SCHEMES * NUM_TASKS
    total = NUM_CHECKPOINTS * per_pile
    mean = -(SIGMA**2) / 2
    lasts = [cell_seconds * rng.lognormvariate(mean, SIGMA) for _ in range(total)]
    placement = Placement(range(at, at + per_pile) for at in range(0, total, per_pile))
    workers = [Worker(f"n{number // 8}") for number in range(num_workers)]
    slots: dict[str, int] = {}
    for worker in workers:
        slots[worker.node] = slots.get(worker.node, 0) + 1
    placement.settle(slots)
    events = [(START_SECONDS, number) for number in range(num_workers)]
    driver_free = driver_busy = end = 0.0
    num_loads = 0
    while events:
        now, number = heapq.heappop(events)
        worker = workers[number]
        if not worker.todo:
            _refill(worker, placement, num_workers)
            if not worker.todo:
                end = max(end, now)
                continue
            if worker.loaded != worker.pile:
                worker.loaded = worker.pile
                num_loads += 1
                now += LOAD_SECONDS
        done = now + lasts[worker.todo.pop(0)]
        heapq.heappush(events, (done, number))
        # The machine answers one after the other; whoever comes meanwhile waits.
        driver_free = max(driver_free, now) + driver_seconds
        driver_busy += driver_seconds
        if driver_free - driver_seconds > now:
            events.remove((done, number))
            heapq.heapify(events)
            heapq.heappush(events, (done + driver_free - driver_seconds - now, number))
    return Outcome(end, sum(lasts) / (num_workers * end), num_loads, driver_busy / end)


def _refill(worker: Worker, placement: Placement, num_workers: int) -> None:
    """Let a worker claim the cells of a scheme, at its pile or another."""
    while True:
        if worker.pile is None:
            worker.pile = placement.choose(worker.node)
            worker.loaded = None  # a share begins with a load
            if worker.pile is None:
                return
        free = placement.free_cells(worker.pile)
        group = [cell for cell in free if cell // NUM_TASKS == free[0] // NUM_TASKS]
        for cell in group:
            if placement.may_take(len(worker.todo), num_workers):
                placement.take(cell)
                worker.todo.append(cell)
        if worker.todo:
            return
        placement.leave(worker.pile, worker.node)
        worker.pile = None


def main() -> int:
    """Print both tables; status 1 where a cell costs more than the budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-only", type=float, metavar="MILLISECONDS")
    parser.add_argument("--cell", type=float, default=30.0, help="Seconds of a cell.")
    options = parser.parse_args()
    if options.model_only is None:
        driver, number = measure()
        share = driver / options.cell
        print(f"{number} cells without models: {1000 * driver:.1f} ms a cell, "
              f"{100 * share:.2f} % of {options.cell:g} s")  # fmt: skip
    else:
        driver = options.model_only / 1000
        share = driver / options.cell
    print(f"\n{'workers':>7} {'minutes':>8} {'in cells':>9} {'loads':>6} {'driver busy':>12}")
    for workers in WORKERS:
        found = simulate(workers, driver, options.cell)
        print(f"{workers:>7} {found.seconds / 60:>8.1f} {100 * found.share_in_cells:>8.0f}% "
              f"{found.num_loads:>6} {100 * found.driver_load:>11.1f}%")  # fmt: skip
    return int(share > OVERHEAD_BUDGET)


if __name__ == "__main__":
    sys.exit(main())
