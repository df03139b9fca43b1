"""Sweeps on three emulated nodes: nodes and processes that die, and the records of one process."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasis_eval.spec import SweepSpec
from oasis_eval.sweep.cluster import Resources
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.run import Plan, sweep
from tests.command_line import INTERRUPTIBLE
from tests.sweep.conftest import Grids, content

pytestmark = [
    pytest.mark.slow,  # a cluster needs half a minute to start, a process on it ten seconds
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("one_thread"),
]

_HOOK = """
import json, os, signal, sys, time
from pathlib import Path

CONTROL = Path({control!r})
if any("oasis_eval.sweep.remote" in item for item in sys.orig_argv):
    from oasis_eval.harness import run
    original = run.evaluate
    host = os.getppid()
    raylet = Path(f"/proc/{{host}}/stat").read_text().rpartition(")")[2].split()[1]

    def evaluate(prepared, task, data, **options):
        marker = CONTROL / f"{{raylet}}.{{host}}.{{os.getpid()}}"
        marker.write_text(prepared.scheme.name)
        control = json.loads((CONTROL / "control.json").read_text())
        if [prepared.scheme.name, task.name] == control.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        hangs = [prepared.scheme.name, task.name] == control.get("hang")
        time.sleep(600.0 if hangs else control.get("sleep", 0.0))
        try:
            return original(prepared, task, data, **options)
        finally:
            marker.unlink()

    run.evaluate = evaluate
"""
"""Marks the cell that a process is at, and lets the test slow processes down or kill them."""


class Nodes:
    """An emulated cluster and what its processes are at."""

    def __init__(self, control: Path) -> None:
        from ray.cluster_utils import Cluster

        self.control = control
        head = {"num_cpus": 1, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.cluster.add_node(num_cpus=1) for _ in range(2)]

    def set(self, **control: object) -> None:
        (self.control / "control.json").write_text(json.dumps(control))

    def marks(self) -> list[Path]:
        """Marks of the cells that any process is at."""
        return list(self.control.glob("*.*.*"))

    def clear(self) -> None:
        """Forget the marks of processes that were killed."""
        for mark in self.marks():
            mark.unlink()

    def at_work(self, node: Any) -> list[Path]:
        """Marks of the cells that a node's processes are at."""
        raylet = node.all_processes["raylet"][0].process.pid
        return list(self.control.glob(f"{raylet}.*"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes of one core."""
    pytest.importorskip("ray", reason="the cluster needs Ray")
    control = tmp_path_factory.mktemp("control")
    (control / "sitecustomize.py").write_text(_HOOK.format(control=str(control)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(control))
        logging.getLogger("ray").setLevel(logging.ERROR)
        nodes = Nodes(control)
        yield nodes
        nodes.cluster.shutdown()


def run(grid: SweepSpec, out: str, address: str, **options: Any) -> tuple[Ledger, str]:
    stream = io.StringIO()
    plan = Plan(Path(out), resources=Resources(address), **options)
    return sweep(grid, plan, stream), stream.getvalue()


def test_a_cell_that_kills_its_process_fails_and_the_others_go_on(
    grid: Grids, nodes: Nodes
) -> None:
    """It is tried twice; its record says how the process ended."""
    nodes.set(kill=["w8a8", "wikitext2"])

    ledger, _ = run(grid(), "runs", nodes.cluster.address)

    assert [entry.state for entry in ledger.entries] == ["ok", "ok", "failed", "ok"]
    reason = str(ledger.entries[2].reason)
    assert "signal 9" in reason
    assert "twice" in reason


def test_a_cell_over_its_limit_fails_and_the_others_go_on(grid: Grids, nodes: Nodes) -> None:
    """The limit is kept on the node, and the process goes on with the next cell."""
    nodes.set(hang=["fp32", "bookcorpus"])

    ledger, _ = run(grid(), "runs", nodes.cluster.address, cell_seconds=20.0)

    assert [entry.state for entry in ledger.entries] == ["ok", "failed", "ok", "ok"]
    assert "time limit of 20 s" in str(ledger.entries[1].reason)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_ends_early_leaves_nothing_behind_but_records(
    grid: Grids, nodes: Nodes, how: signal.Signals
) -> None:
    """Whether it was asked to end or killed: its processes end, and the next sweep goes on."""
    whole = grid(schemes=["fp32", "w8a8", "w4a4", "w8a8-g16"])
    sweep(whole, Plan(Path("alone")), io.StringIO())
    Path("grid.yaml").write_text(yaml.safe_dump(whole.model_dump(mode="json", exclude_unset=True)))
    nodes.set(sleep=5.0)
    command = [sys.executable, "-c", INTERRUPTIBLE, "sweep", "grid.yaml", "--out", "runs"]
    driver = subprocess.Popen(
        [*command, "--executor", "ray", "--address", nodes.cluster.address],
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: list(Path("runs").glob("*.json")) and nodes.marks())
    at_work = {int(mark.name.split(".")[2]) for mark in nodes.marks()}

    driver.send_signal(how)
    _, said = driver.communicate(timeout=120)

    assert driver.returncode == (130 if how == signal.SIGINT else -how)
    assert ("run the same command again" in said) == (how == signal.SIGINT)
    until(lambda: not any(Path(f"/proc/{number}").exists() for number in at_work))
    nodes.clear()
    nodes.set()
    before = len(list(Path("runs").glob("*.json")))
    assert 1 <= before < 8
    ledger, _ = run(whole, "runs", nodes.cluster.address)
    assert [entry.state for entry in ledger.entries] == ["ok"] * 8
    assert sum(entry.reused for entry in ledger.entries) == before
    assert content("runs") == content("alone")


def until(holds: Callable[[], object]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_node_dies_in_the_middle_and_the_records_are_those_of_one_process(
    grid: Grids, nodes: Nodes
) -> None:
    """The cell that was begun there is done elsewhere."""
    whole = grid(models=["./s0", "./s1"], schemes=["fp32", "w8a8", "w4a4", "w8a8-g16"])
    sweep(whole, Plan(Path("alone")), io.StringIO())
    nodes.set(sleep=1.0)
    killed: list[list[Path]] = []

    def kill() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            for node in nodes.others:
                marks = nodes.at_work(node)
                if marks and list(Path("runs").glob("*.json")):
                    nodes.cluster.remove_node(node, allow_graceful=False)
                    killed.append([mark for mark in marks if mark.exists()])
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    ledger, shown = run(whole, "runs", nodes.cluster.address)
    thread.join()

    assert [entry.state for entry in ledger.entries] == ["ok"] * 16
    assert len(killed) == 1
    assert killed[0]  # a cell was begun there and never ended
    assert content("runs") == content("alone")
    assert shown.count(": ok") == 16
