"""The folder of a run: what it is, how far it got, and what it may be resumed from.

    DIR/training.json        what the run is, and its sessions
    DIR/training_log.jsonl   losses and probes, one JSON object a line
    DIR/checkpoints/         what training is resumed from
    DIR/*                    the trained model, only once it is finished
    DIR.yaml                 its card

A run is the same run if `Identity` is equal. A checkpoint counts once its folder holds the file
`complete`, which is written last: whenever a process dies, an older one is whole.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from oasis_eval.errors import RecordError, SpecError
from oasis_eval.parsing import explain
from oasis_eval.record import Outcome, write_text_atomically
from oasis_eval.spec import Dtype, TrainRecipe

COMPLETE = "complete"
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class TextInfo(Outcome):
    """One text of a run; see `tokens.TokenInfo`."""

    name: str
    origin: str
    split: str | None
    sha256: str
    num_documents: int
    num_tokens: int
    tokens_sha256: str


class Identity(Outcome):
    """Everything that decides the weights of a run, but for libraries and hardware."""

    recipe: TrainRecipe
    variant: str
    wiring: str
    settings: dict[str, str | float | int | bool | None] = Field(default_factory=dict)
    """Settings of another value than the variant's (`--set`)."""
    seed: int
    steps: int
    """Those of the recipe, or `--max-steps`."""
    start: str | None
    """SHA-256 of the checkpoint that training starts from; None: from scratch."""
    train: Literal["all", "routers"]
    dtype: Dtype
    """Compute dtype; parameters and optimizer are fp32."""
    tokenizer_sha256: str
    data: tuple[TextInfo, ...]


class Session(Outcome):
    """One process (or group of processes) that trained."""

    started: str
    """UTC, ISO 8601."""
    first_step: int
    """Updates that had been made when it began."""
    last_step: int | None = None
    """Updates at its end; None: it was interrupted."""
    seconds: float | None = None
    """Wall time of training, probes and checkpoints included."""
    device: str
    num_processes: int
    num_threads: int
    versions: dict[str, str]
    git_commit: str | None


class RunInfo(Outcome):
    """Content of `training.json`."""

    schema_version: Literal[1] = 1
    status: Literal["running", "finished"]
    identity: Identity
    sessions: tuple[Session, ...] = ()


class RunFolder:
    """Paths of a run, and the questions that are asked of them."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.info_file = self.path / "training.json"
        self.log_file = self.path / "training_log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.card_file = self.path.with_name(f"{self.path.name}.yaml")

    def read(self) -> RunInfo | None:
        """Return what the folder says of its run; None where there is no folder.

        Raises:
            SpecError: The folder holds something else.
            RecordError: `training.json` is damaged.
        """
        if not self.info_file.is_file():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise SpecError(
                    f"{self.path} exists and holds no run of `train` (no training.json); choose "
                    "another --out"
                )
            return None
        try:
            return RunInfo.model_validate_json(self.info_file.read_bytes())
        except OSError as error:
            raise RecordError(f"{self.info_file}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            raise RecordError(
                f"{self.info_file}: {explain(error, RunInfo)}; if it is a run of `train`, remove "
                "the folder"
            ) from error

    def write(self, info: RunInfo) -> None:
        """Write `training.json`, whole or not at all."""
        write_text_atomically(self.info_file, info.model_dump_json(indent=1) + "\n")

    def clear(self) -> None:
        """Remove the run and its card; a folder that is not known to be a run is never removed.

        Raises:
            SpecError: The folder holds something else.
            RecordError: `training.json` is damaged, or not ours.
        """
        if self.read() is not None:
            self.card_file.unlink(missing_ok=True)
            shutil.rmtree(self.path)

    def last_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint."""
        whole = [
            path
            for path in self.checkpoints.glob("checkpoint-*")
            if _CHECKPOINT.fullmatch(path.name) and (path / COMPLETE).is_file()
        ]
        return max(whole, key=step_of, default=None)

    def rewind(self, step: int) -> None:
        """Drop what was logged or half saved after `step`, so that going on repeats it."""
        for path in self.checkpoints.glob("checkpoint-*"):
            if not (path / COMPLETE).is_file():
                shutil.rmtree(path)
        lines = [line for line in self.log() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in lines) if step else ""
        write_text_atomically(self.log_file, text)

    def append(self, line: dict[str, float]) -> None:
        """Add a line to the log; NaN and infinity are strings, as in records."""
        strict = {
            key: value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN")
            for key, value in line.items()
        }
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(strict) + "\n")

    def log(self) -> list[dict[str, Any]]:
        """Return the whole lines of the log; the last one may have been cut off."""
        if not self.log_file.is_file():
            return []
        text = self.log_file.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def step_of(checkpoint: Path) -> int:
    """Return the updates that had been made when a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def difference(found: Identity, asked: Identity) -> str | None:
    """Return what two runs differ in, the most telling first; None: nothing."""
    for name in ("variant", "wiring", "settings", "seed", "train", "steps", "dtype"):
        if getattr(found, name) != getattr(asked, name):
            return f"{name} {getattr(found, name)!r}, not {getattr(asked, name)!r}"
    if found.recipe.name != asked.recipe.name:
        return f"recipe {found.recipe.name!r}, not {asked.recipe.name!r}"
    for name in TrainRecipe.model_fields:
        old, new = getattr(found.recipe, name), getattr(asked.recipe, name)
        if name != "description" and old != new:
            return f"a recipe {found.recipe.name!r} with another {name} ({old!r}, not {new!r})"
    if found.start != asked.start:
        return "another checkpoint to start from (--from)"
    if found.tokenizer_sha256 != asked.tokenizer_sha256:
        return "another tokenizer"
    for old_text, new_text in zip(found.data, asked.data, strict=True):
        if old_text.tokens_sha256 != new_text.tokens_sha256:
            return f"another text {old_text.name!r} (from {old_text.origin})"
    return None
