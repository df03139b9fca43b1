"""Two tiny checkpoints, two texts, and grids of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from oasis_eval.parsing import parse
from oasis_eval.record import read_records, read_samples
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep.cluster import Resources
from tests import tiny

Grids = Callable[..., SweepSpec]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints `s0` and `s1`; read-only."""
    folder = tmp_path_factory.mktemp("sweep-models")
    for seed in (0, 1):
        tiny.save(folder / f"s{seed}", model=tiny.build_model(seed=seed))
    return folder


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: links to the checkpoints, and texts."""
    furnish(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def furnish(folder: Path, models: Path) -> None:
    """Put links to the checkpoints, and texts, into a folder."""
    for seed in (0, 1):
        (folder / f"s{seed}").symlink_to(models / f"s{seed}")
    (folder / "wiki.txt").write_text(tiny.prose(400))
    (folder / "book.txt").write_text(tiny.prose(400, seed=1))


@pytest.fixture
def grid(home: Path) -> Grids:
    """Gives a grid of one checkpoint, two schemes and two texts, with changes."""
    return make_grid


def make_grid(**changes: object) -> SweepSpec:
    """Return that grid."""
    settings: dict[str, object] = {
        "models": ["./s0"],
        "schemes": ["fp32", "w8a8"],
        "tasks": ["wikitext2", "bookcorpus"],
        "window": 64,
        "data": {"wikitext2": "wiki.txt", "bookcorpus": "book.txt"},
    }
    return parse(SweepSpec, settings | changes, origin="test")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sweeps of this process have the threads of a cell on Ray, so that their sums are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(Resources().cpus)
    yield
    torch.set_num_threads(before)


def content(folder: str) -> dict[str, tuple[str, list[dict[str, object]]]]:
    """Records but for who measured them when, and what lies beside them."""
    return {
        record.key: (
            record.model_copy(update={"provenance": None}).model_dump_json(),
            read_samples(Path(folder), record.key),
        )
        for record in read_records([Path(folder)])
    }
