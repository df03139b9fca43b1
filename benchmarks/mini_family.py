"""Train, measure and tabulate the mini family: all that mini-family.md shows, from nothing.

    python benchmarks/mini_family.py OUT --jobs 2

trains every model into OUT, measures it into OUT/records and writes the tables into
results/reference. A job is a command of oasis-eval on one thread; what is finished is not done
again, so the same line goes on after an interruption. `--only NAME` (several times) takes some of
the models and writes no tables.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
PAGE = REFERENCE / "mini-family.md"
SCHEMES = ("fp32", "w8a8", "w8a8-static", "w4a4", "w4a4-static")
ONE, THREE = (1,), (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Member:
    """A model of the family, with each of its seeds."""

    name: str
    label: str
    arguments: str
    """Of `oasis-eval train mini`, besides seed and folder."""
    seeds: tuple[int, ...] = ONE


def _authors(variant: str) -> str:
    return f"--variant {variant} --wiring oasis_repo"


def _oasis(**settings: object) -> str:
    changes = (f"--set {name}={value}" for name, value in settings.items())
    return " ".join(("--variant oasis", *changes))


# Without depth routing `residual-oasis` is `residual-outeffhop`, and under block wiring `aos`
# computes what `outeffhop` computes: neither is trained.
BLOCK = (
    Member("vanilla", "AttnRes", "--variant vanilla", THREE),
    Member("outeffhop", "OutEffHop", "--variant outeffhop", THREE),
    Member("oasis", "OASIS", "--variant oasis", THREE),
    Member("oasis-adaptive", "OASIS, learned nulls", "--variant oasis_adaptive"),
    Member("clipped", "clipped softmax", "--variant clipped"),
    Member("gated", "gated", "--variant gated"),
    Member("gated-g1", "gated G1", "--variant gated_g1"),
    Member("sparsemax", "sparsemax", "--variant sparsemax"),
    Member("entmax15", "entmax15", "--variant entmax15"),
)
AUTHORS = (
    Member("vanilla-repo", "AttnRes (authors' wiring)", _authors("vanilla"), THREE),
    Member("outeffhop-repo", "token softmax1 alone (authors' wiring)", _authors("outeffhop")),
    Member(
        "depth1-repo",
        "depth softmax1 alone (authors' wiring)",
        f"{_authors('vanilla')} --set depth_normalizer=softmax1",
    ),
    Member("aos-repo", "AoS (authors' wiring)", _authors("aos"), THREE),
    Member("oasis-repo", "OASIS (authors' wiring)", _authors("oasis"), THREE),
)
RESIDUAL = (
    Member("residual-vanilla", "residual, softmax", "--variant residual-vanilla"),
    Member("residual-outeffhop", "residual, OutEffHop", "--variant residual-outeffhop"),
    Member(
        "residual-oasis-adaptive", "residual, learned null", "--variant residual-oasis_adaptive"
    ),
    Member("residual-clipped", "residual, clipped softmax", "--variant residual-clipped"),
    Member("residual-gated", "residual, gated", "--variant residual-gated"),
    Member("residual-gated-g1", "residual, gated G1", "--variant residual-gated_g1"),
    Member("residual-sparsemax", "residual, sparsemax", "--variant residual-sparsemax"),
    Member("residual-entmax15", "residual, entmax15", "--variant residual-entmax15"),
)
ABLATIONS = (
    Member(
        "oasis-beta1",
        "OASIS, coupling 1",
        _oasis(coupling_beta="fixed", coupling_beta_value=1),
    ),
    Member(
        "oasis-beta5",
        "OASIS, coupling 5",
        _oasis(coupling_beta="fixed", coupling_beta_value=5),
    ),
    Member("oasis-logn2", "OASIS, null logits 2", _oasis(token_log_n=2, depth_log_n=2)),
    Member("oasis-lognm2", "OASIS, null logits -2", _oasis(token_log_n=-2, depth_log_n=-2)),
)
MEMBERS = (*BLOCK, *AUTHORS, *RESIDUAL, *ABLATIONS)
SECTIONS = {
    "block": (BLOCK, None),
    "authors": (AUTHORS, None),
    "residual": (RESIDUAL, None),
    "ablations": ((BLOCK[1], BLOCK[2], *ABLATIONS), 1),
}
"""Tables of the page: rows, and the only seed that counts where the others have no part."""

Values = dict[tuple[str, str, str], dict[int, float]]
"""By model, scheme and metric: by seed."""


# --- training and measuring -----------------------------------------------------------------------


def make(member: Member, seed: int, out: Path) -> None:
    """Train and measure one model, or whatever of it is not there yet."""
    folder = out / f"s{seed}" / f"mini-{member.name}"
    call("train", "mini", *member.arguments.split(), f"--seed={seed}", f"--out={folder}")
    card = folder.with_name(f"{folder.name}.yaml")
    content = yaml.safe_load(card.read_text(encoding="utf-8")) | {"label": member.label}
    card.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    quantized = ",".join(SCHEMES[1:])
    answers = ("--task=mini_gsm", "--limit=250", "--batch-size=50")
    text = ("--task=mini_ppl", "--limit=120", "--batch-size=10")
    records = f"--out={out / 'records'}"
    call("evaluate", str(card), f"--scheme=fp32,{quantized}", *answers, records)
    call("evaluate", str(card), "--scheme=fp32", "--diagnostics", *text, records)
    call("evaluate", str(card), f"--scheme={quantized}", *text, records)


def call(*words: str) -> None:
    """Run one command of oasis-eval quietly; its errors are shown."""
    command = [sys.executable, "-m", "oasis_eval", *words, "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def run(members: tuple[Member, ...], out: Path, jobs: int) -> None:
    """Make all models, seed 1 of each before the others."""
    todo = sorted(
        ((seed, member) for member in members for seed in member.seeds), key=lambda item: item[0]
    )
    begun = time.monotonic()
    failed = threading.Event()

    def job(seed: int, member: Member) -> str:
        try:
            if not failed.is_set():
                make(member, seed, out)
        except BaseException:
            failed.set()  # what has not begun is not begun
            raise
        return f"{member.name}, seed {seed}"

    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(job, seed, member) for seed, member in todo]
            for number, future in enumerate(as_completed(futures), 1):
                minutes = (time.monotonic() - begun) / 60.0
                print(f"{number}/{len(todo)} {future.result()}: {minutes:.0f} min", flush=True)
        except BaseException:
            failed.set()
            raise


# --- tables ---------------------------------------------------------------------------------------


def tabulate(out: Path) -> None:
    """Write the files of the reference, and the tables into the page."""
    records = str(out / "records")
    # What fits a printed page: the models that the claims are about.
    tables = {
        "mini": ("mini", (), "model,scheme", ("vanilla", "oasis")),
        "outliers": (
            "mini-outliers",
            ("--baseline", "mini-vanilla"),
            "model,metric",
            ("vanilla", "outeffhop", "oasis"),
        ),
    }
    for spec, (name, options, printed, models) in tables.items():
        words = (records, "--spec", spec, *options)
        table(*words, "--format", "csv", "--out", str(REFERENCE / f"{name}.csv"))
        table(*words, "--format", "markdown", "--out", str(REFERENCE / f"{name}.md"))
        few = [f"--where=model=mini-{model}" for model in models]
        paper = ("--format", "latex", "--rows", printed, "--out", str(REFERENCE / f"{name}.tex"))
        table(*words, *few, *paper)
    long = out / "long.csv"
    table(records, "--rows", "model,seed", "--format", "csv-long", "--out", str(long))
    metrics = {"token_perplexity", "pass@1", *(metric for metric, _ in OUTLIERS.values())}
    keys = ("model", "label", "seed", "scheme", "metric", "value")
    with long.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in metrics]
    kept = sorted({tuple(row[key] for key in keys) for row in rows})
    with (REFERENCE / "mini-seeds.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([keys, *kept])
    values: Values = defaultdict(dict)
    for model, _, seed, scheme, metric, value in kept:
        values[model.removeprefix("mini-"), scheme, metric][int(seed)] = float(value)
    page = PAGE.read_text(encoding="utf-8")
    sections = {name: section_of(values, *rows) for name, rows in SECTIONS.items()}
    for name, text in {**sections, "claims": claims(values), "depth": depth(values)}.items():
        begin, end = f"<!-- tables: {name} -->\n", f"<!-- end: {name} -->\n"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = "".join((before, begin, "\n", text, "\n", end, after))
    PAGE.write_text(page, encoding="utf-8")


def table(*words: str) -> None:
    """Run `oasis-eval table`; its notes are shown."""
    subprocess.run([sys.executable, "-m", "oasis_eval", "table", *words], cwd=ROOT, check=True)


OUTLIERS = {
    "infinity norm, outputs": ("max_inf_norm_outputs", ".0f"),
    "kurtosis, outputs": ("avg_kurtosis_outputs", ".1f"),
    "infinity norm, Linear inputs": ("max_inf_norm_linear_inputs", ".0f"),
    "kurtosis, Linear inputs": ("avg_kurtosis_linear_inputs", ".0f"),
    "sink rate": ("sink_rate", ".2f"),
    "null mass": ("null_mass", ".3f"),
}
HEADS = ("fp32", "W8A8", "W8A8 static", "W4A4", "W4A4 static")


CLAIMS = (
    ("infinity norm, outputs", "-84 % (-9 %)", "fp32", "max_inf_norm_outputs"),
    ("infinity norm, Linear inputs", "", "fp32", "max_inf_norm_linear_inputs"),
    ("kurtosis, outputs", "-97 % (-3 %)", "fp32", "avg_kurtosis_outputs"),
    ("kurtosis, Linear inputs", "", "fp32", "avg_kurtosis_linear_inputs"),
    *(
        (f"perplexity, {head}", "-74 % (-76 %)" * (head == "W8A8"), scheme, "token_perplexity")
        for head, scheme in zip(HEADS, SCHEMES, strict=True)
    ),
    *(
        (f"Pass@1, {head}", "+23 % (+12 %)" * (head == "W4A4"), scheme, "pass@1")
        for head, scheme in zip(HEADS, SCHEMES, strict=True)
    ),
)
"""Rows of the table of claims: what, what the paper's abstract says (an earlier one), and where."""


