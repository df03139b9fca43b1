"""Wrapping plain checkpoints: what is kept, what changes and is said, what is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from oasis_eval import convert as module
from oasis_eval import loading, registry
from oasis_eval.cli import main
from oasis_eval.convert import Conversion, Plan, convert
from oasis_eval.errors import CheckpointError, SpecError
from oasis_eval.modeling.variants import VARIANT_NAMES
from tests.modeling.tiny import BACKBONES, base_config, randomize_, relative_gap, tokens
from tests.tiny import save

IDS = tokens(1, 40, seed=3)

READER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from oasis_eval.modeling.registration import register

register()
ids = torch.tensor(json.loads(sys.argv[1]))
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
        logits = model(ids).logits[0, -1]
    print(json.dumps({"ids": written[0].tolist(), "logits": logits.tolist()}))
"""


def plain_model(backbone: str) -> PreTrainedModel:
    """A plain tiny model in which every parameter matters."""
    kind = LlamaForCausalLM if backbone == "llama" else Qwen3ForCausalLM
    model = kind(base_config(backbone, tie_word_embeddings=backbone == "qwen3"))
    randomize_(model, seed=1)
    return model.eval()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain checkpoint folder of each backbone; read-only."""
    root = tmp_path_factory.mktemp("plain")
    return {name: save(root / name, model=plain_model(name)) for name in BACKBONES}


def logits_of(model: torch.nn.Module) -> Tensor:
    """[T, V]."""
    with torch.no_grad():
        logits: Tensor = model(IDS).logits[0]
    return logits


def run(source: Path, out: Path, variant: str = "vanilla", **choices: object) -> Conversion:
    """Convert a folder."""
    return convert(registry.resolve(str(source)), Plan(variant=variant, **choices), out=out)


def reload(conversion: Conversion) -> torch.nn.Module:
    """What `evaluate` loads when it is given the card."""
    return loading.load(registry.resolve(str(conversion.card_file)), dtype="fp32").model


# --- what is kept -----------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize(
    "choices",
    [
        *({"num_blocks": blocks} for blocks in (1, 2, 4, 5, 6)),
        {},
        {"wiring": "attnres_full"},
        {"variant": "residual-vanilla"},
    ],
    ids=str,
)
def test_wrap_keeps_the_function(
    backbone: str, choices: dict[str, object], sources: dict[str, Path], tmp_path: Path
) -> None:
    """Written and read back, the variant gives the plain model's logits, for every block size."""
    conversion = run(sources[backbone], tmp_path / "out", **choices)
    gap = relative_gap(logits_of(reload(conversion)), logits_of(plain_model(backbone)))

    assert conversion.reasons == ()
    assert gap < 1e-5
    assert conversion.deviation.max_logit_difference < 1e-5
    assert conversion.deviation.top1_agreement == 1.0


def test_without_scale_the_epsilon_is_left(sources: dict[str, Path], tmp_path: Path) -> None:
    """The published form of a read differs from the residual by the norm's epsilon, and says so."""
    conversion = run(sources["llama"], tmp_path / "out", depth_output_scale="none")

    assert [reason.split(":")[0] for reason in conversion.reasons] == ["depth_output_scale none"]
    assert 1e-7 < conversion.deviation.max_logit_difference < 1e-2


# --- what changes, and that it is said --------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_a_change_is_said_and_measured(
    variant: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Every variant converts; a reason is given exactly where the logits move."""
    conversion = run(sources["llama"], tmp_path / "out", variant)
    gap = relative_gap(logits_of(reload(conversion)), logits_of(plain_model("llama")))

    assert bool(conversion.reasons) == (gap > 1e-3)
    assert bool(conversion.reasons) == (conversion.deviation.max_logit_difference > 1e-3)


@pytest.mark.parametrize(
    "wiring", ["oasis_repo", "cumulative", "cumulative_full", "reset", "delta"]
)
def test_other_wirings_are_no_wrap(wiring: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Only the two wirings whose reads add up to the residual keep a plain model's function."""
    conversion = run(sources["qwen3"], tmp_path / "out", wiring=wiring)

    assert len(conversion.reasons) == 1
    assert conversion.reasons[0].startswith(f"wiring {wiring}:")
    assert conversion.deviation.max_logit_difference > 1e-3


def test_softmax1_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    """A reader learns that softmax1, its depth form and the coupling change a trained model."""
    lines = run(sources["llama"], tmp_path / "out", "oasis").lines()
    text = "\n".join(lines)

    assert "The function changes:" in lines
    for reason in ("token_normalizer softmax1", "depth_normalizer softmax1", "null_coupling"):
        assert f"  - {reason}:" in text


