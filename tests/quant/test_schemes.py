"""Names, presets, YAML files and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oasis_eval.errors import SpecError, UnknownNameError, UnsupportedSchemeError
from oasis_eval.quant.backends import backend_for, quantize_
from oasis_eval.quant.fake import FakeBackend
from oasis_eval.quant.schemes import describe, presets, refusal, refused, resolve
from oasis_eval.spec import Calibration, QuantScheme, Region, TensorFormat

PRESETS = {
    "fp32": "reference in fp32, nothing quantized",
    "bf16": "reference in bf16, nothing quantized",
    "fp16": "reference in fp16, nothing quantized",
    "w8a8": "weights 8 bits symmetric per output channel, min-max; "
    "linear inputs 8 bits symmetric per token, dynamic",
    "w6a6": "weights 6 bits symmetric per output channel, min-max; "
    "linear inputs 6 bits symmetric per token, dynamic",
    "w4a8": "weights 4 bits symmetric per output channel, min-max; "
    "linear inputs 8 bits symmetric per token, dynamic",
    "w4a4": "weights 4 bits symmetric per output channel, min-max; "
    "linear inputs 4 bits symmetric per token, dynamic",
    "w8a16": "weights 8 bits symmetric per output channel, min-max; activations in floating point",
    "w4a16": "weights 4 bits symmetric per output channel, min-max; activations in floating point",
    "w8a8-g128": "weights 8 bits symmetric per group of 128 inputs, min-max; "
    "linear inputs 8 bits symmetric per group of 128 inputs, dynamic",
    "w4a8-g128": "weights 4 bits symmetric per group of 128 inputs, min-max; "
    "linear inputs 8 bits symmetric per group of 128 inputs, dynamic",
    "w4a4-g128": "weights 4 bits symmetric per group of 128 inputs, min-max; "
    "linear inputs 4 bits symmetric per group of 128 inputs, dynamic",
    "w4a16-g128": "weights 4 bits symmetric per group of 128 inputs, min-max; "
    "activations in floating point",
    "w8a8-static-linear": "weights 8 bits symmetric per tensor, min-max; "
    "linear inputs 8 bits asymmetric per tensor, static running min-max",
    "w4a4-static-linear": "weights 4 bits symmetric per tensor, min-max; "
    "linear inputs 4 bits asymmetric per tensor, static running min-max",
}


def test_the_presets_are_these() -> None:
    """Every listed preset with what it means, in order."""
    found = {name: scheme.description for name, scheme in presets().items()}

    assert list(PRESETS.items()) == list(found.items())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_name_resolves_to(name: str) -> None:
    """The table and the grammar agree, and case does not matter."""
    assert presets()[name] == resolve(name) == resolve(name.upper())
    assert describe(resolve(name)) == resolve(name).description


def test_static_preset_follows_the_protocol() -> None:
    """Asymmetric running min-max with momentum 0.9 over four batches of calibration text."""
    expected = QuantScheme(
        name="w4a4-static-linear",
        description=PRESETS["w4a4-static-linear"],
        weights=TensorFormat(bits=4, granularity="tensor"),
        activations=TensorFormat(
            bits=4, granularity="tensor", symmetric=False, ranges="running_minmax", momentum=0.9
        ),
        calibration=Calibration(num_batches=4),
    )

    assert expected == resolve("w4a4-static-linear")


@pytest.mark.parametrize(
    ("name", "weight_bits", "activation_bits", "group"),
    [("w5a7-g64", 5, 7, 64), ("w2a16", 2, None, None), ("w16a3-g1", None, 3, 1)],
)
def test_any_width_of_the_grammar_is_a_scheme(
    name: str, weight_bits: int | None, activation_bits: int | None, group: int | None
) -> None:
    """Names that no table lists."""
    scheme = resolve(name)
    formats = [(scheme.weights, weight_bits), (scheme.activations, activation_bits)]

    for fmt, bits in formats:
        assert (None if fmt is None else fmt.bits) == bits
        assert fmt is None or fmt.group_size == group


REFUSED = {
    "nf4": "scheme 'nf4': 4-bit normal-float weights (bitsandbytes) cannot be run by this version; "
    "the nearest is 'w4a16-g128'",
    "fp4": "scheme 'fp4': 4-bit float weights (bitsandbytes) cannot be run by this version; "
    "the nearest is 'w4a16-g128'",
    "llm-int8": "scheme 'llm-int8': 8-bit weights and activations with an outlier split "
    "(bitsandbytes) cannot be run by this version; the nearest is 'w8a8'",
    "fp8": "scheme 'fp8': 8-bit float weights and activations cannot be run by this version; "
    "the nearest is 'w8a8'",
    "mxfp4": "scheme 'mxfp4': 4-bit floats in blocks of 32 with power-of-two scales cannot be run "
    "by this version; the nearest is 'w4a4-g32'",
    "nvfp4": "scheme 'nvfp4': 4-bit floats in blocks of 16 with 8-bit float scales cannot be run "
    "by this version; the nearest is 'w4a4-g16'",
    "w8a8-static": "scheme 'w8a8-static': static ranges over the full graph (attention internals, "
    "residual, depth) cannot be run by this version; the nearest is 'w8a8-static-linear'",
    "w4a4-static": "scheme 'w4a4-static': static ranges over the full graph (attention internals, "
    "residual, depth) cannot be run by this version; the nearest is 'w4a4-static-linear'",
}
for _base in ("w8a8", "w4a4"):
    for _suffix, _what in {
        "smooth": "quantization after SmoothQuant",
        "rot": "quantization after a Hadamard rotation",
        "gptq": "GPTQ weights",
        "real": "real execution (integer codes and integer products)",
    }.items():
        REFUSED[f"{_base}-{_suffix}"] = (
            f"scheme '{_base}-{_suffix}': {_what} cannot be run by this version; "
            f"the nearest is '{_base}'"
        )
COMPOSED = {
    "w4a4-rot-gptq": "scheme 'w4a4-rot-gptq': quantization after a Hadamard rotation and GPTQ "
    "weights cannot be run by this version; the nearest is 'w4a4'",
    "w4a16-g64-gptq": "scheme 'w4a16-g64-gptq': GPTQ weights cannot be run by this version; "
    "the nearest is 'w4a16-g64'",
    "w16a16": "scheme 'w16a16': it quantizes nothing; use 'fp32', 'bf16' or 'fp16'",
    "w8a8-g64-static-linear": "scheme 'w8a8-g64-static-linear': static ranges have no groups; "
    "use 'w8a8-static-linear'",
    "w8a16-static-linear": "scheme 'w8a16-static-linear': static ranges need activations of 2 to "
    "8 bits; use 'w8a16'",
}


def test_the_refused_names_are_these() -> None:
    """Every known name that cannot be run, with its reason."""
    assert dict(refused()) == REFUSED


@pytest.mark.parametrize(("name", "message"), [*REFUSED.items(), *COMPOSED.items()])
def test_a_refused_name_says_why(name: str, message: str) -> None:
    """One line: what it is, that it cannot be run, what is nearest."""
    with pytest.raises(UnsupportedSchemeError) as caught:
        resolve(name)

    assert str(caught.value) == message


@pytest.mark.parametrize("name", REFUSED)
def test_the_nearest_scheme_of_a_refusal_exists(name: str) -> None:
    """The name that a refusal proposes can be run."""
    nearest = refused()[name].rsplit("'", 2)[1]

    assert refusal(resolve(nearest)) is None


@pytest.mark.parametrize("name", ["w9a9", "w8a8-foo", "w1a4", "w8a8-g0", "w8a8-", "int8", "", "w8"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    """A name that means nothing is never guessed."""
    with pytest.raises(UnknownNameError):
        resolve(name)


def test_an_unknown_name_lists_the_nearest() -> None:
    """The message proposes names."""
    with pytest.raises(UnknownNameError, match=r"did you mean .*w8a8-static-linear"):
        resolve("w8a8-static-lin")


def write(path: Path, scheme: object) -> str:
    path.write_text(yaml.safe_dump(scheme), encoding="utf-8")
    return str(path)


def test_a_scheme_is_read_from_yaml(tmp_path: Path) -> None:
    """Every setting of a scheme can be written out; a description is added where there is none."""
    path = write(
        tmp_path / "mine.yaml",
        {
            "name": "mine",
            "weights": {"bits": 3, "granularity": "group", "group_size": 32, "symmetric": False},
            "activations": {
                "bits": 8,
                "granularity": "channel",
                "ranges": "percentile",
                "percentile": 99.9,
            },
            "regions": ["linear_inputs", "lm_head"],
            "skip": ["*.down_proj"],
            "calibration": {"num_batches": 2},
        },
    )
    scheme = resolve(path)

    assert scheme.description == (
        "weights 3 bits asymmetric per group of 32 inputs, min-max; "
        "linear inputs, lm head 8 bits symmetric per input channel, percentile 99.9"
    )
    assert FakeBackend().unsupported(scheme) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_written_out(name: str, tmp_path: Path) -> None:
    """A preset dumped to YAML reads back as the preset."""
    path = write(tmp_path / "preset.yaml", presets()[name].model_dump(mode="json"))

    assert presets()[name] == resolve(path)


def test_a_file_cannot_give_a_preset_another_meaning(tmp_path: Path) -> None:
    """Two different schemes under one name would meet in a table."""
    path = write(
        tmp_path / "x.yaml", {"name": "w8a8", "weights": {"bits": 4, "granularity": "tensor"}}
    )

    with pytest.raises(SpecError, match="'w8a8' is a preset with other settings"):
        resolve(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": {}}, "unknown key 'weight'"),
        ({"weights": {"bits": 9, "granularity": "tensor"}}, "weights.bits"),
        ({"weights": {"bits": 4, "granularity": "group"}}, "'group_size' goes with"),
        ({"weights": {"bits": 4, "granularity": "token"}}, "weights have no tokens"),
    ],
)
def test_a_wrong_file_is_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """Wrong keys and values name the file and the key."""
    path = write(tmp_path / "x.yaml", {"name": "mine"} | changes)

    with pytest.raises(SpecError, match=message) as caught:
        resolve(path)

    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error() -> None:
    """A path that does not exist is named."""
    with pytest.raises(SpecError, match=r"nowhere\.yaml: cannot be read"):
        resolve("nowhere.yaml")


FOREIGN: list[Region] = [
    "attention_scores",
    "attention_probs",
    "attention_context",
    "attention_gate",
    "kv_cache",
    "depth_router",
    "depth_weights",
    "depth_sources",
    "residual",
    "embedding",
]
WEIGHTS = {"bits": 8, "granularity": "channel"}


@pytest.mark.parametrize("region", FOREIGN)
def test_other_regions_are_refused_by_name(region: Region, tmp_path: Path) -> None:
    """A region that cannot be quantized is never dropped from a scheme."""
    path = write(
        tmp_path / "x.yaml",
        {"name": "mine", "weights": WEIGHTS, "regions": ["linear_inputs", region]},
    )

    with pytest.raises(UnsupportedSchemeError) as caught:
        resolve(path)

    assert str(caught.value) == (
        f"{path}: scheme 'mine': region {region} cannot be quantized by this version; it can do "
        "linear_inputs, linear_outputs, lm_head"
    )


@pytest.mark.parametrize(
    ("backend", "execution", "message"),
    [
        ("torch", "real", "real execution cannot be run"),
        ("fake", "real", "real execution cannot be run"),
        ("bitsandbytes", "fake", "backend 'bitsandbytes' cannot be run"),
        ("quanto", "fake", "backend 'quanto' cannot be run"),
        ("torchao", "fake", "backend 'torchao' cannot be run"),
    ],
)
def test_other_backends_are_refused_by_name(
    backend: str, execution: str, message: str, tmp_path: Path
) -> None:
    """Neither execution nor backend is replaced by another."""
    fields = {"name": "mine", "backend": backend, "execution": execution, "weights": WEIGHTS}
    scheme = QuantScheme.model_validate(fields)

    with pytest.raises(UnsupportedSchemeError, match=message):
        resolve(write(tmp_path / "x.yaml", fields))
    assert message in str(FakeBackend().unsupported(scheme))


def test_a_reference_scheme_has_no_backend() -> None:
    """What quantizes nothing is not handed to a quantizer."""
    scheme = resolve("bf16")

    with pytest.raises(UnsupportedSchemeError, match="backend 'none'"):
        backend_for(scheme)
    assert "quantizes nothing" in str(FakeBackend().unsupported(scheme))
    assert refusal(scheme) is None


def test_quantize_refuses_what_the_backend_cannot_do() -> None:
    """The refusal comes before the model is looked at."""
    scheme = resolve("w8a8").model_copy(update={"name": "mine", "regions": ("residual",)})

    with pytest.raises(UnsupportedSchemeError, match="region residual"):
        quantize_(None, scheme)  # type: ignore[arg-type]


def test_schemes_need_no_torch() -> None:
    """Listing and resolving schemes imports neither torch nor transformers."""
    code = (
        "import sys; from oasis_eval.quant import schemes, backends; schemes.presets(); "
        "schemes.resolve('w4a4-g32'); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
