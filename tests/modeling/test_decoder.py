"""The models as ordinary transformers models, and what they let others see."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM

from oasis_eval.errors import SpecError
from oasis_eval.modeling.decoder import OasisForCausalLM
from oasis_eval.modeling.llama import LlamaOasisForCausalLM
from oasis_eval.modeling.registration import register
from oasis_eval.modeling.routing import DepthRouter
from oasis_eval.modeling.taps import Tap
from tests.modeling.tiny import (
    BACKBONES,
    QUICK_CASES,
    WIRINGS,
    base_config,
    new_model,
    settings_of,
    shared_model,
    tiny_config,
    tokens,
)

every_case = pytest.mark.parametrize("case", QUICK_CASES)
both_backbones = pytest.mark.parametrize("backbone", BACKBONES)


def loss_and_gradients(model: OasisForCausalLM, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.detach(), gradients


def expected_without_gradient(model: OasisForCausalLM) -> set[str]:
    """The one router that never reads: the first of `delta`."""
    if model.config.wiring != "delta":
        return set()
    prefix = "model.layers.0.attn_res_sa."
    return {name for name, _ in model.named_parameters() if name.startswith(prefix)}


@every_case
def test_gradients_are_finite_and_reach_every_parameter(case: str) -> None:
    """A training step touches each parameter, and none gets a NaN."""
    model = new_model(tiny_config("qwen3", case))

    _, gradients = loss_and_gradients(model, tokens(2, 10))

    missing = {name for name, _ in model.named_parameters()} - gradients.keys()
    assert missing == expected_without_gradient(model)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("reentrant", [False, True])
@every_case
def test_checkpointing_changes_nothing(case: str, reentrant: bool) -> None:
    """Loss and gradients with recomputed activations equal those without."""
    model = new_model(tiny_config("llama", case))
    ids = tokens(2, 10)
    loss, gradients = loss_and_gradients(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})

    checkpointed_loss, checkpointed = loss_and_gradients(model, ids)

    assert torch.equal(checkpointed_loss, loss)
    assert checkpointed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)


def test_detached_psi_sends_no_gradient_into_attention() -> None:
    """`coupling_psi_gradient: detached` changes gradients and not the function."""
    settings = settings_of("oasis")
    flowing = new_model(tiny_config("llama", settings))
    detached = new_model(
        tiny_config("llama", dataclasses.replace(settings, coupling_psi_gradient="detached"))
    )
    ids = tokens(2, 10)

    loss, gradients = loss_and_gradients(flowing, ids)
    detached_loss, detached_gradients = loss_and_gradients(detached, ids)

    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(loss, detached_loss)
    assert not torch.allclose(gradients[name], detached_gradients[name], rtol=1e-4)


@every_case
def test_bfloat16_is_finite_on_extreme_logits(case: str) -> None:
    """Queries and keys a hundred times too large: weights saturate, nothing overflows."""
    model = new_model(tiny_config("llama", case)).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", ".query")):
                parameter.mul_(100.0)

    loss, gradients = loss_and_gradients(model, tokens(2, 10))

    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@both_backbones
@every_case
def test_outputs_on_request_leave_the_logits_alone(case: str, backbone: str) -> None:
    """Depth weights and null mass come for free; attention weights from the explicit formula."""
    model = shared_model(backbone, case)
    ids = tokens(2, 10)
    with torch.no_grad():
        plain = model(ids)
        seen = model(ids, output_depth_weights=True, output_null_mass=True)
        explicit = model(ids, output_attentions=True, output_null_mass=True)

    assert torch.equal(seen.logits, plain.logits)
    torch.testing.assert_close(explicit.logits, plain.logits, rtol=0, atol=1e-4)
    assert plain.depth_weights is None
    assert plain.null_mass is None
    assert plain.attentions is None
    assert len(seen.depth_weights) == len(model.model.depth_read_names)
    assert len(seen.null_mass) == model.config.num_hidden_layers
    for fused, formula in zip(seen.null_mass, explicit.null_mass, strict=True):
        if model.config.token_normalizer in ("softmax1", "sink"):
            torch.testing.assert_close(fused, formula, rtol=0, atol=1e-5)
            assert fused.dtype == torch.float32
            assert fused.shape == (2, 4, 10)
        else:
            assert fused is None
            assert formula is None


@every_case
def test_depth_weights_and_null_mass_are_what_is_left(case: str) -> None:
    """Each row of depth weights and its null sum to one."""
    model = shared_model("llama", case)

    with torch.no_grad():
        outputs = model(tokens(2, 10), output_depth_weights=True)

    for weights, null in zip(outputs.depth_weights, outputs.depth_null_mass, strict=True):
        total = weights.sum(-1) if null is None else weights.sum(-1) + null
        torch.testing.assert_close(total, torch.ones(2, 10))
        assert (null is None) == (model.config.depth_normalizer != "softmax1")


@every_case
def test_attention_weights_agree_with_both_implementations(case: str) -> None:
    """`output_attentions` gives [B, H, T, S] under sdpa and eager alike."""
    model = shared_model("llama", case)
    ids = tokens(1, 8)
    with torch.no_grad():
        fused = model(ids, output_attentions=True).attentions
        model.set_attn_implementation("eager")
        eager = model(ids, output_attentions=True).attentions
        hidden_weights = model(ids).attentions
    model.set_attn_implementation("sdpa")

    assert hidden_weights is None
    for left, right in zip(fused, eager, strict=True):
        assert left.shape == (1, 4, 8, 8)
        assert torch.equal(left, right)


def test_eager_and_fused_attention_agree() -> None:
    """The attention implementation is a choice of speed."""
    model = new_model(tiny_config("llama", "oasis"))
    ids = tokens(2, 10)
    with torch.no_grad():
        fused = model(ids).logits
        model.set_attn_implementation("eager")
        eager = model(ids).logits

    torch.testing.assert_close(eager, fused, rtol=0, atol=1e-4)


def test_hidden_states_under_residual_wiring_are_those_of_transformers() -> None:
    """One per layer input and the normed output."""
    plain = LlamaForCausalLM(base_config("llama")).eval()
    model = new_model(tiny_config("llama", "residual-vanilla"))
    model.load_state_dict(plain.state_dict())
    ids = tokens(1, 8)
    with torch.no_grad():
        expected = plain(ids, output_hidden_states=True).hidden_states
        actual = model(ids, output_hidden_states=True).hidden_states

    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_tuples_on_request() -> None:
    """`return_dict=False` gives transformers' tuples."""
    model = shared_model("llama", "oasis")
    with torch.no_grad():
        outputs = model(tokens(1, 4), return_dict=False, use_cache=False)

    assert isinstance(outputs, tuple)
    assert outputs[0].shape == (1, 4, 256)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_plain_checkpoint_lacks_only_depth_parameters(kind: str) -> None:
    """Parameter names are the backbone's own."""
    plain = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[kind](base_config(kind))
    for case in ("vanilla", "oasis", *WIRINGS):
        result = new_model(tiny_config(kind, case)).load_state_dict(
            plain.state_dict(), strict=False
        )

        assert result.unexpected_keys == []
        assert all(
            ".attn_res_" in name or "final_res" in name or name.endswith("null_logit")
            for name in result.missing_keys
        )


