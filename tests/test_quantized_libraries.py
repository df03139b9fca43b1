"""Quantized checkpoints of bitsandbytes, optimum-quanto and torchao: another process, strictly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from oasis_eval import registry
from oasis_eval.errors import CheckpointError, UnsupportedSchemeError
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.quant.replacement import LibraryApplied
from oasis_eval.quantized import Plan, Written, quantize
from oasis_eval.spec import Dtype, QuantScheme
from tests import tiny
from tests.command_line import CommandLine
from tests.quant.of_libraries import SLOW, needs_torchao
from tests.quantized_folders import biased_llama, calibration_text, change, gpt2, oasis, qwen3

IDS = torch.arange(3, 60)[None]
READER = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from oasis_eval import registry
from oasis_eval.loading import load
for path in map(Path, sys.argv[1:]):
    card = registry.read_card(path)
    model = load(card, dtype=card.dtype).model
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 60)[None], use_cache=False).logits
    save_file({"logits": logits}, path.with_suffix(".logits"))
"""
HEAD_TOO = {
    "backend": "bitsandbytes",
    "execution": "real",
    # Blocks larger than most weights here, so that the last one is not full.
    "weights": {"type": "nf4", "bits": 4, "granularity": "group", "group_size": 4096},
    "regions": ["linear_inputs", "lm_head"],
    "skip": ["*layers.1.mlp*"],
}
WRITTEN_OUT = {
    name: QuantScheme.model_validate(content | {"name": name})
    for name, content in (
        ("nf4-head-too", HEAD_TOO),
        ("nf4-head-too-rotated", HEAD_TOO | {"transforms": [{"kind": "hadamard"}]}),
    )
}


def tied_llama() -> nn.Module:
    return tiny.build_model(tie_word_embeddings=True)


def outlier_llama() -> nn.Module:
    """Some input columns of every layer pass the threshold of LLM.int8()."""
    model = tiny.build_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] *= 20
            layer.post_attention_layernorm.weight[7] *= 20
    return model


class Case(NamedTuple):
    """What is quantized and how."""

    build: Callable[[], nn.Module]
    scheme: str
    dtype: Dtype = "fp32"


CASES = {
    "llm-int8": Case(outlier_llama, "llm-int8"),
    "llm-int8-biased": Case(biased_llama, "llm-int8", "bf16"),
    "bnb-tied-smooth-rot": Case(tied_llama, "bnb-w8a8-smooth-rot"),
    "nf4": Case(tiny.build_model, "nf4"),
    "nf4-biased": Case(biased_llama, "nf4", "bf16"),
    "nf4-tied-head-too": Case(tied_llama, "nf4-head-too"),
    "nf4-tied-head-too-rot": Case(tied_llama, "nf4-head-too-rotated"),
    "nf4-gated-rot": Case(lambda: oasis("gated"), "nf4-rot"),
    "fp4-gpt2-rot": Case(gpt2, "fp4-rot"),
    "quanto-biased": Case(biased_llama, "quanto-w8a8"),
    "quanto-oasis-smooth-rot": Case(lambda: oasis("oasis"), "quanto-w8a8-smooth-rot"),
    "quanto-gpt2": Case(gpt2, "quanto-w8a8", "bf16"),
    "quanto-qwen3-weights": Case(qwen3, "quanto-w8a16", "bf16"),
    "torchao-biased-smooth-rot": Case(biased_llama, "torchao-w8a8-smooth-rot", "bf16"),
    "quanto-int4": Case(
        lambda: tiny.build_model(hidden_size=192, intermediate_size=256), "quanto-w4a16"
    ),
    "quanto-int4-biased": Case(biased_llama, "quanto-w4a16", "bf16"),
}
MARKS: dict[str, Any] = {
    "torchao-biased-smooth-rot": needs_torchao,
    "quanto-int4": SLOW,
    "quanto-int4-biased": SLOW,
}
NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES]


def scheme_named(name: str) -> QuantScheme:
    return WRITTEN_OUT[name] if name in WRITTEN_OUT else schemes.resolve(name)


