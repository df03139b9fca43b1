"""Quantized checkpoints: written, read by another process bit for bit, read strictly, evaluated."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from oasis_eval import convert as convert_module
from oasis_eval import registry
from oasis_eval.convert import convert
from oasis_eval.errors import CheckpointError, SpecError, UnsupportedSchemeError
from oasis_eval.loading import load, prepare
from oasis_eval.quant import schemes
from oasis_eval.quant.backends import Storable
from oasis_eval.quant.integer_layers import integer_layers
from oasis_eval.quantized import Plan, Written, quantize
from oasis_eval.registry import read_card
from oasis_eval.spec import QuantScheme
from tests import tiny
from tests.command_line import CommandLine
from tests.modeling.plain import build_plain
from tests.quantized_folders import biased_llama, calibration_text, change, gpt2, oasis, qwen3

HEAD_TOO = {
    "name": "head-too",
    "backend": "torch",
    "execution": "real",
    "weights": {"bits": 4, "granularity": "group", "group_size": 20, "symmetric": False},
    "activations": {"bits": 8, "granularity": "token", "ranges": "dynamic"},
    "regions": ["linear_inputs", "lm_head"],
    "skip": ["*layers.1.mlp*"],
}
READER = """
import sys
from collections.abc import Sequence
from pathlib import Path
import torch
from safetensors.torch import save_file
from oasis_eval import registry
from oasis_eval.loading import load
root = Path(sys.argv[1])
ids = torch.arange(3, 60)[None]
for card in sorted(root.glob("*.yaml")):
    found = {}
    for dtype in ("fp32", "bf16"):
        model = load(registry.read_card(card), dtype=dtype).model
        with torch.no_grad():
            found[dtype] = model(input_ids=ids, use_cache=False).logits
    save_file(found, root / f"{card.stem}.logits")