def test_tied_embeddings_stay_tied() -> None:
    """Head and embedding share one tensor, also in bf16."""
    model = new_model(tiny_config("llama", "oasis", tie_word_embeddings=True)).bfloat16()

    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("tap", ["depth_sources", "depth_weights", "depth_logits", "residual"])
@pytest.mark.parametrize("case", ["oasis", "oasis_repo", "delta", "reset"])
def test_taps_can_be_watched_and_replaced(case: str, tap: str) -> None:
    """A hook changes nothing; a replacement that changes the tensor changes the logits."""
    model = new_model(tiny_config("llama", case))
    ids = tokens(1, 6)
    with torch.no_grad():
        expected = model(ids).logits
    found = [name for name, _ in model.named_modules() if name.endswith(f".taps.{tap}")]
    shapes = []
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, output: shapes.append(output.shape)
        )
        for name in found
    ]
    with torch.no_grad():
        watched = model(ids).logits
    for hook in hooks:
        hook.remove()

    assert torch.equal(watched, expected)
    assert shapes

    class Coarse(Tap):
        def forward(self, value: Tensor) -> Tensor:
            return (value * 2).round() / 2

    for name in found:
        model.set_submodule(name, Coarse())
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, expected, atol=1e-3)


@every_case
def test_every_region_has_taps(case: str) -> None:
    """Each sublayer has the depth taps, each attention its own."""
    model = shared_model("llama", case)
    names = {name for name, module in model.named_modules() if isinstance(module, Tap)}

    for index in range(model.config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for tap in ("scores", "probs", "context", "null_mass", "key", "value"):
            assert f"{layer}.self_attn.taps.{tap}" in names
        for port in ("attn_res_sa", "attn_res_mlp"):
            for tap in ("residual", "depth_sources", "depth_logits", "depth_weights"):
                assert f"{layer}.{port}.taps.{tap}" in names
    assert "model.taps.depth_sources" in names


def test_read_names_are_routers_in_order_of_their_weights() -> None:
    """Names and weights of the reads belong together: the number of sources tells."""
    model = shared_model("llama", "full")
    with torch.no_grad():
        weights = model(tokens(1, 3), output_depth_weights=True).depth_weights
    names = model.model.depth_read_names

    assert [part.shape[-1] for part in weights] == list(range(1, 8))
    assert names[:2] == ("layers.0.attn_res_sa", "layers.0.attn_res_mlp")
    assert names[-1] == "final_res"
    assert all(isinstance(model.model.get_submodule(name), DepthRouter) for name in names)


def test_unknown_attention_implementation_is_refused() -> None:
    """A normalizer of another name would silently be ignored."""
    model = new_model(tiny_config("llama", "oasis"))
    model.config._attn_implementation = "flex_attention"

    with pytest.raises(SpecError, match="token_normalizer"):
        model(tokens(1, 3))


def test_changed_configuration_is_checked_again() -> None:
    """A field set after construction does not slip through."""
    config = tiny_config("llama", "vanilla")
    config.num_blocks = 7

    with pytest.raises(SpecError, match="num_blocks"):
        new_model(config)


def test_registering_twice_is_harmless() -> None:
    """Auto classes know the families after `register`, however often it runs."""
    register()
    register()

    model = AutoModelForCausalLM.from_config(tiny_config("qwen3", "oasis"))

    assert type(model).__name__ == "Qwen3OasisForCausalLM"


def test_inputs_embeds_equal_input_ids() -> None:
    """Embeddings can be given instead of ids, and exactly one of the two must be."""
    model = shared_model("llama", "oasis")
    ids = tokens(1, 5)
    with torch.no_grad():
        embedded = model(inputs_embeds=model.model.embed_tokens(ids)).logits

        assert torch.equal(embedded, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize("learned", ["learned", "fixed"])
def test_initial_values(learned: str) -> None:
    """Fresh models start from a uniform mix, a weak coupling and quarter-open gates."""
    settings = dataclasses.replace(
        settings_of("oasis"),
        token_null=learned,
        depth_null=learned,
        token_log_n=0.5,
        depth_log_n=-0.5,
        attention_gate="per_head",
        depth_recency="last",
        depth_recency_init=3.0,
    )
    model = LlamaOasisForCausalLM(tiny_config("llama", settings))
    layer = model.model.layers[1]
    router = layer.attn_res_mlp

    assert torch.equal(router.query, torch.zeros(48))
    assert torch.equal(router.key_norm.weight, torch.ones(48))
    assert router.oasis_beta_raw.item() == -5.0
    assert router.recency_bias.item() == 3.0
    assert (router.null_logit is None) == (learned == "fixed")
    if learned == "learned":
        assert router.null_logit.item() == -0.5
        assert torch.equal(layer.self_attn.null_logit, torch.full((4,), 0.5))
    for head in layer.self_attn.gate.heads:
        assert torch.sigmoid(head.bias).item() == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vanilla", "oasis", "oasis_repo", "reset", "gated"])
def test_compiles_as_one_graph(case: str) -> None:
    """`torch.compile` finds nothing that it must leave out."""
    model = shared_model("llama", case)
    ids = tokens(2, 10)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    with torch.no_grad():
        actual = compiled(ids, use_cache=False).logits
        expected = model(ids, use_cache=False).logits

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_initial_low_rank_queries_are_zero() -> None:
    """A low-rank router starts from a uniform mix, too; its keys do not."""
    model = LlamaOasisForCausalLM(tiny_config("llama", "lowrank"))
    router = model.model.layers[1].attn_res_mlp

    assert not router.q_proj.weight.any()
    assert router.k_proj.weight.any()
