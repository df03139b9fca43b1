"""The command that trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from oasis_eval.cli import options
from oasis_eval.errors import SpecError

if TYPE_CHECKING:
    from oasis_eval.training.models import Trained


def train(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="mini, 100m, qwen3-0.6b, llama-3.2-1b or a *.yaml."),
    ],
    variant: Annotated[str, typer.Option(help="vanilla, oasis, outeffhop, residual-vanilla, ...")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; its card is OUT.yaml beside it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of initial weights and order.")] = 0,
    wiring: Annotated[
        str | None,
        typer.Option(help="attnres_block, attnres_full, oasis_repo, ...; default: the variant's."),
    ] = None,
    changes: Annotated[
        list[str],
        options.SETTINGS,
    ] = [],  # noqa: B006 - typer copies it
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="MODEL", help="Start from a checkpoint: what `evaluate` takes."
        ),
    ] = None,
    parameters: Annotated[
        str, typer.Option("--train", help="all, or routers: only the depth routers learn.")
    ] = "all",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check shapes, memory and step time; train nothing.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, or bf16 by autocast; default: fp32 on the CPU, else bf16."),
    ] = None,
    data: Annotated[
        list[str], typer.Option(metavar="NAME=FILE", help="Local file for a text of the recipe.")
    ] = [],  # noqa: B006 - typer copies it
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of a tokenizer that replaces the recipe's.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Another number of steps than the recipe's.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train OUT anew.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Train a variant from scratch, or go on from a checkpoint.

    The same command goes on where the last one stopped, however it stopped. Several GPUs: put
    `torchrun --nproc-per-node N -m oasis_eval` in the place of `oasis-eval`.

    Example: oasis-eval train mini --variant oasis --seed 0 --out mini-oasis
    """
    from oasis_eval.training import recipes
    from oasis_eval.training.dry_run import dry_run as check
    from oasis_eval.training.run import Plan
    from oasis_eval.training.run import train as run

    plan = Plan(
        recipe=recipes.resolve(recipe),
        variant=variant,
        seed=seed,
        wiring=wiring,
        settings=options.settings(changes),
        start=start,
        train=_trained(parameters),
        device=device,
        dtype=options.dtype_named(dtype),
        tokenizer=tokenizer,
        data=options.mapping(data),
        max_steps=max_steps,
    )
    if dry_run:
        lines = check(plan)
    elif out is None:
        raise SpecError("--out is missing: expected the folder to train in")
    else:
        outcome = run(plan, out, overwrite=overwrite, quiet=quiet)
        lines = [] if outcome is None else outcome.lines()
    for line in lines:
        print(line)  # noqa: T201 - the command's output


def _trained(name: str) -> Trained:
    from oasis_eval.training.models import Trained

    if name in get_args(Trained):
        return name  # type: ignore[return-value]  # checked above
    raise SpecError(f"--train {name!r}: expected all or routers")
