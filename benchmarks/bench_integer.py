"""Integer layers against an fp32 Linear: the whole layer, activations quantized in it.

Interleaved, one thread, CPU time of this process, so that a busy machine shifts both sides alike.

    python benchmarks/bench_integer.py [--rounds 15] [--rows 2048]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from oasis_eval.quant.integer import TorchBackend
from oasis_eval.quant.integer_layers import integer_layers, prepared_bytes
from oasis_eval.quant.schemes import resolve

NUM_INPUTS, NUM_OUTPUTS = 1024, 4096
TARGETS = {"w4a4-real": 0.6, "w4a8-real": 0.6, "w8a8-real": 1.0}
SCHEMES = (*TARGETS, "w8a8-g128-real", "w4a16-real")


class _OneLayer(nn.Module):
    """A model of one Linear."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False)
        self.layer.weight.data.copy_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def seconds(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """CPU time of one call on a tensor that no call has seen, so that nothing is shared."""
    x = x.clone()
    start = time.process_time()
    with torch.no_grad():
        run(x)
    return time.process_time() - start


def main() -> None:
    """Print the ratio of every scheme to fp32, with quartiles, and what it holds in memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=2048)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight, x = torch.randn(NUM_OUTPUTS, NUM_INPUTS), torch.randn(given.rows, NUM_INPUTS)
    plain = _OneLayer(weight)
    models = {}
    for name in SCHEMES:
        models[name] = _OneLayer(weight)
        TorchBackend().apply_(models[name], resolve(name), None, codes={}, keep_reference=False)
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for model in (plain, *models.values()):
        seconds(model, x)
    for _ in range(given.rounds):
        for name, model in models.items():
            before = seconds(plain, x)
            value = seconds(model, x)
            after = seconds(plain, x)
            base += [before, after]
            ratios[name].append(2 * value / (before + after))
    shape = f"{given.rows} x {NUM_INPUTS} x {NUM_OUTPUTS}"
    print(f"fp32 Linear, {shape}: {1e3 * statistics.median(base):.1f} ms, one thread")
    print(f"{'scheme':<16}{'ratio':>8}{'quartiles':>16}{'target':>8}{'bytes/weight':>14}  kernel")
    for name, model in models.items():
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        held = sum(buffer.nbytes for buffer in model.buffers()) + prepared_bytes(model)
        (layer,) = integer_layers(model).values()
        kernel = layer.integer.kernel.name if layer.integer.kernel else "dequantized"
        print(
            f"{name:<16}{middle:>8.3f}{f'{low:.3f}-{high:.3f}':>16}{target:>8}"
            f"{held / weight.numel():>14.2f}  {kernel}"
        )


if __name__ == "__main__":
    main()