def claims(values: Values) -> str:
    """Return the table of OASIS against vanilla, paired by seed."""

    def cell(suffix: str, scheme: str, metric: str) -> str:
        after, before = (values[f"{name}{suffix}", scheme, metric] for name in ("oasis", "vanilla"))
        seeds = sorted(after)
        if metric == "pass@1":
            found = [100.0 * (after[seed] - before[seed]) for seed in seeds]
            return "{:+.1f} points ({:+.1f} to {:+.1f})".format(*interval(found))
        found = [math.log(after[seed] / before[seed]) for seed in seeds]
        ends = [100.0 * math.expm1(end) for end in interval(found)]
        form = "{:+.1f} % ({:+.1f} to {:+.1f})"
        return (form if metric == "token_perplexity" else form.replace(".1f", ".0f")).format(*ends)

    heads = ("the paper", "block wiring", "authors' wiring")
    cells = [
        [said, *(cell(suffix, scheme, metric) for suffix in ("", "-repo"))]
        for _, said, scheme, metric in CLAIMS
    ]
    return markdown("OASIS against vanilla", heads, [name for name, *_ in CLAIMS], cells)


def depth(values: Values) -> str:
    """Return the table of plain residual models against those that route, seed 1 of each."""
    rows = [
        (name, scheme, metric)
        for name, _, scheme, metric in CLAIMS
        if metric != "pass@1"  # at the floor without depth routing: no ratio
    ]
    cells = []
    for _, scheme, metric in rows:
        pairs = [(item.name, item.name.removeprefix("residual-")) for item in RESIDUAL]
        found = [
            math.log(values[plain, scheme, metric][1] / values[routed, scheme, metric][1])
            for plain, routed in pairs
        ]
        ends = [math.exp(end) for end in interval(found)]
        higher = sum(ratio > 0.0 for ratio in found)
        cells.append(["{:.2f} ({:.2f} to {:.2f})".format(*ends), f"{higher} of {len(found)}"])
    heads = ("without, as a multiple of with", "higher without")
    return markdown("depth routing", heads, [name for name, *_ in rows], cells)


