"""Commands that list what there is, and make checkpoints of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oasis_eval.cli import options, output


def models() -> None:
    """List the model cards, and what else `evaluate` takes."""
    from oasis_eval import registry

    rows = [
        (card.name, card.variant, card.source.kind, card.label)
        for card in registry.cards().values()
    ]
    output.print_rows(("model", "variant", "source", "label"), rows)
    print(  # noqa: T201 - the command's output
        "\nAlso: a folder with config.json and safetensors, a *.gguf file or a folder with one, "
        "package:NAME,\na hub id owner/name@revision, or a card of your own (*.yaml)."
    )


def tasks() -> None:
    """List the tasks, their data, and the protocols that score them."""
    from oasis_eval.corpus import DATA_SETS
    from oasis_eval.harness.protocols import DEFAULTS, TASKS, parse_protocol

    rows = [
        (name, default, f"{hub.repo} ({hub.split})" if hub.repo else "a file of yours")
        for name, default in TASKS.items()
        for hub in (DATA_SETS[name],)
    ]
    output.print_rows(("task", "default protocol", "data set (or --data NAME=FILE)"), rows)
    print()  # noqa: T201 - the command's output
    names = [*DEFAULTS, "gsm8k-5shot", "passkey-1024"]
    output.print_rows(
        ("protocol", "meaning"), [(name, parse_protocol(name).summary) for name in names]
    )
    print("\nAnother window or shot count is another name: gptq-1024, gsm8k-0shot.")  # noqa: T201


def schemes(
    show: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print this scheme as YAML, to be changed and named."),
    ] = None,
) -> None:
    """List the quantization schemes, what runs them, and what cannot run here and why.

    Example: oasis-eval schemes --show w4a4 > mine.yaml
    """
    from oasis_eval.quant.names import GRAMMAR
    from oasis_eval.quant.schemes import presets, resolve, to_yaml

    if show is not None:
        print(to_yaml(resolve(show)), end="")  # noqa: T201 - the command's output
        return
    from oasis_eval.quant.support import unsupported

    rows, refused = [], []
    for name, scheme in presets().items():
        reason = unsupported(scheme)
        backend = "-" if scheme.backend == "none" else scheme.backend
        rows.append((name, backend if reason is None else "not here", scheme.description))
        refused += [reason] if reason is not None else []
    output.print_rows(("scheme", "backend", "meaning"), rows)
    lines = [
        "",
        *refused,
        f"Any name of the form {GRAMMAR} is a scheme; X and Y are 2 to 8 or 16 bits.",
        "fp8, mxfp4 and nvfp4 take -smooth, -rot and -gptq too, and fp8 groups: fp8-g128-rot.",
        "Others are YAML files. Without -real, quantized values are computed in floating point.",
    ]
    print("\n".join(lines))  # noqa: T201 - the command's output


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A plain Llama or Qwen3: anything that `evaluate` takes as MODEL.",
        ),
    ],
    variant: Annotated[str, typer.Option(help="vanilla, oasis, aos, residual-outeffhop, ...")],
    out: Annotated[Path, typer.Option(help="Folder to write; its card is OUT.yaml beside it.")],
    wiring: Annotated[
        str | None,
        typer.Option(help="attnres_block, attnres_full, oasis_repo, ...; default: the variant's."),
    ] = None,
    changes: Annotated[
        list[str],
        options.SETTINGS,
    ] = [],  # noqa: B006 - typer copies it
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
        settings=options.settings(changes),
        num_blocks=blocks,
        depth_output_scale=depth_output_scale,
        dtype=options.dtype_named(dtype),
        text=text,
    )
    conversion = wrap(registry.resolve(source), plan, out=out, overwrite=overwrite)
    for line in conversion.lines():
        print(line)  # noqa: T201 - the command's output
