"""Saving and loading: every parameter and every field, read back by another process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from oasis_eval.errors import SpecError
from oasis_eval.modeling.config import SETTING_NAMES, OasisConfig, OasisSettings, apply_settings
from oasis_eval.modeling.registration import register
from oasis_eval.modeling.variants import VARIANT_NAMES, build_config
from tests.modeling.tiny import (
    BACKBONES,
    CASES,
    QUICK_CASES,
    base_config,
    new_model,
    shared_model,
    tiny_config,
    tokens,
)

READER = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from oasis_eval.modeling.registration import register

register()
root = Path(sys.argv[1])
ids = torch.tensor(json.loads((root / "ids.json").read_text()))
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    config = AutoConfig.from_pretrained(folder)
    (folder / "read.json").write_text(json.dumps(config.to_dict(), default=str))
    if (folder / "model.safetensors").exists():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), (folder, info)
        tensors = {name: value.contiguous() for name, value in model.named_parameters()}
        with torch.no_grad():
            tensors["logits"] = model.eval()(ids).logits
        save_file(tensors, folder / "read.safetensors")
"""

NON_DEFAULT: dict[str, object] = {
    "wiring": "attnres_block",
    "num_blocks": 3,
    "token_normalizer": "softmax1",
    "token_log_n": 0.25,
    "token_null": "learned",
    "attention_gate": "g1",
    "depth_router": "lowrank_qk",
    "depth_recency": "linear",
    "depth_recency_init": 8.5,
    "depth_normalizer": "softmax1",
    "depth_log_n": -0.75,
    "depth_null": "learned",
    "depth_null_value": "partial",
    "depth_output_scale": "num_sources",
    "null_coupling": True,
    "coupling_beta": "fixed",
    "coupling_beta_raw_init": -3.5,
    "coupling_beta_value": 0.125,
    "coupling_block_psi": "max",
    "coupling_mlp_psi": "zero",
    "coupling_embedding_psi": "neutral",
    "coupling_centred": False,
    "coupling_psi_gradient": "detached",
    "coupling_logit_clamp": None,
    "coupling_final_read": False,
}
"""A value other than the default for every setting, valid together, but for those of a normalizer
that stretches."""

CLIPPED: dict[str, object] = {
    "token_normalizer": "clipped_softmax",
    "clip_alpha": 4.5,
    "clip_train_length": 77,
    "clip_zeta": 1.03,
}

BASE_FIELDS: dict[str, tuple[object, ...]] = {
    "tie_word_embeddings": (True, False),
    "head_dim": (16, 12),
    "use_cache": (True, False),
    "attention_dropout": (0.0, 0.25),
    "attention_bias": (True, False),
    "rms_norm_eps": (1e-6, 3e-5),
    "initializer_range": (0.02, 0.3),
    "num_key_value_heads": (1, 4),
    "max_position_embeddings": (2048, 64),
    "pad_token_id": (None, 5),
    "eos_token_id": (2, [2, 7]),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    ),
}
"""Fields of the backbone, each with a base class's default and with another value."""


WRITTEN_ON_SAVING = dict.fromkeys(("transformers_version", "_name_or_path"))

MODELS = [(case, "llama") for case in CASES]
MODELS += [(case, "qwen3") for case in QUICK_CASES if case in VARIANT_NAMES]


@cache
def configurations() -> dict[str, OasisConfig]:
    """Configurations to read back, by folder name."""
    found: dict[str, OasisConfig] = {}
    for backbone in BACKBONES:
        settings = OasisSettings(**NON_DEFAULT)
        found[f"config-{backbone}-settings"] = apply_settings(base_config(backbone), settings)
        clipped = OasisSettings(**CLIPPED)
        found[f"config-{backbone}-clipped"] = apply_settings(base_config(backbone), clipped)
        found[f"config-{backbone}-defaults"] = build_config(base_config(backbone), "vanilla")
        for field, values in BASE_FIELDS.items():
            for index, value in enumerate(values):
                base = base_config(backbone, **{field: value})
                found[f"config-{backbone}-{field}-{index}"] = build_config(base, "oasis")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything saved here, and what one new process read from it."""
    root = tmp_path_factory.mktemp("saved")
    ids = tokens(1, 6)
    (root / "ids.json").write_text(json.dumps(ids.tolist()))
    for name, config in configurations().items():
        config.save_pretrained(root / name)
    for case, backbone in MODELS:
        model = new_model(tiny_config(backbone, case))
        numbered_(model)
        model.save_pretrained(root / f"model-{backbone}-{case}")
        with torch.no_grad():
            logits = model(ids).logits
        save_file({"logits": logits}, root / f"model-{backbone}-{case}" / "expected.bin")
    done = subprocess.run(
        [sys.executable, "-c", READER, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return root


def numbered_(model: torch.nn.Module) -> None:
    """Fill the i-th parameter with i / 100."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(index / 100)


