"""A crew on nodes that are threads of this process: who measures what, and what is refused.

The hosts and their processes are replaced, what is said between them is not; Ray has no part in it.
"""

from __future__ import annotations

import contextlib
import io
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oasis_eval.errors import MissingExtraError, OasisError, SpecError
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep import cluster as cluster_module
from oasis_eval.sweep.cluster import Cluster, LostError, Resources, _room
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.remote import Remote
from oasis_eval.sweep.request import Event, Share
from oasis_eval.sweep.run import Plan, sweep
from tests.command_line import CommandLine
from tests.sweep.conftest import Grids, content

pytestmark = pytest.mark.usefixtures("one_thread")

_ONE_AT_A_TIME = threading.Lock()
"""Threads share torch and its random state; real processes do not."""


class Line:
    """What a process hears and says."""

    def __init__(self) -> None:
        self.heard: queue.Queue[str] = queue.Queue()
        self.said: queue.Queue[str] = queue.Queue()
        self.is_cut = False

    def say(self, event: Event) -> None:
        self.said.put(event.model_dump_json())

    def hear(self) -> str:
        while not self.is_cut:
            with contextlib.suppress(queue.Empty):
                return self.heard.get(timeout=0.02)
        return '{"granted": false, "files": {}}'


class Host:
    """A host whose process is a thread."""

    def __init__(self, node: str, out: Path) -> None:
        self.node = node
        self.is_dead = False
        self.line = Line()
        self.remote = Remote(self.line, out)  # type: ignore[arg-type]
        self.is_at_work = False

    def work(self, share: Share) -> None:
        with _ONE_AT_A_TIME:
            self.remote.do(share)


class Nodes(Cluster):
    """A cluster of threads."""

    def __init__(self, folder: Path, slots: dict[str, int]) -> None:
        super().__init__(Resources(gpus=0.0))
        self.folder = folder
        self.slots = slots
        self.hosts: list[Host] = []
        self.shares: list[tuple[str, Share]] = []
        self.granted: list[tuple[str, str]] = []
        self.objections: dict[str, str] = {}
        self.change: Callable[[str, Share], Share] = lambda node, share: share
        self.is_lost: Callable[[Host, Event], bool] = lambda host, event: False

    def room(self) -> dict[str, int]:
        return dict(self.slots)

    def no_room(self) -> SpecError:
        return SpecError("no room")

    def name(self, node: str) -> str:
        return node

    def hire(self, node: str) -> object:
        out = self.folder / f"host-{len(self.hosts)}"
        out.mkdir()
        self.hosts.append(Host(node, out))
        return self.hosts[-1]

    def objection(self, host: Any, versions: Mapping[str, str]) -> object:
        assert {"oasis_eval", "torch"} <= set(versions)
        return (host, "objection")

    def hear(self, host: Any, lines: Sequence[str], *, stop: bool) -> object:
        for line in lines:
            if host.is_at_work:
                host.line.heard.put(line)
                continue
            share = self.change(host.node, Share.model_validate_json(line))
            self.shares.append((host.node, share))
            host.is_at_work = True
            threading.Thread(target=host.work, args=(share,), daemon=True).start()
        return (host, "hear", object())

    def wait(self, calls: Sequence[Any]) -> list[object]:
        return [calls[0]] if len(calls) == 1 else [c for c in calls if _is_ready(c)]

    def answer(self, call: Any) -> Any:
        host, kind, *_ = call
        if kind == "objection":
            return self.objections.get(host.node)
        if host.is_dead:
            raise LostError("ActorDiedError", at_birth=False)
        line = host.line.said.get(timeout=30)
        event = Event.model_validate_json(line)
        if self.is_lost(host, event):
            host.is_dead = True
            raise LostError("ActorDiedError", at_birth=False)
        if event.kind in ("done", "refused"):
            host.is_at_work = False
        if event.kind == "finished":
            self.granted.append((host.node, event.record))
        return [line]

    def dismiss(self, host: Any) -> None:
        host.is_dead = host.line.is_cut = True


def _is_ready(call: Any) -> bool:
    host, kind, *_ = call
    return kind == "objection" or host.is_dead or not host.line.said.empty()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, home: Path) -> Callable[..., Nodes]:
    """Makes sweeps use nodes of these slots."""

    def set_up(**slots: int) -> Nodes:
        nodes = Nodes(home, slots)

        @contextmanager
        def session(resources: Resources):
            yield nodes

        monkeypatch.setattr(cluster_module, "session", session)
        return nodes

    return set_up


