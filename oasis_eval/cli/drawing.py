"""Commands that draw figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oasis_eval.cli import options, output
from oasis_eval.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oasis_eval.report.figures.style import Drawing
    from oasis_eval.theory import NoOpOfBranches, NoOpOfTokens

TOKENS = (4, 16, 64, 256, 1024, 4096)
TOKEN_EPSILONS = (0.1, 0.01, 0.001)
NUM_BRANCHES = 9
SMALLEST_NORMS = (0.0, 0.05, 0.2)
BRANCH_EPSILONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""What `theory` shows."""


def figures(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORDS...",
            help="Folders or files of records, *.safetensors of `attention`, *.csv of "
            "`sensitivity`.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
    kind: Annotated[
        str,
        typer.Option(
            help="perplexity, outliers, sink-mass, null-mass, depth-routing, context, passkey, "
            "attention, sensitivity; default: all that can be drawn.",
        ),
    ] = "",
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN",
            help="Keep records whose field matches, as `table --where`: scheme=w8a8*.",
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="pdf, png or both.")] = "pdf,png",  # noqa: A002 - the option's name
) -> None:
    """Draw figures for print from records: vector text, readable in grey and when colour-blind.

    What a kind lacks is said, with the command that would measure it.

    Example: oasis-eval figures results/runs --out figures --kind perplexity,outliers
    """
    from oasis_eval.report.figures.kinds import draw, read_sources

    kinds = options.names(kind, "--kind") if kind else ()
    filters = options.filters(where or [], "--where")
    drawings, lacking = draw(read_sources(records, where=filters), kinds, where=filters)
    _save(drawings, out, format)
    for line in lacking:
        output.say(f"not drawn: {line}")


def attention(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Anything that `evaluate` takes; models share a tokenizer."
        ),
    ],
    layers: Annotated[str, typer.Option(help="Numbers of layers, from 0: 0,4,11.")] = "0",
    heads: Annotated[str, typer.Option(help="Numbers of heads, from 0: 0,3.")] = "0",
    scheme: Annotated[str, typer.Option(help="Schemes (`oasis-eval schemes`).")] = "fp32",
    text: Annotated[
        Path | None, typer.Option(help="Text to read; default: prose that ships with us.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="First N tokens of the text.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
    format: Annotated[str, typer.Option(help="pdf, png or both.")] = "pdf,png",  # noqa: A002 - the option's name
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16 or fp16; default: fp32 on the CPU, bf16 elsewhere."),
    ] = None,
) -> None:
    """Capture and draw attention maps, models side by side on the same tokens.

    The maps are also written as *.safetensors, which `oasis-eval figures` draws again.

    Example: oasis-eval attention ./vanilla ./oasis --layers 0,4 --heads 0,1 --out figures
    """
    from oasis_eval import attention_maps
    from oasis_eval.attention import Plan, capture
    from oasis_eval.report.figures.kinds import ATTENTION, Sources, draw
    from oasis_eval.report.figures.style import formats_named, stem_of

    formats_named(options.names(format, "--format"))
    plan = Plan(
        models=tuple(models),
        schemes=options.names(scheme, "--scheme"),
        layers=_numbers(layers, "--layers"),
        heads=_numbers(heads, "--heads"),
        text=text,
        num_tokens=tokens,
        device=device,
        dtype=options.dtype_named(dtype),
    )
    captured = []
    for number, maps in enumerate(capture(plan)):
        captured.append(maps)
        stem = stem_of(f"attention-{number}", maps.info.label, maps.info.scheme)
        attention_maps.write(out / f"{stem}{attention_maps.SUFFIX}", maps)
    drawings, _ = draw(Sources((), (), tuple(captured)), (ATTENTION,), where={})
    _save(drawings, out, format)


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.csv and the figure; default: none.")
    ] = None,
    format: Annotated[str, typer.Option(help="pdf, png or both.")] = "pdf,png",  # noqa: A002 - the option's name
) -> None:
    """Show what doing nothing costs under a softmax, with and without a null.

    How large logits must get for a head to output next to nothing, and how much weight a router
    must put on the smallest update, by closed forms that the tests check against the suite's own
    normalizers and a linear program (docs/theory.md).

    Example: oasis-eval theory --out figures
    """
    from oasis_eval import theory as costs

    tokens = list(costs.token_grid(TOKENS, TOKEN_EPSILONS))
    branches = list(costs.branch_grid((NUM_BRANCHES,), SMALLEST_NORMS, BRANCH_EPSILONS))
    # Written first: a folder that cannot be written to is an error and nothing else.
    written = [] if out is None else _write_theory(out, format, tokens, branches)
    print("A head over n tokens that outputs epsilon (others' norm 1, the sink's 0); nats")  # noqa: T201
    output.print_rows(
        ("n", "epsilon", "softmax gap", "sink mass", "softmax1 margin", "largest mass"),
        [
            (
                f"{item.num_tokens}",
                f"{item.epsilon:g}",
                f"{item.gap:.2f}",
                f"{item.sink_mass:.3f}",
                f"{item.null_margin:.2f}",
                f"{item.largest_mass:.1e}",
            )
            for item in tokens
        ],
    )
    print(f"\nA router over {NUM_BRANCHES} branches that reads epsilon (others' norm 1)")  # noqa: T201
    output.print_rows(
        ("smallest", "epsilon", "its weight", "with a null", "null mass"),
        [
            (
                f"{item.smallest_norm:g}",
                f"{item.epsilon:g}",
                "infeasible" if math.isnan(item.dominant_weight) else f"{item.dominant_weight:.3f}",
                f"{item.dominant_weight_null:.3f}",
                f"{item.null_mass:.3f}",
            )
            for item in branches
        ],
    )
    for path in written:
        print(path)  # noqa: T201 - the command's output


def _write_theory(
    out: Path, formats: str, tokens: Sequence[NoOpOfTokens], branches: Sequence[NoOpOfBranches]
) -> list[Path]:
    """Write theory.csv and the figure, and return their paths."""
    from oasis_eval import theory as costs
    from oasis_eval.record import write_text_atomically
    from oasis_eval.report.figures.style import formats_named, save, settings
    from oasis_eval.report.figures.theory import theory as draw_theory

    kinds = formats_named(options.names(formats, "--format"))
    path = out / "theory.csv"
    write_text_atomically(path, costs.to_csv(tokens, branches))
    with settings():
        return [path, *save(draw_theory(tokens, branches), out, kinds)]


def _save(drawings: Sequence[Drawing], out: Path, formats: str) -> None:
    from oasis_eval.report.figures.style import formats_named, save

    kinds = formats_named(options.names(formats, "--format"))
    for drawing in drawings:
        for path in save(drawing, out, kinds):
            print(path)  # noqa: T201 - the command's output


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers of a comma-separated list."""
    names = options.names(text, option)
    if not all(name.isdecimal() for name in names):
        raise SpecError(f"{option} {text!r}: expected whole numbers from 0, separated by commas")
    return tuple(int(name) for name in names)