@pytest.mark.parametrize(("case", "backbone"), MODELS)
def test_every_parameter_comes_back(folder: Path, case: str, backbone: str) -> None:
    """Bit-equal, with nothing initialised anew, and the same logits."""
    saved = folder / f"model-{backbone}-{case}"
    names = [name for name, _ in shared_model(backbone, case).named_parameters()]

    found = load_file(saved / "read.safetensors")

    logits = found.pop("logits")
    assert found.keys() == set(names)
    for index, name in enumerate(names):
        assert torch.equal(found[name], torch.full_like(found[name], index / 100)), name
    assert torch.equal(logits, load_file(saved / "expected.bin")["logits"])


@pytest.mark.parametrize("name", configurations())
def test_every_field_comes_back(folder: Path, name: str) -> None:
    """Also those that hold what a base class has as default."""
    expected = json.loads(json.dumps(configurations()[name].to_dict(), default=str))

    found = json.loads((folder / name / "read.json").read_text())

    assert found | WRITTEN_ON_SAVING == expected | WRITTEN_ON_SAVING


def test_non_default_values_cover_every_setting() -> None:
    """A setting that is added must be added to the round trip."""
    assert set(NON_DEFAULT) | set(CLIPPED) == set(SETTING_NAMES)
    defaults = OasisSettings()
    same = {
        name
        for name, value in (*NON_DEFAULT.items(), *CLIPPED.items())
        if getattr(defaults, name) == value
    }
    assert same == {"wiring"}  # the others exist under few wirings only; models cover them


def test_each_wiring_comes_back(folder: Path) -> None:
    """The models' own configurations, one per wiring and variant."""
    for case, backbone in MODELS:
        found = json.loads((folder / f"model-{backbone}-{case}" / "read.json").read_text())
        settings = dataclasses.asdict(tiny_config(backbone, case).settings)
        assert {name: found[name] for name in SETTING_NAMES} == settings


def test_base_model_loads_alone(folder: Path) -> None:
    """`AutoModel` takes the decoder out of a checkpoint with head."""
    register()
    saved = folder / "model-qwen3-oasis"

    model = AutoModel.from_pretrained(saved)

    expected = load_file(saved / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])


def test_overrides_at_loading_are_checked(folder: Path) -> None:
    """A setting given to `from_pretrained` is validated when the model is built."""
    register()

    with pytest.raises(SpecError, match="num_blocks"):
        AutoModelForCausalLM.from_pretrained(folder / "model-llama-vanilla", num_blocks=9)


def test_loading_in_bfloat16(folder: Path) -> None:
    """A dtype at loading reaches routers and gates, too."""
    register()

    model = AutoModelForCausalLM.from_pretrained(
        folder / "model-llama-oasis_adaptive", dtype=torch.bfloat16
    )

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(folder / "model-llama-oasis_adaptive").null_coupling


def test_tied_weights_come_back(tmp_path: Path) -> None:
    """A tied head is stored once and tied again."""
    register()
    model = new_model(tiny_config("llama", "oasis", tie_word_embeddings=True))
    model.save_pretrained(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_meta_device_loading_sets_missing_parameters(tmp_path: Path) -> None:
    """A plain checkpoint loaded as a variant: depth parameters start as in a fresh model."""
    register()
    plain = new_model(tiny_config("llama", "residual-vanilla"))
    plain.save_pretrained(tmp_path)
    config = tiny_config("llama", "oasis_adaptive")

    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, output_loading_info=True
    )

    router = loaded.model.layers[0].attn_res_mlp
    assert not router.query.any()
    assert torch.equal(router.key_norm.weight, torch.ones(48))
    assert router.oasis_beta_raw.item() == -5.0
    assert loaded.model.layers[0].self_attn.null_logit.tolist() == [0.0] * 4
    assert torch.equal(loaded.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert info["missing_keys"]
    assert not info["unexpected_keys"]
