"""Fidelity to the unquantized model: every number by hand, the store, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3ForCausalLM

from oasis_eval import divergence, registry
from oasis_eval import references as stored
from oasis_eval.cells import versions
from oasis_eval.divergence import token_changes
from oasis_eval.errors import DataError, OutputError, RecordError
from oasis_eval.fidelity import Fidelity, WindowFidelity, compare, tail_share
from oasis_eval.harness import scoring
from oasis_eval.harness.protocols import Window
from oasis_eval.loading import Reference as Loaded
from oasis_eval.loading import load, prepare
from oasis_eval.quant import schemes
from oasis_eval.references import Reference
from oasis_eval.spec import QuantScheme
from tests import tiny
from tests.modeling.tiny import base_config, new_model, randomize_, tiny_config, tokens

WINDOWS = [
    Window(ids := tokens(50, seed=seed).tolist(), ids[1 + start :], start)
    for seed, start in ((0, 0), (1, 0), (2, 25))
]


def small_logits(model: Any) -> Any:
    """Random weights, and logits of few nats, which fp32 holds to 1e-6."""
    randomize_(model, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)
    return model


def gemma() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=tiny.VOCABULARY,
        max_position_embeddings=128,
        final_logit_softcapping=3.0,
        pad_token_id=0,
    )
    return small_logits(Gemma2ForCausalLM(config).eval())


def qwen() -> Qwen3ForCausalLM:
    return small_logits(Qwen3ForCausalLM(base_config("qwen3", tie_word_embeddings=True)).eval())


MODELS = {
    "llama": lambda: small_logits(tiny.build_model()),
    "qwen3-tied": qwen,
    "gemma2-softcap": gemma,
    "oasis": lambda: small_logits(new_model(tiny_config("llama", "oasis"))),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; read-only."""
    folder = tmp_path_factory.mktemp("fidelity") / request.param
    return tiny.save(folder, model=MODELS[request.param]())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("fidelity") / "tiny")


def opened(path: Path) -> Loaded:
    return load(registry.resolve(str(path)), dtype="fp32")


def reference_of(
    loaded: Loaded, windows: list[Window] = WINDOWS, scheme: str = "fp32"
) -> Reference:
    """The stored reference of some windows."""
    with prepare(loaded, schemes.resolve(scheme), dtype="fp32") as prepared:
        reference = Reference(prepared, versions=versions())
        for window in windows:
            reference.fill(window)
    return reference


def measured(path: Path, scheme: str | QuantScheme, windows: list[Window] = WINDOWS) -> Fidelity:
    loaded = opened(path)
    reference = reference_of(loaded, windows)
    chosen = schemes.resolve(scheme) if isinstance(scheme, str) else scheme
    with prepare(loaded, chosen, dtype="fp32") as prepared:
        return compare(prepared, windows, reference)


def naive_head(model: Any, hidden_TD: Tensor) -> Tensor:
    """What the head does, in float64."""
    logits_TV = hidden_TD.double() @ model.lm_head.weight.detach().double().T
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)


def saved_activations(model: Any, window: Window) -> Tensor:
    with torch.no_grad():
        output = model.get_decoder()(input_ids=torch.tensor([window.input_ids]))
    rows = slice(window.offset, window.offset + len(window.targets))
    hidden: Tensor = output.last_hidden_state[0, rows]
    return hidden


@dataclasses.dataclass
class Naive:
    kl: Tensor
    nll: Tensor
    before: Tensor
    same: Tensor


