"""The page on real execution says what the code does, and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from oasis_eval.quant import integer_layers, kernels, storage
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.packing import SIGN_OFFSET
from oasis_eval.quant.replacement import LibraryApplied
from oasis_eval.quant.schemes import resolve
from tests.command_line import CommandLine
from tests.tiny import build_model, prose, save

PAGE = (Path(__file__).parents[1] / "docs" / "quantized.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (oasis-eval .*)$", PAGE, flags=re.MULTILINE)


def test_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown, one after the other, with TINY and a short text for the hub's."""
    save(tmp_path / "my-llama", model=build_model())
    (tmp_path / "wiki.txt").write_text(prose(300))
    monkeypatch.chdir(tmp_path)
    call = CommandLine(monkeypatch, capsys)
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] == "evaluate":
            words += ["--data", "wikitext2=wiki.txt", "--window", "64", "--quiet"]
        if words[0] == "parity":
            words += ["--limit", "1"]
        result = call(words)

        assert result.status == 0, (command, result.err)
    assert {command.split()[1] for command in COMMANDS} == {"evaluate", "quantize", "parity"}


def test_the_page_names_every_tensor() -> None:
    """As files have them, and the rule of signs."""
    layer = integer_layers
    for name in (layer.CODES, layer.SCALE, layer.ZERO_POINT, layer.RANGE):
        assert f"`NAME.{name}`" in PAGE
    assert f"symmetric codes plus {SIGN_OFFSET}" in PAGE
    assert f'"quant_method": "{storage.METHOD}", "version": {storage.VERSION}' in PAGE


@pytest.mark.parametrize("scheme", ["bnb-w8a8", "nf4", "quanto-w8a16"])
def test_the_page_names_the_tensors_of_libraries(scheme: str) -> None:
    """In the row of the scheme, as files have them."""
    row = next(
        line for line in PAGE.splitlines() if line.startswith("| `") and f"`{scheme}`" in line
    )
    applied = quantize_(build_model(), resolve(scheme))
    assert isinstance(applied, LibraryApplied)
    name, layer = next(iter(applied.layers.items()))
    stored = applied.library.stored(name, layer)

    assert not [key for key in (*stored.tensors, *stored.constants) if f"`{key}`" not in row]


def test_the_page_lists_the_kernels_in_order() -> None:
    """One row each for the CPU, fastest first."""
    rows = re.findall(r"^\| CPU(?:, CUDA)? \| (.*?) \|", PAGE, flags=re.MULTILINE)

    assert len(rows) == len(kernels.candidates(torch.device("cpu")))
    assert "oneDNN" in rows[0]
    assert "split" in rows[1]
    assert "fp32" in rows[2]
    assert "_int_mm" in rows[3]