class Folders:
    """Folders of the cases, each made when first asked for, and what they were made from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.text = calibration_text(root)
        self._made: dict[str, Written] = {}

    def written(self, name: str) -> Written:
        if name not in self._made:
            case = CASES[name]
            model = case.build().to({"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype])
            source = tiny.save(self.source(name), model=model)
            plan = Plan(scheme=scheme_named(case.scheme), calibration=self.text)
            self._made[name] = quantize(
                registry.resolve(str(source)), plan, out=self.root / f"{name}-quantized"
            )
        return self._made[name]

    def source(self, name: str) -> Path:
        return self.root / name

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.written(name).folder / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """All cases, read-only."""
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copied(folders: Folders, tmp_path: Path) -> Callable[[str], Path]:
    """Return what copies a case's folder, to damage it."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders.written(name).folder, tmp_path / name))

    return copy


def read(folder: Path, dtype: Dtype) -> Reference:
    return load(registry.resolve(str(folder)), dtype=dtype)


def logits_of(prepared: PreparedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = prepared.model(input_ids=IDS, use_cache=False).logits
    return logits


class Answer(NamedTuple):
    """What a scheme makes of a model."""

    logits: Tensor
    prepared: PreparedModel


def answer(folder: Path, scheme: QuantScheme, dtype: Dtype, text: str) -> Answer:
    with prepare(read(folder, dtype), scheme, dtype=dtype, calibration_data=text) as prepared:
        return Answer(logits_of(prepared), prepared)


# --- what comes back --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_the_scheme_on_the_original(name: str, folders: Folders) -> None:
    """Logits, coverage and warnings, though the folder's are read from its own modules."""
    case = CASES[name]
    written = folders.written(name)
    scheme = written.scheme
    before = answer(folders.source(name), scheme, case.dtype, folders.text)
    after = answer(written.folder, scheme, case.dtype, folders.text)

    assert torch.equal(before.logits, after.logits)
    assert before.logits.dtype == after.logits.dtype
    assert before.prepared.coverage == after.prepared.coverage == written.coverage
    assert sorted(before.prepared.warnings) == sorted(after.prepared.warnings)
    with prepare(
        read(folders.source(name), case.dtype), schemes.resolve("fp32"), dtype=case.dtype
    ) as plain:
        assert not torch.equal(logits_of(plain).float(), after.logits.float())


@pytest.mark.parametrize(
    "names",
    [
        [name for name in CASES if name not in MARKS],
        pytest.param(["torchao-biased-smooth-rot"], marks=needs_torchao),
        pytest.param(["quanto-int4", "quanto-int4-biased"], marks=SLOW),
    ],
    ids=["always", "torchao", "int4"],
)
def test_another_process_computes_the_same_logits(names: list[str], folders: Folders) -> None:
    """One that knows nothing but the folders; it imports every library, which takes seconds."""
    cards = [folders.written(name).card_file for name in names]
    subprocess.run([sys.executable, "-c", READER, *cards], check=True)
    for name, card in zip(names, cards, strict=True):
        case = CASES[name]
        scheme = scheme_named(case.scheme)
        expected = answer(folders.source(name), scheme, case.dtype, folders.text).logits

        assert torch.equal(load_file(card.with_suffix(".logits"))["logits"], expected), name


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_stored_under_the_names_of_their_library(name: str, folders: Folders) -> None:
    """What its own `state_dict` has, so that other readers of that find it; and codes are small."""
    written = folders.written(name)
    tensors = folders.tensors(name)
    applied = read(written.folder, CASES[name].dtype).applied
    assert isinstance(applied, LibraryApplied)
    for layer_name, layer in applied.layers.items():
        prefix = f"{layer_name}."
        stored = {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)}
        if applied.scheme.backend == "torchao":  # one tensor of its own class, which pickles
            assert stored - {"bias"} == {"weight.qdata", "weight.scale", "weight.zero_point"}
            continue
        expected = layer.state_dict()

        assert stored == set(expected)
        for key, value in expected.items():
            assert torch.equal(tensors[prefix + key], value)
            assert tensors[prefix + key].dtype == value.dtype


