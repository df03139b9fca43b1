"""What depth routing and null routing cost, next to the plain decoder.

Models of 512 dimensions, 12 layers, 8 heads on 4 key/value heads, 512 tokens, float32, one thread.
Times are medians of interleaved runs, in CPU seconds of the process, which a busy machine disturbs
less than the clock; ratios are medians of the ratios within a turn. Memory is the peak of live
tensors of a training step above the parameters, counted by a dispatch mode, not by the allocator.

    python benchmarks/bench_decoder.py [--repeats 9] [--tokens 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from oasis_eval.modeling.variants import build_config

VOCABULARY = 4096
VARIANTS = ("residual-vanilla", "vanilla", "outeffhop", "oasis")
BUDGETS = (
    ("forward", "vanilla", "residual-vanilla", 1.15),
    ("forward", "oasis", "vanilla", 1.25),
    ("training step", "oasis", "vanilla", 1.35),
    ("peak memory", "oasis", "vanilla", 1.3),
)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensor storages that were made inside and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                self._track(leaf.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= num_bytes


def build_models(seed: int) -> dict[str, torch.nn.Module]:
    """Return the models by name; `transformers` is the library's own Llama."""
    base = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    torch.manual_seed(seed)
    models: dict[str, torch.nn.Module] = {"transformers": LlamaForCausalLM(base)}
    for name in VARIANTS:
        model = LlamaOasisForCausalLM(build_config(base, name))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(".query"):
                    parameter.normal_(std=0.05)  # the cost must not depend on a uniform mix
        models[name] = model
    return models


def forward(model: torch.nn.Module, ids: Tensor) -> None:
    """Run one forward pass without gradients."""
    with torch.no_grad():
        model.eval()(ids, use_cache=False)


def training_step(model: torch.nn.Module, ids: Tensor) -> None:
    """Run forward and backward."""
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def cpu_seconds(
    run: Callable[[torch.nn.Module, Tensor], None],
    models: dict[str, torch.nn.Module],
    ids: Tensor,
    repeats: int,
) -> dict[str, list[float]]:
    """Return the times of `run` on each model, one per turn."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            start = time.process_time()
            run(model, ids)
            if turn:  # the first one warms up
                times[name].append(time.process_time() - start)
    return times


def peak_bytes(model: torch.nn.Module, ids: Tensor) -> float:
    """Return the peak of live bytes of a training step, without parameters."""
    with PeakMemory() as memory:
        training_step(model, ids)
    return float(memory.peak_bytes)


def main() -> None:
    """Measure, then print a table and the ratios that have a budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = build_models(seed=0)
    ids = torch.randint(0, VOCABULARY, (1, arguments.tokens))
    table = {
        "forward": cpu_seconds(forward, models, ids, arguments.repeats),
        "training step": cpu_seconds(training_step, models, ids, arguments.repeats),
        "peak memory": {name: [peak_bytes(model, ids)] for name, model in models.items()},
    }
    for name in models:
        print(
            f"{name:18s} forward {statistics.median(table['forward'][name]) * 1e3:8.1f} ms   "
            f"training step {statistics.median(table['training step'][name]) * 1e3:8.1f} ms   "
            f"peak {table['peak memory'][name][0] / 2**20:7.1f} MiB"
        )
    for what, name, reference, budget in BUDGETS:
        pairs = zip(table[what][name], table[what][reference], strict=True)
        ratio = statistics.median(mine / other for mine, other in pairs)
        print(f"{what}: {name} / {reference} = {ratio:.3f} (budget {budget})")


if __name__ == "__main__":
    main()
