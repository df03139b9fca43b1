"""Model type `oasis` and our tasks inside a plain `lm_eval` command, for who asks for it.

lm-eval 0.4.13 discovers no plugins. `install` therefore writes a `.pth` file beside the installed
packages, which Python reads at every start: it puts a finder in place that waits for two modules of
lm-eval and adds to each as it is imported. Nothing else is touched and nothing heavy is imported
before lm-eval is. The file is never part of a wheel and `remove` takes it away.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from oasis_eval.errors import SpecError

FILE_NAME = "oasis_eval_lm_eval.pth"
# An uninstalled suite must leave Python's start quiet, hence the look-up before the import.
_CONTENT = (
    'import importlib.util; importlib.util.find_spec("oasis_eval") and '
    '__import__("oasis_eval.harness.hook", fromlist=["activate"]).activate()\n'
)


def add_model(registry: ModuleType) -> None:
    """Register model type `oasis` in lm-eval's registry module; a second call changes nothing."""
    if "oasis" not in registry.model_registry:
        registry.model_registry.register("oasis", target="oasis_eval.harness.plugin:PluginLM")


def add_tasks(manager: ModuleType) -> None:
    """Let every task manager of lm-eval's module read our tasks; a second call changes nothing."""
    cls: Any = manager.TaskManager
    plain = cls.__init__
    if getattr(plain, "reads_oasis_tasks", False):
        return

    def with_our_tasks(
        self: object, *args: Any, include_path: Any = None, include_defaults: bool = True, **kw: Any
    ) -> None:
        from oasis_eval.paths import data_folder

        given = [*include_path] if isinstance(include_path, list | tuple) else [include_path]
        paths = [path for path in given if path]
        # Who leaves lm-eval's own tasks out names every folder that they want.
        if include_defaults:
            ours = data_folder("tasks")
            paths = [ours, *(path for path in paths if Path(path).resolve() != ours.resolve())]
        plain(self, *args, include_path=paths, include_defaults=include_defaults, **kw)

    with_our_tasks.reads_oasis_tasks = True  # type: ignore[attr-defined]  # a mark on a function
    cls.__init__ = with_our_tasks


_ADDITIONS: dict[str, Callable[[ModuleType], None]] = {
    "lm_eval.api.registry": add_model,
    "lm_eval.tasks.manager": add_tasks,
}


class _Adding(Loader):
    """Runs a module as its own loader does, and then what is to be added."""

    def __init__(self, loader: Loader, add: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._add = add

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._add(module)


class _Finder(MetaPathFinder):
    """Finds the modules of lm-eval that something is added to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        add = _ADDITIONS.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if add else None
        if add is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Adding(spec.loader, add)
        return spec


def activate() -> None:
    """Wait for lm-eval in this process; what of it is imported already is added to at once."""
    for name, add in _ADDITIONS.items():
        if name in sys.modules:
            add(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def place(folder: Path | None = None) -> Path:
    """Return where the file is or would be: by default among this Python's packages."""
    return (folder or Path(sysconfig.get_path("purelib"))) / FILE_NAME


def install(folder: Path | None = None) -> Path:
    """Write the file and return its path.

    Raises:
        SpecError: The folder cannot be written.
    """
    path = place(folder)
    try:
        path.write_text(_CONTENT, encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be written ({error.strerror}); use `oasis-eval harness` instead, "
            "which needs no hook, or install into a virtual environment"
        ) from error
    return path


def remove(folder: Path | None = None) -> Path | None:
    """Delete the file; returns its path, None where there is none.

    Raises:
        SpecError: It cannot be deleted.
    """
    path = place(folder)
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"{path}: cannot be deleted ({error.strerror}); delete it") from error
    return path
