"""Public checkpoint formats: each loaded from a folder as its publisher writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oasis_eval import loading
from oasis_eval.checkpoint import digest
from oasis_eval.errors import CheckpointError
from oasis_eval.loading import Reference
from oasis_eval.modeling.formats.folder import read_public
from oasis_eval.spec import DirSource, ModelCard
from tests.modeling.public_folders import (
    GROUPS,
    HEADS,
    OPEN_FORMS,
    backbone_config,
    backbone_shapes,
    fla,
    kimi,
    load,
    oasis_repo,
    open_attnres,
    random_tensors,
    write,
)
from tests.modeling.published import Fla, Kimi, OasisRepo, OpenAttnRes, Published
from tests.modeling.tiny import relative_gap, tokens

IDS = tokens(24, seed=5)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(tmp_path / "cache"))


def logits_of(reference: Reference) -> Tensor:
    """[T, V]."""
    with torch.no_grad():
        logits: Tensor = reference.model(IDS.unsqueeze(0)).logits[0]
    return logits


def gap_to_published(folder: Path, published: Published) -> float:
    """Largest difference to the literal model, relative to the largest logit."""
    return relative_gap(logits_of(load(folder)), published.logits(IDS))


# --- the same function as the publisher's -----------------------------------------------------


@pytest.mark.parametrize("form", OPEN_FORMS)
def test_open_attnres_is_the_published_function(form: str, tmp_path: Path) -> None:
    """Random weights under the public names give the literal implementation's logits."""
    config, shapes = OPEN_FORMS[form]
    tensors = random_tensors(shapes)
    folder = write(tmp_path / "model", config, tensors)

    assert gap_to_published(folder, OpenAttnRes(config, tensors)) < 1e-5


def test_forms_of_one_mode_differ(tmp_path: Path) -> None:
    """The wirings that share `attnres_mode: block` are different functions of the same weights."""
    config, shapes = open_attnres("block", final=True)
    tensors = random_tensors(shapes)
    reset = OpenAttnRes(config, tensors).logits(IDS)
    fewer = {name: value for name, value in tensors.items() if "final_res" not in name}
    cumulative = OpenAttnRes(config, fewer).logits(IDS)

    assert relative_gap(cumulative, reset) > 1e-2


def test_cumulative_sees_the_newest_state_twice(tmp_path: Path) -> None:
    """Layer 0 reads [emb, emb]; after a boundary the copy and the stream are both sources."""
    config, shapes = open_attnres("block")
    folder = write(tmp_path / "model", config, random_tensors(shapes))
    model = load(folder).model
    with torch.no_grad():
        weights = model(IDS.unsqueeze(0), output_depth_weights=True).depth_weights

    assert [read.shape[-1] for read in weights] == [2, 2, 2, 2, 3, 3, 3, 3]


def test_cumulative_layer_0_adds_its_bias_to_one_of_two_equal_embeddings(tmp_path: Path) -> None:
    """Equal sources differ in weight by the bias alone."""
    config, shapes = open_attnres("block")
    tensors = random_tensors(shapes)
    folder = write(tmp_path / "model", config, tensors)
    with torch.no_grad():
        first = load(folder).model(IDS.unsqueeze(0), output_depth_weights=True).depth_weights[0]
    expected = torch.sigmoid(tensors["model.layers.0.attn_res_bias"])

    torch.testing.assert_close(first[..., 1], expected.expand(first.shape[:-1]))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("arguments", "token_null", "depth_null"),
    [
        ({}, 1.0, 1.0),
        ({"attn_softmax": "vanilla", "attn_res_softmax_fn": "vanilla"}, 0.0, 0.0),
        ({"attn_softmax": "softmax1", "attn_res_softmax_fn": "vanilla"}, 1.0, 0.0),
    ],
)
def test_oasis_authors_format_is_the_published_function(
    model_type: str,
    arguments: dict[str, str],
    token_null: float,
    depth_null: float,
    tmp_path: Path,
) -> None:
    """The authors' wiring, router, recency and coupling, with the softmax they were run with."""
    config, shapes = oasis_repo(model_type, **arguments)
    tensors = random_tensors(shapes)
    folder = write(tmp_path / "model", config, tensors)
    published = OasisRepo(config, tensors, token_null=token_null, depth_null=depth_null)

    assert gap_to_published(folder, published) < 1e-5


