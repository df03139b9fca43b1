"""From a specification to its cells, with whatever is known to stand in their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from oasis_eval import registry
from oasis_eval.calibration import text_of
from oasis_eval.cells import Cell
from oasis_eval.errors import DataError, OasisError, SpecError, UnknownNameError
from oasis_eval.harness import run as harness
from oasis_eval.harness.protocols import (
    QUESTION_TASKS,
    TASKS,
    Protocol,
    new_tokens,
    parse_protocol,
    with_window,
)
from oasis_eval.quant import schemes
from oasis_eval.quant.support import unsupported
from oasis_eval.record import DataInfo
from oasis_eval.spec import (
    Calibration,
    Dtype,
    EvaluationSpec,
    ModelCard,
    QuantScheme,
    RunSpec,
    TaskRef,
)

Given = TypeVar("Given")
Found = TypeVar("Found")


def cells_of(spec: EvaluationSpec) -> list[Cell]:
    """Return the cells of a call in the order models, schemes, tasks; no text or weight is read.

    Args:
        spec: Models, schemes, tasks and how to run them.

    Raises:
        SpecError: Something named in `spec` does not exist.
        CheckpointError: A model's folder holds none.
        UnsupportedSchemeError: The parts of a scheme's name contradict each other.
    """
    problems: list[OasisError] = []
    cards = _each(registry.resolve, spec.models, problems)
    distinct = dict.fromkeys(_each(schemes.resolve, spec.schemes, problems))
    problems += name_clashes(distinct)
    tasks = [task for refs in _each(task_refs, [spec], problems) for task in refs]
    _refuse(problems)
    chosen = [(scheme, unsupported(scheme)) for scheme in distinct]
    dtype: Dtype = spec.dtype or ("fp32" if spec.device == "cpu" else "bf16")
    references = {scheme: _reference_dtype(scheme, dtype) for scheme, _ in chosen}
    seeds = _each(lambda card: _seed(card, spec.seed), cards, problems)
    _refuse(problems)
    only_questions = all(is_question(task) for task in tasks)
    if spec.diagnostics and only_questions and None not in references.values():
        raise SpecError(
            "diagnostics are measured on the windows of perplexity tasks; found only "
            f"{', '.join(spec.tasks)}: add one, for example wikitext2, or add {dtype} to the "
            "schemes, whose answers the others can be compared with"
        )
    _check_data_keys(spec)
    return [
        Cell(
            RunSpec(
                model=name,
                scheme=scheme,
                task=task,
                dtype=scheme.dtype or dtype,
                seed=seed,
                batch_size=spec.batch_size,
                device=spec.device,
                diagnostics=spec.diagnostics and not is_question(task) and refusal is None,
                fidelity=references[scheme] if spec.diagnostics and refusal is None else None,
            ),
            card,
            unsupported=refusal,
            fewshot_file=spec.data.get(f"{task.name}:train"),
            calibration_file=spec.data.get("calibration"),
            reference_dtype=references[scheme],
        )
        for name, card, seed in zip(spec.models, cards, seeds, strict=True)
        for scheme, refusal in chosen
        for task in tasks
    ]


def _each(
    resolve: Callable[[Given], Found], given: Iterable[Given], problems: list[OasisError]
) -> list[Found]:
    """Return what each is; what stands in the way of one goes to `problems`."""
    found = []
    for item in given:
        try:
            found.append(resolve(item))
        except OasisError as error:
            problems.append(error)
    return found


def name_clashes(schemes: Iterable[QuantScheme]) -> list[SpecError]:
    """Return why schemes cannot be told apart by their names, one error a name."""
    counts = Counter(scheme.name for scheme in dict.fromkeys(schemes))
    return [
        SpecError(
            f"scheme {name!r}: found {count} schemes of this name with other settings; results go "
            "by names, give each file its own 'name:'"
        )
        for name, count in counts.items()
        if count > 1
    ]


def _refuse(problems: list[OasisError]) -> None:
    """Raise what was found, all of it at once: nobody mends a list one name a run."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise SpecError("; ".join(map(str, problems)))


