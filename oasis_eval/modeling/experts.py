"""Experts that transformers keeps in one tensor, as linear layers of their own.

A mixture's experts are raw parameters [E, N, K] behind transformers' experts interface, where no
quantizer, observer or hook finds a layer. Here each expert's matrices become Linears whose weights
are views of the tensor, named as checkpoints have named them for long: `experts.3.down_proj`. While
such a layer runs, its `token_rows` says which of the pass's tokens its rows are, [R], and how many
tokens the pass has; None before it first ran.

Shapes: S tokens, D width, E experts, A experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_DECLARED = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
"""What every module on the interface says of itself."""
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def separate_(model: nn.Module) -> int:
    """Turn the experts of every module on the interface into layers, in place and for good.

    A module whose output is not the same afterwards, on a few random tokens, is left as it is.

    Returns:
        How many modules were turned.
    """
    found = [
        module
        for module in model.modules()
        if all(hasattr(module, name) for name in _DECLARED) and "down_proj" in module._parameters
    ]
    return sum(_separate_(module) for module in found)


class _Expert(nn.Module):
    """The matrices of one expert; it is never called itself."""


class _SeparatedExperts:
    """Forward pass over experts that are modules; the other attributes are the module's own."""

    has_gate: bool
    has_post_expert_norm: bool
    act_fn: Any
    post_expert_norm: Any
    _apply_gate: Any
    _modules: dict[str, Any]
    _num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run every token through its experts, one expert at a time; sums are fp32 or wider.

        Args:
            hidden_states: [S, D].
            top_k_index: [S, A]; E and above is no expert.
            top_k_weights: [S, A].
        """
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        total = torch.zeros_like(hidden_states, dtype=wide)
        for number in torch.unique(top_k_index).tolist():
            if number >= self._num_experts:
                continue
            place, token = torch.where(number == top_k_index.T)
            expert = self._modules[str(number)]
            first = expert.gate_up_proj if self.has_gate else expert.up_proj
            first.token_rows = expert.down_proj.token_rows = (token, len(hidden_states))
            inner = first(hidden_states[token])
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            output = expert.down_proj(inner)
            if self.has_post_expert_norm:
                output = self.post_expert_norm(output)
            total.index_add_(0, token, output.to(wide) * top_k_weights[token, place, None].to(wide))
        return total.to(hidden_states.dtype)


def _separate_(module: Any) -> bool:
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    kind, parameters = type(module), dict(module._parameters)
    inputs = _probe(module, parameters[names[0]])
    with torch.no_grad():
        expected = module(*inputs)
    for name in names:
        stacked = module._parameters.pop(name)
        bias = module._parameters.pop(f"{name}_bias") if module.has_bias else None
        for number in range(len(stacked)):
            expert = module._modules.setdefault(str(number), _Expert())
            setattr(expert, name, _layer(stacked, bias, number, module.is_transposed))
    module._num_experts = len(stacked)
    module.__class__ = type(f"Separated{kind.__name__}", (_SeparatedExperts, kind), {})
    with torch.no_grad():
        found = module(*inputs)
    scale = expected.abs().max().float().clamp_min(1e-30)
    if bool((found - expected).abs().max().float() <= _TOLERANCE[expected.dtype] * scale):
        return True
    module.__class__ = kind
    for number in range(module._num_experts):
        del module._modules[str(number)]
    del module._num_experts
    module._parameters.update(parameters)
    return False


def _layer(stacked: Tensor, bias: Tensor | None, number: int, is_transposed: bool) -> nn.Linear:
    """Return one expert's matrix as a layer that shares its memory."""
    weight = stacked.detach()[number]
    weight = weight.T if is_transposed else weight
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=stacked.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach()[number], requires_grad=bias.requires_grad)
    layer.token_rows = None  # type: ignore[assignment]  # modules take any attribute
    return layer.train(False)


def _probe(module: Any, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens and a routing that reaches two experts with each."""
    num_experts, width = len(weight), weight.shape[1 if module.is_transposed else 2]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBE_TOKENS, width, generator=generator).to(weight)
    first = torch.arange(_PROBE_TOKENS) % num_experts
    index = torch.stack((first, (first + 1) % num_experts), dim=1)[:, : min(2, num_experts)]
    shares = torch.rand(index.shape, generator=generator).softmax(dim=-1)
    return hidden, index.to(weight.device), shares.to(weight)
