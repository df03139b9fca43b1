"""The page on adding things: its files are read, its programs run, and what they add works."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from oasis_eval import registry
from oasis_eval.errors import UnsupportedSchemeError
from oasis_eval.modeling import variants
from oasis_eval.quant import backends, support
from oasis_eval.quant.schemes import resolve
from oasis_eval.record import read_records
from oasis_eval.spec import QuantScheme, TensorFormat
from tests.command_line import CommandLine
from tests.tiny import build_model, build_tokenizer, prose, save

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (oasis-eval .*)$", PAGE, flags=re.MULTILINE)
FILES = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
VARIANT, ROW, BACKEND = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder with the files of the page, a checkpoint and a text."""
    save(tmp_path / "my-llama")
    (tmp_path / "notes.txt").write_text(prose(300))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("reader")
def test_card_and_scheme_are_what_they_say() -> None:
    """Under the names and with the settings that the page gives them."""
    card = registry.resolve("house-llama.yaml")
    scheme = resolve("w4a4-wide-down.yaml")

    assert len(FILES) == 3
    assert (card.name, card.label) == ("house-llama", "House Llama, step 9000")
    assert Path(card.source.path).name == "my-llama"  # type: ignore[union-attr]  # a folder
    assert scheme.skip == ("*.down_proj",)
    assert support.unsupported(scheme) is None


@pytest.mark.slow  # three commands, one of which starts lm-eval
def test_commands_run(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shown; the records name the card and the scheme, and what was skipped."""
    call = CommandLine(monkeypatch, capsys)
    for command in COMMANDS:
        result = call(shlex.split(command)[1:])

        assert result.status == 0, (command, result.err)
    assert "my_notes" in result.out
    records = list(read_records([reader / "results" / "runs"]))
    assert {(item.card.name, item.spec.scheme.name) for item in records} == {
        ("house-llama", "fp32"),
        ("house-llama", "w8a8"),
        ("./my-llama", "w4a4"),
        ("./my-llama", "w4a4-wide-down"),
    }
    (wide,) = [item for item in records if item.spec.scheme.name == "w4a4-wide-down"]
    assert wide.coverage is not None
    left = {item.module for item in wide.coverage.modules if not item.quantized}
    assert {f"model.layers.{index}.mlp.down_proj" for index in (0, 1)} <= left


def test_the_variant_is_built_saved_and_named(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its folder it computes the same; with its row, `convert` knows it."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(VARIANT, names)
    assert bool(torch.isfinite(names["logits"]).all())
    again = names["LlamaOasisForCausalLM"].from_pretrained("softpick-gated").eval()
    with torch.no_grad():
        logits = again(torch.arange(3, 35).unsqueeze(0)).logits
    assert torch.equal(logits, names["logits"])

    exec(ROW, names)
    assert names["ROW"] == {"softpick_gated": names["settings"]}
    added = MappingProxyType({**variants._VARIANTS, **names["ROW"]})
    monkeypatch.setattr(variants, "_VARIANTS", added)
    call = CommandLine(monkeypatch, capsys)
    result = call(["convert", "./my-llama", "--variant", "softpick_gated", "--out", "wrapped"])
    assert result.status == 0, result.err
    assert registry.resolve("wrapped").variant == "softpick_gated"


def _ternary_scheme(bits: int) -> QuantScheme:
    """A scheme of the page's backend, whose name is not in the list of this version."""
    fmt = TensorFormat(bits=bits, granularity="channel")
    scheme = QuantScheme(name="ternary", weights=fmt)
    return scheme.model_copy(update={"backend": "ternary"})


def test_the_backend_quantizes_and_undoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as the page says: three values a channel, a true coverage, the model back."""
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # dataclasses look it up
    exec(BACKEND, names)
    monkeypatch.setattr(backends, "backend_for", lambda _: names["TernaryBackend"]())
    reasons = MappingProxyType({**support._REASONS, "ternary": names["unsupported"]})
    monkeypatch.setattr(support, "_REASONS", reasons)
    model = build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([build_tokenizer()(prose(40))["input_ids"]])

    with pytest.raises(UnsupportedSchemeError, match="2 bits per output channel"):
        backends.quantize_(model, _ternary_scheme(4))
    applied = backends.quantize_(model, _ternary_scheme(2), keep_reference=True)
    with torch.no_grad():
        model(ids)
    assert applied.verify() == ()
    quantized = {item.module for item in applied.coverage.modules if item.quantized}
    assert len(quantized) == 14
    for name, value in model.state_dict().items():
        if name.removesuffix(".weight") in quantized:
            for row, old in zip(value, before[name], strict=True):
                scale = row.abs().max()
                kept = old.abs() > 0.7 * old.abs().mean()
                assert {*row.tolist()} <= {-scale.item(), 0.0, scale.item()}
                assert scale.item() == pytest.approx(old[kept].abs().mean().item(), rel=1e-5)
        else:
            assert torch.equal(value, before[name])
    applied.undo()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
