"""The wheel: what is in it, and that it works with the checkout out of reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from oasis_eval import __version__
from tests.command_line import CommandLine
from tests.tiny import save

pytestmark = [
    pytest.mark.slow,  # builds, installs, and loads torch twice in new processes
    pytest.mark.skipif(
        # Not by their modules: looking for pip turns setuptools' distutils off in this process.
        any(not [*metadata.distributions(name=name)] for name in ("pip", "hatchling")),
        reason="building a wheel without a network needs pip and hatchling in this environment",
    ),
]

ROOT = Path(__file__).parents[1]
DATA = ("models", "tasks", "results/tables", "results/sweeps", "results/reference")
EXPECTED = (
    "models/cards/smollm2-135m-instruct.yaml",
    "models/recipes/mini.yaml",
    "models/mini/tokenizer/tokenizer.json",
    "tasks/oasis_wikitext2.yaml",
    "tasks/groups/oasis.yaml",
    "tasks/text/demo.txt",
    "tasks/text/calibration.txt",
    "results/tables/results.yaml",
    "results/sweeps/mini.yaml",
    "results/reference/quantization.csv",
)
"""One of each kind, so that an empty folder is not taken for a complete one."""


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *map(str, arguments)]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stderr[-3000:]


def _files(folder: Path) -> dict[str, Path]:
    """Files of a folder of the checkout by their path in it, without what Python leaves there."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with what is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with nothing but the wheel's content."""
    folder = wheel.parent / "packages"
    _pip("install", "--no-deps", "--no-compile", "--target", folder, wheel)
    return folder


def _python(installed: Path, cwd: Path, arguments: Sequence[object]) -> str:
    """Run Python on the wheel and on what it depends on.

    Without `site` no .pth file is read, which is how an editable install makes the checkout known.
    """
    packages = [installed, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, packages))),
        "HOME": str(cwd),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    command = [sys.executable, "-S", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )

    assert done.returncode == 0, f"{arguments}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_data_and_modules_are_inside(wheel: Path) -> None:
    """Every file of the data folders and of the package, byte for byte."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

        assert {f"oasis_eval/_data/{path}" for path in EXPECTED} <= names
        expected = {
            f"oasis_eval/{name}": path for name, path in _files(ROOT / "oasis_eval").items()
        }
        for folder in DATA:
            for name, path in _files(ROOT / folder).items():
                expected[f"oasis_eval/_data/{folder}/{name}"] = path
        inside = {name for name in names if name.startswith("oasis_eval/")}
        assert inside == set(expected)
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name


def test_nothing_else_is_inside(wheel: Path) -> None:
    """No hook that Python reads at its start, no tests, no records, no other top-level name."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    information = f"oasis_eval-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"oasis_eval", information}
    assert not [name for name in names if name.endswith((".pth", ".pyc"))]
    assert not [name for name in names if {"tests", "runs"} & set(name.split("/"))]
    assert f"{information}/licenses/LICENSE" in names


def test_works_without_the_checkout(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its commands find their data, and measure what the checkout measures."""
    save(tmp_path / "tiny")
    script = installed / "bin" / "oasis-eval"

    def run(*arguments: object) -> str:
        return _python(installed, tmp_path, [script, *arguments])

    where = _python(installed, tmp_path, ["-c", "import oasis_eval; print(oasis_eval.__file__)"])
    assert Path(where.strip()) == installed / "oasis_eval" / "__init__.py"
    assert run("--version").split() == ["oasis-eval", __version__]
    listed = run("models")
    for card in (ROOT / "models" / "cards").glob("*.yaml"):
        assert card.stem in listed
    assert "w4a4" in run("schemes")
    assert "mini_ppl" in run("tasks")

    cell = ("--task", "mini_ppl", "--window", 64, "--limit", 2, "--scheme", "w4a4", "--quiet")
    run("evaluate", "./tiny", *cell, "--out", "runs")
    monkeypatch.chdir(tmp_path)
    assert (
        CommandLine(monkeypatch, capsys)(["evaluate", "./tiny", *cell, "--out", "own"]).status == 0
    )
    (theirs,), (ours,) = ([*Path(name).glob("*.json")] for name in ("runs", "own"))
    assert theirs.name == ours.name
    metrics = [json.loads(path.read_text())["metrics"] for path in (theirs, ours)]
    assert metrics[0] == metrics[1]

    assert "tiny" in run("table", "runs", "--spec", "perplexity", "--baseline", "w4a4")
    run("report", "runs", "--out", "report.html")
    assert "mini_ppl" in (tmp_path / "report.html").read_text()


def test_lm_eval_finds_the_model_type(installed: Path, tmp_path: Path) -> None:
    """By the entry point, from the installed package; the task files are there, too."""
    code = (
        "import sys\nfrom importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='lm_eval.models', name='oasis')\n"
        "kind = point.load()\nfrom oasis_eval.paths import data_folder\n"
        "module = sys.modules[kind.__module__].__file__\n"
        "print(kind.__name__, module, data_folder('tasks'), sep='\\n')"
    )
    name, module, tasks = _python(installed, tmp_path, ["-c", code]).splitlines()[-3:]

    assert name == "PluginLM"
    assert Path(module) == installed / "oasis_eval" / "harness" / "plugin.py"
    assert (Path(tasks) / "oasis_wikitext2.yaml").is_file()
    assert Path(tasks).is_relative_to(installed)
