"""Tiny checkpoints shared by the tests (read them, never change them), and how to measure one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import torch
from torch import nn

from oasis_eval import corpus, registry
from oasis_eval.harness import run as harness
from oasis_eval.harness.run import Outcome, TaskData
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.quant import schemes
from oasis_eval.spec import TaskRef
from tests import tiny


class Piece(NamedTuple):
    """One forward pass by hand: its tokens, and the first that is scored."""

    ids: list[int]
    first: int


def nll_by_hand(model: nn.Module, pieces: Sequence[Piece]) -> tuple[float, int]:
    """Sum the losses of the scored tokens in float64, one unbatched forward pass a piece."""
    total, count = 0.0, 0
    for ids, first in pieces:
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([ids])).logits[0].double()
        log_p_TV = logits_TV.log_softmax(dim=-1)
        for at in range(first, len(ids)):
            total -= float(log_p_TV[at - 1, ids[at]])
            count += 1
    return total, count


class Folder(Protocol):
    """Makes a checkpoint folder for one test module."""

    def __call__(self, name: str, **settings: object) -> Path: ...


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with start and end tokens and no pad token."""
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def uniform_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """UNIFORM: TINY with an all-zero head."""
    model = tiny.scale_head_(tiny.build_model(), 0.0)
    return tiny.save(tmp_path_factory.mktemp("models") / "uniform", model=model)


@pytest.fixture(scope="session")
def starting_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY whose tokenizer puts the start token before every text."""
    tokenizer = tiny.build_tokenizer(adds_start=True)
    return tiny.save(tmp_path_factory.mktemp("models") / "starting", tokenizer=tokenizer)


def load_folder(folder: Path) -> Reference:
    """Load a checkpoint folder in fp32."""
    return load(registry.resolve(str(folder)), dtype="fp32")


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> Reference:
    return load_folder(tiny_folder)


@pytest.fixture(scope="session")
def uniform_reference(uniform_folder: Path) -> Reference:
    return load_folder(uniform_folder)


@pytest.fixture(scope="session")
def starting_reference(starting_folder: Path) -> Reference:
    return load_folder(starting_folder)


class Measure(Protocol):
    """Runs one task on one model under one scheme."""

    def __call__(
        self,
        reference: Reference,
        texts: str | list[str],
        protocol: str,
        *,
        task: str = "wiki40b",
        scheme: str = "fp32",
        batch_size: int = 1,
        limit: int | None = None,
    ) -> Outcome: ...


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Measure texts: a string is a text file, a list is a jsonl file of documents."""

    def run(
        reference: Reference,
        texts: str | list[str],
        protocol: str,
        *,
        task: str = "wiki40b",
        scheme: str = "fp32",
        batch_size: int = 1,
        limit: int | None = None,
    ) -> Outcome:
        if isinstance(texts, str):
            path = tmp_path / "text.txt"
            path.write_bytes(texts.encode())
        else:
            path = tiny.write_jsonl(tmp_path / "text.jsonl", texts)
        data = TaskData((corpus.load(task, data=str(path)),))
        ref = TaskRef(name=task, protocol=protocol, data=str(path), limit=limit)
        with prepare(reference, schemes.resolve(scheme), dtype="fp32") as prepared:
            return harness.evaluate(prepared, ref, data, batch_size=batch_size, quiet=True)

    return run


def metric(outcome: Outcome, name: str) -> float:
    """Return one metric of an outcome."""
    found = [item.value for item in outcome.metrics if item.name == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


@pytest.fixture(scope="session")
def gsm8k_row() -> Callable[[str, str], str]:
    """One line of a GSM8K file."""
    return lambda question, answer: json.dumps({"question": question, "answer": answer}) + "\n"
