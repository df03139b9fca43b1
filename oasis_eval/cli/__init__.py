"""The command line: parses, calls one function, prints. Heavy imports happen inside commands."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from oasis_eval import __version__
from oasis_eval.cli import (
    catalogue,
    drawing,
    measuring,
    quantized,
    reporting,
    sensing,
    sweeping,
    tables,
    training,
)
from oasis_eval.cli.output import say
from oasis_eval.errors import OasisError

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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"oasis-eval {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    if debug:
        os.environ["OASIS_EVAL_DEBUG"] = "1"


app.command()(measuring.evaluate)
app.command()(sweeping.sweep)
app.command()(tables.table)
app.command()(tables.compare)
app.command()(reporting.report)
app.command()(drawing.figures)
app.command(name="import")(tables.import_)
app.command()(catalogue.models)
app.command()(catalogue.tasks)
app.command()(catalogue.schemes)
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(measuring.harness)
app.command()(catalogue.convert)
app.command()(quantized.quantize)
app.command()(quantized.parity)
app.command()(training.train)
app.command()(measuring.diagnose)
app.command()(sensing.sensitivity)
app.command()(drawing.attention)
app.command()(drawing.theory)
app.command()(measuring.demo)


def main() -> None:
    """Run the command line; a user's mistake is one or two lines and exit status 2."""
    try:
        app()
    except OasisError as error:
        if os.environ.get("OASIS_EVAL_DEBUG"):
            raise
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK") == "0":
            say(f"error: {error}")  # of a launcher's group, one process speaks
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
