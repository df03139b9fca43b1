"""What a perplexity pass costs beside what a user would run instead.

Time: the suite's scorer against a bare loop of forward passes with one windowed cross-entropy, on
a 50M-parameter Llama. Memory: the suite's lm-eval model against lm-eval's own HFLM on the same
text, at a vocabulary of 150k, each in a process of its own. Timed runs are interleaved; the ratio
is the median of the rounds' ratios.

    python benchmarks/bench_perplexity.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW = 512
NUM_WINDOWS = 4
ROUNDS = 7
LARGE_VOCABULARY = 151_936


def small_llama(vocabulary: int = 32_000, hidden: int = 512, layers: int = 8) -> LlamaForCausalLM:
    """Return a random Llama; the defaults have about 50M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def bench_time() -> None:
    """Print the ratio of the scorer's time to the bare loop's."""
    from oasis_eval.harness.protocols import Window
    from oasis_eval.harness.scoring import Scorer

    model = small_llama()
    ids = torch.randint(
        0, 32_000, (NUM_WINDOWS, WINDOW), generator=torch.Generator().manual_seed(1)
    )
    windows = [Window(row, row[1:], 0) for row in ids.tolist()]
    scorer = Scorer(model, device="cpu")

    @torch.inference_mode()
    def bare() -> float:
        total = 0.0
        for row in ids:
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        return total

    def ours() -> float:
        return sum(score.nll_nats for score in scorer.score(windows, batch_size=1))

    bare(), ours()
    ratios = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        expected = bare()
        middle = time.perf_counter()
        actual = ours()
        ratios.append((time.perf_counter() - middle) / (middle - start))
    assert abs(actual - expected) <= 5e-5 * expected
    print(f"time, suite / bare loop: {statistics.median(ratios):.3f} (limit 1.05)")


def save_large_model(folder: Path) -> None:
    """Save a small model with a large vocabulary and a whitespace tokenizer."""
    small_llama(LARGE_VOCABULARY, hidden=64, layers=2).save_pretrained(folder)
    words = {f"w{index}": index for index in range(1000)}
    words["<unk>"], words["<s>"] = 1000, 1001
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<s>"
    ).save_pretrained(folder)


def measure_memory(kind: str, folder: str) -> None:
    """Score one text with one of the two models and print loss and memory above the load."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text = " ".join(f"w{index * 7 % 1000}" for index in range(2 * 2048))
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    if kind == "suite":
        from oasis_eval import load, prepare, resolve_model
        from oasis_eval.harness.lm import OasisLM
        from oasis_eval.quant.schemes import resolve

        reference = load(resolve_model(folder), dtype="fp32")
        with prepare(reference, resolve("fp32"), dtype="fp32") as prepared:
            model = OasisLM(prepared, quiet=True)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            loss = model.loglikelihood_rolling([request])[0]
    else:
        model = HFLM(pretrained=folder, dtype="float32", device="cpu", add_bos_token=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loss = model.loglikelihood_rolling([request], disable_tqdm=True)[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {"loss": float(loss), "peak_mb": after / 1024, "extra_mb": (after - before) / 1024}
        )
    )


def bench_memory() -> None:
    """Print the ratio of peak memory, whole process and above the loaded model."""
    with tempfile.TemporaryDirectory() as folder:
        save_large_model(Path(folder))
        results = {}
        for kind in ("hflm", "suite"):
            command = [sys.executable, __file__, kind, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[kind] = json.loads(done.stdout.splitlines()[-1])
    suite, hflm = results["suite"], results["hflm"]
    assert abs(suite["loss"] - hflm["loss"]) <= 1e-4 * abs(hflm["loss"]), results
    for name in ("peak_mb", "extra_mb"):
        ratio = suite[name] / hflm[name]
        print(
            f"{name}: suite {suite[name]:.0f}, HFLM {hflm[name]:.0f}, ratio {ratio:.2f} (limit 0.5)"
        )


def bench_loads() -> None:
    """Print how often three schemes load one checkpoint."""
    from oasis_eval import EvaluationSpec, evaluate

    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.txt"
        save_large_model(model)
        text.write_text(" ".join(f"w{index * 7 % 1000}" for index in range(600)))
        spec = EvaluationSpec(
            models=(str(model),), tasks=("text",), data={"text": str(text)}, window=256
        )
        report = evaluate(spec, Path(folder) / "records", quiet=True)
    assert report.is_complete, report
    print(f"loads for {len(report.records)} schemes: {report.num_loads} (limit 1)")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure_memory(sys.argv[1], sys.argv[2])
    else:
        bench_time()
        bench_memory()
        bench_loads()
