"""A cell: one model under one scheme on one task, its key, and the record of its failure."""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import traceback
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from oasis_eval import ranks
from oasis_eval.diagnostics.measure import VERSION as DIAGNOSTICS_VERSION
from oasis_eval.errors import OasisError, UnsupportedSchemeError
from oasis_eval.fidelity import VERSION as FIDELITY_VERSION
from oasis_eval.harness.protocols import parse_protocol
from oasis_eval.harness.run import TaskData
from oasis_eval.parsing import content_hash
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant.libraries import PACKAGES
from oasis_eval.record import SCHEMA_VERSION, DataInfo, Provenance, RunRecord
from oasis_eval.spec import Backend, Dtype, ModelCard, RunSpec

NUMBERS_VERSION = 2
"""Raised when a change of the code changes numbers that no protocol version covers."""

_LIBRARIES = ("torch", "transformers", "tokenizers", "lm_eval", "datasets", "numpy")


@dataclass(slots=True)
class Cell:
    """One model under one scheme on one task."""

    spec: RunSpec
    card: ModelCard
    data: TaskData | None = None
    problem: OasisError | None = None
    """Why the cell cannot run, known before anything loads."""
    unsupported: str | None = None
    digest: str | None = None
    calibration: DataInfo | None = None
    """The text that fixes static ranges."""
    fewshot_file: str | None = None
    """Local file of training questions; None: the data set's own."""
    calibration_file: str | None = None
    """Local file that replaces the scheme's calibration text."""
    reference_dtype: Dtype | None = None
    """Dtype of the unquantized model that the cell would be compared with; None: it is that."""

    @property
    def identity(self) -> str:
        """Key of the cell as far as it is known without its texts, wherever they were sought."""
        spec = self.spec.model_dump(mode="json", exclude={"task": {"data"}, **self._unasked})
        return content_hash(["identity", self.card.name, spec])

    @property
    def can_run(self) -> bool:
        """Whether nothing is known to stand in its way."""
        return self.problem is None and self.unsupported is None

    @property
    def key(self) -> str:
        """Content hash of everything that the cell's numbers depend on."""
        if self.data is None or self.digest is None or self.problem is not None:
            return self.identity
        protocol = parse_protocol(self.spec.task.protocol)
        return content_hash(
            {
                "schema": SCHEMA_VERSION,
                "numbers": NUMBERS_VERSION,
                "spec": self.spec.model_dump(
                    mode="json",
                    exclude={
                        "model": True,
                        "task": {"data"},
                        "scheme": {"description"},
                        **self._unasked,
                    },
                ),
                **({"diagnostics": DIAGNOSTICS_VERSION} if self.spec.diagnostics else {}),
                **({"fidelity": FIDELITY_VERSION} if self.spec.fidelity else {}),
                # Its seed is in `spec`, whoever said it.
                "card": self.card.model_dump(mode="json", exclude={"name", "source", "seed"}),
                "checkpoint": self.digest,
                "data": [info.sha256 for info in self.data.infos],
                "calibration": self.calibration.sha256 if self.calibration else None,
                "protocol": protocol.sha256,
                "versions": versions(self.spec.scheme.backend),
            }
        )

    def key_with(self, *, diagnostics: bool, fidelity: Dtype | None) -> str:
        """Return the key that the cell has with or without what is measured besides scores."""
        update = {"diagnostics": diagnostics, "fidelity": fidelity}
        return replace(self, spec=self.spec.model_copy(update=update)).key

    @property
    def _unasked(self) -> dict[str, bool]:
        """Settings that have no part in a key where they are not used."""
        return {name: True for name in ("diagnostics", "fidelity") if not getattr(self.spec, name)}

    def unsupported_record(self) -> RunRecord:
        """Return the record of a cell that its backend refused before anything loaded."""
        return RunRecord(
            key=self.key,
            spec=self.spec,
            card=self.card,
            status="unsupported",
            reason=self.unsupported,
            data=self.data.infos if self.data else (),
        )

    def failed_record(self, error: Exception) -> RunRecord:
        """Return the record of a failure, with a traceback where the input is not at fault.

        A scheme that cannot be put on this very model, as it turned out, is as unsupported as one
        that was refused before.
        """
        expected = isinstance(error, OasisError)
        text = " ".join(str(error).split())
        return RunRecord(
            key=self.key,
            spec=self.spec,
            card=self.card,
            status="unsupported" if isinstance(error, UnsupportedSchemeError) else "failed",
            reason=text if expected else f"{type(error).__name__}: {text}",
            traceback=None if expected else "".join(traceback.format_exception(error)),
            data=self.data.infos if self.data else (),
        )


def versions(backend: Backend = "none") -> dict[str, str]:
    """Return the versions of the libraries that can change a number.

    Args:
        backend: Of the scheme; a library that runs it is in, and only then.
    """
    found = {name: _version(name) for name in _LIBRARIES}
    library = PACKAGES.get(backend)
    if library is not None:
        try:
            found[library] = _version(library)
        except importlib.metadata.PackageNotFoundError:
            found[library] = "not installed"
    return found


@functools.cache
def _version(library: str) -> str:
    """Return a library's version, which takes milliseconds to find and is in every key."""
    return importlib.metadata.version(library)


def provenance(prepared: PreparedModel, *, started: datetime, seconds: float) -> Provenance:
    """Return who measured, with what.

    Args:
        prepared: The model that was measured.
        started: UTC.
        seconds: How long it took.
    """
    import torch

    return Provenance(
        checkpoint_sha256=prepared.digest,
        versions={
            **versions(prepared.scheme.backend),
            "oasis_eval": importlib.metadata.version("oasis-eval"),
        },
        git_commit=git_commit(),
        device=prepared.device,
        dtype=prepared.dtype,
        attention=prepared.attention,
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        num_threads=torch.get_num_threads(),
        num_processes=ranks.current().count,
    )


def git_commit() -> str | None:
    """Return the commit of the checkout that runs, None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            ["git", "-C", str(root), "rev-parse", "HEAD"],  # noqa: S607 - whatever git the user has
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
