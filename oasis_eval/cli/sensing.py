"""Command for what each part of a model costs under a scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from oasis_eval.cli import options, output
from oasis_eval.errors import SpecError

if TYPE_CHECKING:
    from oasis_eval.sensitivity.measure import OnProgress, Progress

DEFAULT_OUT = Path("results/runs/sensitivity")


def sensitivity(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Anything that `evaluate` takes as MODEL.")
    ],
    scheme: Annotated[
        str, typer.Option(help="One scheme of fake execution (`oasis-eval schemes`).")
    ] = "w4a4",
    by: Annotated[
        str, typer.Option(help="What is quantized alone: layer, region or kind (of module).")
    ] = "layer",
    all_but_one: Annotated[
        bool,
        typer.Option(
            "--all-but-one", help="Quantize everything but one part: what does leaving it out save?"
        ),
    ] = False,
    task: Annotated[str, typer.Option(help="A task of text (`oasis-eval tasks`).")] = "wikitext2",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Local text, jsonl or parquet file instead of the hub: wikitext2=FILE, "
            "calibration=FILE. Repeatable.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: the task's own.")
    ] = None,
    limit: Annotated[int, typer.Option(help="First N windows (rolling protocols: documents).")] = 8,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = DEFAULT_OUT,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Quantize one part of a model at a time and rank parts by what they cost.

    Every part is compared with the unquantized model on the same tokens. Results are kept in --out
    as JSON and CSV; a part that is there is not run again, so an interrupted call is simply
    repeated.

    Example: oasis-eval sensitivity ./my-llama --scheme w4a4 --by kind --limit 2
    """
    from oasis_eval.sensitivity.measure import By, Plan
    from oasis_eval.sensitivity.measure import sensitivity as measure
    from oasis_eval.sensitivity.ranking import lines

    if by not in get_args(By):
        raise SpecError(f"--by {by!r}: expected one of {', '.join(get_args(By))}")
    options.at_least(("--window", window, 2), ("--limit", limit, 1))
    plan = Plan(
        model=model,
        scheme=scheme,
        by=by,  # type: ignore[arg-type]  # checked above
        all_but_one=all_but_one,
        task=task,
        data=options.mapping(data or []),
        window=window,
        limit=limit,
        device=device,
        dtype=options.dtype_named(dtype),
    )
    try:
        with _progress_bar(quiet=quiet) as show:
            found, path = measure(plan, out, on_progress=show)
    except KeyboardInterrupt:
        output.say("interrupted; finished parts are kept, run the same command again to go on")
        raise typer.Exit(130) from None
    for line in lines(found):
        print(line)  # noqa: T201 - the command's output
    print(f"\nResults: {path} and {path.with_suffix('.csv').name}")  # noqa: T201


@contextmanager
def _progress_bar(*, quiet: bool) -> Iterator[OnProgress]:
    """Yield what shows on standard error which part runs, and how long the rest will take."""
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("windows, left:"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
        transient=True,
    )
    tasks: dict[bool, progress.TaskID] = {}

    def show(state: Progress) -> None:
        is_reference = state.part == "reference"
        if is_reference not in tasks:
            tasks[is_reference] = bar.add_task(state.part)
        bar.update(
            tasks[is_reference],
            completed=state.done,
            total=state.total,
            description=state.part,
        )

    with bar:
        yield show
