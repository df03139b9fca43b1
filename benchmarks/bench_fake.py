"""Cost of fake quantization: forward passes of a 50M-parameter Llama over 4 x 512 tokens, fp32.

Each pass of a variant is timed between two floating-point passes and set against their mean, in CPU
seconds of one thread; printed are medians over the rounds.

    OMP_NUM_THREADS=1 python benchmarks/bench_fake.py [rounds [variant,...]]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_eval.quant.backends import quantize_
from oasis_eval.quant.calibrate import Batch
from oasis_eval.quant.layers import FakeQuantLinear
from oasis_eval.quant.schemes import resolve

VARIANTS = (
    "fp32 again",
    "w8a8",
    "w4a4",
    "w4a4-g128",
    "w8a8-static-linear",
    "w8a8 unshared",
    "w4a4 unshared",
)
TARGETS = {"w8a8": 1.15}


def build_model() -> LlamaForCausalLM:
    """Return a Llama of 51 million parameters with seeded random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=8,
        num_attention_heads=10,
        num_key_value_heads=10,
        vocab_size=16384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def unshare(model: nn.Module) -> None:
    """Make every layer quantize its input itself."""
    for module in model.modules():
        if isinstance(module, FakeQuantLinear):
            module.quantization.session.shared = None


def seconds(model: nn.Module, ids_BT: Tensor) -> float:
    """Return the CPU time of one forward pass."""
    start = time.process_time()
    with torch.no_grad():
        model(input_ids=ids_BT, use_cache=False)
    return time.process_time() - start


def main() -> None:
    """Time every variant and print a table of ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    ids_BT = torch.randint(0, 16384, (4, 512), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids_BT[:1], torch.ones_like(ids_BT[:1]))
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else VARIANTS
    models: dict[str, nn.Module] = {"fp32": build_model()}
    for name in chosen:
        models[name] = build_model()
        scheme = name.removesuffix(" unshared")
        if scheme != "fp32 again":
            quantize_(models[name], resolve(scheme), [batch])
        if scheme != name:
            unshare(models[name])
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
    print(f"fp32 pass over 4 x 512 tokens: {statistics.median(base):.2f} s, one thread")
    print(f"{'variant':<24}{'ratio':>8}{'quartiles':>16}{'target':>8}")
    for name in models:
        values = ratios[name]
        low, _, high = statistics.quantiles(values, n=4)
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        spread = f"{low:.3f}-{high:.3f}"
        print(f"{name:<24}{statistics.median(values):>8.3f}{spread:>16}{target:>8}")


if __name__ == "__main__":
    main()
