"""Runs a model part by part beside its stored reference.

The checkpoint is loaded once and the scheme put on it once; parts are switched in place. Whatever
is finished is on disk before the next part begins, and is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from oasis_eval.cells import NUMBERS_VERSION, versions
from oasis_eval.errors import CheckpointError, SpecError, UnsupportedSchemeError
from oasis_eval.fidelity import VERSION as FIDELITY_VERSION
from oasis_eval.fidelity import Fidelity, compare
from oasis_eval.harness.protocols import Window, parse_protocol
from oasis_eval.harness.run import load_data, scored_windows
from oasis_eval.loading import Reference as Loaded
from oasis_eval.loading import load, prepare
from oasis_eval.parsing import content_hash
from oasis_eval.plan import is_question, task_refs
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.quant.parts import Parts
from oasis_eval.quant.support import indivisible, unsupported
from oasis_eval.references import Reference
from oasis_eval.registry import resolve
from oasis_eval.sensitivity.results import (
    VERSION,
    WHOLE,
    PartResult,
    Sensitivity,
    read,
    write,
)
from oasis_eval.spec import Dtype, EvaluationSpec, QuantScheme, TaskRef

By = Literal["layer", "region", "kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to look at."""

    model: str
    """What `evaluate` takes."""
    scheme: str
    by: By = "layer"
    all_but_one: bool = False
    """Whether everything but one part is quantized, not that part alone."""
    task: str = "wikitext2"
    data: Mapping[str, str]
    """Local files by task name, and `calibration`."""
    window: int | None = None
    limit: int = 8
    """Windows, or documents of a rolling protocol."""
    device: str = "cpu"
    dtype: Dtype | None = None
    """None: fp32 on the CPU, bf16 elsewhere."""


class Progress(NamedTuple):
    """How far a call is, in forward passes of one window."""

    done: int
    total: int
    part: str
    """What runs now."""


OnProgress = Callable[[Progress], object]


def sensitivity(
    plan: Plan, out: Path, *, on_progress: OnProgress = lambda progress: None
) -> tuple[Sensitivity, Path]:
    """Measure every part that has no result yet.

    Args:
        plan: Model, scheme, parts and text.
        out: Folder of results.
        on_progress: Called before the first pass and after each.

    Returns:
        All results, and the JSON file that holds them.

    Raises:
        UnsupportedSchemeError: The scheme cannot be run, or does not come apart.
        OasisError: The model or text cannot be had, or results cannot be written.
    """
    scheme = divisible(plan.scheme)
    task = _task(plan)
    data = load_data(task, fewshot=None)
    dtype: Dtype = plan.dtype or ("fp32" if plan.device == "cpu" else "bf16")
    loaded = load(resolve(plan.model), dtype=dtype, device=plan.device)
    refuse_quantized(loaded)
    with prepare(loaded, schemes.resolve(dtype), dtype=dtype) as prepared:
        windows = scored_windows(prepared, task, data)
        reference = reference_pass(prepared, windows, on_progress=on_progress)
    key = content_hash(
        {
            "version": [VERSION, FIDELITY_VERSION, NUMBERS_VERSION],
            "checkpoint": loaded.digest,
            "card": loaded.card.model_dump(mode="json", exclude={"name", "source", "seed"}),
            "scheme": scheme.model_dump(mode="json", exclude={"description"}),
            "parts": [plan.by, plan.all_but_one],
            "protocol": parse_protocol(task.protocol).sha256,
            "limit": plan.limit,
            "data": [info.sha256 for info in data.infos],
            "calibration": _calibration_hash(scheme, plan.data.get("calibration")),
            "dtype": dtype,
            "device": plan.device.partition(":")[0],
            "versions": versions(scheme.backend),
        }
    )
    path = out / f"{_file_name(Path(loaded.card.name).name, scheme, plan)}-{key[:8]}.json"
    with (
        prepare(
            loaded, scheme, dtype=dtype, calibration_data=plan.data.get("calibration")
        ) as prepared,
        _parts(prepared) as parts,
    ):
        found = _known(path, key) or Sensitivity(
            key=key,
            model=loaded.card.label,
            scheme=scheme.name,
            by=plan.by,
            all_but_one=plan.all_but_one,
            task=task.name,
            protocol=task.protocol,
            dtype=prepared.dtype,
            reference_dtype=dtype,
            num_tokens=(),
            reference_nll_nats=(),
            part_names=tuple(parts.groups(plan.by)),
        )
        subject = Subject(prepared, parts, windows, reference)
        for more in measure(subject, found, on_progress=on_progress):
            found = more
            write(path, found)
    return found, path