def naive(loaded: Loaded, scheme: str) -> Naive:
    """Whole logits of both models in float64, from the hidden states of each."""
    with prepare(loaded, schemes.resolve("fp32"), dtype="fp32") as prepared:
        before = [naive_head(prepared.model, saved_activations(prepared.model, w)) for w in WINDOWS]
    with prepare(loaded, schemes.resolve(scheme), dtype="fp32") as prepared:
        after = [naive_head(prepared.model, saved_activations(prepared.model, w)) for w in WINDOWS]
    left, right = (torch.cat(logits).log_softmax(-1) for logits in (before, after))
    targets = torch.tensor([token for window in WINDOWS for token in window.targets])[:, None]
    return Naive(
        kl=(left.exp() * (left - right)).sum(-1),
        nll=-right.gather(-1, targets)[:, 0],
        before=-left.gather(-1, targets)[:, 0],
        same=left.argmax(-1) == right.argmax(-1),
    )


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["w4a4", "w8a8"])
def test_every_number_by_hand(source: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, to 1e-6, in tiles and blocks that divide nothing evenly."""
    monkeypatch.setattr(scoring, "_MIN_TILE_ROWS", 7)
    monkeypatch.setattr(scoring, "_MAX_TILE_ROWS", 7)
    monkeypatch.setattr(divergence, "_BLOCK_ELEMENTS", 3 * tiny.VOCABULARY)
    found = measured(source, scheme)
    expected = naive(opened(source), scheme)
    kl, nll, before, same = (np.concatenate(parts) for parts in zip(*found.windows, strict=True))

    assert [len(window.kl) for window in found.windows] == [49, 49, 24]
    np.testing.assert_allclose(kl, expected.kl, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(nll, expected.nll, rtol=0, atol=2e-6)
    np.testing.assert_allclose(before, expected.before, rtol=0, atol=2e-6)
    assert (same == expected.same.numpy()).all()
    metrics = found.metrics()
    change = expected.nll - expected.before
    increase = change.clamp_min(0.0).sort(descending=True).values
    assert metrics["kl_nats"] == pytest.approx(float(expected.kl.mean()), abs=1e-6)
    assert metrics["same_top1"] == float(expected.same.double().mean())
    assert metrics["delta_nll_nats"] == pytest.approx(float(change.mean()), abs=1e-6)
    assert metrics["median_nll_nats"] == pytest.approx(np.median(expected.nll), abs=2e-6)
    assert metrics["worst_window_nll_nats"] == pytest.approx(
        max(float(part.mean()) for part in expected.nll.split([49, 49, 24])), abs=2e-6
    )
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("p99_9", 99.9)):
        value = np.percentile(expected.kl, share)
        assert metrics[f"kl_{name}_nats"] == pytest.approx(value, abs=1e-6, rel=1e-5)
    assert metrics["kl_max_nats"] == pytest.approx(float(expected.kl.max()), abs=1e-6, rel=1e-5)
    assert metrics["increase_tail_share"] == pytest.approx(
        float(increase[:2].sum() / increase.sum()), abs=1e-5
    )
    worst = expected.kl.sort(descending=True).values[:2].sum() / expected.kl.sum()
    assert metrics["kl_tail_share"] == pytest.approx(float(worst), abs=1e-5)
    assert metrics["nll_tail_share"] == pytest.approx(
        float(expected.nll.max() / expected.nll.sum()), abs=1e-6
    )
    assert metrics["kl_nats"] > 1e-6


def test_the_reference_beside_itself(source: Path) -> None:
    """Run again, it is the same in every bit: no divergence, every top token, no change."""
    found = measured(source, "fp32")
    metrics = found.metrics()

    for name in ("kl_nats", "kl_max_nats", "delta_nll_nats", "kl_tail_share"):
        assert metrics[name] == 0.0
    assert metrics["same_top1"] == 1.0
    assert found.delta() == (0.0, 0.0, 0.0)


def test_a_window_depends_on_nothing_else(llama: Path) -> None:
    """Alone, among others, or in another order: the same numbers in every bit."""
    together = measured(llama, "w4a4").windows
    backwards = measured(llama, "w4a4", WINDOWS[::-1]).windows[::-1]
    alone = [measured(llama, "w4a4", [window]).windows[0] for window in WINDOWS]

    for one, other, third in zip(together, backwards, alone, strict=True):
        for left, middle, right in zip(one, other, third, strict=True):
            assert (left == middle).all()
            assert (left == right).all()


def test_a_quantized_head_is_read_by_the_scheme_alone(llama: Path) -> None:
    """The reference keeps its own head while the model's is quantized, cast or rotated."""
    head_only = schemes.resolve("w4a4").model_copy(
        update={"name": "head", "regions": ("lm_head",), "activations": None}
    )
    head_only = head_only.model_copy(update={"skip": ("model.layers.*",)})
    loaded = opened(llama)
    reference = reference_of(loaded)
    hidden = torch.cat([saved_activations(loaded.model, window) for window in WINDOWS])
    left = naive_head(loaded.model, hidden).log_softmax(-1)
    with prepare(loaded, head_only, dtype="fp32") as prepared:
        right = naive_head(prepared.model, hidden).log_softmax(-1)
        found = compare(prepared, WINDOWS, reference)
    expected = (left.exp() * (left - right)).sum(-1).mean()

    assert found.metrics()["kl_nats"] == pytest.approx(float(expected), rel=1e-5)
    assert expected > 1e-3


@pytest.mark.parametrize(("scheme", "most"), [("bf16", 1e-2), ("w8a8-rot", 1e-2)])
def test_other_dtypes_and_rotated_heads(llama: Path, scheme: str, most: float) -> None:
    """Close to the reference, as it is on paper, and its losses are the reference's own."""
    plain = measured(llama, "fp32")
    found = measured(llama, scheme)

    assert 0.0 < found.metrics()["kl_nats"] < most
    for one, other in zip(plain.windows, found.windows, strict=True):
        assert (one.reference_nll == other.reference_nll).all()


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("scale", [1e-4, 0.1, 3.0, 300.0])
def test_far_and_near_logits(scale: float, shift: float) -> None:
    """From rounding to logits that have nothing in common, fp32 keeps 1e-6 of the divergence."""
    generator = torch.Generator().manual_seed(0)
    base = 20.0 * torch.randn(40, 300, generator=generator)
    other = base + shift + scale * torch.randn(40, 300, generator=generator)
    targets = torch.randint(300, (40,), generator=generator)
    found = token_changes(base, other, targets, base.argmax(-1))
    left, right = (logits.double().log_softmax(-1) for logits in (base, other))
    kl = (left.exp() * (left - right)).sum(-1)
    change = (left - right).gather(-1, targets[:, None])[:, 0]

    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.nll.double(), change, rtol=1e-5, atol=2e-5)


