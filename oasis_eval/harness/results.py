"""Result files of lm-eval as records, so that its numbers stand in our tables.

Reads JSON only and needs no lm-eval. What the file does not say is left out: the precision of a
foreign model, the hash of the text, the number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from oasis_eval.errors import RecordError
from oasis_eval.harness.answers import FILTERS
from oasis_eval.harness.protocols import TASKS, Details, parse_protocol
from oasis_eval.harness.results_file import (
    ResultsFile,
    SampleCount,
    TaskConfig,
    find_files,
    read_file,
)
from oasis_eval.parsing import content_hash
from oasis_eval.record import (
    SCHEMA_VERSION,
    Metric,
    ProtocolInfo,
    Provenance,
    RunRecord,
    record_text,
    write_record,
)
from oasis_eval.spec import (
    Dtype,
    HubSource,
    ImportedRun,
    ModelCard,
    NamedSource,
    QuantScheme,
    TaskRef,
)

AS_RUN = "as lm-eval ran it"
"""Name of the scheme of a foreign model."""

_OURS = "oasis_"
_QUESTIONS = {
    f"{_OURS}{task}{part}": task
    for task, protocol in TASKS.items()
    if parse_protocol(protocol).asks
    for part in ("", "_answer")
}
"""Tasks of lm-eval that ask what a task of ours asks, or score its reference answers."""
_NAMES = ("pretrained", "model", "path", "engine")
"""Arguments that name the model, in lm-eval's own order."""
_WHICH = frozenset({*_NAMES, "revision", "trust_remote_code"})
"""Arguments that say which model ran, not how."""
_DTYPES: dict[str, Dtype] = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}


class _Model(NamedTuple):
    """What ran."""

    card: ModelCard
    scheme: QuantScheme
    arguments: dict[str, str]


class Imported(NamedTuple):
    """What an import did."""

    record: RunRecord
    path: Path
    is_new: bool
    """False where the same record was there already."""


def import_results(path: Path, out: Path) -> list[Imported]:
    """Write the records of results files; a second import changes nothing.

    Args:
        path: What lm-eval wrote to its `--output_path`, or that folder.
        out: Folder of records.

    Raises:
        RecordError: The file is not lm-eval's, or a record cannot be written.
    """
    imported = []
    for record in (item for file in find_files(path) for item in read_results(file)):
        place = out / f"{record.key}.json"
        is_new = not place.exists() or place.read_bytes() != record_text(record).encode()
        if is_new:
            write_record(out, record)
        imported.append(Imported(record, place, is_new))
    return imported


def read_results(path: Path) -> list[RunRecord]:
    """Return one record for each task and group of a results file.

    Raises:
        RecordError: The file is not lm-eval's, or holds no number.
    """
    file = read_file(path)
    found = list(_records(file, _model(file)))
    if not found:
        raise RecordError(f"{path}: no task in it has a number")
    return found


def _records(file: ResultsFile, model: _Model) -> Iterator[RunRecord]:
    done: set[str] = set()
    for name in file.results:
        if name in done:
            continue
        together = [
            item
            for item, task in _QUESTIONS.items()
            if item in file.results and task == _QUESTIONS.get(name)
        ]
        names = together if name in _QUESTIONS else [name]
        done.update(names)
        task = _task(file, names[0])
        values = [item for each in names for item in _metrics(file, each, task)]
        if not values:
            continue
        details = _details(file, names[0], task, {item.name: item.value for item in values})
        batch_size = details.get("batch_size")
        info = _protocol(file, names[0], task, details)
        left_out = {"num_skipped"} if _is_ours(file, names[0]) else set()
        config = file.config
        yield RunRecord(
            key=content_hash(["import", SCHEMA_VERSION, file.sha256, names[0]]),
            spec=ImportedRun(
                importer="lm-eval",
                results_sha256=file.sha256,
                model=model.card.name,
                scheme=model.scheme,
                task=task,
                dtype=config.oasis_dtype or _DTYPES.get(config.model_dtype or ""),
                seed=(config.random_seed or 0) if model.card.seed is None else model.card.seed,
                batch_size=batch_size if isinstance(batch_size, int) else None,
                device=config.oasis_device,
                model_type=config.model,
                model_args=model.arguments,
                task_version=_version(file, names[0]),
                num_fewshot=file.shots.get(names[0]),
            ),
            card=model.card,
            status="ok",
            metrics=tuple(
                sorted(
                    (item for item in values if item.name not in left_out),
                    key=lambda item: (item.name, item.filter or ""),
                )
            ),
            protocols=(info,) if info else (),
            warnings=config.oasis_warnings,
            provenance=_provenance(file),
        )