@pytest.mark.parametrize("name", NAMES)
def test_codes_take_their_bits_on_disk(name: str, folders: Folders) -> None:
    """No weight of a quantized layer is there in floating point; the file is as small as said."""
    written = folders.written(name)
    tensors = folders.tensors(name)
    model = read(folders.source(name), "fp32").model
    for item in written.coverage.modules:
        if not item.quantized:
            continue
        keys = [key for key in tensors if key.startswith(f"{item.module}.weight")]
        codes = [key for key in keys if key.rsplit(".", 1)[-1] in ("weight", "_data", "qdata")]
        count = model.get_submodule(item.module).weight.numel()  # type: ignore[union-attr, operator]

        assert item.weight_bits in (4, 8)
        assert [tensors[key].dtype.itemsize for key in codes] == [1]
        assert tensors[codes[0]].numel() == count * item.weight_bits // 8
        others = sum(tensors[key].numel() for key in keys if key not in codes)
        assert others < count * item.weight_bits / 8
    size = (written.folder / "model.safetensors").stat().st_size
    assert written.bytes_weights == size < written.coverage.bytes_before
    # Beside codes and scales: names, and per layer a code book and its settings.
    room = 400 * len(tensors)
    assert written.coverage.bytes_after <= size <= written.coverage.bytes_after + room