def run(grid: SweepSpec, out: str = "runs", **options: Any) -> Ledger:
    plan = Plan(Path(out), resources=Resources(), **options)
    return sweep(grid, plan, io.StringIO())


def test_records_are_those_of_one_process(grid: Grids, use: Callable[..., Nodes]) -> None:
    """Diagnostics, schemes that nothing can run and samples, too; each checkpoint on one node."""
    nodes = use(a=1, b=1)
    whole = grid(
        models=["./s0", "./s1"],
        schemes=["fp32", "w8a8", "bnb-w4a4"],
        diagnostics=True,
    )

    ledger = run(whole)
    sweep(whole, Plan(Path("alone")), io.StringIO())

    assert ledger.count("ok") == 8
    assert ledger.count("unsupported") == 4
    assert content("runs") == content("alone")
    homes = {(node, share.requests[0].card.name) for node, share in nodes.shares}
    assert {("a", "./s0"), ("b", "./s1")} <= {(node, name) for node, name in homes}


def test_a_second_sweep_measures_nothing(grid: Grids, use: Callable[..., Nodes]) -> None:
    """Nobody is hired."""
    nodes = use(a=1)
    run(grid())
    before = len(nodes.hosts)

    again = run(grid())

    assert all(entry.reused for entry in again.entries)
    assert len(nodes.hosts) == before == 1


def test_answers_are_compared_wherever_they_were_given(
    grid: Grids, use: Callable[..., Nodes], home: Path
) -> None:
    """A node gets the unquantized model's with the cell; its own folder has none."""
    rows = [f'{{"question": "{n} and 2?", "answer": "#### {n + 2}"}}' for n in range(8)]
    (home / "q.jsonl").write_text("\n".join(rows))
    settings = {"tasks": ["gsm8k"], "max_new_tokens": 4, "limit": 2, "diagnostics": True}
    whole = grid(
        schemes=["w8a8", "fp32"],
        data={"gsm8k": "q.jsonl", "gsm8k:train": "q.jsonl"},
        window=None,
        **settings,
    )
    use(a=1)
    run(whole.model_copy(update={"schemes": ("fp32",)}))  # by a host that is gone afterwards

    ledger = run(whole)
    sweep(whole, Plan(Path("alone")), io.StringIO())

    names = {metric.name for metric in ledger.entries[0].record.metrics}  # type: ignore[union-attr]
    assert any(name.startswith("flips_") for name in names)
    assert content("runs") == content("alone")


def test_a_node_that_dies_loses_the_cell_that_it_was_at(
    grid: Grids, use: Callable[..., Nodes]
) -> None:
    """It is done elsewhere, as is what it had not begun."""
    nodes = use(a=1, b=1)
    lost: list[int] = []

    def is_lost(host: Host, event: Event) -> bool:
        if host.node != "a" or event.kind != "started" or lost:
            return False
        lost.append(1)
        del nodes.slots["a"]
        return True

    nodes.is_lost = is_lost

    ledger = run(grid(models=["./s0", "./s1"]))

    assert lost == [1]
    assert [entry.state for entry in ledger.entries] == ["ok"] * 8


def test_a_cell_with_which_two_workers_die_fails(grid: Grids, use: Callable[..., Nodes]) -> None:
    """The third would, too."""
    nodes = use(a=1)
    nodes.is_lost = lambda host, event: (
        event.kind == "started"
        and _scheme(nodes, host, event)
        == (
            "w8a8",
            "wikitext2",
        )
    )

    ledger = run(grid())

    assert [entry.state for entry in ledger.entries] == ["ok", "ok", "failed", "ok"]
    assert "worker on node a was lost (ActorDiedError) (twice in a row)" in str(
        ledger.entries[2].reason
    )
    assert len(nodes.hosts) == 3


def _scheme(nodes: Nodes, host: Host, event: Event) -> tuple[str, str]:
    share = next(share for node, share in reversed(nodes.shares) if node == host.node)
    spec = share.requests[event.cells[0]].spec
    return spec.scheme.name, spec.task.name


# --- nodes that would make other numbers --------------------------------------------------------


def _other_checkpoint(share: Share) -> Share:
    changed = [request.model_copy(update={"digest": "0" * 64}) for request in share.requests]
    return share.model_copy(update={"requests": tuple(changed)})