def test_a_collapsed_model_does_not_find_every_token() -> None:
    """All logits equal: its prediction is the first token, not any that is asked for."""
    base_RV = torch.eye(4)
    found = token_changes(base_RV, torch.zeros(4, 4), torch.arange(4), base_RV.argmax(-1))

    assert found.same_top.tolist() == [True, False, False, False]


def test_tails() -> None:
    """The largest of what is positive; one token at least."""
    values = np.array([-5.0, 0.0, 1.0, 3.0, 6.0])

    assert tail_share(values, 0.01) == 0.6
    assert tail_share(values, 0.4) == 0.9
    assert tail_share(-np.ones(4), 0.01) == 0.0
    assert math.isnan(tail_share(np.array([1.0, math.nan]), 0.5))
    assert tail_share(np.arange(200.0), 0.01) == pytest.approx((199 + 198) / (199 * 100))


def test_intervals_are_paired() -> None:
    """Over windows, as everywhere in the suite; none for one window or a loss without end."""
    rng = np.random.default_rng(0)
    windows = []
    for size in (10, 20, 30, 40):
        before = rng.random(size)
        same = np.ones(size, dtype=np.bool_)
        windows.append(WindowFidelity(rng.random(size), before + rng.random(size), before, same))
    found = Fidelity(tuple(windows), 41, "fp32")
    delta = found.delta()

    assert delta is not None
    assert delta.estimate == pytest.approx(found.metrics()["delta_nll_nats"])
    assert delta.low < delta.estimate < delta.high
    stored = {metric.name: metric for metric in found.as_metrics("text")}
    assert stored["delta_nll_nats"].stderr == delta.stderr
    assert stored["kl_nats"].stderr is not None
    assert stored["kl_max_nats"].stderr is None
    assert Fidelity(found.windows[:1], 11, "fp32").delta() is None
    windows[0].nll[3] = math.inf
    assert Fidelity(tuple(windows), 41, "fp32").delta() is None
    assert found.metrics()["delta_nll_nats"] == math.inf


# --- the store --------------------------------------------------------------------------------


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("references/*/*.safetensors"))


def test_the_reference_runs_once(llama: Path, tmp_path: Path) -> None:
    """Another scheme, another call, more windows: what is stored is not run again."""
    loaded = opened(llama)

    assert reference_of(loaded, WINDOWS[:2]).num_run == 2
    assert len(files(tmp_path / "cache")) == 2
    assert reference_of(opened(llama), WINDOWS).num_run == 1
    hidden = load_file(stored.Store(files(tmp_path / "cache")[0].parent).path(WINDOWS[2]))
    torch.testing.assert_close(
        hidden["hidden"], saved_activations(loaded.model, WINDOWS[2]), rtol=0, atol=0
    )


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_a_damaged_file_is_run_again(llama: Path, tmp_path: Path, damage: str) -> None:
    """Cut off, one bit changed, empty, or of another window: never trusted."""
    good = measured(llama, "w4a4").metrics()
    store = stored.Store(files(tmp_path / "cache")[0].parent)
    path = store.path(WINDOWS[1])
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "changed":
        content[-5] ^= 1
    elif damage == "other":
        content = bytearray(store.path(WINDOWS[2]).read_bytes())
    path.write_bytes(b"" if damage == "empty" else content)
    loaded = opened(llama)
    reference = reference_of(loaded)

    assert reference.num_run == 1
    with prepare(loaded, schemes.resolve("w4a4"), dtype="fp32") as prepared:
        assert compare(prepared, WINDOWS, reference).metrics() == good
        path.unlink()
        with pytest.raises(RecordError, match="run again"):
            compare(prepared, WINDOWS, reference)


