"""What comparing with the stored reference costs, next to scoring under the same scheme.

A Llama of 512 dimensions, 8 layers and 12288 tokens, of whose parameters the head is a fifth, as in
models of 100 to 300 million; 4 windows of 512 tokens, one at a time, float32, one thread. Times are
CPU seconds of interleaved runs, ratios the median of the ratios within a turn. Memory is the peak
of live tensors above the parameters. Scoring pays for the head as well, comparing for two of them.

    python benchmarks/bench_fidelity.py [--repeats 7] [--tokens 512] [--schemes w8a8,w4a4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_decoder import PeakMemory
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from oasis_eval import registry
from oasis_eval.cells import versions
from oasis_eval.fidelity import compare
from oasis_eval.harness.protocols import Window
from oasis_eval.harness.scoring import Scorer
from oasis_eval.loading import load, prepare
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.references import Reference

TIME_BUDGET = 1.3
VOCABULARY = 12288
WINDOWS = 4


def checkpoint(folder: Path, length: int) -> Path:
    """Write a model with random weights and a tokenizer that nobody uses."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes of tensors that were alive at once."""
    with PeakMemory() as memory:
        run()
    return memory.peak_bytes


def main() -> None:
    """Print times, memory and their ratios against the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--schemes", default="w8a8,w4a4")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCABULARY, (WINDOWS, arguments.tokens), generator=generator).tolist()
    windows = [Window(ids, ids[1:], 0) for ids in rows]
    with tempfile.TemporaryDirectory() as home:
        os.environ["OASIS_EVAL_CACHE"] = f"{home}/cache"
        folder = checkpoint(Path(home) / "model", arguments.tokens)
        loaded = load(registry.resolve(str(folder)), dtype="fp32")
        with prepare(loaded, schemes.resolve("fp32"), dtype="fp32") as plain:
            reference = Reference(plain, versions=versions())
            first = cpu_seconds(lambda: [reference.fill(window) for window in windows])
        print(f"reference pass, once: {first:.3f} s")
        for name in arguments.schemes.split(","):
            with prepare(loaded, schemes.resolve(name), dtype="fp32") as prepared:

                def score(prepared: PreparedModel = prepared) -> object:
                    return Scorer(prepared.model, device="cpu").score(windows, batch_size=1)

                def fidelity(prepared: PreparedModel = prepared) -> object:
                    return compare(prepared, windows, reference)

                pairs = []
                for turn in range(arguments.repeats + 1):
                    pair = cpu_seconds(score), cpu_seconds(fidelity)
                    if turn:  # the first turn warms up
                        pairs.append(pair)
                ratio = statistics.median(mine / other for other, mine in pairs)
                before, during = peak_bytes(score), peak_bytes(fidelity)
            print(
                f"{name:8s} scoring {statistics.median(p for p, _ in pairs):.3f} s   "
                f"fidelity {statistics.median(f for _, f in pairs):.3f} s   "
                f"ratio {ratio:.2f} (budget {TIME_BUDGET})   "
                f"memory {before / 2**20:.1f} -> {during / 2**20:.1f} MiB"
            )


if __name__ == "__main__":
    main()
