"""A run: what it writes, that it repeats itself, goes on, and refuses another run's folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from oasis_eval import checkpoint, loading, registry
from oasis_eval.errors import DataError, RecordError, SpecError, UnknownNameError
from oasis_eval.modeling.variants import VARIANT_NAMES
from oasis_eval.training import tokens
from oasis_eval.training.blocks import TrainingBlocks
from oasis_eval.training.folder import COMPLETE, RunFolder
from oasis_eval.training.run import Outcome, Plan, build_model, load_tokenizer, train
from oasis_eval.training.schedule import rate_factor
from tests.training.tiny import STEPS, plan, recipe


def run(plan: Plan, out: Path, **options: bool) -> Outcome:
    """Train without a progress bar."""
    outcome = train(plan, out, quiet=True, **options)
    assert outcome is not None
    return outcome


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "model.safetensors")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def log(out: Path) -> list[dict[str, float]]:
    """Lines of the log without wall times."""
    return [
        {key: value for key, value in line.items() if key != "seconds"}
        for line in RunFolder(out).log()
    ]


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny recipe, vanilla, seed 0; read-only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OASIS_EVAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        out = tmp_path_factory.mktemp("run") / "finished"
        run(plan(place), out)
    return out


def test_learns(finished: Path) -> None:
    """Twelve steps on a repetitive text lower the held-out loss."""
    losses = [line["held_out_loss"] for line in log(finished) if "held_out_loss" in line]

    assert losses[-1] < 0.8 * losses[0]


def test_log_has_every_line(finished: Path) -> None:
    """Losses every two steps, probes at the start, every six steps and at the end."""
    lines = log(finished)

    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 6, 12]
    assert [line["tokens"] for line in lines if "loss" in line][-1] == STEPS * 4 * 16


def test_rates_of_log_are_the_schedule(place: Path, finished: Path) -> None:
    """Each line has the rate of the step before it."""
    rates = [line["learning_rate"] for line in log(finished) if "loss" in line]
    tiny = recipe(place)
    expected = [0.01 * rate_factor(tiny, step - 1, steps=STEPS) for step in (2, 4, 6, 8, 10, 12)]

    assert rates == pytest.approx(expected, rel=1e-12)


def test_folder_is_a_checkpoint_with_a_card(finished: Path) -> None:
    """The folder and the card beside it load strictly, as what was trained."""
    for name in (str(finished), f"{finished}.yaml"):
        reference = loading.load(registry.resolve(name), dtype="fp32")

        assert reference.card.variant == "vanilla"
        assert reference.card.label == "tiny, vanilla, seed 0"
        assert reference.card.seed == 0
        assert reference.context_length == 16
        assert reference.model.config.use_cache
        assert reference.tokenizer.eos_token_id == reference.model.config.eos_token_id


def test_training_json_says_what_was_run(finished: Path) -> None:
    """Recipe, variant, seed, text, versions and time."""
    info = json.loads((finished / "training.json").read_text())

    assert info["status"] == "finished"
    assert info["identity"]["recipe"]["learning_rate"] == 0.01
    assert (info["identity"]["variant"], info["identity"]["seed"]) == ("vanilla", 0)
    assert len(info["identity"]["data"][0]["tokens_sha256"]) == 64
    (session,) = info["sessions"]
    assert (session["first_step"], session["last_step"]) == (0, STEPS)
    assert session["versions"]["torch"] == torch.__version__
    assert session["seconds"] > 0


def test_weights_are_those_of_a_bare_loop(place: Path, finished: Path) -> None:
    """AdamW, decay of matrices, clipping and schedule written out, with whole batches."""
    asked = plan(place)
    tokenizer = load_tokenizer(asked)
    model = build_model(asked, tokenizer, None).train()
    text = tokens.load(asked.recipe.data[0], tokenizer, data=asked.data)
    blocks = TrainingBlocks(asked.recipe, [text], steps=STEPS, seed=0)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(STEPS):
        ids_BT = blocks.__getitems__(range(4 * step, 4 * step + 4))["input_ids"]
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate_factor(asked.recipe, step, steps=STEPS)
        optimizer.step()
        optimizer.zero_grad()
    expected, found = model.state_dict(), weights(finished)

    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 2e-5


def test_same_seed_same_weights(place: Path, finished: Path, tmp_path: Path) -> None:
    """Bit for bit, and the same log; so the digest of the checkpoint is the same too."""
    run(plan(place), tmp_path / "again")

    assert same(weights(tmp_path / "again"), weights(finished))
    assert log(tmp_path / "again") == log(finished)
    assert checkpoint.digest(tmp_path / "again") == checkpoint.digest(finished)


def test_other_seed_other_weights(place: Path, finished: Path, tmp_path: Path) -> None:
    run(plan(place, seed=1), tmp_path / "other")

    assert not same(weights(tmp_path / "other"), weights(finished))


@pytest.mark.parametrize("whole", [(8,), ()])
def test_resumed_run_is_the_uninterrupted_one(
    place: Path, finished: Path, tmp_path: Path, whole: tuple[int, ...]
) -> None:
    """From the last whole checkpoint or from the start, with a log that ran ahead of it."""
    out = tmp_path / "resumed"
    shutil.copytree(finished, out)
    folder = RunFolder(out)
    info = folder.read()
    assert info is not None
    folder.write(info.model_copy(update={"status": "running"}))
    (out / "model.safetensors").unlink()
    for step in {8, 12}.difference(whole):
        (folder.checkpoints / f"checkpoint-{step}" / COMPLETE).unlink()
        (folder.checkpoints / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"cut off")
    outcome = run(plan(place), out)

    assert outcome.resumed_from == (whole[0] if whole else None)
    assert same(weights(out), weights(finished))
    assert log(out) == log(finished)


def test_finished_run_is_left_alone(place: Path, finished: Path) -> None:
    """The same command again trains nothing."""
    before = (finished / "model.safetensors").stat().st_mtime_ns
    outcome = run(plan(place), finished)

    assert outcome.already_finished
    assert outcome.lines()[-1].endswith(f"oasis-eval evaluate {finished}.yaml")
    assert (finished / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variant": "oasis"}, "variant 'vanilla', not 'oasis'"),
        ({"seed": 3}, "seed 0, not 3"),
        ({"wiring": "attnres_full"}, "wiring 'attnres_block', not 'attnres_full'"),
        ({"settings": {"num_blocks": 1}}, r"settings \{\}, not \{'num_blocks': 1\}"),
        ({"max_steps": 7}, "steps 12, not 7"),
        ({"train": "routers"}, "train 'all', not 'routers'"),
        ({"dtype": "bf16"}, "dtype 'fp32', not 'bf16'"),
    ],
)
def test_other_run_is_refused(
    place: Path, finished: Path, changes: dict[str, object], words: str
) -> None:
    """By the name of what differs."""
    asked = dataclasses.replace(plan(place), **changes)
    with pytest.raises(SpecError, match=words):
        train(asked, finished, quiet=True)


def test_other_recipe_or_text_is_refused(place: Path, finished: Path, tmp_path: Path) -> None:
    changed = plan(place, recipe=recipe(place, learning_rate=0.02))
    with pytest.raises(SpecError, match=r"another learning_rate \(0.01, not 0.02\)"):
        train(changed, finished, quiet=True)
    renamed = plan(place, recipe=recipe(place, name="small"))
    with pytest.raises(SpecError, match="recipe 'tiny', not 'small'"):
        train(renamed, finished, quiet=True)
    text = (place / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text(text.replace("s", "z"))
    other = plan(place, data={"prose": str(tmp_path / "text.jsonl")})
    with pytest.raises(SpecError, match="another text 'prose'"):
        train(other, finished, quiet=True)


def test_overwrite_trains_anew(place: Path, tmp_path: Path) -> None:
    """Only the folder of a run is ever removed."""
    out = tmp_path / "out"
    run(plan(place, max_steps=2), out)
    outcome = run(plan(place, max_steps=3), out, overwrite=True)

    assert outcome.info.identity.steps == 3
    assert [line["step"] for line in log(out) if "loss" in line] == [2, 3]  # every 2, and the last
    assert "3 steps" in (tmp_path / "out.yaml").read_text()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(SpecError, match="holds no run"):
        train(plan(place), mine, overwrite=True, quiet=True)
    (mine / "training.json").write_text('{"epochs": 3}')
    with pytest.raises(RecordError, match=r"training\.json: .*remove the folder"):
        train(plan(place), mine, overwrite=True, quiet=True)
    assert (mine / "thesis.tex").exists()


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_every_variant_trains(place: Path, tmp_path: Path, variant: str) -> None:
    """Two steps move every parameter that can get a gradient, and the result loads."""
    run(plan(place, variant=variant, max_steps=2), tmp_path / "out")
    reference = loading.load(registry.resolve(str(tmp_path / "out")), dtype="fp32")

    assert reference.card.variant == variant
    assert all(torch.isfinite(p).all() for p in reference.model.parameters())


def test_weights_are_stored_as_asked(place: Path, tmp_path: Path) -> None:
    """bf16 is the rounded fp32 run."""
    run(plan(place, max_steps=2), tmp_path / "wide")
    narrow = plan(place, max_steps=2, recipe=recipe(place, weights="bf16"))
    run(narrow, tmp_path / "narrow")
    wide = {name: tensor.bfloat16() for name, tensor in weights(tmp_path / "wide").items()}

    assert same(weights(tmp_path / "narrow"), wide)


def test_accumulation_does_not_change_the_step(place: Path, tmp_path: Path) -> None:
    """One pass of four sequences, or four of one, give the same weights up to rounding."""
    for size in (1, 4):
        asked = plan(place, recipe=recipe(place, micro_batch_size=size))
        run(asked, tmp_path / str(size))
    once, four = weights(tmp_path / "4"), weights(tmp_path / "1")

    assert max((once[name] - four[name]).abs().max().item() for name in once) < 1e-4
    assert log(tmp_path / "4")[1]["loss"] == pytest.approx(log(tmp_path / "1")[1]["loss"], rel=1e-6)


def test_routers_alone(place: Path, finished: Path, tmp_path: Path) -> None:
    """Fine-tuning a checkpoint's routers leaves everything else bit for bit as it was."""
    start = plan(place, start=str(finished), train="routers")
    run(start, tmp_path / "tuned")
    before, after = weights(finished), weights(tmp_path / "tuned")
    moved = {name for name in before if not torch.equal(before[name], after[name])}

    assert moved
    assert all("attn_res_" in name or "final_res" in name for name in moved)
    with pytest.raises(SpecError, match="no depth routers"):
        train(plan(place, variant="residual-vanilla", train="routers"), tmp_path / "x", quiet=True)