def test_what_changes_states_changes_the_key(llama: Path, tmp_path: Path) -> None:
    """Another checkpoint, dtype or library: a folder of its own; another window: a file."""
    other = tiny.save(tmp_path / "other", model=tiny.build_model(seed=1))
    reference_of(opened(llama))
    reference_of(opened(other))
    reference_of(opened(llama), scheme="bf16")
    loaded = opened(llama)
    with prepare(loaded, schemes.resolve("fp32"), dtype="fp32") as prepared:
        newer = Reference(prepared, versions=versions() | {"torch": "99.0"})
        newer.fill(WINDOWS[0])
    moved = WINDOWS[0]._replace(offset=1, targets=WINDOWS[0].targets[1:])
    reference_of(opened(llama), [moved])

    folders = {}
    for file in files(tmp_path / "cache"):
        folders.setdefault(file.parent, []).append(file)
    assert sorted(map(len, folders.values())) == [1, 3, 3, 4]


def test_a_full_disk_is_said(llama: Path, tmp_path: Path) -> None:
    """In one line, with what to do."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(OutputError, match="OASIS_EVAL_CACHE"):
        reference_of(opened(llama))


def test_nothing_to_compare(llama: Path) -> None:
    """No window with a scored token is a mistake, not a division by zero."""
    with pytest.raises(DataError, match="one window"):
        measured(llama, "w4a4", [Window([1, 2], [], 0)])


# --- memory -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.large: set[str] = set()
        """Operations that made tensors of a million elements or more."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        if max(sizes, default=0) >= 1_000_000:
            self.large.add(func.overloadpacket.__name__)
        return result


@contextmanager
def largest_tensor() -> Iterator[Largest]:
    with Largest() as mode:
        yield mode


def test_no_tensor_of_tokens_by_vocabulary(tmp_path: Path) -> None:
    """With 8,000 tokens of vocabulary and 700 scored, at most a tile of 256 rows."""
    vocabulary = 8000
    model = tiny.build_model(vocab_size=vocabulary, max_position_embeddings=800)
    loaded = opened(tiny.save(tmp_path / "wide", model=model))
    ids = tokens(701).tolist()
    windows = [Window(ids, ids[1:], 0)]
    patch = pytest.MonkeyPatch()
    patch.setattr(scoring, "_TILE_ELEMENTS", 1 << 18)
    try:
        with largest_tensor() as seen_reference:
            reference = reference_of(loaded, windows)
        with (
            prepare(loaded, schemes.resolve("w4a4"), dtype="fp32") as prepared,
            largest_tensor() as seen,
        ):
            compare(prepared, windows, reference)
    finally:
        patch.undo()

    tile = 256 * vocabulary
    assert seen.elements == seen_reference.elements == tile < 700 * vocabulary
    assert "mm" in seen.large
    assert not seen.large & {"sub", "sub_", "mul", "mul_", "exp_", "expm1_"}


@pytest.mark.parametrize(
    ("rows_of_scoring", "num_tokens", "sizes"),
    [
        (4096, 511, [256, 255]),
        (4096, 2047, [1024, 1023]),
        (1000, 2047, [500] * 4 + [47]),
        (256, 2047, [256] * 7 + [255]),
        (4096, 100, [100]),
        (7, 15, [7, 7, 1]),
    ],
)
def test_two_tiles_for_one(
    llama: Path,
    rows_of_scoring: int,
    num_tokens: int,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two heads take together what one takes in scoring, but no product of few rows."""
    monkeypatch.setattr(scoring.Scorer, "tile_rows", lambda self: rows_of_scoring)
    tiles = reference_of(opened(llama), []).tiles(num_tokens)

    assert [tile.stop - tile.start for tile in tiles] == sizes
    assert tiles[0].start == 0
    assert tiles[-1].stop == num_tokens
