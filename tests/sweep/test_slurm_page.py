"""The page on Slurm: its script is one, its options exist, and it runs with Slurm stood in for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from oasis_eval import cli
from oasis_eval.record import read_records
from tests.sweep.conftest import Grids

PAGE = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)

_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
_COMMANDS = {
    "srun": _SRUN,
    "scontrol": "#!/bin/bash\necho here\n",
}


def test_the_script_is_one(tmp_path: Path) -> None:
    """As bash has it, and its head as Slurm has it."""
    file = tmp_path / "sweep.sbatch"
    file.write_text(SCRIPT)

    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert SCRIPT.startswith("#!/bin/bash\n#SBATCH --")
    head = SCRIPT.partition("\n\n")[0].splitlines()[1:]
    assert all(re.fullmatch(r"#SBATCH --[\w-]+=\S+", line) for line in head)


def test_its_options_are_those_of_the_command() -> None:
    """Of `oasis-eval sweep`."""
    (line,) = re.findall(r"^oasis-eval sweep .*$", SCRIPT, flags=re.MULTILINE)
    command = typer.main.get_command(cli.app).commands["sweep"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}

    used = set(re.findall(r"--[\w-]+", line))

    assert used == {"--executor", "--address", "--cell-cpus"}
    assert used <= known


@pytest.mark.slow  # a cluster is started with `ray start`, and waited for as the script does
@pytest.mark.timeout(400)
def test_the_script_runs_a_sweep(grid: Grids, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node, which is this machine, with commands that stand in for Slurm's."""
    pytest.importorskip("ray", reason="the cluster needs Ray")
    commands = home / "commands"
    commands.mkdir()
    for name, text in _COMMANDS.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").write_text("")
    (home / "g.yaml").write_text(grid(schemes=["fp32"]).model_dump_json())
    (home / "sweep.sbatch").write_text(SCRIPT.replace("--cell-cpus 8", "--cell-cpus 1"))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), "/usr/bin:/bin"]),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "1",
    }

    done = subprocess.run(
        ["bash", "sweep.sbatch", "g.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=350,
    )

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = list(read_records([Path("results/runs")]))
    assert [record.status for record in records] == ["ok", "ok"]
    assert {record.provenance.num_threads for record in records if record.provenance} == {1}
