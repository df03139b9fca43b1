"""Public checkpoint formats: names map both ways, and what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oasis_eval.errors import CheckpointError
from oasis_eval.modeling.formats.fla import KEYS as FLA_KEYS
from oasis_eval.modeling.formats.folder import expected_shapes, read_public
from oasis_eval.modeling.formats.keys import (
    KeyMap,
    public_shape,
    shape_as_ours,
    shape_as_public,
)
from oasis_eval.modeling.formats.kimi import KEYS as KIMI_KEYS
from oasis_eval.modeling.formats.open_attnres import KEYS as OPEN_KEYS
from tests.modeling.public_folders import (
    LAYERS,
    MIDDLE,
    OPEN_FORMS,
    WIDTH,
    Config,
    Shapes,
    backbone_config,
    fla,
    kimi,
    load,
    oasis_repo,
    open_attnres,
    random_tensors,
    write,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        *OPEN_FORMS.values(),
        oasis_repo("llama"),
        oasis_repo("qwen3"),
        fla(head_norms=True, block_size=2),
        fla(head_norms=False, block_size=None),
        kimi(),
    ],
)
def test_names_and_shapes_map_both_ways(config: Config, shapes: Shapes, tmp_path: Path) -> None:
    """Ours to theirs gives exactly the published names and shapes, and back."""
    public = read_public(write(tmp_path / "model", config, random_tensors(shapes)))
    assert public is not None
    keys = public.translation.keys
    ours = expected_shapes(public.translation.config)
    if config["tie_word_embeddings"]:
        del ours["lm_head.weight"]
    back = {name: keys.to_public(name) for name in ours}

    assert {
        mapped.name: public_shape(ours[name], mapped.form) for name, mapped in back.items()
    } == shapes
    assert {name: keys.to_ours(mapped.name).name for name, mapped in back.items()} == {
        name: name for name in ours
    }


@pytest.mark.parametrize("keys", [OPEN_KEYS, FLA_KEYS, KIMI_KEYS], ids=["open", "fla", "kimi"])
def test_map_refuses_the_other_sides_names(keys: KeyMap) -> None:
    """A renamed tensor under our name is none of the format's, and the reverse."""
    assert keys.to_ours("model.layers.3.attn_res_sa.query") is None
    assert keys.to_public("model.layers.3.mlp_res_proj.weight") is None


@pytest.mark.parametrize("form", ["same", "row", "scalar"])
def test_tensor_forms_invert(form: str) -> None:
    """A tensor goes to its public shape and back unchanged."""
    tensor = torch.arange(1.0) if form == "scalar" else torch.arange(5.0)
    public = shape_as_public(tensor, form)

    assert tuple(public.shape) == public_shape(tuple(tensor.shape), form)
    assert torch.equal(shape_as_ours(public, form), tensor)


def test_k3_names_map() -> None:
    """The routers of Kimi K3 itself have a place here, whatever its other layers are."""
    pairs = {
        "model.layers.92.self_attention_res_proj.weight": "model.layers.92.attn_res_sa.query",
        "model.layers.92.mlp_res_norm.weight": "model.layers.92.attn_res_mlp.key_norm.weight",
        "model.output_attn_res_proj.weight": "model.final_res.query",
    }

    assert {name: KIMI_KEYS.to_ours(name).name for name in pairs} == pairs


@pytest.mark.parametrize("gate", ["sigmoid_scalar", "sigmoid_vector", "learnable_alpha"])
def test_gate_types_are_refused_by_name(gate: str, tmp_path: Path) -> None:
    """Only the released gate type is read."""
    config, shapes = open_attnres("block", attnres_gate_type=gate)
    folder = write(tmp_path / "model", config, random_tensors(shapes))

    with pytest.raises(CheckpointError, match=f"attnres_gate_type '{gate}' is not supported"):
        load(folder)


