"""Time of attention under each normalizer against plain fused attention and the eager formula.

All contenders take turns in one process, so that what else the machine does hits all alike; the
medians of their times are compared. Batch 2, 8 heads over 4 key/value heads, 512 tokens of width
64, causal, fp32, as in a decoder layer of width 512. Prints a table; `--json` prints it as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from oasis_eval.modeling.attention import attend
from oasis_eval.modeling.normalizers import Normalizer

BATCH, HEADS, KEY_HEADS, TOKENS, WIDTH = 2, 8, 4, 512, 64
SCALING = WIDTH**-0.5
SOFTMAX1 = Normalizer("softmax1")

LIMITS = {
    ("softmax1", "forward"): ("sdpa", 1.5),
    ("softmax1", "forward+backward"): ("sdpa", 1.2),
}
LEAST_SPEEDUP_OVER_EAGER = 3.5


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Plain fused attention, the yardstick."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


def softmax1(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The fast path."""
    return attend(query, key, value, mask, normalizer=SOFTMAX1, scaling=SCALING).context


def softmax1_null(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The fast path with the null mass used, so that its gradient flows."""
    output = attend(
        query, key, value, mask, normalizer=SOFTMAX1, scaling=SCALING, need_null_mass=True
    )
    assert output.null_mass is not None
    return output.context * output.null_mass.mean()


def eager(
    kind: Normalizer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """The reference path, which forms scores and weights."""
    return attend(
        query, key, value, mask, normalizer=kind, scaling=SCALING, need_probs=True
    ).context


def formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax1 in an eager attention function of transformers, as it is usually written."""
    groups = HEADS // KEY_HEADS
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    scores = query @ key.transpose(-1, -2) * SCALING
    scores = scores + torch.where(mask, 0.0, torch.finfo(scores.dtype).min)
    peak = scores.max(dim=-1, keepdim=True).values.clamp_min(0.0)
    weights = torch.exp(scores - peak)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(-peak))
    return (weights @ value).transpose(1, 2).contiguous()


def library(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """What transformers itself has for a null with logit 0: the eager attention of gpt-oss."""
    if mask is None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    bias = torch.zeros(()).masked_fill(~mask, torch.finfo(query.dtype).min)
    module = SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, sinks=torch.zeros(HEADS), training=False
    )
    context, _ = eager_attention_forward(module, query, key, value, bias, SCALING)
    return context


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]] = {
    "sdpa": sdpa,
    "softmax1": softmax1,
    "softmax1 + null mass": softmax1_null,
    "softmax1, formula": formula,
    "softmax1, transformers": library,
    "softmax1, eager path": partial(eager, SOFTMAX1),
    "softmax, eager path": partial(eager, Normalizer("softmax")),
    "clipped_softmax": partial(eager, Normalizer("clipped_softmax", gamma=-12.0 / TOKENS)),
    "softpick": partial(eager, Normalizer("softpick")),
    "sparsemax": partial(eager, Normalizer("sparsemax")),
    "entmax15": partial(eager, Normalizer("entmax15")),
}


def measure(rounds: int, padded: bool) -> dict[str, dict[str, float]]:
    """Return milliseconds, median over `rounds`, by contender and direction."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, weight = (
        torch.randn(BATCH, heads, TOKENS, WIDTH, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    mask = None
    if padded:
        mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        mask[0, ..., : TOKENS // 8] = False
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    times: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "forward+backward": []} for name in CONTENDERS
    }
    for turn in range(rounds + 2):  # the first two warm up
        for name, call in CONTENDERS.items():
            start = time.perf_counter()
            with torch.no_grad():
                call(query, key, value, mask)
            middle = time.perf_counter()
            output = call(*leaves, mask)
            upstream = weight if output.shape == weight.shape else weight.transpose(1, 2)
            torch.autograd.grad(output, leaves, upstream)
            end = time.perf_counter()
            if turn >= 2:
                times[name]["forward"].append(middle - start)
                times[name]["forward+backward"].append(end - middle)
    return {
        name: {way: 1e3 * statistics.median(values) for way, values in ways.items()}
        for name, ways in times.items()
    }


def main() -> None:
    """Measure with and without padding and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {
        label: measure(options.rounds, padded)
        for label, padded in (("causal", False), ("left-padded", True))
    }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for label, by_name in results.items():
        print(f"\n{label}, milliseconds (ratio to sdpa), {options.threads} thread(s)")
        for name, ways in by_name.items():
            cells = (f"{ms:8.2f} ({ms / by_name['sdpa'][way]:5.2f})" for way, ms in ways.items())
            print(
                f"  {name:22s}"
                + "".join(f"  {way} {c}" for way, c in zip(ways, cells, strict=True))
            )
        for (name, way), (base, limit) in LIMITS.items():
            ratio = by_name[name][way] / by_name[base][way]
            print(f"  {name} {way}: {ratio:.2f} x {base}, at most {limit} wanted")
        for way in ("forward", "forward+backward"):
            for name in ("softmax1, formula", "softmax1, transformers"):
                speedup = by_name[name][way] / by_name["softmax1"][way]
                print(
                    f"  softmax1 {way}: {speedup:.2f} times faster than {name!r}, "
                    f"at least {LEAST_SPEEDUP_OVER_EAGER} wanted"
                )


if __name__ == "__main__":
    main()