class Subject(NamedTuple):
    """What is measured."""

    prepared: PreparedModel
    """The model under the whole scheme."""
    parts: Parts
    windows: list[Window]
    """What to run on; the reference has seen them."""
    reference: Reference
    """The unquantized model."""


def measure(
    subject: Subject, found: Sensitivity, *, on_progress: OnProgress = lambda progress: None
) -> Iterator[Sensitivity]:
    """Measure what `found` lacks, and yield it again, with more in it, after every part.

    Args:
        subject: Model, parts and text.
        found: What is known already.
        on_progress: Called before the first pass and after each.
    """
    prepared, parts, windows, reference = subject
    groups = parts.groups(found.by)
    known = {result.name: result for result in (found.whole, *found.parts) if result is not None}
    todo = [name for name in (WHOLE, *groups) if name not in known]
    scored = [window for window in windows if window.targets]
    total, done = len(todo) * len(scored), 0

    def step(name: str) -> Callable[[], None]:
        def count() -> None:
            nonlocal done
            done += 1
            on_progress(Progress(done, total, name))

        return count

    if not todo:
        yield found
    for name in todo:
        on_progress(Progress(done, total, name))
        chosen = parts.all if name == WHOLE else groups[name]
        if found.all_but_one and name != WHOLE:
            chosen = tuple(part for part in parts.all if part.label(found.by) != name)
        parts.only(chosen)
        run = compare(prepared, windows, reference, on_window=step(name))
        known[name] = _result(name, len(groups.get(name, parts.all)), run)
        found = found.model_copy(
            update={
                "num_tokens": tuple(len(window.kl) for window in run.windows),
                "reference_nll_nats": tuple(
                    float(window.reference_nll.sum()) for window in run.windows
                ),
                "whole": known.get(WHOLE),
                "parts": tuple(known[part] for part in groups if part in known),
            }
        )
        yield found


def divisible(name: str) -> QuantScheme:
    """Return the scheme of that name.

    Raises:
        UnsupportedSchemeError: It cannot be run, or does not come apart.
    """
    scheme = schemes.resolve(name)
    reason = unsupported(scheme) or indivisible(scheme)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    return scheme


def refuse_quantized(loaded: Loaded) -> None:
    """Refuse a checkpoint of codes, which has no unquantized reference.

    Raises:
        CheckpointError: It is one.
    """
    if loaded.applied is not None:
        raise CheckpointError(
            f"{loaded.card.name}: the checkpoint is quantized already; expected the one that it "
            "was made from, with which every part is compared"
        )


def _parts(prepared: PreparedModel) -> Parts:
    assert prepared.applied is not None
    return Parts(prepared.model, prepared.applied)


def reference_pass(
    prepared: PreparedModel,
    windows: list[Window],
    *,
    on_progress: OnProgress = lambda progress: None,
) -> Reference:
    """Return the unquantized model's pass over windows, run where it is not stored.

    Raises:
        UnsupportedSchemeError: The model's head does not run apart from its backbone.
    """
    reference = Reference(prepared, versions=versions())
    if not reference.is_usable:
        raise UnsupportedSchemeError(
            f"{prepared.card.name}: logits are not made of the backbone's hidden states alone, so "
            "no reference can be kept to compare with"
        )
    for done, window in enumerate(windows, start=1):
        reference.fill(window)
        on_progress(Progress(done, len(windows), "reference"))
    return reference


def _task(plan: Plan) -> TaskRef:
    spec = EvaluationSpec(
        models=(plan.model,),
        schemes=(plan.scheme,),
        tasks=(plan.task,),
        window=plan.window,
        data=dict(plan.data),
        limit=plan.limit,
    )
    (task,) = task_refs(spec)
    if is_question(task):
        raise SpecError(f"--task {plan.task}: asks questions; expected a text, such as wikitext2")
    return task


def _calibration_hash(scheme: QuantScheme, data: str | None) -> str | None:
    from oasis_eval.calibration import text_of

    return None if scheme.calibration is None else text_of(scheme.calibration, data).info.sha256


def _known(path: Path, key: str) -> Sensitivity | None:
    if not path.exists():
        return None
    found = read(path)
    return found if found.key == key else None


def _result(name: str, num_parts: int, run: Fidelity) -> PartResult:
    return PartResult(
        name=name,
        num_parts=num_parts,
        nll_nats=tuple(float(window.nll.sum()) for window in run.windows),
        kl_nats=tuple(float(window.kl.sum()) for window in run.windows),
        same_top1=run.metrics()["same_top1"],
    )


def _file_name(model: str, scheme: QuantScheme, plan: Plan) -> str:
    words = f"{model}-{scheme.name}-{plan.by}" + ("-all-but-one" if plan.all_but_one else "")
    return "".join(sign if sign.isalnum() or sign in "-._" else "-" for sign in words)
