"""A grid of 12 cells, and the records of a run that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.campaigns.children import start

GRID = """name: twelve
models: [./a, ./b]
schemes: [fp32, w8a8, w4a4]
tasks: [wikitext2, bookcorpus]
window: 64
data: {wikitext2: wiki.txt, bookcorpus: book.txt}
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, texts and `grid.yaml`, and in `whole` what an undisturbed sweep made."""
    folder = tmp_path_factory.mktemp("campaign")
    for seed, name in enumerate("ab"):
        tiny.save(folder / name, model=tiny.build_model(seed=seed))
    (folder / "wiki.txt").write_text(tiny.prose(2000))
    (folder / "book.txt").write_text(tiny.prose(2000, seed=1))
    (folder / "grid.yaml").write_text(GRID)
    process = start(folder, ["sweep", "grid.yaml", "--out", "whole"], name="whole")
    process.join()
    assert process.exitcode == 0, (folder / "whole.err").read_text()
    return folder


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
