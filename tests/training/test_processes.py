"""Training in processes of its own: killed and resumed, and as a group of two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oasis_eval.training.folder import RunFolder
from tests.training.tiny import recipe_file

COMMAND = Path(sys.executable).with_name("oasis-eval")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
TORCHRUN += ["--no-python", str(COMMAND)]
# As for GPUs: accelerate starts several processes for them alone, and the device is ours to say.
ACCELERATE = [str(COMMAND.with_name("accelerate")), "launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--main_process_port", "0", "-m", "oasis_eval"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OASIS_EVAL_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def arguments(recipe: Path, out: Path, *more: str) -> list[str]:
    data = f"prose={recipe.parent / 'text.jsonl'}"
    return ["train", str(recipe), "--out", str(out), "--data", data, "--quiet", *more]


def call(command: Sequence[str | Path], tmp_path: Path) -> None:
    done = subprocess.run(
        command,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def log(out: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in RunFolder(out).log()
    ]


@pytest.mark.slow  # three processes that import torch and train 400 steps
def test_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """SIGKILL in the middle, twice; then the log and the weights are those of a whole run."""
    recipe = recipe_file(tmp_path, steps=400, save_every=20, probe_every=50)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    call([COMMAND, *arguments(recipe, whole, "--variant", "oasis")], tmp_path)
    command = [str(COMMAND), *arguments(recipe, broken, "--variant", "oasis")]
    for reach in (90, 230):
        process = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.DEVNULL)
        while process.poll() is None:
            lines = RunFolder(broken).log()
            if lines and lines[-1]["step"] >= reach:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        assert process.wait() == -signal.SIGKILL
        assert not (broken / "config.json").exists()
    call(command, tmp_path)
    info = RunFolder(broken).read()

    assert info is not None
    assert info.sessions[0].first_step == 0
    assert all(session.first_step >= 80 for session in info.sessions[1:])
    assert [session.last_step for session in info.sessions] == [None, None, 400]
    assert log(broken) == log(whole)
    expected, found = (load_file(out / "model.safetensors") for out in (whole, broken))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow  # two processes that import torch, and one for comparison
@pytest.mark.parametrize(
    ("variant", "group"),
    [("vanilla", TORCHRUN), ("oasis", TORCHRUN), ("oasis", ACCELERATE)],
    ids=["vanilla", "oasis", "accelerate"],
)
def test_two_processes_train_what_one_does(
    tmp_path: Path, variant: str, group: Sequence[str]
) -> None:
    """With gloo: the same sequences a step, so the same weights up to rounding."""
    recipe = recipe_file(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    call([COMMAND, *arguments(recipe, one, "--variant", variant)], tmp_path)
    call([*group, *arguments(recipe, two, "--variant", variant)], tmp_path)
    expected, found = (load_file(out / "model.safetensors") for out in (one, two))

    assert max((found[n] - t).abs().max().item() for n, t in expected.items()) < 1e-4
    assert [line["step"] for line in log(two)] == [line["step"] for line in log(one)]
    assert [line["loss"] for line in log(two) if "loss" in line] == pytest.approx(
        [line["loss"] for line in log(one) if "loss" in line], rel=1e-5
    )
    info = RunFolder(two).read()
    assert info is not None
    assert [session.num_processes for session in info.sessions] == [2]


@pytest.mark.slow  # two processes that import torch
def test_routers_without_gradient_do_not_stop_a_group(tmp_path: Path) -> None:
    """Under `delta` the first router reads nothing, so its parameters take no part in a step."""
    recipe = recipe_file(tmp_path)
    more = ("--variant", "vanilla", "--wiring", "delta")
    call([*TORCHRUN, *arguments(recipe, tmp_path / "out", *more)], tmp_path)

    assert (tmp_path / "out" / "model.safetensors").is_file()