def _is_ours(file: ResultsFile, name: str) -> bool:
    """Tell whether a task is one of those that `evaluate` runs too."""
    config = file.configs.get(name)
    is_text = name.startswith(_OURS) and config is not None and config.is_text
    return is_text or name in _QUESTIONS


def _model(file: ResultsFile) -> _Model:
    """Return the card and scheme that our model type stored, or what is known of another's."""
    config = file.config
    arguments = _arguments(config.model_args)
    if config.oasis_card is not None and config.oasis_scheme_settings is not None:
        return _Model(config.oasis_card, config.oasis_scheme_settings, arguments)
    given = next((arguments[key] for key in _NAMES if key in arguments), None)
    path = given or file.model_name or config.model
    name = f"{path}@{arguments['revision']}" if "revision" in arguments else path
    how = {key: value for key, value in sorted(arguments.items()) if key not in _WHICH}
    settings = ",".join(f"{key}={value}" for key, value in how.items())
    scheme = QuantScheme(
        name=f"{AS_RUN} ({settings})" if settings else AS_RUN,
        description=f"model type {config.model} of lm-eval, precision as its arguments say",
        backend="lm-eval",
        execution="unknown",
        regions=(),
    )
    source = (
        HubSource(repo=path, revision=config.model_sha)
        if config.model_sha
        else NamedSource(name=path)
    )
    label = PurePosixPath(path).name if path.startswith((".", "/", "~")) else name
    card = ModelCard(name=name, family="any", source=source, label=label or name)
    return _Model(card, scheme, arguments)


def _arguments(given: dict[str, object] | str | None) -> dict[str, str]:
    if isinstance(given, str):
        pairs = (part.partition("=") for part in given.split(",") if part)
        return {key.strip(): value.strip() for key, _, value in pairs}
    return {key: str(value) for key, value in (given or {}).items()}


def _task(file: ResultsFile, name: str) -> TaskRef:
    """Return what `evaluate` would call the task, or lm-eval's own name and way of running it."""
    config = file.configs.get(name, TaskConfig())
    metadata = config.metadata or {}
    shots = file.shots.get(name)
    task, protocol, data = name, "lm-eval" if shots is None else f"lm-eval {shots}-shot", None
    limit = _limit(file, name)
    if name in _QUESTIONS:
        task = _QUESTIONS[name]
        protocol = str(metadata.get("protocol") or f"gsm8k-{shots or 0}shot")
    elif _is_ours(file, name):
        task, protocol = str(metadata["corpus_name"]), str(metadata["protocol"])
        if not parse_protocol(protocol).per_document:
            windows = metadata.get("limit")
            limit = windows if isinstance(windows, int) else None
    if isinstance(metadata.get("data"), str) and _is_ours(file, name):
        data = str(metadata["data"])
    budget = {**(config.generation_kwargs or {}), **_gen_kwargs(file)}.get("max_gen_toks")
    return TaskRef(
        name=task,
        protocol=protocol,
        data=data,
        limit=limit,
        max_new_tokens=int(str(budget)) if str(budget).isdigit() else None,
        chat_template=bool(file.chat_template),
    )


def _gen_kwargs(file: ResultsFile) -> Mapping[str, object]:
    given = file.config.gen_kwargs
    return given if isinstance(given, dict) else _arguments(given)


def _limit(file: ResultsFile, name: str) -> int | None:
    """Return how many documents were asked for; of a fraction, how many it came to."""
    limit = file.config.limit
    if limit is None or limit >= 1:
        return None if limit is None else int(limit)
    return file.samples.get(name, SampleCount()).effective or None


def _version(file: ResultsFile, name: str) -> str | None:
    version = file.versions.get(name)
    return None if version is None else str(version)


def _metrics(file: ResultsFile, name: str, task: TaskRef) -> Iterator[Metric]:
    """Yield a task's numbers; lm-eval writes them as `metric,filter` beside `metric_stderr,...`."""
    values = file.results[name]
    count = file.samples.get(name, SampleCount()).effective
    per_document = not _is_ours(file, name) or name in _QUESTIONS
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        number = _number(value)
        if not comma or metric.endswith("_stderr") or number is None:
            continue
        yield Metric(
            task=task.name,
            name=metric,
            value=number,
            stderr=_number(values.get(f"{metric}_stderr,{chosen}")),
            # Of a text, lm-eval counts the documents; our metrics count windows.
            count=count if per_document else None,
            protocol=task.protocol,
            filter=FILTERS.get(metric)
            if _is_ours(file, name)
            else (None if chosen == "none" else chosen),
        )