def interval(found: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean with its 95 % interval of Student's t."""
    mean, error = statistics.mean(found), statistics.stdev(found) / math.sqrt(len(found))
    half = float(stats.t.ppf(0.975, len(found) - 1)) * error
    return mean, mean - half, mean + half


def section_of(values: Values, members: tuple[Member, ...], seed: int | None) -> str:
    """Return the three tables of a section: outliers, perplexity, answers."""

    def cell(model: str, scheme: str, metric: str, form: str, scale: float = 1.0) -> str:
        by_seed = values[model, scheme, metric]
        found = [scale * value for of, value in sorted(by_seed.items()) if seed in (None, of)]
        form = (
            ".0f"
            if form == "perplexity" and found[0] >= 50.0
            else form.replace("perplexity", ".2f")
        )
        spread = [statistics.stdev(found)] if len(found) > 1 else []
        return " ± ".join(format(value, form) for value in (statistics.mean(found), *spread))

    outliers = [
        [cell(item.name, "fp32", metric, form) for metric, form in OUTLIERS.values()]
        for item in members
    ]
    perplexity = [
        [cell(item.name, scheme, "token_perplexity", "perplexity") for scheme in SCHEMES]
        for item in members
    ]
    answers = [
        [cell(item.name, scheme, "pass@1", ".0f", 100.0) for scheme in SCHEMES] for item in members
    ]
    labels = [item.label for item in members]
    return "\n".join(
        (
            markdown("", OUTLIERS, labels, outliers),
            markdown("perplexity", HEADS, labels, perplexity),
            markdown("Pass@1, %", HEADS, labels, answers),
        )
    )


def markdown(corner: str, heads: object, labels: list[str], cells: list[list[str]]) -> str:
    """Return one table."""
    rule = f"|---|{'---:|' * len(cells[0])}"
    head, *lines = [
        [corner, *heads],
        *([name, *row] for name, row in zip(labels, cells, strict=True)),
    ]
    body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join((f"| {' | '.join(head)} |".replace("|  |", "| |"), rule, *body, ""))


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of models and records")
    parser.add_argument("--jobs", type=int, default=2, help="models at once, a thread each")
    parser.add_argument("--only", action="append", choices=[item.name for item in MEMBERS])
    given = parser.parse_args()
    out = given.out.resolve()
    run(
        tuple(item for item in MEMBERS if not given.only or item.name in given.only),
        out,
        given.jobs,
    )
    if not given.only:
        tabulate(out)


if __name__ == "__main__":
    main()
