"""The results file of lm-eval, as far as records are made of it.

Reads JSON and needs no lm-eval. The file is another program's: keys that are not read here may
come and go.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from oasis_eval.errors import RecordError
from oasis_eval.parsing import explain
from oasis_eval.spec import Dtype, ModelCard, QuantScheme

_PARTS = frozenset({"results", "configs", "config"})
_LONGEST_EXPLANATION = 300


class _Loose(BaseModel):
    """Part of a foreign file: keys that are not read here are none of our business."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class SampleCount(_Loose):
    """Documents of a task, and how many of them were evaluated."""

    original: int | None = None
    effective: int | None = None


class TaskConfig(_Loose):
    """A task's configuration, kept whole: its hash says how the task was run."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    metadata: dict[str, object] | None = None
    generation_kwargs: dict[str, object] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is one of our perplexity tasks, which name their text and protocol."""
        return {"corpus_name", "protocol"} <= set(self.metadata or {})


class RunConfig(_Loose):
    """How lm-eval ran, and what our model type adds (`oasis_...`)."""

    model: str
    model_args: dict[str, object] | str | None = None
    model_dtype: str | None = None
    model_sha: str | None = None
    batch_size: int | str | None = None
    device: str | None = None
    limit: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Documents a task; below 1 a share of them."""
    gen_kwargs: dict[str, object] | str | None = None
    random_seed: int | None = None
    fewshot_seed: int | None = None
    oasis_version: str | None = None
    oasis_card: ModelCard | None = None
    oasis_scheme_settings: QuantScheme | None = None
    oasis_checkpoint_sha256: str | None = None
    oasis_dtype: Dtype | None = None
    oasis_device: str | None = None
    oasis_attention: str | None = None
    oasis_warnings: tuple[str, ...] = ()
    oasis_protocol_versions: dict[str, int] = {}


class ResultsFile(_Loose):
    """The parts of a results file that records are made of."""

    sha256: str
    """Of the file."""

    results: dict[str, dict[str, object]] = Field(min_length=1)
    configs: dict[str, TaskConfig]
    """By task; groups have none."""
    config: RunConfig
    versions: dict[str, str | int | float | None] = {}
    shots: dict[str, int | None] = Field(default={}, alias="n-shot")
    samples: dict[str, SampleCount] = Field(default={}, alias="n-samples")
    group_subtasks: dict[str, list[str]] = {}
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    date: float | None = Field(default=None, ge=0, le=1e11)
    """Seconds since 1970."""
    seconds: float | None = Field(default=None, alias="total_evaluation_time_seconds")
    model_name: str | None = None
    chat_template: str | None = None
    system_instruction_sha: str | None = None
    fewshot_as_multiturn: bool | None = None


def find_files(path: Path) -> list[Path]:
    """Return a file itself, or every results file below an `--output_path` folder, sorted.

    Raises:
        RecordError: The folder has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("results_*.json"))
    if not found:
        raise RecordError(f"{path}: no results_*.json below it; give lm-eval's --output_path")
    return found


def read_file(path: Path) -> ResultsFile:
    """Read a results file.

    Raises:
        RecordError: It cannot be read, or is not lm-eval's.
    """
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path}: not JSON ({error}); import the results file that lm-eval's --output_path made"
        ) from error
    if not isinstance(value, dict) or not set(value) >= _PARTS:
        raise RecordError(
            f"{path}: not a results file of lm-eval, which has 'results', 'configs' and 'config'; "
            "import what its --output_path made"
        )
    try:
        sha256 = hashlib.sha256(content).hexdigest()
        return ResultsFile.model_validate({**value, "sha256": sha256})
    except ValidationError as error:
        reasons = explain(error, ResultsFile)[:_LONGEST_EXPLANATION]
        raise RecordError(f"{path}: not a results file of lm-eval: {reasons}") from error