def test_unrecorded_softmax_is_a_warning(tmp_path: Path) -> None:
    """What the OASIS format does not store is said wherever its results are shown."""
    config, shapes = oasis_repo("llama")
    reference = load(write(tmp_path / "model", config, random_tensors(shapes)))

    assert len(reference.warnings) == 1
    assert "softmax1 was assumed" in reference.warnings[0]


def test_recorded_softmax_is_no_warning(tmp_path: Path) -> None:
    """A configuration that names both arguments leaves nothing to assume."""
    config, shapes = oasis_repo("llama", attn_softmax="softmax1", attn_res_softmax_fn="softmax1")

    assert load(write(tmp_path / "model", config, random_tensors(shapes))).warnings == ()


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("block_size", [None, 1, 2, 4, 8])
def test_fla_is_the_published_function(
    head_norms: bool, block_size: int | None, tmp_path: Path
) -> None:
    """With and without norms of queries and keys, blocks from one sublayer to all of them."""
    config, shapes = fla(head_norms=head_norms, block_size=block_size)
    tensors = random_tensors(shapes)
    folder = write(tmp_path / "model", config, tensors)
    named = config | {
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "rms_norm_eps": config["norm_eps"],
    }

    assert gap_to_published(folder, Fla(named, tensors)) < 1e-5


def test_kimi_names_on_a_qwen3_are_the_published_function(tmp_path: Path) -> None:
    """Block attention residuals with blocks counted in decoder layers."""
    config, shapes = kimi()
    tensors = random_tensors(shapes)

    assert (
        gap_to_published(write(tmp_path / "model", config, tensors), Kimi(config, tensors)) < 1e-5
    )


def test_plain_baseline_stays_plain(tmp_path: Path) -> None:
    """A Qwen3 without routers is loaded by transformers, from its own folder."""
    config = backbone_config(model_type="qwen3")
    tensors = random_tensors(backbone_shapes(head_norms=True))
    folder = write(tmp_path / "model", config, tensors)
    reference = load(folder)

    assert read_public(folder) is None
    assert type(reference.model) is Qwen3ForCausalLM
    assert not (tmp_path / "cache").exists()