"""


CASES: dict[str, tuple[object, str, str]] = {
    "llama-w4a4": (tiny.build_model, "w4a4-real", "fp32"),
    "llama-tied-w8a8": (lambda: tiny.build_model(tie_word_embeddings=True), "w8a8-real", "fp32"),
    "llama-biased-static": (biased_llama, "w8a8-static-linear-real", "fp32"),
    "llama-biased-bf16": (biased_llama, "w4a4-real", "bf16"),
    "llama-tied-head-too": (
        lambda: tiny.build_model(tie_word_embeddings=True),
        "head-too",
        "fp32",
    ),
    "llama-weight-only": (tiny.build_model, "w4a16-g32-real", "bf16"),
    "llama-smooth": (tiny.build_model, "w4a4-smooth-real", "fp32"),
    "llama-tied-rot": (
        lambda: tiny.build_model(tie_word_embeddings=True),
        "w4a4-rot-real",
        "fp32",
    ),
    "oasis-smooth-rot": (lambda: oasis("oasis"), "w4a8-smooth-rot-real", "fp32"),
    "gpt2-rot": (gpt2, "w4a8-rot-real", "fp32"),
    "gpt2-w4a8": (gpt2, "w4a8-real", "fp32"),
    "gpt2-untied-static": (lambda: gpt2(tied=False), "w4a4-static-linear-real", "fp32"),
    "qwen3-w4a4": (qwen3, "w4a4-real", "bf16"),
    "oasis-w4a4": (lambda: oasis("oasis"), "w4a4-real", "fp32"),
    "outeffhop-w8a8": (lambda: oasis("residual-outeffhop"), "w8a8-real", "fp32"),
}


def scheme_named(name: str) -> QuantScheme:
    return QuantScheme.model_validate(HEAD_TOO) if name == "head-too" else schemes.resolve(name)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Written]]:
    """Every case quantized and written; beside each folder what another process computed."""
    sources, root = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("quantized")
    text = calibration_text(sources)
    results = {}
    for name, (build, scheme, dtype) in CASES.items():
        model = build()  # type: ignore[operator]  # a function of no arguments
        model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        source = tiny.save(sources / name, model=model)
        plan = Plan(scheme=scheme_named(scheme), calibration=text)
        results[name] = quantize(registry.resolve(str(source)), plan, out=root / name)
    subprocess.run([sys.executable, "-c", READER, root], check=True)
    return root, results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_another_process_computes_the_same_logits(
    name: str, dtype: str, written: tuple[Path, dict[str, Written]]
) -> None:
    """Against the checkpoint quantized here in memory: equal bit for bit in its own dtype.

    In the other dtype only what is not quantized is cast, so the two folders' answers differ.
    """
    root, results = written
    _, scheme, stored = CASES[name]
    logits = load_file(root / f"{name}.logits")
    assert logits[dtype].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert not torch.equal(logits["fp32"], logits["bf16"].float())
    if dtype != stored:
        return
    source = load(
        registry.resolve(str(root.parent / _sources(root) / name)),
        dtype=stored,  # type: ignore[arg-type]
    )
    ids = torch.arange(3, 60)[None]
    text = str(root.parent / _sources(root) / "calibration.txt")
    with prepare(
        source,
        scheme_named(scheme),
        dtype=stored,  # type: ignore[arg-type]
        calibration_data=text,
    ) as prepared:
        with torch.no_grad():
            expected = prepared.model(input_ids=ids, use_cache=False).logits
        coverage = prepared.coverage

    assert torch.equal(logits[stored], expected)
    assert coverage == results[name].coverage


def _sources(root: Path) -> str:
    """Name of the folder of sources, made just before the one of checkpoints."""
    return next(path.name for path in root.parent.glob("sources*"))


@pytest.mark.parametrize("name", CASES)
def test_a_folder_holds_codes_and_its_scheme(
    name: str, written: tuple[Path, dict[str, Written]]
) -> None:
    """No floating-point weight of a quantized layer, the whole scheme, a card beside it."""
    root, results = written
    tensors = load_file(root / name / "model.safetensors")
    covered = [item.module for item in results[name].coverage.modules if item.quantized]
    config = json.loads((root / name / "config.json").read_text())
    card = read_card(root / f"{name}.yaml")

    for module in covered:
        assert f"{module}.weight" not in tensors
        assert tensors[f"{module}.weight_codes"].dtype in (torch.int8, torch.uint8)
        assert tensors[f"{module}.weight_scale"].dtype == torch.float32
        assert (f"{module}.input_limits" in tensors) == ("static" in CASES[name][1])
    assert config["quantization_config"]["quant_method"] == "oasis_eval"
    assert (
        QuantScheme.model_validate(config["quantization_config"]["scheme"]) == results[name].scheme
    )
    assert card.dtype == CASES[name][2]
    assert results[name].scheme.name in card.label
    assert (root / name / "scheme.yaml").exists() == (CASES[name][1] == "head-too")


def test_the_file_of_four_bit_codes_is_small(written: tuple[Path, dict[str, Written]]) -> None:
    """Half a byte a weight, as counted in the coverage, plus the header."""
    root, results = written
    size = (root / "llama-w4a4" / "model.safetensors").stat().st_size
    coverage = results["llama-w4a4"].coverage

    assert size < 0.55 * coverage.bytes_before
    assert coverage.bytes_after <= size <= coverage.bytes_after + 12_000


# --- strict reading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "all_one"),
    [
        ("gemma2", "w4a4-smooth-real", False),
        ("gemma3", "w8a8-smooth-rot-real", False),
        ("gemma", "w4a4-rot-real", True),
        ("gemma", "w4a4-smooth-rot-real", True),
    ],
)
def test_gains_of_one_plus_weight_come_back_as_written(
    family: str, name: str, all_one: bool, tmp_path: Path
) -> None:
    """In 16 bits, too: what a transform left in fp32 is fp32 in the file and in memory."""
    model = build_plain(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.97, -0.5)  # small gains
    text = calibration_text(tmp_path)
    for dtype in ("bf16", "fp32"):
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        source = tiny.save(tmp_path / f"{dtype}-source", model=copy.deepcopy(model).to(kind))
        plan = Plan(scheme=schemes.resolve(name), calibration=text)
        out = tmp_path / dtype
        assert quantize(registry.resolve(str(source)), plan, out=out).dtype == dtype
        stored = load_file(out / "model.safetensors")
        wide = json.loads((out / "config.json").read_text())["quantization_config"]["fp32"]
        gains = [key for key in wide if float((stored[key].bfloat16() - stored[key]).abs().max())]

        assert len(wide) >= 4
        assert bool(gains) != all_one
        for read_as in ("bf16", "fp32"):
            again = load(registry.resolve(str(out)), dtype=read_as).model  # type: ignore[arg-type]
            own = dict(again.named_parameters())
            assert all(own[key].dtype == torch.float32 for key in wide)
            assert all(torch.equal(own[key], stored[key]) for key in wide)
            assert own["model.embed_tokens.weight"].dtype == (
                torch.bfloat16 if read_as == "bf16" else torch.float32
            )


@pytest.fixture
def folder(tmp_path: Path, written: tuple[Path, dict[str, Written]]) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(written[0] / "llama-w4a4", tmp_path / "copy"))


CODES = "model.layers.1.mlp.up_proj.weight_codes"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (CODES, None, f"tensors missing: {CODES}"),
        (SCALE, None, f"tensors missing: {SCALE}"),
        ("model.norm.weight", None, "tensors missing: model.norm.weight"),
        ("model.layers.1.mlp.up_proj.weight", torch.ones(96, 48), "not part of the model"),
        (CODES, torch.zeros(96, 48, dtype=torch.uint8), r"is \[96, 48\], expected \[96, 24\]"),
        (CODES, torch.zeros(96, 24, dtype=torch.int8), "stored as int8, expected uint8"),
        (SCALE, torch.ones(96, 1).bfloat16(), "stored as bfloat16, expected float32"),
        ("model.norm.weight", torch.ones(48, dtype=torch.int32), "stored as int32, expected float"),
        (SCALE, -torch.ones(96, 1), "a scale that is not a positive number"),
        (SCALE, torch.full((96, 1), torch.nan), "a scale that is not a positive number"),
    ],
)
def test_reading_is_strict(name: str, value: torch.Tensor | None, text: str, folder: Path) -> None:
    """Whatever is missing, too much or of another kind is an error with its name."""
    change(folder, name, value)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(registry.resolve(str(folder)), dtype="fp32")

    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("weight_codes", torch.full((96, 48), -128, dtype=torch.int8), "code -128"),
        ("input_limits", torch.tensor([1.0, -1.0]), r"the range \[1.0, -1.0\]"),
        ("input_limits", torch.tensor([torch.nan, 1.0]), r"the range \[nan, 1.0\]"),
    ],
)
def test_values_that_no_quantizer_makes_are_refused(
    key: str, value: torch.Tensor, text: str, tmp_path: Path
) -> None:
    """Codes and ranges of a damaged file are an error with the tensor's name, never a score."""
    source = tiny.save(tmp_path / "source")
    scheme = schemes.resolve("w8a8-static-linear-real")
    quantize(registry.resolve(str(source)), Plan(scheme=scheme), out=tmp_path / "stored")
    name = f"model.layers.1.mlp.up_proj.{key}"
    change(tmp_path / "stored", name, value)

    with pytest.raises(CheckpointError, match=text) as caught:
        load(registry.resolve(str(tmp_path / "stored")), dtype="fp32")
    assert name in str(caught.value)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "key", "value", "text"),
    [
        ("llama-w4a4", "weight_codes", 0x08, "code -8, and symmetric codes end at -7"),
        ("llama-w4a4", "weight_codes", 0x80, "code -8, and symmetric codes end at -7"),
        ("llama-w4a4", "weight_codes", 0x1F, None),
        (
            "llama-tied-head-too",
            "weight_zero_point",
            16,
            "a zero point of 16, and levels end at 15",
        ),
        ("llama-tied-head-too", "weight_zero_point", 15, None),
        ("llama-tied-head-too", "weight_codes", 0x00, None),
    ],
)
def test_four_bit_codes_that_no_quantizer_makes_are_refused(
    case: str,
    key: str,
    value: int,
    text: str | None,
    tmp_path: Path,
    written: tuple[Path, dict[str, Written]],
) -> None:
    """One byte is changed: -8 in either half, or a zero point that is no level; 1 and 15 are."""
    copy = Path(shutil.copytree(written[0] / case, tmp_path / "copy"))
    codes = load_file(copy / "model.safetensors")[f"{UP}.{key}"]
    codes[3, 1] = value
    change(copy, f"{UP}.{key}", codes)
    if text is None:
        load(registry.resolve(str(copy)), dtype="fp32")
        return
    with pytest.raises(CheckpointError, match=text) as caught:
        load(registry.resolve(str(copy)), dtype="fp32")
    assert f"{UP}.{key}" in str(caught.value)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    """As for any checkpoint."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="incomplete"):
        load(registry.resolve(str(folder)), dtype="fp32")


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"version": 2}, CheckpointError, "version 2; .* reads 1"),
        ({"scheme": {"name": "x"}}, SpecError, "quantization_config"),
        ({"quant_method": "gptq"}, CheckpointError, "quantized already"),
    ],
)
def test_a_foreign_configuration_is_refused(
    settings: dict[str, object], error: type[Exception], text: str, folder: Path
) -> None:
    """Another method, another version, a scheme that is none."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))
    with pytest.raises(error, match=text):
        load(registry.resolve(str(folder)), dtype="fp32")


