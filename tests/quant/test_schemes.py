"""Names, presets, YAML files and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from oasis_eval.errors import SpecError, UnknownNameError, UnsupportedSchemeError
from oasis_eval.quant.backends import backend_for, quantize_
from oasis_eval.quant.schemes import describe, presets, resolve
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import (
    Calibration,
    Gptq,
    Hadamard,
    QuantScheme,
    Region,
    SmoothQuant,
    TensorFormat,
)
from tests.command_line import CommandLine

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
    """The listed presets with what they mean, in order."""
    found = {name: scheme.description for name, scheme in presets().items()}

    assert list(PRESETS.items()) == list(found.items())[: len(PRESETS)]
    assert "after GPTQ; weights 4 bits" in found["w4a4-gptq"]
    assert "full graph 8 bits asymmetric per tensor" in found["w8a8-static"]
    assert "power-of-two scales" in found["mxfp4"]
    assert found["llm-int8"].endswith(
        "input columns beyond 6 in floating point; run by bitsandbytes"
    )


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


CONTRADICTIONS = {
    "w16a16": "it quantizes nothing; use 'fp32', 'bf16' or 'fp16'",
    "w8a8-g64-static-linear": "static ranges have no groups; use 'w8a8-static-linear'",
    "w8a8-g64-static": "static ranges have no groups; use 'w8a8-static'",
    "w8a16-static-linear": "static ranges need activations of 2 to 8 bits; use 'w8a16'",
    "fp8-static": "static ranges need an integer format; use 'fp8'",
    "mxfp4-g64": "its groups are part of the format; use 'mxfp4'",
    "w16a8-gptq": "GPTQ rounds weights, which it leaves alone; use 'w16a8'",
    "w4a16-smooth": "SmoothQuant is for activations, which it leaves alone; use 'w4a16'",
    "quanto-w8a8-real": "quanto is real execution anyway; use 'quanto-w8a8'",
}


@pytest.mark.parametrize(("name", "message"), CONTRADICTIONS.items())
def test_a_name_that_contradicts_itself_says_why(name: str, message: str) -> None:
    """One line: what does not go together, and a name that means something."""
    with pytest.raises(UnsupportedSchemeError) as caught:
        resolve(name)

    assert str(caught.value) == f"scheme {name!r}: {message}"
    resolve(message.rsplit("'", 2)[1])


def test_a_composed_name_has_every_part() -> None:
    """Groups, transforms with their constants in their order, execution."""
    scheme = resolve("w4a8-g128-smooth0.75-rot-gptq-real")
    expected = QuantScheme(
        name="w4a8-g128-smooth0.75-rot-gptq-real",
        description=describe(scheme),
        backend="torch",
        execution="real",
        weights=TensorFormat(bits=4, granularity="group", group_size=128),
        activations=TensorFormat(bits=8, granularity="group", group_size=128, ranges="dynamic"),
        calibration=Calibration(num_batches=4),
        transforms=(SmoothQuant(alpha=0.75), Hadamard(), Gptq()),
    )

    assert expected == scheme


def test_the_full_graph_leaves_out_head_weights_and_queries() -> None:
    """Every region but these; ranges are percentiles, running over four batches."""
    scheme = resolve("w4a4-static")
    activations = TensorFormat(
        bits=4,
        granularity="tensor",
        symmetric=False,
        ranges="running_minmax",
        percentile=99.999,
        momentum=0.9,
    )

    assert set(get_args(Region)) - set(scheme.regions) == {
        "lm_head",
        "depth_weights",
        "depth_query",
    }
    assert (scheme.activations, scheme.calibration) == (activations, Calibration(num_batches=4))


@pytest.mark.parametrize("name", ["w8a8-foo", "w8a8-g0", "w8a8-", "int8", ""])
def test_an_unknown_name_is_an_error(name: str) -> None:
    """A name that means nothing is never guessed."""
    with pytest.raises(UnknownNameError):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w9a9", "2 to 8 bits, or 16"),
        ("w1a4", "2 to 8 bits, or 16"),
        ("w8", "expected wXaY"),
        ("w3a", "expected wXaY"),
        ("w4a4-gptq-rot", "in the order smooth, rot, gptq"),
        ("w4a4-smooth1.5", "alpha is written"),
        ("nf4-gptq", "takes -smooth and -rot, in this order; use 'nf4'"),
        ("nf4-smooth", "SmoothQuant is for activations"),
    ],
)
def test_a_name_that_is_nearly_one_says_what_is_wrong(name: str, message: str) -> None:
    """Better than a guess at what was meant."""
    with pytest.raises(UnsupportedSchemeError, match=message):
        resolve(name)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """The last one would win, and a number would be of another width than the first line says."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: mine\nweights: {bits: 4, granularity: channel}\n"
        "weights: {bits: 8, granularity: channel}\n"
    )

    with pytest.raises(SpecError, match=r"'weights' is given twice, again on line 3"):
        resolve(str(path))


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
    assert unsupported(scheme) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_written_out(name: str, tmp_path: Path) -> None:
    """A preset dumped to YAML reads back as the preset."""
    path = write(tmp_path / "preset.yaml", presets()[name].model_dump(mode="json"))

    assert presets()[name] == resolve(path)


@pytest.mark.parametrize(
    "name", ["fp32", "w4a4", "w4a4-static", "w4a4-rot-gptq", "nf4", "w3a5-g64"]
)
def test_a_shown_scheme_is_a_file_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `schemes --show` prints reads back as the same scheme, and can be changed."""
    call = CommandLine(monkeypatch, capsys)
    path = tmp_path / "mine.yaml"
    path.write_text(call(["schemes", "--show", name]).out)
    same = resolve(str(path))
    path.write_text(path.read_text().replace(f"name: {name}", "name: mine"))

    assert same == resolve(name)
    assert resolve(str(path)).model_dump(exclude={"name"}) == same.model_dump(exclude={"name"})


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


def test_what_a_backend_cannot_do_is_named_before_anything_loads() -> None:
    """Backends with one execution only are not given the other."""
    weights = TensorFormat(bits=8, granularity="channel")
    scheme = QuantScheme(name="mine", backend="fake", execution="real", weights=weights)

    assert unsupported(scheme) == (
        "scheme 'mine': backend 'fake' has execution 'fake' only; real execution is backend 'torch'"
    )
    with pytest.raises(UnsupportedSchemeError, match="execution 'fake' only"):
        quantize_(None, scheme)  # type: ignore[arg-type]  # refused before it is looked at


def test_a_reference_scheme_has_no_backend() -> None:
    """What quantizes nothing is not handed to a quantizer."""
    scheme = resolve("bf16")

    with pytest.raises(UnsupportedSchemeError, match="backend 'none'"):
        backend_for(scheme)
    assert unsupported(scheme) is None


def test_schemes_need_no_torch() -> None:
    """Listing and resolving schemes imports neither torch nor transformers."""
    code = (
        "import sys; from oasis_eval.quant import schemes, backends, support; "
        "[support.unsupported(scheme) for scheme in schemes.presets().values()]; "
        "schemes.resolve('w4a4-g32'); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
