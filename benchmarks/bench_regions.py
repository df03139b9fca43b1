"""Cost of the full graph, and of static ranges against a literal quantizer of the literature.

Forward passes of a 50M-parameter Llama over 4 x 512 tokens in fp32, attention on the eager path. A
pass of every variant is timed between two floating-point passes and set against their mean, in CPU
seconds of one thread; printed are medians over the rounds.

- `full graph`: scores, weights, context, keys and values, residual stream, embedding, inputs and
  outputs of every Linear. Target: at most twice the floating-point pass.
- `static linear`: inputs of every Linear but the head, per tensor, asymmetric. `literal` does the
  same as published research code does it: every layer for itself, each step an operation with a
  result of its own. Target: less than half of its overhead.

    OMP_NUM_THREADS=1 python benchmarks/bench_regions.py [rounds]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from bench_fake import build_model
from torch import Tensor, nn

from oasis_eval.modeling.instrumentation import instrumented
from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.names import FULL_GRAPH
from oasis_eval.quant.schemes import resolve
from oasis_eval.spec import QuantScheme

TARGETS = {"full graph static": 2.0, "full graph dynamic": 2.0}


class LiteralQuantizer(nn.Module):
    """Asymmetric, per tensor, by a fixed range: one operation after the other."""

    def __init__(self, low: float, high: float, bits: int) -> None:
        super().__init__()
        self.levels = 2**bits - 1
        self.scale = torch.tensor((max(high, 0.0) - min(low, 0.0)) / self.levels)
        self.zero_point = torch.round(-torch.tensor(min(low, 0.0)) / self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` quantized and dequantized."""
        codes = torch.round(x / self.scale)
        codes = codes + self.zero_point
        codes = torch.clamp(codes, 0.0, self.levels)
        codes = codes - self.zero_point
        return codes * self.scale


def quantize_literally(model: nn.Module, batch: Batch) -> None:
    """Give every Linear but the head a quantizer of its own for its input."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    del linears["lm_head"]
    ranges: dict[str, tuple[float, float]] = {}

    def observe(name: str, x: Tensor) -> None:
        ranges[name] = float(x.min()), float(x.max())

    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: observe(name, args[0]))
        for name, module in linears.items()
    ]
    seconds(model, batch.input_ids_BT)
    for handle in handles:
        handle.remove()
    for name, module in linears.items():
        quantizer = LiteralQuantizer(*ranges[name], bits=8)
        module.register_forward_pre_hook(lambda _, args, quantizer=quantizer: quantizer(args[0]))


def seconds(model: nn.Module, ids_BT: Tensor) -> float:
    """Return the CPU time of one forward pass."""
    start = time.process_time()
    with torch.no_grad():
        model(input_ids=ids_BT, use_cache=False)
    return time.process_time() - start


def dynamic() -> QuantScheme:
    """Return the full graph with a range per token."""
    preset = resolve("w8a8")
    return preset.model_copy(update={"name": "dynamic", "regions": FULL_GRAPH})


def main() -> None:
    """Time every variant and print a table of ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    ids_BT = torch.randint(0, 16384, (4, 512), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids_BT[:1], torch.ones_like(ids_BT[:1]))
    models: dict[str, nn.Module] = {}
    for name in ("fp32", "full graph static", "full graph dynamic", "static linear", "literal"):
        models[name] = build_model()
        models[name].set_attn_implementation("eager")
    for name, scheme in (
        ("full graph static", resolve("w8a8-static")),
        ("full graph dynamic", dynamic()),
    ):
        context = instrumented(models[name], ("attention", "kv_cache", "residual"))
        missing = context.__enter__()  # for as long as the program runs
        assert not missing
        quantize_(models[name], scheme, [batch])
    quantize_(models["static linear"], resolve("w8a8-static-linear"), [batch])
    quantize_literally(models["literal"], batch)
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        seconds(model, ids_BT)
    reference = models.pop("fp32")
    base = [seconds(reference, ids_BT)]
    for _ in range(rounds):
        for name, model in models.items():
            value = seconds(model, ids_BT)
            base.append(seconds(reference, ids_BT))
            ratios[name].append(2 * value / (base[-2] + base[-1]))
    print(f"fp32 pass over 4 x 512 tokens, eager: {statistics.median(base):.2f} s, one thread")
    print(f"{'variant':<24}{'ratio':>8}{'quartiles':>16}{'target':>8}")
    for name in models:
        values = ratios[name]
        low, _, high = statistics.quantiles(values, n=4)
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        spread = f"{low:.3f}-{high:.3f}"
        print(f"{name:<24}{statistics.median(values):>8.3f}{spread:>16}{target:>8}")
    ours, literal = (statistics.median(ratios[name]) - 1 for name in ("static linear", "literal"))
    print(f"overhead against the literal quantizer: {ours / literal:.2f} of it (target < 0.50)")


if __name__ == "__main__":
    main()
