"""What a run starts from: shared initial weights, the public sizes, what learns and decays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from oasis_eval.errors import SpecError, UnknownNameError
from oasis_eval.modeling.config import LlamaOasisConfig
from oasis_eval.modeling.variants import VARIANT_NAMES
from oasis_eval.training import recipes
from oasis_eval.training.dry_run import _config as config_of
from oasis_eval.training.dry_run import count
from oasis_eval.training.models import decaying
from oasis_eval.training.run import Plan, build_model, load_tokenizer
from tests.training.tiny import plan, recipe


def built(folder: Path, variant: str, seed: int = 0, **changes: object) -> torch.nn.Module:
    asked = plan(folder, variant=variant, seed=seed, **changes)
    return build_model(asked, load_tokenizer(asked), None)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_variants_share_initial_weights(place: Path, variant: str) -> None:
    """Every tensor of the plain backbone is the same in every variant of one seed."""
    plain = built(place, "residual-vanilla").state_dict()
    state = built(place, variant).state_dict()

    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())


def test_initial_weights_are_the_backbones_own(place: Path) -> None:
    """Those that transformers' Llama draws from the seed, with the recipe's deviation."""
    asked = plan(place, seed=5)
    model = build_model(asked, load_tokenizer(asked), None)
    torch.manual_seed(5)
    values = model.config.to_dict()
    settings = set(LlamaOasisConfig().to_dict()) - set(LlamaForCausalLM.config_class().to_dict())
    kept = {k: v for k, v in values.items() if k not in settings and k != "model_type"}
    library = LlamaForCausalLM(LlamaForCausalLM.config_class(**kept)).state_dict()

    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in library.items())


def test_initialisation_leaves_the_random_stream_alone(place: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    built(place, "gated")

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400)]
)
def test_sizes_are_those_of_the_public_models(name: str, num_parameters: int) -> None:
    """The published parameter counts, without depth routing."""
    needs = count_quickly(name)

    assert needs == num_parameters


def count_quickly(name: str) -> int:
    """Parameters on the meta device."""
    from oasis_eval.modeling.formats.folder import causal_class

    config = config_of(Plan(recipe=recipes.resolve(name), variant="residual-vanilla"))
    with torch.device("meta"):
        model = causal_class(config)(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_shipped_recipe_is_valid(name: str) -> None:
    """Its name is its file's, and its configuration can be built."""
    found = recipes.resolve(name)

    assert found.name == name
    assert found.description
    assert config_of(Plan(recipe=found, variant="oasis")).num_blocks == found.num_blocks


def test_paper_recipes_say_what_the_paper_says() -> None:
    for name in ("qwen3-0.6b", "llama-3.2-1b"):
        found = recipes.resolve(name)

        assert [text.name for text in found.data] == ["bookcorpus", "wiki40b"]
        assert (found.context, found.learning_rate, found.warmup_steps) == (512, 4e-4, 2000)
        assert (found.betas, found.weight_decay, found.clip_norm) == ((0.9, 0.95), 0.1, 1.0)


def test_unknown_recipe() -> None:
    with pytest.raises(UnknownNameError, match="unknown recipe 'minni'; did you mean mini"):
        recipes.resolve("minni")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lerning_rate": 1}, "unknown key 'lerning_rate'"),
        ({"betas": [0.9, 1.0]}, "betas: both must be at least 0 and below 1"),
        ({"micro_batch_size": 3}, "batch_size 4 is no multiple of micro_batch_size 3"),
        ({"save_every": 5}, "save_every 5 is no multiple of log_every 2"),
        ({"schedule": "constant"}, "'final_rate' does not apply"),
        ({"data": [{"name": "a"}, {"name": "a"}]}, "names one text twice"),
        ({"data": [{"name": "a", "share": 0.5}, {"name": "b"}]}, "for every text"),
        ({"data": [{"name": "mini"}]}, "give 'max_tokens'"),
        ({"data": [{"name": "a", "problem_share": 0.5}]}, "goes with 'mini'"),
        ({"data": [{"name": "a", "repeat_share": 0.5}]}, "'repeat_share' goes with 'mini'"),
    ],
)
def test_wrong_recipe_is_refused(place: Path, changes: dict[str, object], words: str) -> None:
    """In one line, by the key."""
    with pytest.raises(SpecError, match=words):
        recipe(place, **changes)


def test_what_decays(place: Path) -> None:
    """Matrices; on request also norms and queries; never null logits, strengths and biases."""
    names = {rule: set(decaying(built(place, "oasis_adaptive"), rule)) for rule in RULES}
    gated = set(decaying(built(place, "gated"), RULES[1]))
    layer = "model.layers.1."

    assert layer + "self_attn.q_proj.weight" in names["matrices"]
    assert "model.embed_tokens.weight" in names["matrices"]
    assert layer + "attn_res_sa.query" not in names["matrices"]
    assert {layer + "attn_res_sa.query", "model.norm.weight"} <= names["matrices_and_vectors"]
    for name in ("self_attn.null_logit", "attn_res_mlp.null_logit", "attn_res_mlp.oasis_beta_raw"):
        assert not any(layer + name in found for found in names.values())
    assert layer + "self_attn.gate.heads.0.bias" not in gated
    assert layer + "self_attn.gate.heads.0.weight" in gated


RULES = ("matrices", "matrices_and_vectors")


def test_vocabulary_must_hold_the_tokenizer(place: Path) -> None:
    small = recipe(place)
    backbone = small.backbone.model_copy(update={"vocab_size": 100})
    asked = plan(place, recipe=small.model_copy(update={"backbone": backbone}))
    with pytest.raises(SpecError, match="vocab_size is 100, but the tokenizer has 256 tokens"):
        build_model(asked, load_tokenizer(asked), None)


def test_memory_is_counted(place: Path) -> None:
    """Weights, gradients and means by hand: 4, 4 and 8 bytes a parameter that learns."""
    needs = count(config_of(plan(place)), plan(place))
    number = sum(parameter.numel() for parameter in built(place, "vanilla").parameters())

    assert needs.num_parameters == number
    assert (needs.weight_bytes, needs.gradient_bytes) == (4 * number, 4 * number)
    assert needs.optimizer_bytes == 8 * number
    routers = count(config_of(plan(place)), plan(place, train="routers"))
    assert routers.gradient_bytes == 4 * routers.num_router_parameters == 4 * 5 * 2 * 24