def _seed(card: ModelCard, given: int | None) -> int:
    """Return the seed of a model's numbers."""
    if given is None:
        return card.seed or 0
    if card.seed not in (None, given):
        raise SpecError(
            f"{card.name}: found seed {given}, but its card says that it was trained with seed "
            f"{card.seed}; leave --seed out, or correct the card"
        )
    return given


def _reference_dtype(scheme: QuantScheme, dtype: Dtype) -> Dtype | None:
    """Return the dtype of what a scheme is compared with; None: it is that itself."""
    return None if scheme.execution == "none" and scheme.dtype == dtype else dtype


def task_refs(spec: EvaluationSpec) -> list[TaskRef]:
    """Return the tasks of a call with their protocols, in order.

    Raises:
        SpecError: A task or protocol is unknown, or a protocol fits no task.
    """
    protocols = [parse_protocol(name) for name in spec.protocols]
    refs: list[TaskRef] = []
    used: set[str] = set()
    for task in spec.tasks:
        for protocol in harness.protocols_for(task, protocols):
            used.add(protocol.name)
            sized = with_window(protocol, spec.window) if spec.window else protocol
            ref = _task_ref(spec, task, sized)
            if ref not in refs:  # a window makes one of protocols that differ in it alone
                refs.append(ref)
    unused = [protocol.name for protocol in protocols if protocol.name not in used]
    if unused:
        raise SpecError(f"protocol {unused[0]!r} fits none of the tasks {', '.join(spec.tasks)}")
    return refs


def is_question(task: TaskRef) -> bool:
    """Tell whether a task asks questions; the others score text, and have windows to diagnose."""
    return parse_protocol(task.protocol).asks


def _task_ref(spec: EvaluationSpec, task: str, protocol: Protocol) -> TaskRef:
    asks = protocol.asks
    if spec.chat_template and protocol.kind == "passkey":
        raise SpecError(
            "--chat-template: a passkey prompt is a text to go on with; leave the option out"
        )
    return TaskRef(
        name=task,
        protocol=protocol.name,
        data=spec.data.get(task),
        limit=spec.limit,
        max_new_tokens=(asks and spec.max_new_tokens) or new_tokens(task),
        chat_template=spec.chat_template and asks,
    )


def _check_data_keys(spec: EvaluationSpec) -> None:
    known = {*TASKS, *(f"{task}:train" for task in QUESTION_TASKS), "calibration"}
    for key in spec.data:
        if key not in known:
            raise UnknownNameError("--data key", key, known)


class Texts:
    """Texts of tasks and calibration, each read once, whether it is there or not."""

    def __init__(self) -> None:
        self._data: dict[tuple[TaskRef, str | None], harness.TaskData | OasisError] = {}
        self._calibration: dict[tuple[Calibration, str | None], DataInfo | OasisError] = {}

    def give(self, cell: Cell) -> None:
        """Give a cell its texts, or the reason why it has none."""
        data = self._of_task(cell.spec.task, cell.fewshot_file)
        if isinstance(data, OasisError):
            cell.problem = data
        else:
            cell.data = data
        settings = cell.spec.scheme.calibration
        if settings is None or cell.unsupported is not None:
            return
        found = self._of_calibration(settings, cell.calibration_file)
        if isinstance(found, OasisError):
            cell.problem = cell.problem or found
        else:
            cell.calibration = found

    def _of_task(self, task: TaskRef, fewshot: str | None) -> harness.TaskData | OasisError:
        key = (task, fewshot)
        if key not in self._data:
            try:
                self._data[key] = harness.load_data(task, fewshot=fewshot)
            except OasisError as error:
                self._data[key] = error
        return self._data[key]

    def _of_calibration(self, settings: Calibration, file: str | None) -> DataInfo | OasisError:
        key = (settings, file)
        if key not in self._calibration:
            try:
                text = text_of(settings, file)
            except DataError as error:
                self._calibration[key] = error
            else:
                name = f"calibration:{text.name}"
                self._calibration[key] = text.info.model_copy(update={"name": name})
        return self._calibration[key]