# --- how they are loaded ----------------------------------------------------------------------


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A checkpoint like the released ones: cumulative, bf16."""
    config, shapes = open_attnres("block", torch_dtype="bfloat16")
    tensors = {name: value.bfloat16() for name, value in random_tensors(shapes).items()}
    return write(tmp_path / "released", config, tensors)


def test_bfloat16_stays_bfloat16(released: Path, tmp_path: Path) -> None:
    """The translated file holds the same bytes under other names."""
    model = load(released, dtype="bf16").model
    (translated,) = (tmp_path / "cache" / "formats").iterdir()
    stored = load_file(translated / "model.safetensors")
    source = load_file(released / "model.safetensors")

    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert torch.equal(
        stored["model.layers.1.attn_res_mlp.query"], source["model.layers.1.mlp_res_proj.weight"][0]
    )
    assert torch.equal(
        model.model.layers[1].attn_res_mlp.query, source["model.layers.1.mlp_res_proj.weight"][0]
    )


def test_digest_is_that_of_the_source(released: Path) -> None:
    """Records name the published files, not their translation."""
    assert load(released).digest == digest(released)


def test_translation_is_kept(released: Path, tmp_path: Path) -> None:
    """The second load reads the folder that the first one wrote; another content is another."""
    load(released)
    folder = tmp_path / "cache" / "formats"
    (first,) = folder.iterdir()
    before = (first / "model.safetensors").stat().st_mtime_ns
    load(released)

    assert [path.name for path in folder.iterdir()] == [first.name]
    assert (first / "model.safetensors").stat().st_mtime_ns == before

    tensors = load_file(released / "model.safetensors")
    tensors["model.norm.weight"][0] = 3.0
    save_file(tensors, released / "model.safetensors", metadata={"format": "pt"})
    load(released)

    assert len(list(folder.iterdir())) == 2


def test_shards_are_translated_one_by_one(tmp_path: Path) -> None:
    """An indexed checkpoint keeps its files, and stray files beside them are not read."""
    config, shapes = open_attnres("block", final=True)
    tensors = random_tensors(shapes)
    folder = write(tmp_path / "model", config, tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[:30], sorted(tensors)[30:])):
        shard = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"leftover": torch.ones(1)}, folder / "consolidated.safetensors")

    assert gap_to_published(folder, OpenAttnRes(config, tensors)) < 1e-5
    (translated,) = (tmp_path / "cache" / "formats").iterdir()
    assert len(list(translated.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("family", ["any", "qwen3_attnres", "qwen3_oasis"])
def test_card_may_name_either_type(released: Path, family: str) -> None:
    """A card's family is the published model_type, ours, or any."""
    card = ModelCard(name="x", family=family, label="x", source=DirSource(path=str(released)))

    assert loading.load(card, dtype="fp32").model.config.model_type == "qwen3_oasis"


def test_card_of_another_family_is_refused(released: Path) -> None:
    """The message names the published type."""
    card = ModelCard(name="x", family="llama", label="x", source=DirSource(path=str(released)))

    with pytest.raises(CheckpointError, match="'llama', the checkpoint is 'qwen3_attnres'"):
        loading.load(card, dtype="fp32")


def test_generate(released: Path) -> None:
    """Greedy decoding with a cache follows the full forward pass."""
    model = load(released).model
    with torch.no_grad():
        ids = model.generate(IDS[None, :8], max_new_tokens=6, do_sample=False, eos_token_id=-1)
        for length in range(8, 14):
            assert ids[0, length] == model(ids[:, :length]).logits[0, -1].argmax()


def test_code_in_the_folder_never_runs(released: Path, tmp_path: Path) -> None:
    """`auto_map` and Python files of the publisher are neither run nor carried along."""
    marker = tmp_path / "marker"
    (released / "modeling_attnres.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    auto_map = {
        "AutoConfig": "modeling_attnres.Qwen3AttnResConfig",
        "AutoModelForCausalLM": "modeling_attnres.Qwen3AttnResForCausalLM",
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((released / name).read_text())
        (released / name).write_text(json.dumps(content | {"auto_map": auto_map}))
    load(released)
    (translated,) = (tmp_path / "cache" / "formats").iterdir()

    assert not marker.exists()
    assert not list(translated.glob("*.py"))
    assert "auto_map" not in json.loads((translated / "config.json").read_text())


def test_rotary_base_of_either_spelling_is_kept(tmp_path: Path) -> None:
    """`rope_theta` of older configurations and `rope_parameters` of newer ones."""
    config, shapes = open_attnres("block")
    tensors = random_tensors(shapes)
    newer = {name: value for name, value in config.items() if name != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    folder = write(tmp_path / "model", newer, tensors)

    assert Qwen3Config.from_dict(dict(newer)).rope_parameters["rope_theta"] == 5000.0
    assert gap_to_published(folder, OpenAttnRes(config, tensors)) < 1e-5


def test_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    """A stored head is dropped where it is the embedding, and an error where it is not."""
    config, shapes = open_attnres("block")
    tensors = random_tensors(shapes)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    other = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1.0}

    published = OpenAttnRes(config, tensors)
    assert gap_to_published(write(tmp_path / "same", config, same), published) < 1e-5
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(write(tmp_path / "other", config, other))
