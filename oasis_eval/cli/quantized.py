"""Commands for integer execution: checkpoints of codes, and whether real equals fake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oasis_eval.cli import options


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Anything that `evaluate` takes as MODEL.")
    ],
    scheme: Annotated[str, typer.Option(help="A scheme with codes, such as w4a4-real or nf4.")],
    out: Annotated[Path, typer.Option(help="Folder to write; its card is OUT.yaml beside it.")],
    calibration: Annotated[
        Path | None, typer.Option(help="Text for static ranges; default: the scheme's.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16 for what stays as it is; default: as in MODEL."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Write a quantized checkpoint: codes, scales, and the scheme they were made with.

    What is written is read again and must give the same logits bit for bit.

    Example: oasis-eval quantize ./my-llama --scheme w4a4-real --out my-llama-w4a4
    """
    from oasis_eval import registry
    from oasis_eval.quant import schemes
    from oasis_eval.quantized import Plan
    from oasis_eval.quantized import quantize as write

    plan = Plan(
        scheme=schemes.resolve(scheme),
        dtype=options.dtype_named(dtype),
        calibration=None if calibration is None else str(calibration),
        overwrite=overwrite,
    )
    for line in write(registry.resolve(model), plan, out=out).lines():
        print(line)  # noqa: T201 - the command's output


def parity(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Anything in floating point that `evaluate` takes as MODEL."
        ),
    ],
    scheme: Annotated[
        str, typer.Option(help="Schemes of real execution, for example w8a8-real,w4a4-real.")
    ] = "w8a8-real,w4a4-real",
    text: Annotated[
        Path | None, typer.Option(help="Text to run on; default: prose that ships with us.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: 512 or the model's positions.")
    ] = None,
    limit: Annotated[int, typer.Option(help="First N windows.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a scheme and no table.")
    ] = False,
) -> None:
    """Compare real with fake execution of the same scheme on the same tokens.

    Layer by layer on identical inputs, where sums must be exact, and end to end, where the
    difference must stay within 3 times what another summation order does to fake execution. Exit
    status 1: some scheme is beyond that.

    Example: oasis-eval parity ./my-llama --scheme w8a8-real --limit 2
    """
    from oasis_eval import registry
    from oasis_eval.parity import Plan, compare, table
    from oasis_eval.quant import schemes

    options.at_least(("--window", window, 2), ("--limit", limit, 1))
    plan = Plan(
        schemes=tuple(schemes.resolve(name) for name in options.names(scheme, "--scheme")),
        text=text,
        window=window,
        num_windows=limit,
        device=device,
        dtype=options.dtype_named(dtype),
    )
    found = []
    for comparison in compare(registry.resolve(model), plan):
        found.append(comparison)
        if as_json:
            print(json.dumps(comparison.as_json()), flush=True)  # noqa: T201 - the command's output
    if not as_json:
        print("\n".join(table(found)))  # noqa: T201 - the command's output
    if not all(comparison.passes for comparison in found):
        raise typer.Exit(1)
