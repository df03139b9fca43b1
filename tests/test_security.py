"""What comes from elsewhere runs no code, fills no memory, and writes nowhere but where it may."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import yaml

from oasis_eval.errors import RecordError, SpecError
from oasis_eval.record import read_record, read_records
from oasis_eval.registry import resolve
from tests.command_line import CommandLine
from tests.tiny import prose, save

_MARKER = "marker"


class _Harm:
    """Pickles to code that makes a file."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (_MARKER, "w")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY; read-only."""
    return save(tmp_path_factory.mktemp("security") / "tiny")


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder `here/`, beside nothing else; with a copy of the checkpoint and a text."""
    home = tmp_path / "here"
    shutil.copytree(model, home / "tiny")
    (home / "text.txt").write_text(prose(200))
    monkeypatch.chdir(home)
    return home


def sweep(call: CommandLine, **changes: object):
    grid = {
        "models": ["./tiny"],
        "schemes": ["fp32"],
        "tasks": ["text"],
        "window": 64,
        "data": {"text": "text.txt"},
    }
    Path("grid.yaml").write_text(yaml.safe_dump(grid | changes))
    return call(["sweep", "grid.yaml", "--out", "out"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "weights.pkl"])
def test_a_pickle_is_not_opened(call: CommandLine, home: Path, name: str) -> None:
    """Refused with one line, and what it would have run has not run."""
    (home / "tiny" / "model.safetensors").unlink()
    (home / "tiny" / name).write_bytes(pickle.dumps(_Harm()))

    result = sweep(call)

    assert result.status == 1
    assert "pickle weights" in result.err
    assert not (home / _MARKER).exists()
    assert not list(Path("out").glob("*.json"))


def test_code_of_a_checkpoint_is_not_imported(call: CommandLine, home: Path) -> None:
    """The result says that there is some."""
    code = f"open({_MARKER!r}, 'w')\n"
    config = json.loads((home / "tiny" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "evil.Evil"}
    (home / "tiny" / "config.json").write_text(json.dumps(config))
    for name in ("modeling_evil.py", "evil.py", "sitecustomize.py"):
        (home / "tiny" / name).write_text(code)

    result = sweep(call)

    assert result.status == 0
    assert "auto_map" in result.err
    assert not (home / _MARKER).exists()


@pytest.mark.parametrize(
    "text",
    [
        "models: !!python/object/apply:builtins.open ['marker', 'w']",
        "models: !!python/name:os.system ''",
        "models: !function evil.run",
        "models: !include /etc/passwd",
    ],
)
@pytest.mark.parametrize("kind", ["grid", "scheme", "card"])
def test_tags_of_yaml_do_nothing(call: CommandLine, home: Path, text: str, kind: str) -> None:
    """One line, status 2."""
    Path("bad.yaml").write_text(text + "\n")
    result = {
        "grid": lambda: call(["sweep", "bad.yaml"]),
        "scheme": lambda: sweep(call, schemes=["bad.yaml"]),
        "card": lambda: sweep(call, models=["bad.yaml"]),
    }[kind]()

    assert result.status == 2
    where = "" if kind == "grid" else "grid: "  # the grid that names the file
    assert result.err.startswith(f"error: {where}bad.yaml: not valid YAML")
    assert result.err.count("\n") == 1
    assert not (home / _MARKER).exists()


def test_a_bomb_of_yaml_is_refused(call: CommandLine, home: Path) -> None:
    """Nine lines that would become a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    Path("bomb.yaml").write_text("\n".join(lines))

    result = call(["sweep", "bomb.yaml"])

    assert (result.status, "aliases" in result.err) == (2, True)


def test_a_card_of_ones_own_names_no_function(home: Path) -> None:
    """It would be called with a path; cards that ship may do it."""
    card = {
        "name": "evil",
        "family": "any",
        "label": "x",
        "source": {
            "kind": "package",
            "package": "yaml",
            "install": "x",
            "assemble": "yaml:safe_load",
        },
    }
    Path("evil.yaml").write_text(yaml.safe_dump(card))

    with pytest.raises(SpecError, match="'assemble' names a function"):
        resolve("./evil.yaml")


EVIL_NAMES = ["../../evil", "/tmp/evil", "..", "a/b", "~/evil", "a\\b", "$(touch marker)"]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_are_not_paths(call: CommandLine, home: Path, name: str) -> None:
    """Of grids, schemes, models and labels: everything written lies in the folder of records."""
    scheme = {"name": name, "weights": {"bits": 8, "granularity": "channel"}}
    Path("scheme.yaml").write_text(yaml.safe_dump(scheme))
    card = {
        "name": name,
        "family": "llama",
        "label": name,
        "source": {"kind": "dir", "path": "tiny"},
    }
    Path("card.yaml").write_text(yaml.safe_dump(card))
    before = {path for path in home.parent.rglob("*") if "out" not in path.parts}

    result = sweep(call, name=name, models=["./card.yaml"], schemes=["./scheme.yaml"])
    report = call(["report", "out", "--out", "out/report.html"])

    assert (result.status, report.status) == (0, 0), result.err
    after = {path for path in home.parent.rglob("*") if "out" not in path.parts}
    assert after - before == {home / "grid.yaml"}
    (record,) = read_records([Path("out")])
    assert record.card.name == record.spec.scheme.name == name
    assert sorted(path.name.partition(".")[0] for path in Path("out").iterdir()) == sorted(
        ["", record.key, record.key, "report"]
    )


@pytest.mark.parametrize("key", ["../../evil", "/etc/passwd", "a/b", "..", "", "a\nb"])
def test_the_key_of_a_record_is_no_path(call: CommandLine, home: Path, key: str) -> None:
    """Its samples are looked for beside it and nowhere else."""
    assert sweep(call).status == 0
    (path,) = Path("out").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": key}))

    with pytest.raises(RecordError, match="key"):
        read_record(path)


def test_markup_of_others_is_escaped(call: CommandLine, home: Path) -> None:
    """In the names of a record, in a report and in a table."""
    name = "<script>alert(1)</script>&%$#_{}"
    card = {
        "name": name,
        "family": "llama",
        "label": name,
        "source": {"kind": "dir", "path": "tiny"},
    }
    Path("card.yaml").write_text(yaml.safe_dump(card))
    assert sweep(call, models=["./card.yaml"]).status == 0
    assert call(["report", "out", "--out", "report.html"]).status == 0
    latex = call(["table", "out", "--format", "latex"]).out

    assert "<script>alert" not in Path("report.html").read_text()
    assert r"\&\%\$\#\_\{\}" in latex