def test_a_scheme_altered_under_its_name_is_refused(folder: Path) -> None:
    """The message names the setting, not the scheme that was given already."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["scheme"]["activations"]["bits"] = 8
    path.write_text(json.dumps(config))
    reference = load(registry.resolve(str(folder)), dtype="fp32")

    with (
        pytest.raises(UnsupportedSchemeError, match=r"settings differ from .* in activations"),
        prepare(reference, schemes.resolve("w4a4-real"), dtype="fp32"),
    ):
        pass


def test_another_scheme_is_refused_and_the_right_one_named(folder: Path) -> None:
    """One line that says which one to give."""
    reference = load(registry.resolve(str(folder)), dtype="fp32")
    for name in ("fp32", "w8a8", "w4a4", "w8a8-real"):
        with (
            pytest.raises(UnsupportedSchemeError, match="give --scheme w4a4-real") as caught,
            prepare(reference, schemes.resolve(name), dtype="fp32"),
        ):
            pass
        assert "\n" not in str(caught.value)
    for _ in range(2):
        with prepare(reference, schemes.resolve("w4a4-real"), dtype="bf16") as prepared:
            assert prepared.coverage is not None
            assert prepared.coverage.num_quantized == 14
            assert prepared.model.get_input_embeddings().weight.dtype == torch.bfloat16
            scale = next(iter(integer_layers(prepared.model).values())).stored.scale
            assert scale.dtype == torch.float32


def test_a_scheme_of_ones_own_is_beside_the_weights(
    written: tuple[Path, dict[str, Written]],
) -> None:
    """Its YAML is what `--scheme` takes."""
    root, _ = written
    folder = root / "llama-tied-head-too"
    reference = load(registry.resolve(str(folder)), dtype="fp32")
    with pytest.raises(UnsupportedSchemeError, match=r"the file scheme.yaml in its folder"):
        prepare(reference, schemes.resolve("w4a4"), dtype="fp32").__enter__()
    with prepare(reference, schemes.resolve(str(folder / "scheme.yaml")), dtype="fp32") as prepared:
        layers = integer_layers(prepared.model)

    assert "lm_head" in layers
    assert not any("layers.1.mlp" in name for name in layers)


# --- writing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return tiny.save(tmp_path_factory.mktemp("source") / "tiny")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w4a4", "no integer codes to store; use one ending in -real"),
        ("fp32", "no integer codes to store"),
        ("w6a6-real", "weights of 6 bits"),
        ("w4a4-static-real", "has no integer product"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    name: str, text: str, source: Path, tmp_path: Path
) -> None:
    """With the scheme's name and the reason; nothing is left behind."""
    with pytest.raises(UnsupportedSchemeError, match=text) as caught:
        quantize(
            registry.resolve(str(source)),
            Plan(scheme=schemes.resolve(name)),
            out=tmp_path / "out",
        )

    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_comes_back_otherwise_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is made with what is on disk."""
    from oasis_eval.quant import storage

    write = storage.write

    def careless(
        model: nn.Module, applied: Storable, folder: Path, *, notes: Sequence[str]
    ) -> None:
        write(model, applied, folder, notes=notes)
        tensors = load_file(folder / "model.safetensors")
        tensors[CODES] = tensors[CODES].flip(0).contiguous()  # possible codes, of other rows
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(storage, "write", careless)
    with pytest.raises(CheckpointError, match="does not come back as it was"):
        quantize(
            registry.resolve(str(source)),
            Plan(scheme=schemes.resolve("w4a4-real")),
            out=tmp_path / "out",
        )

    assert list(tmp_path.iterdir()) == []


def test_quantizing_a_quantized_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    """It has no weights any more."""
    with pytest.raises(CheckpointError, match="quantized already, as 'w4a4-real'"):
        quantize(
            registry.resolve(str(folder)),
            Plan(scheme=schemes.resolve("w8a8-real")),
            out=tmp_path / "out",
        )
    with pytest.raises(CheckpointError, match="convert the one that it was made from"):
        convert(
            registry.resolve(str(folder)), convert_module.Plan(variant="oasis"), out=tmp_path / "o"
        )


def test_the_command_writes_and_evaluate_reads(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Quantize, refuse to replace, replace, evaluate by folder and by card as the original does."""
    call = CommandLine(monkeypatch, capsys)
    out, runs, text = tmp_path / "made", tmp_path / "runs", tmp_path / "text.txt"
    text.write_text(tiny.prose(400))
    command = ["quantize", source, "--scheme", "w4a4-real", "--out", out]
    first = call(command)
    assert first.status == 0
    assert "14 of 15 linear layers" in first.out
    assert "equal bit for bit" in first.out
    again = call(command)
    assert again.status == 2
    assert "exists" in again.err
    assert call([*command, "--overwrite"]).status == 0
    options = ["--task", "text", "--data", f"text={text}", "--window", 64, "--out", runs]
    nlls = []
    for model in (source, out, tmp_path / "made.yaml"):
        result = call(["evaluate", model, *options, "--scheme", "w4a4-real", "--json", "--quiet"])
        assert result.status == 0
        metrics = {item["name"]: item["value"] for item in json.loads(result.out)["metrics"]}
        nlls.append(metrics["nll_nats"])

    assert nlls[0] == nlls[1] == nlls[2]
    refused = call(["evaluate", out, *options, "--scheme", "w8a8", "--quiet"])
    assert refused.status == 2
    assert refused.err.count("give --scheme w4a4-real") == 1


def test_the_card_is_whole(written: tuple[Path, dict[str, Written]]) -> None:
    """Relative to its own place, so that folder and card can be moved together."""
    root, _ = written
    content = yaml.safe_load((root / "qwen3-w4a4.yaml").read_text())

    assert content["source"] == {"kind": "dir", "path": "qwen3-w4a4"}
    assert content["family"] == "qwen3"


def test_a_read_model_is_of_its_own_class(written: tuple[Path, dict[str, Written]]) -> None:
    """Everything but its layers is what it was."""
    root, _ = written
    reference = load(read_card(root / "llama-w4a4.yaml"), dtype="fp32")

    assert isinstance(reference.model, LlamaForCausalLM)
    assert not reference.model.training
    assert len(integer_layers(reference.model)) == 14
