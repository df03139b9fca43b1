"""The page on training says what the code does, and its commands run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from oasis_eval.cli import main
from oasis_eval.training import recipes
from tests import tiny
from tests.training.tiny import settings

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (oasis-eval train .*)$", PAGE, flags=re.MULTILINE)


def test_page_lists_every_recipe() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| [^|]+\|$", PAGE, flags=re.MULTILINE)

    assert sorted(set(rows) & set(recipes.recipe_names())) == sorted(recipes.recipe_names())


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shown, with the tiny recipe under the names of the others."""
    monkeypatch.chdir(tmp_path)
    tiny_recipe = settings(tmp_path)
    for name in ("books.jsonl", "wiki.jsonl"):
        (tmp_path / name).write_text((tmp_path / "text.jsonl").read_text())
    two = [{"name": "bookcorpus"}, {"name": "wiki40b"}]
    ours = {"mini": {}, "100m": {"data": two}, "my-recipe": {}}
    for name, changes in ours.items():
        content = {**tiny_recipe, "steps": 4, **changes}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    tiny.save(tmp_path / "plain")
    run = 0
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[1] == "llama-3.2-1b":
            continue  # half a minute; a slow test of its own
        words[1] = words[1].removesuffix(".yaml") + ".yaml"
        words = ["./plain" if word == "smollm2-135m-instruct" else word for word in words]
        if "--data" not in words:
            words += ["--data", "prose=text.jsonl"]
        monkeypatch.setattr(sys, "argv", ["oasis-eval", *words, "--quiet"])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, command
        run += 1
        if "--out" in words:
            out = tmp_path / words[words.index("--out") + 1]
            assert (out / "model.safetensors").is_file()
            assert out.with_name(f"{out.name}.yaml").is_file()

    assert run >= 5
