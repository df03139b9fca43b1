"""Commands that run models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oasis_eval.cli import options, output
from oasis_eval.errors import SpecError

if TYPE_CHECKING:
    from oasis_eval.record import RunRecord
    from oasis_eval.spec import EvaluationSpec


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A card (`oasis-eval models`), a folder with safetensors, a *.gguf file, "
            "package:NAME, or a hub id owner/name@revision.",
        ),
    ],
    scheme: Annotated[
        str, typer.Option(help="Schemes, by name (`oasis-eval schemes`) or YAML file.")
    ] = "fp32,w8a8,w4a4",
    task: Annotated[str, typer.Option(help="Tasks (`oasis-eval tasks`).")] = "wikitext2",
    protocol: Annotated[
        str, typer.Option(help="Protocols (`oasis-eval tasks`); default: each task's own.")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Local text, jsonl or parquet file instead of the hub: wikitext2=FILE, "
            "gsm8k=FILE, gsm8k:train=FILE, calibration=FILE. Repeatable.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; changes the protocol's name.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="First N windows, documents (rolling protocols) or questions."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of records.")] = options.RECORDS,
    batch_size: Annotated[int, typer.Option(help="Sequences of one forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed that the model was trained with, where its card does not say: tables "
            "average over seeds."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the longest answer; default: 256, mini_gsm 64, passkey 16."),
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask questions through the chat template.")
    ] = False,
    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics",
            help="Also measure outliers, attention sinks and depth routing on scored text, and "
            "how far a scheme's predictions and answers are from the unquantized model's.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print records, one JSON object a line, and no table.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Measure models under quantization schemes.

    Every model, scheme, task and protocol is a cell with a record of its own in --out. A cell that
    has its record is not run again, so an interrupted call is simply repeated. Exit status 2: some
    cell has no numbers. Several GPUs share the batches of each cell if `accelerate launch -m
    oasis_eval` or `torchrun -m oasis_eval` stands in the place of `oasis-eval`.

    Example: oasis-eval evaluate ./my-llama --scheme fp32,w8a8,w4a4 --task wikitext2,gsm8k
    --limit 20
    """
    from oasis_eval.parsing import parse
    from oasis_eval.spec import EvaluationSpec

    options.at_least(
        ("--window", window, 2),
        ("--limit", limit, 1),
        ("--batch-size", batch_size, 1),
        ("--max-new-tokens", max_new_tokens, 1),
    )
    spec = parse(
        EvaluationSpec,
        {
            "models": models,
            "schemes": options.names(scheme, "--scheme"),
            "tasks": options.names(task, "--task"),
            "protocols": options.names(protocol, "--protocol") if protocol else (),
            "data": options.mapping(data or []),
            "window": window,
            "limit": limit,
            "batch_size": batch_size,
            "device": device,
            "dtype": dtype,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "chat_template": chat_template,
            "diagnostics": diagnostics,
        },
        origin="evaluate",
    )
    _check_data_is_read(spec)
    _evaluate(spec, out, as_json=as_json, quiet=quiet)


def _check_data_is_read(spec: EvaluationSpec) -> None:
    """Refuse a file that would be passed over; unknown names have messages of their own."""
    from oasis_eval.harness.protocols import TASKS

    for key in spec.data:
        task = key.partition(":")[0]
        if task in TASKS and task not in spec.tasks and set(spec.tasks) <= set(TASKS):
            raise SpecError(
                f"--data {key}=...: no task reads it; the tasks are {', '.join(spec.tasks)}"
            )


def _evaluate(spec: EvaluationSpec, out: Path, *, as_json: bool, quiet: bool) -> None:
    from oasis_eval import pipeline, ranks

    def show(record: RunRecord) -> None:
        if as_json:
            print(record.model_dump_json(), flush=True)  # noqa: T201 - the command's output

    try:
        report = pipeline.evaluate(spec, out, quiet=quiet, on_record=show)
    except KeyboardInterrupt:
        output.say("interrupted; finished cells are kept, run the same command again to go on")
        raise typer.Exit(130) from None
    if not ranks.current().is_first:  # another process says it
        raise typer.Exit(0 if report.is_complete else 2)
    if any(record.status == "ok" for record in report.records) and not as_json:
        output.print_table(report.records)
        print(f"\nRecords: {out}   Table for a paper: oasis-eval table {out} --format latex")  # noqa: T201
    records = report.records
    output.say_of_cells((record, "warning", text) for record in records for text in record.warnings)
    failed = [record for record in records if record.status != "ok"]
    output.say_of_cells((record, record.status, str(record.reason)) for record in failed)
    for error in report.errors:
        output.say(f"error: {error}")
    if not report.is_complete:
        raise typer.Exit(2)


def harness(context: typer.Context) -> None:
    """Run lm-eval's own command line with model type `oasis` and our tasks.

    Example: oasis-eval harness run --model oasis --model_args model=./my-llama,scheme=w4a4
    --tasks arc_easy,oasis_wikitext2

    `--install-hook` lets a plain `lm_eval` command know the same, in this Python; `--remove-hook`
    takes that back.
    """
    if context.args in (["--install-hook"], ["--remove-hook"]):
        _change_hook(context.args[0])
        return
    if context.args in (["--help"], ["-h"]):
        print(context.get_help())  # noqa: T201 - the command's output
        print("\nEverything after `harness` goes to lm-eval: try `oasis-eval harness run --help`.")  # noqa: T201
        return
    from oasis_eval.harness.plugin import main as lm_eval_main

    lm_eval_main(context.args)


def _change_hook(asked: str) -> None:
    from oasis_eval.harness import hook

    if asked == "--install-hook":
        output.say(f"Written: {hook.install()}")
        output.say("`lm_eval` of this Python now knows model type `oasis` and our tasks.")
        return
    path = hook.remove()
    output.say(f"Deleted: {path}" if path else f"No hook at {hook.place()}: nothing to do.")


def diagnose(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Anything that `evaluate` takes as MODEL.")
    ],
    scheme: Annotated[str, typer.Option(help="One scheme (`oasis-eval schemes`).")] = "fp32",
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on; default: prose that ships with us.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: 512 or the model's positions.")
    ] = None,
    limit: Annotated[int, typer.Option(help="First N windows.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Sequences of one forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
) -> None:
    """Say on one screen where a model's outliers are, whether it sinks, whether depth collapses.

    The same numbers for every layer, in records: oasis-eval evaluate MODEL --diagnostics

    Example: oasis-eval diagnose ./my-llama --scheme w4a4 --limit 2
    """
    from oasis_eval.diagnose import Plan
    from oasis_eval.diagnose import diagnose as look

    options.at_least(
        ("--window", window, 2), ("--limit", limit, 1), ("--batch-size", batch_size, 1)
    )
    plan = Plan(
        model=model,
        scheme=scheme,
        text=text,
        window=window,
        num_windows=limit,
        batch_size=batch_size,
        device=device,
        dtype=options.dtype_named(dtype),
    )
    for line in look(plan):
        print(line)  # noqa: T201 - the command's output


def demo(
    out: Annotated[Path, typer.Option(help="Folder of records, tables and figures.")] = Path(
        "demo-output"
    ),
) -> None:
    """Run the main job on the mini family: tables and figures of six small trained models.

    fp32, W8A8 and W4A4 with dynamic and static ranges; perplexity, Pass@1 and diagnostics.
    """
    from oasis_eval.demo import run

    if not run(out).is_complete:
        raise typer.Exit(2)