def test_a_broken_promise_is_an_error(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement decides: a change that nobody expected is not written."""
    monkeypatch.setattr(module, "reasons_of_change", lambda config: ())

    with pytest.raises(CheckpointError, match="should keep the function, but a logit differs by"):
        run(sources["llama"], tmp_path / "out", "outeffhop")
    assert list(tmp_path.iterdir()) == []


# --- what is written --------------------------------------------------------------------------


def test_another_process_reads_and_generates(sources: dict[str, Path], tmp_path: Path) -> None:
    """A new process gets the plain models' logits and their greedy continuations."""
    folders = [str(run(sources[name], tmp_path / name).folder) for name in BACKBONES]
    ids = IDS[:, :9]
    command = [sys.executable, "-c", READER, json.dumps(ids.tolist()), *folders]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for backbone, line in zip(BACKBONES, printed.splitlines(), strict=True):
        read = json.loads(line)
        plain = plain_model(backbone)
        with torch.no_grad():
            expected = plain.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
            logits = plain(ids).logits[0, -1]

        assert read["ids"] == expected[0].tolist()
        assert relative_gap(torch.tensor(read["logits"]), logits) < 1e-5


def test_plain_tensors_are_copied_bit_for_bit(sources: dict[str, Path], tmp_path: Path) -> None:
    """Old tensors keep name and value; all new ones belong to depth routing."""
    conversion = run(sources["qwen3"], tmp_path / "out")
    before = load_file(sources["qwen3"] / "model.safetensors")
    after = load_file(conversion.folder / "model.safetensors")

    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all("attn_res" in name or "final_res" in name for name in after.keys() - before.keys())


def test_new_random_parameters_are_reproducible(sources: dict[str, Path], tmp_path: Path) -> None:
    """Two conversions of one checkpoint are one checkpoint, whatever was drawn in between."""
    first = run(sources["llama"], tmp_path / "first", "gated_g1")
    torch.rand(7)
    second = run(sources["llama"], tmp_path / "second", "gated_g1")

    assert (first.folder / "model.safetensors").read_bytes() == (
        second.folder / "model.safetensors"
    ).read_bytes()


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    """bfloat16 weights stay what they are, and the wrap of them is exact."""
    source = save(tmp_path / "plain", model=plain_model("llama").bfloat16())
    conversion = run(source, tmp_path / "out")
    tensors = load_file(conversion.folder / "model.safetensors")

    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert conversion.reasons == ()
    assert conversion.deviation.max_logit_difference < 1e-5


def test_rounding_to_another_dtype_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    """--dtype that drops bits is a change of the function."""
    conversion = run(sources["llama"], tmp_path / "out", dtype="bf16")

    assert conversion.reasons == ("dtype bf16: the weights, stored as fp32, are rounded",)


def test_card_says_what_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    """Family, variant (with another wiring than its own), dtype and a path that moves along."""
    conversion = run(sources["llama"], tmp_path / "out", wiring="attnres_full")
    card = registry.read_card(conversion.card_file)

    assert card.name == "out"
    assert card.family == "llama_oasis"
    assert card.variant == "vanilla (attnres_full)"
    assert card.dtype == "fp32"
    assert "path: out\n" in conversion.card_file.read_text()


def test_a_setting_of_ones_own_is_in_model_and_card(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ablation says what it is."""
    out = tmp_path / "out"
    options = ("--variant", "oasis", "--out", str(out), "--wiring", "oasis_repo")
    options += ("--set", "coupling_beta=fixed", "--set", "coupling_beta_value=0.5")
    options += ("--set", "coupling_centred=false")
    assert command(str(sources["llama"]), *options, monkeypatch=monkeypatch) == 0

    config = json.loads((out / "config.json").read_text())
    assert (config["coupling_beta"], config["coupling_beta_value"]) == ("fixed", 0.5)
    assert config["coupling_centred"] is False
    assert registry.read_card(tmp_path / "out.yaml").variant == (
        "oasis (oasis_repo, coupling_beta fixed, coupling_beta_value 0.5, coupling_centred False)"
    )


def test_generation_settings_are_taken_over(tmp_path: Path) -> None:
    """Even those that transformers would refuse to write: a temperature without sampling."""
    generation = {"temperature": 0.6, "do_sample": False, "eos_token_id": [2, 5]}
    source = save(tmp_path / "plain", model=plain_model("llama"), generation=generation)
    folder = run(source, tmp_path / "out").folder
    written = json.loads((folder / "generation_config.json").read_text())

    assert {name: written[name] for name in generation if name != "do_sample"} == {
        "temperature": 0.6,
        "eos_token_id": [2, 5],
    }


# --- refusals ---------------------------------------------------------------------------------


def test_existing_output_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    """A folder or a card in the way stays as it was."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "card.yaml").write_text("mine")

    for name in ("folder", "card"):
        with pytest.raises(SpecError, match="exists; choose another --out, or add --overwrite"):
            run(sources["llama"], tmp_path / name)
    assert (tmp_path / "card.yaml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.yaml", "folder"]


def test_overwrite_replaces(sources: dict[str, Path], tmp_path: Path) -> None:
    """--overwrite leaves nothing of the old folder, nor anything beside the new one."""
    out = tmp_path / "out"
    run(sources["llama"], out)
    (out / "leftover").touch()
    card = registry.resolve(str(sources["qwen3"]))
    convert(card, Plan(variant="aos"), out=out, overwrite=True)

    assert not (out / "leftover").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3_oasis"
    assert registry.read_card(tmp_path / "out.yaml").variant == "aos"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.yaml"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"num_blocks": 7}, "num_blocks is 7; .* takes 1 to 6"),
        ({"wiring": "attnres"}, "wiring is 'attnres'; expected"),
        ({"wiring": "attnres_full", "num_blocks": 2}, "has no blocks; leave it out"),
        ({"depth_output_scale": "sources"}, "depth_output_scale is 'sources'; expected"),
        ({"variant": "osais"}, "unknown variant 'osais'; did you mean oasis"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    choices: dict[str, object], message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """One line, and an existing folder survives a failed replacement."""
    out = tmp_path / "out"
    out.mkdir()
    plan = Plan(**{"variant": "vanilla", **choices})

    with pytest.raises(SpecError, match=message):
        convert(registry.resolve(str(sources["llama"])), plan, out=out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_plain_llama_and_qwen3_are_wrapped(sources: dict[str, Path], tmp_path: Path) -> None:
    """A variant is not wrapped again, and other families have no depth routing."""
    variant = run(sources["llama"], tmp_path / "variant").folder
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
    config = MistralConfig(**small, num_attention_heads=2, num_key_value_heads=2)
    other = save(tmp_path / "mistral", model=MistralForCausalLM(config))

    for folder, model_type in ((variant, "llama_oasis"), (other, "mistral")):
        with pytest.raises(CheckpointError, match=f"model_type is '{model_type}'; only a plain"):
            run(folder, tmp_path / "out")


# --- the command ------------------------------------------------------------------------------


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["oasis-eval", "convert", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_command_prints_the_statement_and_its_measurement(
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Folder, statement, figures and the next command, in that order."""
    out = tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text("A text of one's own, a little longer than nothing.")
    options = ("--variant", "vanilla", "--out", str(out), "--blocks", "3", "--text", str(text))
    status = command(str(sources["llama"]), *options, monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()

    assert status == 0
    assert lines[0] == f"Written: {out} (attnres_block, 3 blocks, depth_output_scale num_sources)"
    assert lines[1].startswith("The function is kept:")
    assert re.fullmatch(
        r"Measured on 50 tokens: largest logit difference \d(\.\d)?e-0\d of the largest logit, "
        r"top-1 equal on 100\.0 %",
        lines[2],
    )
    assert lines[3].endswith(f"oasis-eval evaluate {out}.yaml")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dtype", "int8", "error: --dtype 'int8': expected one of fp32, bf16, fp16"),
        ("--text", "nowhere.txt", "nowhere.txt"),
        ("--blocks", "99", "error: num_blocks is 99"),
        ("--set", "token_log_n", "error: --set 'token_log_n': expected SETTING=VALUE"),
        ("--set", "token_log_n=x", "error: --set 'token_log_n=x': expected a valid number"),
        ("--set", "depth_null=no", "error: --set 'depth_null=no': expected 'fixed' or 'learned'"),
        ("--set", "token_logn=1", "error: unknown setting 'token_logn'; did you mean token_log_n"),
        ("--set", "coupling_beta=fixed", "error: coupling_beta_value is None"),
    ],
)
def test_command_explains_mistakes_in_one_line(
    option: str,
    value: str,
    message: str,
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2, the cause, no traceback, nothing written."""
    options = ("--variant", "vanilla", "--out", str(tmp_path / "out"), option, value)
    status = command(str(sources["llama"]), *options, monkeypatch=monkeypatch)
    error = capsys.readouterr().err

    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
