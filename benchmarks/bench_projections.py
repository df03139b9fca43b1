"""sparsemax and entmax15 over attention rows against the library's full sort, forward only.

    OMP_NUM_THREADS=1 python benchmarks/bench_projections.py [ROUNDS]

Interleaved rounds on causal rows of 256 keys, 4 sequences, 5 heads; medians of CPU time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import entmax
import torch
from torch import Tensor

from oasis_eval.modeling import normalizers

SHAPE = (4, 5, 256, 256)


def seconds(function: Callable[[Tensor], object], logits: Tensor) -> float:
    """Return the CPU time of one call."""
    begun = time.process_time()
    function(logits)
    return time.process_time() - begun


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    torch.manual_seed(0)
    hidden = ~torch.ones(SHAPE[-2:], dtype=torch.bool).tril()
    logits = (2.0 * torch.randn(SHAPE)).masked_fill(hidden, -4.0)
    for name in ("sparsemax", "entmax15"):
        ours = getattr(normalizers, name)
        full = getattr(entmax, name)
        times = [(seconds(ours, logits), seconds(full, logits)) for _ in range(rounds)]
        mine, theirs = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
        print(f"{name}: {mine:.1f} ms, full sort {theirs:.1f} ms, ratio {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
