"""The cache of tokens is a test's own, and torch has one thread: tiny models get slower by more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny recipe's text and tokenizer; read-only."""
    return tmp_path_factory.mktemp("place")