def test_a_setting_of_ones_own_is_trained_and_recorded(place: Path, tmp_path: Path) -> None:
    """An ablation: the model has it, run and card say so, going on without it is refused."""
    settings = {"token_log_n": 2.0, "num_blocks": 1}
    run(plan(place, variant="outeffhop", settings=settings, max_steps=2), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    info = RunFolder(tmp_path / "run").read()

    assert (config["token_log_n"], config["num_blocks"]) == (2.0, 1)
    assert info is not None
    assert info.identity.settings == settings
    assert registry.read_card(tmp_path / "run.yaml").variant == (
        "outeffhop (token_log_n 2.0, num_blocks 1)"
    )
    with pytest.raises(SpecError, match="settings"):
        run(plan(place, variant="outeffhop", max_steps=2), tmp_path / "run")


def test_other_variant_of_a_checkpoint_is_refused(
    place: Path, finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="token_normalizer is 'softmax', but variant 'oasis'"):
        train(plan(place, variant="oasis", start=str(finished)), tmp_path / "x", quiet=True)


def test_mistakes_are_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown variant 'oasiz'; did you mean oasis"):
        train(plan(place, variant="oasiz"), tmp_path / "x", quiet=True)
    with pytest.raises(UnknownNameError, match="unknown text of recipe 'tiny' 'wiki'"):
        train(plan(place, data={"wiki": "x.txt"}), tmp_path / "x", quiet=True)
    with pytest.raises(DataError, match="give --data prose=FILE"):
        train(plan(place, data={}), tmp_path / "x", quiet=True)
    with pytest.raises(SpecError, match="device 'cuda:1'"):
        train(plan(place, device="cuda:1"), tmp_path / "x", quiet=True)
    with pytest.raises(SpecError, match="fp16"):
        train(plan(place, dtype="fp16"), tmp_path / "x", quiet=True)
    assert not (tmp_path / "x").exists()
