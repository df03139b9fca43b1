"""What measuring outliers, attention and depth routing costs, next to a plain pass.

Backbones of 512 dimensions, 8 layers, 8 heads on 4 key/value heads, 4 windows of 512 tokens, one
at a time, float32, one thread; the head, which scoring pays for as well, is in neither pass. Times
are CPU seconds of interleaved runs, ratios the median of the ratios within a turn. Memory is the
peak of live tensors above the parameters.

    python benchmarks/bench_diagnostics.py [--repeats 7] [--tokens 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_decoder import PeakMemory
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_eval.diagnostics.observation import observe
from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from oasis_eval.modeling.variants import build_config

TIME_BUDGET = 2.0
MEMORY_BUDGET = 1.3
WINDOWS = 4


def build_models(length: int) -> dict[str, Any]:
    """Return a plain Llama and two variants of it."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    models: dict[str, Any] = {"llama": LlamaForCausalLM(config)}
    for variant in ("vanilla", "oasis"):
        models[variant] = LlamaOasisForCausalLM(build_config(config, variant))
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def plain(model: Any, ids: Tensor) -> None:
    """Run the backbone over the windows."""
    for row in ids.split(1):
        model.model(input_ids=row, use_cache=False)


def observed(model: Any, ids: Tensor) -> None:
    """Run it under observation."""
    with observe(model) as observation:
        for row in ids.split(1):
            observation.run(row)


def cpu_seconds(run: Callable[[Any, Tensor], None], model: Any, ids: Tensor) -> float:
    """Return the CPU time of one run."""
    start = time.process_time()
    run(model, ids)
    return time.process_time() - start


def peak_bytes(run: Callable[[Any, Tensor], None], model: Any, ids: Tensor) -> int:
    """Return the most bytes of tensors that were alive at once."""
    with PeakMemory() as memory:
        run(model, ids)
    return memory.peak_bytes


def main() -> None:
    """Print times, memory and their ratios against the budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, 4096, (WINDOWS, arguments.tokens))
    for name, model in build_models(arguments.tokens).items():
        pairs = []
        for turn in range(arguments.repeats + 1):
            pair = cpu_seconds(plain, model, ids), cpu_seconds(observed, model, ids)
            if turn:  # the first turn warms up
                pairs.append(pair)
        ratio = statistics.median(mine / other for other, mine in pairs)
        before, during = peak_bytes(plain, model, ids), peak_bytes(observed, model, ids)
        print(
            f"{name:8s} plain {statistics.median(p for p, _ in pairs):.3f} s   "
            f"observed {statistics.median(o for _, o in pairs):.3f} s   "
            f"ratio {ratio:.2f} (budget {TIME_BUDGET})   "
            f"memory {before / 2**20:.1f} -> {during / 2**20:.1f} MiB, "
            f"ratio {during / before:.2f} (budget {MEMORY_BUDGET})"
        )


if __name__ == "__main__":
    main()
