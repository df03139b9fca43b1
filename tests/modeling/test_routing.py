"""The arithmetic of a depth read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from oasis_eval.modeling.config import OasisSettings
from oasis_eval.modeling.routing import (
    DepthRouter,
    Source,
    couple,
    inverse_rms,
    mix,
    pseudo_query_logits,
)
from tests.modeling.tiny import settings_of, tiny_config

EPS = 1e-6


def make_sources(count: int, width: int = 48, dtype: torch.dtype = torch.float32) -> list[Source]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, 2, 5, width, generator=generator).to(dtype)
    psis = torch.rand(count, 2, 5, generator=generator)
    return [
        Source(value, inverse_rms(value, EPS), psi) for value, psi in zip(values, psis, strict=True)
    ]


def make_router(settings: OasisSettings, *, is_coupled: bool = True) -> DepthRouter:
    torch.manual_seed(0)
    router = DepthRouter(tiny_config("llama", settings), is_coupled=is_coupled)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_rms_widens(dtype: torch.dtype) -> None:
    """Computed in fp32 from whatever the source is stored in; a zero row gives 1 / sqrt(eps)."""
    value = torch.randn(2, 3, 48).to(dtype)
    value[0, 0] = 0.0

    actual = inverse_rms(value, EPS)

    expected = torch.rsqrt(value.double().pow(2).mean(-1) + EPS)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_inverse_rms_has_a_gradient_at_zero() -> None:
    """A source of zeros, the reset partial sum, gets gradient 0 and no NaN."""
    value = torch.zeros(1, 2, 48, requires_grad=True)

    inverse_rms(value, EPS).sum().backward()

    assert torch.equal(value.grad, torch.zeros_like(value))


def test_logits_equal_a_query_on_normed_sources() -> None:
    """(w g) . v / rms(v) is w . RMSNorm_g(v)."""
    query, weight = torch.randn(48), torch.randn(48)
    sources = make_sources(4)

    actual = pseudo_query_logits(query * weight, sources)

    for index, source in enumerate(sources):
        value = source.value.double()
        normed = weight * value / (value.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
        torch.testing.assert_close(
            actual[..., index].double(), normed @ query.double(), rtol=1e-5, atol=1e-5
        )


def test_logits_stay_wide_under_autocast() -> None:
    """Mixed-precision training does not round depth logits, whose size is not bounded."""
    query, sources = 10.0 * torch.randn(48), make_sources(4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = pseudo_query_logits(query, sources)

    assert torch.equal(actual, pseudo_query_logits(query, sources))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mix_adds_up_in_fp32(dtype: torch.dtype) -> None:
    """The weighted sum is rounded once, to the dtype of the sources."""
    values = [source.value for source in make_sources(6, dtype=dtype)]
    weights = torch.softmax(torch.randn(2, 5, 6), dim=-1)

    actual = mix(weights, values)

    stacked = torch.stack(values, dim=-2).double()
    expected = (weights.double().unsqueeze(-1) * stacked).sum(-2)
    assert actual.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_mix_has_the_gradient_of_a_sum() -> None:
    """In-place accumulation leaves what backward needs alone."""
    weights = torch.rand(1, 2, 3, dtype=torch.float64, requires_grad=True)
    values = [torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    assert torch.autograd.gradcheck(lambda w, *v: mix(w, v), (weights, *values))


def test_coupling_lowers_what_did_nothing() -> None:
    """A larger null mass means a smaller logit; centring keeps the mean of the logits."""
    logits, psi = torch.zeros(1, 1, 3), torch.tensor([[[0.1, 0.5, 0.9]]])

    centred = couple(logits, psi, 2.0, centred=True)
    plain = couple(logits, psi, 2.0, centred=False)

    torch.testing.assert_close(centred, torch.tensor([[[0.8, 0.0, -0.8]]]))
    torch.testing.assert_close(plain, torch.tensor([[[-0.2, -1.0, -1.8]]]))


def test_beta_is_softplus_up_to_ten() -> None:
    """0.0067 at the start, at most 10, and a constant where it is fixed."""
    router = make_router(settings_of("oasis"))
    fixed = dataclasses.replace(
        settings_of("oasis"), coupling_beta="fixed", coupling_beta_value=0.5
    )

    betas = []
    for raw in (-5.0, 0.0, 100.0):
        torch.nn.init.constant_(router.oasis_beta_raw, raw)
        betas.append(router.beta.item())

    assert betas == pytest.approx([0.00671535, 0.6931472, 10.0], rel=1e-5)
    assert make_router(fixed).beta == 0.5


def read(settings: OasisSettings, sources: list[Source]) -> tuple[Tensor, Tensor, Tensor | None]:
    with torch.no_grad():
        return make_router(settings)(tuple(sources))


def test_null_value_takes_the_null_mass() -> None:
    """`partial` and `embedding` add null mass times the newest and the first source."""
    settings = settings_of("oasis")
    sources = make_sources(3)
    zero, weights, null = read(settings, sources)

    for value, source in (("partial", sources[-1]), ("embedding", sources[0])):
        hidden, same_weights, _ = read(
            dataclasses.replace(settings, depth_null_value=value), sources
        )

        torch.testing.assert_close(hidden, zero + null.unsqueeze(-1) * source.value)
        assert torch.equal(same_weights, weights)


def test_scale_is_the_number_of_sources() -> None:
    """`num_sources` multiplies the read."""
    sources = make_sources(3)
    plain, *_ = read(settings_of("oasis"), sources)
    scaled, *_ = read(
        dataclasses.replace(settings_of("oasis"), depth_output_scale="num_sources"), sources
    )

    torch.testing.assert_close(scaled, 3 * plain)


def test_neutral_embedding_is_the_mean_of_the_others() -> None:
    """Its centred psi would be what the mean of the others makes it."""
    settings = dataclasses.replace(settings_of("oasis"), coupling_embedding_psi="neutral")
    sources = make_sources(3)
    seen: list[Tensor] = []
    router = make_router(settings)
    router.taps.depth_psi.register_forward_hook(lambda *call: seen.append(call[-1]))

    router(tuple(sources))
    router(tuple(sources[:1]))

    torch.testing.assert_close(seen[0][..., 0], (sources[1].psi + sources[2].psi) / 2)
    assert torch.equal(seen[1][..., 0], sources[0].psi)


def test_clamp_cuts_coupled_logits() -> None:
    """Logits beyond the clamp stay at it."""
    settings = dataclasses.replace(settings_of("oasis"), coupling_logit_clamp=0.1)
    seen: list[Tensor] = []
    router = make_router(settings)
    router.taps.depth_logits.register_forward_hook(lambda *call: seen.append(call[-1]))

    router(tuple(make_sources(4)))

    assert seen[0].abs().max().item() == pytest.approx(0.1)


@pytest.mark.parametrize(("recency", "steps"), [("last", [0, 0, 1]), ("linear", [0, 0.5, 1])])
def test_recency_favours_the_newest(recency: str, steps: list[float]) -> None:
    """The bias goes to the newest source, or grows towards it; one source gets it whole or not."""
    plain = make_router(settings_of("vanilla"), is_coupled=False)
    biased = make_router(
        dataclasses.replace(settings_of("vanilla"), depth_recency=recency), is_coupled=False
    )
    biased.load_state_dict(plain.state_dict(), strict=False)
    torch.nn.init.constant_(biased.recency_bias, 2.0)
    logits: dict[str, Tensor] = {}
    for name, router in (("plain", plain), ("biased", biased)):
        router.taps.depth_logits.register_forward_hook(
            lambda *call, name=name: logits.update({name: call[-1]})
        )
        router(tuple(make_sources(3)))

    expected = 2.0 * torch.tensor(steps).expand(2, 5, 3)
    torch.testing.assert_close(logits["biased"] - logits["plain"], expected)


def test_one_source_is_returned_whole() -> None:
    """Softmax over a single source is 1, whatever its logit."""
    source = make_sources(1)[0]

    hidden, weights, null = read(settings_of("vanilla"), [source])

    assert torch.equal(hidden, source.value)
    assert torch.equal(weights, torch.ones(2, 5, 1))
    assert null is None
