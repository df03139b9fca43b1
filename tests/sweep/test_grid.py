"""Which cells a grid has, and which grids are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from oasis_eval.errors import OasisError, SpecError, UnknownNameError
from oasis_eval.parsing import parse
from oasis_eval.spec import SweepSpec
from oasis_eval.sweep.grid import expand, read_grid
from tests import tiny

Row = tuple[str, str, str, str, int]
Rows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints x-s0, x-s1 and y; read-only, of headers alone."""
    folder = tmp_path_factory.mktemp("grid")
    for name in ("x-s0", "x-s1", "y"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Gives the cells of a grid as rows, in order."""
    monkeypatch.chdir(folder)

    def rows(**changes: object) -> list[Row]:
        settings: dict[str, object] = {"name": "g", "models": ["./y"], "schemes": ["fp32", "w8a8"]}
        cells = expand(parse(SweepSpec, settings | changes, origin="test"))
        return [
            (
                cell.spec.model,
                cell.spec.scheme.name,
                cell.spec.task.name,
                cell.spec.task.protocol,
                cell.spec.seed,
            )
            for cell in cells
        ]

    return rows


def test_a_grid_is_a_product(rows: Rows) -> None:
    """Models, schemes, tasks, in this order; a task has its own protocol or those that fit."""
    found = rows(
        models=["./y", "./x-s0"],
        tasks=["text", "gsm8k"],
        protocols=["gptq-64", "rolling-word", "gsm8k-0shot"],
    )

    assert found == [
        (model, scheme, task, protocol, 0)
        for model in ("./y", "./x-s0")
        for scheme in ("fp32", "w8a8")
        for task, protocol in (
            ("text", "gptq-64"),
            ("text", "rolling-word"),
            ("gsm8k", "gsm8k-0shot"),
        )
    ]


def test_seeds_are_those_of_models(rows: Rows) -> None:
    """`{seed}` is replaced by each; a model without it is measured once, under the first."""
    found = rows(models=["./x-s{seed}", "./y"], schemes=["fp32"], tasks=["text"], seeds=[1, 0])

    assert found == [
        ("./x-s1", "fp32", "text", "gptq-2048", 1),
        ("./y", "fp32", "text", "gptq-2048", 1),
        ("./x-s0", "fp32", "text", "gptq-2048", 0),
    ]


def test_a_card_knows_its_seed(
    folder: Path, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken where the grid does not name one for the model, and contradicted by nothing."""
    for name in ("x-s0", "x-s1", "y"):
        shutil.copytree(folder / name, tmp_path / name)
    for name, seed in (("x-s1", 1), ("y", 7)):
        source = f"{{kind: dir, path: {name}}}"
        card = f"{{name: x, family: llama, label: X, source: {source}, seed: {seed}}}"
        (tmp_path / f"{name}.yaml").write_text(card)
    settings = {"schemes": ["fp32"], "tasks": ["text"]}

    def seeds(models: list[str], **changes: object) -> list[tuple[str, int]]:
        monkeypatch.chdir(tmp_path)
        return [(row[0], row[-1]) for row in rows(models=models, **settings, **changes)]

    assert seeds(["./y", "./x-s0", "./x-s1"]) == [("./y", 7), ("./x-s0", 0), ("./x-s1", 1)]
    assert seeds(["./x-s{seed}", "./y"], seeds=[1, 0]) == [("./x-s1", 1), ("./y", 7), ("./x-s0", 0)]
    (tmp_path / "x-s2").mkdir()
    (tmp_path / "x-s1.yaml").rename(tmp_path / "x-s2.yaml")
    with pytest.raises(SpecError, match=r"found seed 2, but its card says .* seed 1"):
        rows(models=["x-s{seed}.yaml"], seeds=[2], **settings)


def test_an_exclusion_leaves_out_what_matches_all_its_fields(rows: Rows) -> None:
    """Names or patterns; one of several has to match."""
    found = rows(
        models=["./x-s{seed}", "./y"],
        tasks=["text", "bookcorpus"],
        seeds=[0, 1],
        exclude=[
            {"models": ["./x-s{seed}"], "schemes": ["w*"], "tasks": ["text"]},
            {"models": ["./x-s?"], "seeds": [1]},
            {"models": ["./y"], "protocols": ["qualcomm-*"]},
        ],
    )

    assert found == [
        ("./x-s0", "fp32", "text", "gptq-2048", 0),
        ("./x-s0", "fp32", "bookcorpus", "qualcomm-512", 0),
        ("./x-s0", "w8a8", "bookcorpus", "qualcomm-512", 0),
        ("./y", "fp32", "text", "gptq-2048", 0),
        ("./y", "w8a8", "text", "gptq-2048", 0),
    ]


def test_an_inclusion_adds_cells_with_the_grids_settings_unless_it_has_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is excluded from the product may be included; what is there already is replaced."""
    monkeypatch.chdir(folder)
    grid = parse(
        SweepSpec,
        {
            "models": ["./y"],
            "schemes": ["fp32", "w4a4"],
            "tasks": ["text"],
            "window": 64,
            "limit": 7,
            "protocols": ["openattnres-64"],
            "diagnostics": True,
            "exclude": [{"schemes": ["w4a4"]}],
            "include": [
                {"schemes": ["w4a4-gptq"]},
                {"tasks": ["gsm8k"], "limit": 3, "batch_size": 8},
                {"schemes": ["fp32"], "batch_size": 4},
                {"models": ["./x-s0"], "seeds": [0], "schemes": ["w4a4"], "dtype": "bf16"},
            ],
        },
        origin="test",
    )

    cells = expand(grid)
    found = [
        (c.spec.model, c.spec.scheme.name, c.spec.task.name, c.spec.task.limit, c.spec.batch_size)
        for c in cells
    ]

    assert found == [
        ("./y", "fp32", "text", 7, 4),
        ("./y", "w4a4-gptq", "text", 7, 1),
        ("./y", "fp32", "gsm8k", 3, 8),
        ("./y", "w4a4", "gsm8k", 3, 8),
        ("./x-s0", "w4a4", "text", 7, 1),
    ]
    assert [cell.spec.task.protocol for cell in cells][:3] == [
        "openattnres-64",
        "openattnres-64",
        "gsm8k-5shot",
    ]
    assert [cell.spec.diagnostics for cell in cells] == [True, True, False, False, True]
    assert cells[-1].spec.dtype == "bf16"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"models": []}, SpecError, "models"),
        ({"models": ["./gone"]}, OasisError, "no such folder"),
        ({"models": ["./y", "./y"]}, SpecError, "'./y' is there twice"),
        ({"schemes": ["w9a8"]}, OasisError, "w9a8"),
        ({"schemes": ["fp23"]}, UnknownNameError, "did you mean"),
        ({"tasks": ["wiki"]}, UnknownNameError, "^g: unknown task"),
        (
            {"models": ["./gone"], "schemes": ["fp23", "w4a4", "w3a"], "tasks": ["wiki"]},
            SpecError,
            "^g: ./gone: no such .*; unknown scheme 'fp23'.*; scheme 'w3a'.*; unknown task 'wiki'",
        ),
        ({"seeds": [0, 1]}, SpecError, "no model has {seed} in its name"),
        ({"seeds": []}, SpecError, "seeds"),
        ({"seeds": ["a"]}, SpecError, "seeds"),
        ({"seed": 1}, SpecError, "unknown key 'seed' .*seeds"),
        ({"window": 1}, SpecError, "window"),
        ({"protocols": ["gsm8k-5shot"]}, SpecError, "fits none"),
        ({"exclude": [{}]}, SpecError, "would leave out every cell"),
        ({"exclude": [{"scheme": ["fp32"]}]}, SpecError, "exclude.0.scheme"),
        ({"exclude": [{"schemes": ["w4a4"]}]}, SpecError, r"exclude 1 \(schemes: w4a4\) matches"),
        ({"exclude": [{"models": ["*"]}]}, SpecError, "leave no cell"),
        ({"include": [{}]}, SpecError, "would add nothing"),
        ({"include": [{"schemes": ["w9a8"]}]}, OasisError, "w9a8"),
        ({"data": {"wikitext": "x"}}, UnknownNameError, "--data key"),
        ({"device": "tpu"}, SpecError, "device"),
        ({"name": ""}, SpecError, "name"),
    ],
)
def test_what_is_wrong_with_a_grid_is_one_line(
    rows: Rows, changes: dict[str, object], kind: type[OasisError], message: str
) -> None:
    """Before anything is read."""
    with pytest.raises(kind, match=message) as caught:
        rows(**changes)

    assert "\n" not in str(caught.value)


def test_two_schemes_of_one_name_are_refused(rows: Rows, tmp_path: Path) -> None:
    """One would take the other's place in silence."""
    files = []
    for bits in (5, 6):
        file = tmp_path / f"{bits}.yaml"
        file.write_text(f"name: mine\nweights: {{bits: {bits}, granularity: channel}}\n")
        files.append(str(file))

    assert len(rows(schemes=files[:1])) == 1
    with pytest.raises(SpecError, match="scheme 'mine': found 2 schemes of this name"):
        rows(schemes=files)
    with pytest.raises(SpecError, match="g: scheme 'mine': found 2 schemes"):
        rows(schemes=files[:1], include=[{"schemes": files[1:], "tasks": ["text"]}])


def test_a_grid_that_explodes_is_refused_before_it_does(rows: Rows) -> None:
    """A short file may ask for more cells than memory holds."""
    names = [f"w8a8-g{number}" for number in range(1, 3000)]
    models = [f"./m{number}" for number in range(1000)]

    with pytest.raises(SpecError, match=r"2,999,000 cells; a grid has at most 100,000"):
        rows(models=models, schemes=names, tasks=["text"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: &a [x]\nmodels: *a\n", "aliases"),
        ("models: [x]\nmodels: [y]\n", "given twice"),
        ("models: !!python/object/apply:os.system ['touch marker']\n", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("just text", "expected keys with values|valid dictionary"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str
) -> None:
    """Bombs, tags that would run code, and text: one line with the file's name."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "g.yaml"
    path.write_text(content)

    with pytest.raises(SpecError, match=message) as caught:
        read_grid(path)

    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(("line", "name"), [("", "small"), ("name: other\n", "other")])
def test_a_grid_is_called_as_its_file(tmp_path: Path, line: str, name: str) -> None:
    """Unless it has a name of its own."""
    (tmp_path / "small.yaml").write_text(f"{line}models: [x]\n")

    assert read_grid(tmp_path / "small.yaml").name == name


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Specifications are short."""
    path = tmp_path / "g.yaml"
    path.write_text("# " + tiny.prose(1 << 20) + "\n")

    with pytest.raises(SpecError, match="larger than 1 MiB"):
        read_grid(path)