def _number(value: object) -> float | None:
    """Return a number as one; lm-eval writes `N/A` for what it has none of."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _details(file: ResultsFile, name: str, task: TaskRef, values: Mapping[str, float]) -> Details:
    """Return the settings that `evaluate` stores with a protocol, as far as the file has them."""
    config = file.config
    size = config.batch_size
    whole = int(size) if size is not None and str(size).isdigit() else size
    details: Details = {"limit": task.limit, "batch_size": whole}
    protocol = parse_protocol(task.protocol) if _is_ours(file, name) else None
    if protocol is not None and protocol.kind == "passkey":
        details |= {
            "window": protocol.window,
            "lengths": ", ".join(map(str, protocol.lengths)),
            "max_new_tokens": task.max_new_tokens,
        }
    elif name in _QUESTIONS:
        count = file.samples.get(name, SampleCount()).effective or 0
        details |= {
            "shots": file.shots.get(name),
            "chat_template": task.chat_template,
            "max_new_tokens": task.max_new_tokens,
            "fewshot_seed": config.fewshot_seed,
        }
        for metric in ("cut", "unread", "prompt_truncated"):
            if count and math.isfinite(values.get(metric, math.nan)):
                details[f"num_{metric}"] = round(values[metric] * count)
    elif protocol is not None:
        details["window"] = protocol.window
        if "num_skipped" in values:
            details["skipped"] = int(values["num_skipped"])
    else:
        details |= {"task_version": _version(file, name), "lm_eval": file.lm_eval_version}
    return {key: value for key, value in details.items() if value is not None or key == "limit"}


def _protocol(file: ResultsFile, name: str, task: TaskRef, details: Details) -> ProtocolInfo | None:
    """Return how a number was measured; None where the file does not tell our version of it."""
    if not _is_ours(file, name):
        return ProtocolInfo(
            name=task.protocol,
            version=1,
            sha256=_configuration_hash(file, name),
            summary=f"task {name} of lm-eval, settings as in its results file",
            details=details,
        )
    protocol = parse_protocol(task.protocol)
    recorded = file.config.oasis_protocol_versions.get(protocol.kind)
    if recorded is None:
        return None
    same = recorded == protocol.version
    return ProtocolInfo(
        name=protocol.name,
        version=recorded,
        sha256=protocol.sha256 if same else content_hash([protocol.name, recorded]),
        summary=protocol.summary if same else f"as version {recorded} of the suite defined it",
        details=details,
    )


def _configuration_hash(file: ResultsFile, name: str) -> str:
    """Hash everything that lm-eval's configuration says of a task, but for paths and the model."""
    parts = sorted(_leaves(file, name, seen=frozenset()))
    return content_hash(
        {
            "tasks": [
                [part, _version(file, part), file.configs[part].model_dump(exclude={"metadata"})]
                for part in parts
                if part in file.configs
            ],
            "version": _version(file, name),
            "generation": dict(_gen_kwargs(file)),
            "fewshot_seed": file.config.fewshot_seed,
            "fewshot_as_multiturn": file.fewshot_as_multiturn,
            "system_instruction": file.system_instruction_sha,
        }
    )


def _leaves(file: ResultsFile, name: str, *, seen: frozenset[str]) -> set[str]:
    """Return the tasks of a group; a task is its own only one."""
    below = [item for item in file.group_subtasks.get(name, []) if item not in seen]
    if not below:
        return {name}
    return {leaf for item in below for leaf in _leaves(file, item, seen=seen | {name})}


def _provenance(file: ResultsFile) -> Provenance:
    config = file.config
    versions: dict[Literal["lm_eval", "transformers", "oasis_eval"], str | None] = {
        "lm_eval": file.lm_eval_version,
        "transformers": file.transformers_version,
        "oasis_eval": config.oasis_version,
    }
    started = None
    if file.date is not None:
        started = datetime.fromtimestamp(file.date, UTC).isoformat(timespec="seconds")
    return Provenance(
        checkpoint_sha256=config.oasis_checkpoint_sha256,
        versions={name: version for name, version in versions.items() if version is not None},
        device=config.oasis_device,
        dtype=config.oasis_dtype or config.model_dtype,
        attention=config.oasis_attention,
        started=started,
        seconds=file.seconds,
        num_threads=None,
    )