def test_what_is_printed_to_evaluate_a_folder_runs(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the dtype, where the default would be refused."""
    line = folders.written("quanto-gpt2").lines()[-1]
    command = line.partition("Evaluate: oasis-eval ")[2].split()
    text = folders.text
    call = CommandLine(monkeypatch, capsys)
    options = ["--task", "text", "--data", f"text={text}", "--window", 64, "--limit", 1, "--quiet"]
    result = call([*command, *options, "--out", folders.root / "runs"])

    assert command[-2:] == ["--dtype", "bf16"]
    assert "--dtype" not in folders.written("nf4").lines()[-1]
    assert result.status == 0, result.err


def test_reading_quantizes_nothing(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library's way from weights to codes is gone when a folder is read."""
    import bitsandbytes
    from optimum.quanto.nn import qmodule

    names = ("llm-int8", "nf4", "quanto-biased")
    for name in names:
        folders.written(name)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("quantized again")

    for module, key in (
        (bitsandbytes.functional, "quantize_4bit"),
        (bitsandbytes.nn.Int8Params, "_quantize"),
        (qmodule, "quantize_weight"),
    ):
        monkeypatch.setattr(module, key, forbidden)
    for name in names:
        read(folders.written(name).folder, "fp32")
    with pytest.raises(AssertionError, match="quantized again"):
        answer(folders.source("nf4"), schemes.resolve("nf4"), "fp32", folders.text)


def test_a_threshold_is_part_of_the_folder(folders: Folders) -> None:
    """The outlier columns of LLM.int8() are there in what was read, and matter."""
    applied = read(folders.written("llm-int8").folder, "fp32").applied
    assert isinstance(applied, LibraryApplied)
    without = answer(folders.source("llm-int8"), schemes.resolve("bnb-w8a8"), "fp32", folders.text)
    found = answer(
        folders.written("llm-int8").folder, schemes.resolve("llm-int8"), "fp32", folders.text
    )

    assert [layer.state.threshold for layer in applied.layers.values()] == [6.0] * 14  # type: ignore[union-attr]
    assert not torch.equal(without.logits, found.logits)


# --- other dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nf4", "llm-int8"])
def test_bitsandbytes_computes_in_another_dtype(name: str, folders: Folders) -> None:
    """Codes stay, everything else is cast, by `load` as by `prepare`, and back afterwards."""
    folder, scheme = folders.written(name).folder, scheme_named(CASES[name].scheme)
    reference = read(folder, "fp32")
    with prepare(reference, scheme, dtype="fp32") as prepared:
        first = logits_of(prepared)
    with prepare(reference, scheme, dtype="bf16") as prepared:
        narrow = logits_of(prepared)
        applied = prepared.applied
        assert isinstance(applied, LibraryApplied)
        if name == "nf4":
            weights = {applied.library.dequantize(x).dtype for x in applied.layers.values()}
            assert weights == {torch.bfloat16}
            assert {layer.compute_dtype for layer in applied.layers.values()} == {torch.bfloat16}
    with prepare(reference, scheme, dtype="fp32") as prepared:
        again = logits_of(prepared)

    assert torch.equal(first, again)
    assert narrow.dtype == torch.bfloat16
    assert 0 < float((narrow.float() - first).norm() / first.norm()) < 0.05
    assert torch.equal(answer(folder, scheme, "bf16", folders.text).logits, narrow)


@pytest.mark.parametrize(
    ("name", "dtype", "flag"),
    [
        ("quanto-biased", "bf16", "fp32"),
        ("quanto-gpt2", "fp32", "bf16"),
        pytest.param("torchao-biased-smooth-rot", "fp32", "bf16", marks=needs_torchao),
    ],
)
def test_a_library_that_cannot_cast_says_so(
    name: str, dtype: Dtype, flag: str, folders: Folders
) -> None:
    """One line with the dtype to give, from `load` and from `prepare`; the model stays usable."""
    folder, scheme = folders.written(name).folder, scheme_named(CASES[name].scheme)
    with pytest.raises(UnsupportedSchemeError, match=f"give --dtype {flag}") as caught:
        read(folder, dtype)
    assert "\n" not in str(caught.value)
    reference = read(folder, CASES[name].dtype)
    with prepare(reference, scheme, dtype=CASES[name].dtype) as prepared:
        before = logits_of(prepared)
    with (
        pytest.raises(UnsupportedSchemeError, match=f"give --dtype {flag}"),
        prepare(reference, scheme, dtype=dtype),
    ):
        pass
    with prepare(reference, scheme, dtype=CASES[name].dtype) as prepared:
        assert torch.equal(logits_of(prepared), before)


# --- strict reading ---------------------------------------------------------------------------

UP = "model.layers.1.mlp.up_proj"
NF4_STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"


def packed(**settings: object) -> Tensor:
    """Return settings as bitsandbytes packs them."""
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [96, 48]}
AO = "torchao-biased-smooth-rot"
DAMAGE: list[tuple[str, str, Tensor | None, str]] = [
    ("nf4", f"{UP}.weight", None, "tensors missing"),
    ("nf4", f"{UP}.weight.absmax", None, "tensors missing"),
    ("nf4", f"{UP}.weight.quant_map", None, "tensors missing"),
    ("nf4", NF4_STATE, None, "tensors missing"),
    ("nf4", f"{UP}.weight.nested_absmax", torch.ones(2), "not part of the model"),
    ("nf4", f"{UP}.bias", torch.ones(96), "not part of the model"),
    ("nf4", f"{UP}.weight", torch.zeros(96, 24, dtype=torch.uint8), r"is \[96, 24\], expected"),
    ("nf4", f"{UP}.weight", torch.zeros(2304, 1), "stored as float32, expected uint8"),
    ("nf4", f"{UP}.weight.absmax", torch.ones(71), r"is \[71\], expected \[72\]"),
    ("nf4", f"{UP}.weight.absmax", torch.ones(72).half(), "stored as float16, expected float32"),
    ("nf4", f"{UP}.weight.absmax", -torch.ones(72), "magnitude that is negative or not finite"),
    ("nf4", f"{UP}.weight.absmax", torch.full((72,), torch.inf), "negative or not finite"),
    ("nf4", f"{UP}.weight.quant_map", torch.linspace(-1, 1, 16), "is not what bitsandbytes"),
    ("nf4", f"{UP}.weight.quant_map", torch.ones(16).half(), "is not what bitsandbytes"),
    ("nf4", NF4_STATE, packed(**STATE | {"blocksize": 32}), "is not what bitsandbytes"),
    ("nf4", NF4_STATE, packed(**STATE | {"shape": [48, 96]}), "is not what bitsandbytes"),
    ("nf4", NF4_STATE, packed(**STATE | {"dtype": "float16"}), "is not what bitsandbytes"),
    ("nf4", NF4_STATE, torch.zeros(3, dtype=torch.uint8), "is not what bitsandbytes"),
    ("nf4", "model.norm.weight", torch.ones(48, dtype=torch.int32), "stored as int32"),
    ("llm-int8", f"{UP}.SCB", None, "tensors missing"),
    ("llm-int8", f"{UP}.weight", torch.zeros(96, 48), "stored as float32, expected int8"),
    ("llm-int8", f"{UP}.weight", torch.zeros(48, 96, dtype=torch.int8), r"is \[48, 96\]"),
    ("llm-int8", f"{UP}.weight", torch.full((96, 48), -128, dtype=torch.int8), "code -128"),
    ("llm-int8", f"{UP}.SCB", torch.ones(96).bfloat16(), "stored as bfloat16"),
    ("llm-int8", f"{UP}.SCB", torch.full((96,), torch.nan), "negative or not finite"),
    ("llm-int8", f"{UP}.weight_format", torch.tensor(2, dtype=torch.uint8), "is not what bitsand"),
    ("llm-int8", f"{UP}.weight_codes", torch.zeros(96, 48), "not part of the model"),
    ("quanto-biased", f"{UP}.weight._data", None, "tensors missing"),
    ("quanto-biased", f"{UP}.input_scale", None, "tensors missing"),
    ("quanto-biased", f"{UP}.weight", torch.zeros(96, 48), "not part of the model"),
    ("quanto-biased", f"{UP}.weight._data", torch.zeros(96, 48), "stored as float32, expected int"),
    ("quanto-biased", f"{UP}.weight._scale", torch.ones(96), r"is \[96\], expected \[96, 1\]"),
    ("quanto-biased", f"{UP}.weight._scale", torch.ones(96, 1).half(), "stored as float16"),
    ("quanto-biased", f"{UP}.weight._scale", -torch.ones(96, 1), "negative or not finite"),
    ("quanto-biased", f"{UP}.input_scale", torch.tensor(1.0), "1, which was not calibrated"),
    ("quanto-biased", f"{UP}.input_scale", torch.tensor(torch.nan), "negative or not finite"),
    ("quanto-qwen3-weights", f"{UP}.input_scale", torch.tensor(0.5).bfloat16(), "is for calibr"),
    (AO, f"{UP}.weight.qdata", None, "tensors missing"),
    (AO, f"{UP}.weight.scale", torch.zeros(96, 1), "a scale that is not a positive number"),
    (AO, f"{UP}.weight.zero_point", torch.ones(96, 1, dtype=torch.int8), "is not what torchao"),
    ("quanto-int4", f"{UP}.weight._data._data", None, "tensors missing"),
    ("quanto-int4", f"{UP}.weight._shift", torch.full((512, 1), torch.inf), "not finite"),
    ("quanto-int4", f"{UP}.weight._data._data", torch.zeros(256, 96), "expected uint8"),
]