REFUSED: dict[str, tuple[tuple[Config, Shapes], str]] = {
    "unknown mode": (open_attnres("delta_block"), "attnres_mode 'delta_block' is not supported"),
    "delta with the embedding": (
        open_attnres("delta", biases=False),
        "'delta' without .* also reads the embedding",
    ),
    "full, both": (open_attnres("full", final=True), "no known form of this mode"),
    "block, neither": (open_attnres("block", biases=False), "lacks .* and lacks"),
    "unequal blocks without biases": (
        open_attnres("block", biases=False, final=True, layers=5),
        "blocks of 3 layers leave a shorter last block of 2",
    ),
    "null source": (
        open_attnres("block", attnres_use_null_source=True),
        "attnres_use_null_source True is not supported",
    ),
    "number of blocks": (
        open_attnres("block", attnres_num_blocks="two"),
        "attnres_num_blocks is 'two'; expected a positive integer",
    ),
    "type of a value": (
        open_attnres("block", attnres_recency_bias_init="3"),
        "attnres_recency_bias_init is '3'; expected float",
    ),
    "backbone value": (open_attnres("block", hidden_size="wide"), "not a qwen3 configuration"),
    "quantized": (
        open_attnres("block", quantization_config={"bits": 4}),
        "quantization_config: expected unquantized",
    ),
    "OASIS softmax": (
        oasis_repo("llama", attn_softmax="clipped(0:1.1)"),
        r"attn_softmax 'clipped\(0:1.1\)' is not supported",
    ),
    "OASIS backbone": (oasis_repo("phi3"), "model_type 'phi3' is not supported"),
    "Kimi K3": (
        ({**kimi()[0], "model_type": "kimi_k3"}, kimi()[1]),
        r"\(Kimi K3 naming\): .*model_type 'kimi_k3' is not supported",
    ),
    "Kimi K3 blocks": (
        ({**kimi()[0], "attn_res_block_size": 3}, kimi()[1]),
        "blocks of 3 layers leave a shorter last block of 1",
    ),
    "routers of no format": (
        (backbone_config(model_type="qwen3"), open_attnres("block")[1]),
        "tensor model.layers.0.attn_res_bias belongs to a depth router",
    ),
    **{
        f"fla {name}": (
            (
                {**fla(head_norms=False, block_size=2)[0], name: value},
                fla(head_norms=False, block_size=2)[1],
            ),
            message,
        )
        for name, value, message in (
            ("model_type", "kda", "model_type 'kda' of flash-linear-attention is not supported"),
            ("qkv_bias", True, "qkv_bias True is not supported"),
            ("window_size", 64, "window_size 64 is not supported"),
            ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
            ("rope_theta", None, "rope_theta null"),
            ("attnres_block_size", 3, "blocks of 3 sublayers leave a shorter last block of 2"),
        )
    },
    "fla epsilons": (
        (
            {**fla(head_norms=True, block_size=2)[0], "norm_eps": 1e-6},
            fla(head_norms=True, block_size=2)[1],
        ),
        "two different epsilons",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_features_are_refused_by_name(case: str, tmp_path: Path) -> None:
    """One line that names what was found, before anything is evaluated or stored."""
    (config, shapes), message = REFUSED[case]
    folder = write(tmp_path / "model", config, random_tensors(shapes))

    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


DAMAGES: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "missing router tensor": (
        {"model.layers.2.mlp_res_bias": None},
        "tensor model.layers.2.mlp_res_bias is missing",
    ),
    "missing backbone tensor": (
        {"model.layers.1.mlp.up_proj.weight": None},
        "tensor model.layers.1.mlp.up_proj.weight is missing",
    ),
    "missing tensors": (
        {"model.layers.1.attn_res_norm.weight": None, "model.norm.weight": None},
        "tensor model.layers.1.attn_res_norm.weight is missing and 1 more",
    ),
    "misshapen query": (
        {"model.layers.0.attn_res_proj.weight": (WIDTH,)},
        rf"model.layers.0.attn_res_proj.weight has shape \[{WIDTH}\], expected \[1, {WIDTH}\]",
    ),
    "misshapen bias": (
        {"model.layers.0.attn_res_bias": (1,)},
        r"model.layers.0.attn_res_bias has shape \[1\], expected \[\]",
    ),
    "misshapen projection": (
        {"model.layers.3.mlp.down_proj.weight": (WIDTH, MIDDLE + 1)},
        rf"down_proj.weight has shape \[{WIDTH}, {MIDDLE + 1}\]",
    ),
    "unexpected tensor": (
        {"model.layers.0.attn_res_gate.weight": (WIDTH,)},
        "tensor model.layers.0.attn_res_gate.weight is not expected",
    ),
    "layer too many": (
        {f"model.layers.{LAYERS}.attn_res_bias": ()},
        f"tensor model.layers.{LAYERS}.attn_res_bias is not expected",
    ),
    "our name": (
        {"model.layers.0.attn_res_sa.key_norm.weight": (WIDTH,)},
        "tensor model.layers.0.attn_res_sa.key_norm.weight is not expected",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_are_compared_strictly(damage: str, tmp_path: Path) -> None:
    """A missing, unexpected or misshapen tensor is an error under its published name."""
    changes, message = DAMAGES[damage]
    config, shapes = open_attnres("block")
    for name, shape in changes.items():
        if shape is None:
            del shapes[name]
        else:
            shapes[name] = shape
    folder = write(tmp_path / "model", config, random_tensors(shapes))

    with pytest.raises(CheckpointError, match=message):
        load(folder)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
