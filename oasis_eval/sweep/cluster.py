"""A Ray cluster as a sweep sees it: nodes with room, hosts on them. Only this module knows Ray."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from oasis_eval.cells import Cell
from oasis_eval.errors import MissingExtraError, OasisError, SpecError
from oasis_eval.sweep.host import Host


class ClusterError(OasisError):
    """A cluster, or a node of it, cannot be used."""


class LostError(Exception):
    """A host is not there any more."""

    def __init__(self, how: str, *, at_birth: bool) -> None:
        """Say how.

        Args:
            how: In a few words.
            at_birth: Whether it never could be there, most likely for want of this package.
        """
        super().__init__(how)
        self.at_birth = at_birth


@dataclass(frozen=True, slots=True)
class Resources:
    """Where cells run and what each of them needs."""

    address: str | None = None
    """Of a cluster, or `auto`; None: one is made of this machine."""
    cpus: int = 1
    """Cores of a cell, and threads of its process."""
    gpus: float | None = None
    """GPUs of a cell, or the part of one; None: one where a cell's device is that."""

    def fitting(self, cells: Sequence[Cell]) -> Resources:
        """Return what these cells need.

        Raises:
            SpecError: They cannot have that.
        """
        if self.cpus < 1:
            raise SpecError(f"--cell-cpus {self.cpus}: expected 1 or more")
        if self.gpus is not None and (self.gpus < 0 or (self.gpus > 1 and self.gpus % 1)):
            raise SpecError(f"--cell-gpus {self.gpus:g}: expected a part of one, or a whole number")
        if self.address is not None and "://" in self.address:
            raise SpecError(f"--address {self.address}: expected HOST:PORT or auto")
        devices = {cell.spec.device for cell in cells if cell.spec.device.startswith("cuda")}
        numbered = sorted(device for device in devices if device not in ("cuda", "cuda:0"))
        if numbered:
            raise SpecError(
                f"device {numbered[0]}: a cell on a cluster has a GPU of its own, called cuda"
            )
        if devices and self.gpus == 0:
            raise SpecError("--cell-gpus 0, but the grid's device is cuda")
        return replace(self, gpus=(1.0 if devices else 0.0) if self.gpus is None else self.gpus)


def require() -> None:
    """Check that Ray is there.

    Raises:
        MissingExtraError: It is not.
    """
    _ray()


@contextlib.contextmanager
def session(resources: Resources) -> Iterator[Cluster]:
    """Connect to a cluster, or make one of this machine, for the time of a block.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: There is no cluster, or not one of this version of Ray and Python.
    """
    ray = _ray()
    if ray.is_initialized():  # whoever did it decides how long
        yield Cluster(resources)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if resources.address is None:
            ray.init(address="local", include_dashboard=False, **common)
        else:
            ray.init(address=resources.address, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        where = f"--address {resources.address}" if resources.address else "this machine"
        raise ClusterError(
            f"{where}: no cluster could be used: {text}; one that has a token needs "
            "RAY_AUTH_MODE=token"
        ) from error
    try:
        yield Cluster(resources)
    finally:
        ray.shutdown()


class Cluster:
    """Nodes and hosts of the cluster that this process is connected to."""

    def __init__(self, resources: Resources) -> None:
        """Note what each cell needs, which is what a host takes."""
        self._resources = resources

    @property
    def num_threads(self) -> int:
        """Threads of a cell."""
        return self._resources.cpus

    def room(self) -> dict[str, int]:
        """Return the nodes that are there, and how many hosts each has room for."""
        nodes = [node for node in _ray().nodes() if node["Alive"]]
        found = {str(node["NodeID"]): _room(node["Resources"], self._resources) for node in nodes}
        return {node: number for node, number in found.items() if number}

    def no_room(self) -> SpecError:
        """Return the error of a cell that fits on no node."""
        needs = f"{self._resources.cpus} CPUs"
        if self._resources.gpus:
            needs += f" and {self._resources.gpus:g} GPUs"
        have = {
            f"{node['Resources'].get('CPU', 0):g} CPUs and {node['Resources'].get('GPU', 0):g} GPUs"
            for node in _ray().nodes()
            if node["Alive"]
        }
        return SpecError(
            f"a cell needs {needs}, and no node has as much: "
            f"{', '.join(sorted(have)) or 'none is there'}; see --cell-cpus and --cell-gpus"
        )

    def name(self, node: str) -> str:
        """Return what people call a node."""
        for known in _ray().nodes():
            if known["NodeID"] == node:
                return f"{known['NodeManagerHostname']} ({known['NodeManagerAddress']})"
        return node[:8]

    def hire(self, node: str) -> object:
        """Return a new host on a node, which begins when the node has room."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        make = _ray().remote(Host).options
        return make(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(os.getcwd(), self._resources.cpus)

    def objection(self, host: Any, versions: Mapping[str, str]) -> object:
        """Call `Host.objection`."""
        return host.objection.remote(versions)

    def hear(self, host: Any, lines: Sequence[str], *, stop: bool) -> object:
        """Call `Host.hear`."""
        return host.hear.remote(lines, stop=stop)

    def wait(self, calls: Sequence[object]) -> list[object]:
        """Return calls that are answered, after a second at most."""
        ready, _ = _ray().wait(list(calls), timeout=1.0)
        return list(ready)

    def answer(self, call: object) -> Any:
        """Return what a call returned.

        Raises:
            LostError: The host is not there any more.
        """
        ray = _ray()
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            at_birth = bool(getattr(error, "actor_init_failed", False))
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            how = lines[-1][:200] if at_birth else f"{type(error).__name__}: {lines[-1][:150]}"
            raise LostError(how, at_birth=at_birth) from error

    def dismiss(self, host: Any) -> None:
        """End a host and its process."""
        _ray().kill(host)


def _room(has: Mapping[str, float], resources: Resources) -> int:
    """Return how many cells fit on a node when nothing else is on it."""
    room = int(has.get("CPU", 0.0) // resources.cpus)
    if not resources.gpus:
        return room
    gpus = has.get("GPU", 0.0)
    of_gpus = gpus * (1 // resources.gpus) if resources.gpus <= 1 else gpus // resources.gpus
    return min(room, int(of_gpus))


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "pip install 'oasis-eval[ray]'") from error
    module: ModuleType = ray
    return module