@pytest.mark.parametrize(
    ("name", "tensor", "value", "text"),
    [pytest.param(*item, marks=MARKS.get(item[0], ())) for item in DAMAGE],
)
def test_reading_is_strict(
    name: str, tensor: str, value: Tensor | None, text: str, copied: Callable[[str], Path]
) -> None:
    """Whatever is missing, too much, of another kind or impossible is one line with its name."""
    folder = copied(name)
    change(folder, tensor, value)
    with pytest.raises(CheckpointError, match=text) as caught:
        read(folder, CASES[name].dtype)

    assert tensor in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_settings_of_a_weight_are_those_of_the_library(folders: Folders) -> None:
    """The damage above is measured against what is really written."""
    from bitsandbytes.utils import unpack_tensor_to_dict

    tensors = folders.tensors("nf4")

    assert unpack_tensor_to_dict(tensors[NF4_STATE]) == STATE
    assert torch.equal(tensors[NF4_STATE], packed(**STATE))


@pytest.mark.parametrize("name", ["nf4", "quanto-biased"])
def test_a_truncated_file_is_refused(name: str, copied: Callable[[str], Path]) -> None:
    """As for any checkpoint."""
    path = copied(name) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="incomplete"):
        read(path.parent, "fp32")


def edit(folder: Path, **settings: object) -> None:
    """Change what `config.json` says of quantization."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= settings
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("nf4", "fp4", "bitsandbytes__fp4"),
        ("nf4", "llm-int8", "SCB"),
        ("nf4", "quanto-w8a16", "weight._data"),
        ("nf4", "w4a4-real", "weight_codes"),
        ("nf4", "w4a4", "no integer codes to store"),
        ("nf4", "nf4-rot", r"rotated inputs in config.json \(0\) .* \(4\)"),
        ("fp4-gpt2-rot", "fp4", r"rotated inputs in config.json \(8\) .* \(0\)"),
        ("llm-int8", "nf4", "weight.absmax"),
        ("quanto-biased", "quanto-w8a16", "input_scale holds .* is for calibrated inputs"),
        ("quanto-qwen3-weights", "quanto-w8a8", "input_scale holds 1, which was not calibrated"),
    ],
)
def test_another_scheme_in_the_configuration_is_refused(
    name: str, other: str, text: str, copied: Callable[[str], Path]
) -> None:
    """Codes that another scheme would read as something else."""
    folder = copied(name)
    edit(folder, scheme=schemes.resolve(other).model_dump(mode="json"))
    with pytest.raises((CheckpointError, UnsupportedSchemeError), match=text) as caught:
        read(folder, CASES[name].dtype)

    assert "\n" not in str(caught.value)


def test_another_dtype_in_the_configuration_is_refused(copied: Callable[[str], Path]) -> None:
    """It is part of how a 4-bit weight is looked up."""
    folder = copied("nf4")
    path = folder / "config.json"
    for dtype, text in (("bfloat16", "quant_state"), ("int8", "config.json gives dtype 'int8'")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
        with pytest.raises(CheckpointError, match=text):
            read(folder, "fp32")


@pytest.mark.parametrize("change_of", ["width", "module", "inverse", "fewer"])
def test_other_rotations_in_the_configuration_are_refused(
    change_of: str, copied: Callable[[str], Path]
) -> None:
    """What rotates in the forward pass is that which was written, or nothing runs."""
    folder = copied("nf4-gated-rot")
    path = folder / "config.json"
    rotated = json.loads(path.read_text())["quantization_config"]["rotated"]
    assert {item["inverse"] for item in rotated} == {True, False}  # gates, and layers
    if change_of == "fewer":
        rotated.pop()
    else:
        value = {"width": 32, "module": "lm_head", "inverse": not rotated[0]["inverse"]}[change_of]
        rotated[0] |= {change_of: value}
    edit(folder, rotated=rotated)

    with pytest.raises(CheckpointError, match="are not those that 'nf4-rot' has"):
        read(folder, "fp32")


def test_another_version_of_the_library_is_noted(copied: Callable[[str], Path]) -> None:
    """Its codes mean the same as far as can be checked; a reader is told."""
    folder = copied("nf4")
    edit(folder, library="bitsandbytes 0.1")
    reference = read(folder, "fp32")
    with prepare(reference, schemes.resolve("nf4"), dtype="fp32") as prepared:
        warnings = prepared.warnings

    assert len(warnings) == 1
    assert warnings[0].startswith("the codes were made by bitsandbytes 0.1, and bitsandbytes ")
    change(folder, f"{UP}.weight.quant_map", torch.linspace(-1, 1, 16))
    with pytest.raises(CheckpointError, match=r"what wrote it \(bitsandbytes 0.1\)"):
        read(folder, "fp32")


# --- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "noted"),
    [
        ("nf4", 0),
        ("llm-int8-rot", 1),
        ("quanto-w8a8", 1),
        pytest.param("torchao-w8a8", 0, marks=needs_torchao),
    ],
)
def test_records_of_a_folder_are_those_of_the_scheme(
    scheme: str,
    noted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`quantize`, then `evaluate` of both: every metric, and per-window values, to the last bit."""
    call = CommandLine(monkeypatch, capsys)
    text = tmp_path / "text.txt"
    text.write_text(tiny.prose(3000))
    source, out = tiny.save(tmp_path / "source"), tmp_path / "stored"
    evaluated = ["--task", "text", "--window", 64, "--limit", 8, "--data", f"text={text}"]
    stored = call(["quantize", source, "--scheme", scheme, "--out", out])
    assert stored.status == 0, stored.err
    records, values = [], []
    for place in (source, out):
        runs = tmp_path / f"runs-{place.name}"
        result = call(
            ["evaluate", place, *evaluated, "--scheme", scheme, "--out", runs, "--json", "--quiet"]
        )
        assert result.status == 0, result.err
        records.append(json.loads(result.out))
        values.append([path.read_bytes() for path in runs.glob("*.samples.jsonl")])
    first, second = records

    assert first["metrics"] == second["metrics"]
    assert first["metrics"]
    assert values[0] == values[1]
    assert len(values[0]) == 1
    assert first["coverage"] == second["coverage"]
    assert first["coverage"]["num_quantized"] == 14
    warnings = [record["warnings"] for record in records]
    assert sorted(warnings[0]) == sorted(warnings[1])
    assert len(warnings[0]) == noted
    refused = call(["evaluate", out, *evaluated, "--scheme", "w8a8", "--quiet", "--out", tmp_path])
    assert refused.status == 2
    assert refused.err.count(f"give --scheme {scheme}") == 1
