"""What a sweep costs beside its evaluation passes, and what a second process gains.

A Llama of 512 dimensions and 8 layers with a tokenizer of 512 tokens, on generated prose, float32.
First six schemes over one checkpoint in this process: wall time of everything after the imports,
next to the sum of the cells' own times. Then two checkpoints, with one thread in this process and
in two processes of one thread each, whose start is counted.

    OMP_NUM_THREADS=1 python benchmarks/bench_sweep.py [--windows 16]
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from contextlib import chdir
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from oasis_eval.minicorpus import tokenizer as mini_tokenizer
from oasis_eval.parsing import parse
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep.ledger import Ledger
from oasis_eval.sweep.run import Plan, sweep

LOAD_BUDGET = 1.1
GAIN_BUDGET = 1.6
TOKENS = 256
SCHEMES = ["fp32", "w8a8", "w6a6", "w4a8", "w4a4", "w8a8-g64"]


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write a model with random weights and the tokenizer of the generated corpus."""
    tokenizer = mini_tokenizer.load()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def timed(models: list[str], out: str, *, windows: int, jobs: int | None) -> tuple[float, Ledger]:
    """Run a grid; return its wall time and its cells."""
    settings = {
        "models": models,
        "schemes": SCHEMES,
        "tasks": ["mini_ppl"],
        "window": TOKENS,
        "limit": windows,
        "batch_size": 4,
    }
    grid = parse(SweepSpec, settings, origin="bench")
    start = time.perf_counter()
    ledger = sweep(grid, Plan(Path(out), jobs=jobs), io.StringIO())
    seconds = time.perf_counter() - start
    assert ledger.count("ok") == len(ledger.entries)
    return seconds, ledger


def own_seconds(ledger: Ledger) -> float:
    """Return the sum of what the cells took by themselves."""
    provenances = [entry.record.provenance for entry in ledger.entries if entry.record]
    return sum(item.seconds or 0.0 for item in provenances if item is not None)


def main() -> None:
    """Print times and their ratios against the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=48)
    windows = parser.parse_args().windows
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as home, chdir(home):
        os.environ["OASIS_EVAL_CACHE"] = f"{home}/cache"
        for seed in (0, 1):
            write_checkpoint(Path(f"s{seed}"), seed)
        timed(["./s0"], "warm", windows=1, jobs=None)
        whole, ledger = timed(["./s0"], "one", windows=windows, jobs=None)
        passes = own_seconds(ledger)
        print(
            f"{len(ledger.entries)} schemes, one load: {whole:.1f} s, passes {passes:.1f} s, ratio "
            f"{whole / passes:.3f} (budget {LOAD_BUDGET})"
        )
        both = ["./s0", "./s1"]
        alone, _ = timed(both, "alone", windows=windows, jobs=None)
        shared, _ = timed(both, "shared", windows=windows, jobs=2)
        print(
            f"12 cells, one thread each: one process {alone:.1f} s, two {shared:.1f} s, gain "
            f"{alone / shared:.2f} (budget {GAIN_BUDGET})"
        )


if __name__ == "__main__":
    main()
