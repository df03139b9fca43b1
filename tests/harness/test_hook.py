"""The hook: nothing before lm-eval is imported, model type and tasks after, gone when removed."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from oasis_eval.errors import SpecError
from oasis_eval.harness import hook
from oasis_eval.paths import data_folder
from tests import tiny
from tests.command_line import CommandLine


def _python(folder: Path, code: str) -> str:
    """Run code in a new Python that reads `folder` as it reads the folder of its packages."""
    start = f"import site, sys; site.addsitedir({str(folder)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Error processing" not in done.stderr
    return done.stdout.strip()


def test_python_starts_without_anything_heavy(tmp_path: Path) -> None:
    """The file costs a look-up and one light import, until lm-eval comes."""
    hook.install(tmp_path)
    code = (
        "names = ('lm_eval', 'torch', 'transformers', 'pydantic', 'yaml', 'typer')\n"
        "print([name for name in names if name in sys.modules], len(sys.meta_path))"
    )
    plain = tmp_path / "empty"
    plain.mkdir()

    before, after = (_python(folder, code) for folder in (plain, tmp_path))
    assert before.startswith("[] ")
    assert after == f"[] {int(before.split()[-1]) + 1}"


def test_lm_eval_knows_the_model_type_and_the_tasks(tmp_path: Path) -> None:
    """As it is imported, both; its own model types stay."""
    hook.install(tmp_path)
    code = (
        "import lm_eval.models\nfrom lm_eval.api.registry import model_registry as m\n"
        "from lm_eval.tasks import TaskManager as T\n"
        "alone = T(include_defaults=False).all_tasks\n"
        "print('oasis' in m, 'hf' in m, T.__init__.reads_oasis_tasks, alone)"
    )

    assert _python(tmp_path, code) == "True True True []"
    assert _python(tmp_path / "none", code.replace("T.__init__.reads_oasis_tasks, ", "")) == (
        "False True []"
    )


def test_an_uninstalled_suite_leaves_python_alone(tmp_path: Path) -> None:
    """The line looks before it imports."""
    path = hook.install(tmp_path)
    path.write_text(path.read_text().replace("oasis_eval", "no_such_suite"))

    assert _python(tmp_path, "print('quiet')") == "quiet"


def test_our_folder_comes_once_and_before_the_users(tmp_path: Path) -> None:
    """Whatever way the user's folders are given; who leaves the defaults out gets nothing added."""
    seen: list[tuple[object, bool]] = []

    class TaskManager:
        def __init__(
            self,
            verbosity: str | None = None,
            include_path: object = None,
            include_defaults: bool = True,
        ) -> None:
            seen.append((include_path, include_defaults))

    module = ModuleType("manager")
    module.TaskManager = TaskManager  # type: ignore[attr-defined]  # a stand-in
    for _ in range(2):
        hook.add_tasks(module)
    ours = data_folder("tasks")
    TaskManager()
    TaskManager("INFO", include_path=str(tmp_path))
    TaskManager(include_path=[tmp_path, str(ours)])
    TaskManager(include_path=tmp_path, include_defaults=False)

    assert seen == [
        ([ours], True),
        ([ours, str(tmp_path)], True),
        ([ours, tmp_path], True),
        ([tmp_path], False),
    ]


def test_install_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line; removing twice is no mistake, an unwritable folder is told."""
    call = CommandLine(monkeypatch, capsys)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    path = tmp_path / hook.FILE_NAME

    assert call(["harness", "--install-hook"]).status == 0
    assert path.is_file()
    assert str(path) in call(["harness", "--remove-hook"]).err
    assert not path.exists()
    assert "nothing to do" in call(["harness", "--remove-hook"]).err

    with pytest.raises(SpecError, match="cannot be written"):
        hook.install(tmp_path / "missing")


@pytest.mark.slow
def test_groups_are_lm_evals(tmp_path: Path) -> None:
    """Every group's tasks exist, in lm-eval's own list beside its own."""
    hook.install(tmp_path)
    code = (
        "import json\nfrom lm_eval.tasks import TaskManager\nmanager = TaskManager()\n"
        "ours = [name for name in manager.all_groups if name.startswith('oasis')]\n"
        "tasks = {name: list(manager._index[name].cfg['task']) for name in ours}\n"
        "print(json.dumps([tasks, [t for t in manager.all_subtasks if t.startswith('oasis')],\n"
        "    'arc_easy' in manager.all_subtasks]))"
    )
    groups, subtasks, has_defaults = json.loads(_python(tmp_path, code).splitlines()[-1])

    assert set(groups) == {"oasis", "oasis_perplexity", "oasis_gsm8k_both", "oasis_mini"}
    assert {task for tasks in groups.values() for task in tasks} <= set(subtasks)
    assert has_defaults


@pytest.mark.slow
def test_plain_lm_eval_gives_the_number_of_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit: lm-eval's own command line with the hook, and ours."""
    model = tiny.save(tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(tiny.prose(700))
    call = CommandLine(monkeypatch, capsys)
    done = call(
        [
            *("evaluate", model, "--task", "wikitext2", "--protocol", "gptq-64", "--quiet"),
            *("--scheme", "w4a4", "--data", f"wikitext2={text}", "--out", tmp_path / "runs"),
        ]
    )
    assert done.status == 0
    hook.install(tmp_path / "tiny")
    arguments = [
        *("lm_eval", "run", "--model", "oasis", "--model_args", f"model={model},scheme=w4a4"),
        *("--tasks", "oasis_wikitext2", "--batch_size", "1", "--device", "cpu"),
        *("--metadata", json.dumps({"data": str(text), "protocol": "gptq-64"})),
        *("--output_path", str(tmp_path / "out")),
    ]
    code = f"sys.argv = {arguments!r}\nfrom lm_eval.__main__ import cli_evaluate\ncli_evaluate()\n"
    _python(tmp_path / "tiny", code)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["oasis_wikitext2"]
    (record,) = (tmp_path / "runs").glob("*.json")
    ours = {m["name"]: m["value"] for m in json.loads(record.read_text())["metrics"]}

    assert theirs["token_perplexity,none"] == ours["token_perplexity"]
    assert theirs["num_tokens,none"] == ours["num_tokens"]
