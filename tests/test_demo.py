"""The mini family that ships, and the demo that runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from oasis_eval import demo, registry
from oasis_eval.spec import DirSource

FAMILY = sorted(name for name in registry.cards() if name.startswith("mini-"))
MOST_BYTES = 40_000_000


def _folder(name: str) -> Path:
    source = registry.cards()[name].source
    assert isinstance(source, DirSource)
    return Path(source.path)


def test_the_demo_has_its_models() -> None:
    """Vanilla first, which the others are compared with."""
    assert demo.MODELS[0] == demo.BASELINE
    assert set(demo.MODELS) <= set(FAMILY)


@pytest.mark.parametrize("name", FAMILY)
def test_a_checkpoint_is_what_its_card_says(name: str) -> None:
    """Small, bf16, trained to the end by the recipe that ships, as the variant of its name."""
    card, folder = registry.cards()[name], _folder(name)
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    with safe_open(folder / "model.safetensors", framework="np") as file:
        slices = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118 - not a mapping
        assert {part.get_dtype() for part in slices} == {"BF16"}
        shapes = [part.get_shape() for part in slices]
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)

    assert 900_000 < count < 1_100_000
    assert training["status"] == "finished"
    assert training["identity"]["recipe"]["name"] == "mini"
    assert training["identity"]["seed"] == 1
    assert card.variant.partition(" ")[0] == training["identity"]["variant"]
    assert config["wiring"] == training["identity"]["wiring"]


def test_all_of_it_is_small() -> None:
    """Committed weights stay under 40 MB together."""
    files = [path for name in FAMILY for path in _folder(name).iterdir()]

    assert sum(path.stat().st_size for path in files) < MOST_BYTES


def test_one_recipe_and_one_text_for_all() -> None:
    """So that a difference between two of them is the variant's."""
    runs = [json.loads((_folder(name) / "training.json").read_text()) for name in FAMILY]

    for key in ("recipe", "data", "steps", "tokenizer_sha256"):
        assert len({json.dumps(run["identity"][key], sort_keys=True) for run in runs}) == 1, key


def test_the_demo_writes_tables_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models, two windows, two questions: every cell has its number."""
    monkeypatch.setattr(demo, "NUM_ITEMS", 2)
    monkeypatch.setattr(demo, "SCHEMES", ("fp32", "w8a8", "w4a4"))
    report = demo.run(tmp_path, models=("mini-vanilla", "mini-oasis"))
    out, err = capsys.readouterr()

    assert report.is_complete
    assert len(report.records) == 2 * 3 * 2
    assert "Pass@1" in out
    assert "infinity norm" in out
    for name in demo.TABLES:
        for suffix in ("csv", "tex", "md"):
            assert (tmp_path / f"{name}.{suffix}").stat().st_size > 0
    assert list((tmp_path / "figures").glob("*.pdf"))
    assert f"{len(list((tmp_path / 'figures').iterdir()))} files in {tmp_path / 'figures'}" in err
    values = {
        (item.spec.model, item.spec.scheme.name): metric.value
        for item in report.records
        if (metric := item.metric("token_perplexity")) is not None
    }
    with (tmp_path / "mini.csv").open(encoding="utf-8") as file:
        text = file.read()
    for value in values.values():
        assert repr(value)[:10] in text
    assert len(list(csv.reader(text.splitlines()))) > 2
