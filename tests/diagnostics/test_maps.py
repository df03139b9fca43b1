"""Attention maps: those of the model itself, of the layers and heads asked for, and their file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oasis_eval import attention_maps, registry
from oasis_eval.attention import Plan, capture
from oasis_eval.diagnostics.maps import capture_maps
from oasis_eval.errors import RecordError, SpecError
from oasis_eval.loading import load, prepare
from oasis_eval.modeling.normalizers import normalize
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from tests import tiny
from tests.command_line import CommandLine
from tests.modeling.tiny import shared_model, tokens

IDS = tuple(tokens(1, 20)[0].tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("maps") / "tiny")


@pytest.fixture(scope="module")
def prepared(folder: Path) -> PreparedModel:
    reference = load(registry.resolve(str(folder)), dtype="fp32")
    with prepare(reference, schemes.resolve("fp32"), dtype="fp32") as found:
        return found


def test_maps_are_those_of_the_model(prepared: PreparedModel) -> None:
    """Layers and heads in the order asked for, equal to the model's own eager weights."""
    found = capture_maps(prepared, IDS, layers=(1, 0), heads=(3, 0, 1), text_sha256="x")
    model = tiny.build_model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([IDS]), output_attentions=True).attentions

    for row, layer in enumerate((1, 0)):
        for column, head in enumerate((3, 0, 1)):
            np.testing.assert_allclose(
                found.weights[row, column], expected[layer][0, head].numpy(), atol=2e-6
            )
    assert not found.null.any()
    assert found.info.tokens == tuple(prepared.tokenizer.decode([token]) for token in IDS)


@pytest.mark.parametrize("case", ["oasis", "sink", "clipped", "softpick"])
def test_the_null_takes_what_the_keys_do_not(case: str, prepared: PreparedModel) -> None:
    """Weights equal the normalizer on scores in float64, and null is what they lack to one."""
    model = shared_model("llama", case)
    seen: dict[str, torch.Tensor] = {}
    attention = model.model.layers[1].self_attn
    handles = [
        getattr(attention.taps, name).register_forward_hook(
            lambda _, __, value, name=name: seen.__setitem__(name, value)
        )
        for name in ("query", "key")
    ]
    other = replace(prepared, model=model)
    found = capture_maps(other, IDS, layers=(1,), heads=(2,), text_sha256="x")
    for handle in handles:
        handle.remove()
    groups = seen["query"].shape[1] // seen["key"].shape[1]
    query, key = seen["query"][0, 2].double(), seen["key"][0, 2 // groups].double()
    visible = torch.ones(len(IDS), len(IDS), dtype=torch.bool).tril()
    logit = attention.null_logit
    if logit is not None:
        logit = logit.detach().double().reshape(-1)[2 % logit.numel()]
    scores = attention.scaling * query @ key.T
    probs, _ = normalize(scores, visible, attention.normalizer, null_logit=logit)

    np.testing.assert_allclose(found.weights[0, 0], probs.numpy(), atol=3e-6)
    lack = (1.0 - probs.sum(dim=-1)).clamp_min(0.0)
    np.testing.assert_allclose(found.null[0, 0], lack.numpy(), atol=3e-6)


@pytest.mark.parametrize(
    ("layers", "heads", "ids", "message"),
    [
        ((2,), (0,), IDS, "layer 2: .* has layers 0 to 1"),
        ((0,), (4,), IDS, "head 4: layer 0 has heads 0 to 3"),
        ((0,), (0,), (), "0 tokens: expected 1 to 1024"),
    ],
)
def test_what_is_not_there_is_refused(
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    ids: tuple[int, ...],
    message: str,
    prepared: PreparedModel,
) -> None:
    """With what there is."""
    with pytest.raises(SpecError, match=message):
        capture_maps(prepared, ids, layers=layers, heads=heads, text_sha256="x")


def test_file_holds_the_maps(prepared: PreparedModel, tmp_path: Path) -> None:
    """Read back equal; the same maps are the same bytes."""
    found = capture_maps(prepared, IDS, layers=(0,), heads=(1, 2), text_sha256="x")
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    attention_maps.write(one, found)
    attention_maps.write(two, found)
    back = attention_maps.read(one)

    assert one.read_bytes() == two.read_bytes()
    assert back.info == found.info
    assert np.array_equal(back.weights, found.weights)
    assert np.array_equal(back.null, found.null)


def test_damaged_files_are_named(folder: Path, tmp_path: Path, prepared: PreparedModel) -> None:
    """A missing, a foreign, a cut and an inconsistent file."""
    found = capture_maps(prepared, IDS, layers=(0,), heads=(1,), text_sha256="x")
    path = tmp_path / "a.safetensors"
    with pytest.raises(RecordError, match="no such file of attention maps"):
        attention_maps.read(path)
    with pytest.raises(RecordError, match="safetensors without attention maps"):
        attention_maps.read(folder / "model.safetensors")
    attention_maps.write(path, found)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordError, match="cannot be read as attention maps"):
        attention_maps.read(path)
    attention_maps.write(path, replace(found, null=found.null[:, :, :-1]))
    with pytest.raises(RecordError, match="damaged attention maps: arrays"):
        attention_maps.read(path)
    with pytest.raises(RecordError, match="cannot be written"):
        attention_maps.write(path / "below", found)


def test_models_with_other_tokens_do_not_stand_side_by_side(folder: Path, tmp_path: Path) -> None:
    """The text must be the same tokens for all."""
    starting = tiny.save(tmp_path / "starting", tokenizer=tiny.build_tokenizer(adds_start=True))
    text = tmp_path / "text.txt"
    text.write_text(tiny.prose(60))
    plan = Plan((str(folder), str(starting)), ("fp32",), (0,), (0,), text, 16, "cpu", None)
    with pytest.raises(SpecError, match="reads the text as other tokens"):
        list(capture(plan))


def test_command(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A figure and a file a model and scheme, which `figures` draws again to the same bytes."""
    call = CommandLine(monkeypatch, capsys)
    out = tmp_path / "out"
    done = call(
        [
            "attention",
            folder,
            "--scheme",
            "fp32,w4a4",
            "--layers",
            "0,1",
            "--heads",
            "0",
            "--tokens",
            "12",
            "--out",
            out,
            "--format",
            "pdf",
        ]
    )

    assert done.status == 0, done.err
    files = sorted(path.suffix for path in out.iterdir())
    assert files == [".pdf", ".safetensors", ".safetensors"]
    again = call(["figures", out, "--out", tmp_path / "again", "--format", "pdf"])
    assert again.status == 0, again.err
    (first,), (second,) = out.glob("*.pdf"), (tmp_path / "again").glob("*.pdf")
    assert first.read_bytes() == second.read_bytes()
    for option, value, words in (
        ("--layers", "x", "expected whole numbers"),
        ("--layers", "7", "has layers 0 to 1"),
        ("--format", "svg", "expected some of pdf, png"),
    ):
        refused = call(["attention", folder, option, value, "--tokens", "12", "--out", out])
        assert refused.status == 2
        assert words in refused.err