def _other_text(share: Share) -> Share:
    return share.model_copy(update={"keys": tuple("0" * 64 for _ in share.keys)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_checkpoint, "its checkpoint ./s0 is another one than where the sweep was started"),
        (_other_text, "its text of wikitext2 or of the calibration is another one"),
        (None, "it has torch 1.0, the sweep was started with 2.0"),
    ],
)
def test_a_node_that_would_make_other_numbers_is_not_used(
    grid: Grids, use: Callable[..., Nodes], change: Callable[[Share], Share] | None, reason: str
) -> None:
    """The others do its cells, and the sweep says so."""
    nodes = use(a=1, b=1)
    if change is None:
        nodes.objections["a"] = reason
    else:
        nodes.change = lambda node, share: change(share) if node == "a" else share

    ledger = run(grid())

    assert [entry.state for entry in ledger.entries] == ["ok"] * 4
    (error,) = ledger.errors
    assert str(error).startswith(f"node a is not used: {reason}")
    assert {node for node, _ in nodes.granted} == {"b"}


def test_without_a_node_nothing_runs(grid: Grids, use: Callable[..., Nodes]) -> None:
    """The error has every reason."""
    nodes = use(a=1, b=1)
    nodes.objections |= {"a": "it is old", "b": "it is new"}

    with pytest.raises(OasisError, match="no node of the cluster can be used: node") as caught:
        run(grid())

    assert "node a is not used: it is old" in str(caught.value)
    assert "node b is not used: it is new" in str(caught.value)


# --- what is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--executor", "ray", "--jobs", "2"], "--jobs is of the processes of this machine"),
        (["--executor", "ray", "--cell-cpus", "0"], "--cell-cpus 0: expected 1 or more"),
        (["--executor", "ray", "--cell-gpus", "1.5"], "--cell-gpus 1.5: expected a part of one"),
        (["--executor", "ray", "--address", "ray://x:1"], "expected HOST:PORT or auto"),
        (["--address", "x:1"], "--address x:1: only with --executor ray"),
        (["--cell-gpus", "1"], "--cell-gpus 1.0: only with --executor ray"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    grid: Grids,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    text: str,
) -> None:
    """Status 2, and nothing has run."""
    (home / "g.yaml").write_text(grid().model_dump_json())

    result = CommandLine(monkeypatch, capsys)(["sweep", "g.yaml", *options])

    assert result.status == 2
    assert text in result.err
    assert not Path("results").exists()


def test_without_ray_the_error_names_the_extra(
    grid: Grids, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read."""
    monkeypatch.setitem(sys.modules, "ray", None)
    (home / "g.yaml").write_text(grid().model_dump_json())

    result = CommandLine(monkeypatch, capsys)(["sweep", "g.yaml", "--executor", "ray"])

    assert result.status == 2
    assert result.err.strip().endswith(
        "package 'ray' is not installed; run: pip install 'oasis-eval[ray]'"
    )
    with pytest.raises(MissingExtraError):
        cluster_module.require()


def test_gpus_are_asked_for_where_the_device_is_one(grid: Grids) -> None:
    """One a cell; a numbered one cannot be had."""
    from oasis_eval.sweep.grid import expand

    def fitting(device: str, **options: Any) -> float | None:
        return Resources(**options).fitting(expand(grid(device=device))).gpus

    assert fitting("cpu") == 0.0
    assert fitting("cuda") == 1.0
    assert fitting("cuda", gpus=0.5) == 0.5
    with pytest.raises(SpecError, match="device cuda:1: a cell on a cluster has a GPU of its own"):
        fitting("cuda:1")
    with pytest.raises(SpecError, match="--cell-gpus 0, but the grid's device is cuda"):
        fitting("cuda", gpus=0.0)


def test_room_of_a_node() -> None:
    """Whole cells; two halves share a GPU, a half of each of two is no one."""
    node = {"CPU": 8.0, "GPU": 2.0}

    assert _room(node, Resources(cpus=3, gpus=0.0)) == 2
    assert _room(node, Resources(cpus=1, gpus=1.0)) == 2
    assert _room(node, Resources(cpus=1, gpus=0.5)) == 4
    assert _room(node, Resources(cpus=1, gpus=0.4)) == 4
    assert _room(node, Resources(cpus=1, gpus=2.0)) == 1
    assert _room({"CPU": 8.0}, Resources(cpus=1, gpus=1.0)) == 0
