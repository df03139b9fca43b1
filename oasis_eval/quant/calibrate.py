"""Static activation ranges from calibration text.

The model runs in floating point, its weights not yet quantized, and each layer's activations are
reduced to a range as they pass; none is kept. Three rules make a range a property of the text and
not of how it was batched:

- padding never enters, whichever side it is on;
- the unit of a running range is the sequence, never the batch: the first sequence sets the range
  and each later one moves it by 1 - momentum;
- percentiles are exact over all tokens, from tails kept in a second pass over the text.

Dimensions: B sequences, T tokens, N real tokens of one sequence, K features, R ranges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from oasis_eval.errors import QuantizationError
from oasis_eval.quant.observers import observer_for
from oasis_eval.quant.padding import PaddingContext, Tokens
from oasis_eval.quant.primitives import Range
from oasis_eval.spec import TensorFormat


class Batch(NamedTuple):
    """Calibration tokens: ids and a mask that is 1 at real tokens and 0 at padding."""

    input_ids_BT: Tensor  # noqa: N815 - shape suffix
    attention_mask_BT: Tensor  # noqa: N815 - shape suffix


class Site(NamedTuple):
    """Where activations are observed."""

    name: str
    module: nn.Module
    side: Literal["input", "output"]
    shape: Literal["tokens", "heads", "attention"] = "tokens"
    """[B, T, K] (or one vector [K] of the model itself), [B, T, H, C], or [B, H, T, S] of H heads
    and S keys with the mask as second argument: of those only what real queries see counts."""


def calibrate(
    model: nn.Module, sites: Sequence[Site], fmt: TensorFormat, batches: Sequence[Batch]
) -> dict[tuple[str, str], Range]:
    """Run `model` over the text and return the range of every site.

    Args:
        model: A causal language model, not yet quantized.
        sites: What to observe.
        fmt: Format with static ranges.
        batches: The text; each batch goes through the model at once.

    Returns:
        Ranges of shape [1] or [K], fp32, by (name, side).

    Raises:
        QuantizationError: There is no text, a site never ran, or it saw non-finite values.
    """
    if not any(bool(batch.attention_mask_BT.any()) for batch in batches):
        raise QuantizationError("static activation ranges need calibration text, and there is none")
    observers = {(site.name, site.side): observer_for(fmt) for site in sites}
    context = PaddingContext()
    handles = [attach(site, observers[site.name, site.side].observe, context) for site in sites]
    run = runner(model, sites)
    try:
        with torch.no_grad(), evaluation_mode(model):
            for _ in range(max(observer.num_passes for observer in observers.values())):
                for batch in batches:
                    context.enter(tokens_of(batch))
                    run(batch)
                    context.leave()
                    for observer in observers.values():
                        observer.end_batch()
                for observer in observers.values():
                    observer.end_pass()
    finally:
        for handle in handles:
            handle.remove()
    return {(name, side): _checked(o.result(), name) for (name, side), o in observers.items()}


def tokens_of(batch: Batch) -> Tokens:
    """Return what a padding context must know about a batch."""
    real_BT = batch.attention_mask_BT.bool()
    num_sequences, num_tokens = real_BT.shape
    return Tokens(num_sequences, num_tokens, None if bool(real_BT.all()) else real_BT)


def attach(
    site: Site, observe: Callable[[Tensor, int], None], context: PaddingContext
) -> torch.utils.hooks.RemovableHandle:
    """Show the real tokens that pass a site, sequence by sequence.

    Args:
        site: Where.
        observe: Called with the tokens [N, K] of one sequence in fp32 and the number of the
            sequence in its batch.
        context: Knows the padding of the pass that is running.
    """

    def show(x: Tensor, mask: Tensor | None = None) -> None:
        if site.shape == "attention":
            for index, x_N1 in enumerate(_visible(x.detach(), mask, context.tokens(site.name))):
                if len(x_N1):
                    observe(x_N1.float(), index)
            return
        if x.dim() == 1:
            observe(x.detach()[None].float(), 0)
            return
        x = x.detach().flatten(-2) if site.shape == "heads" else x.detach()
        rows = getattr(site.module, "token_rows", None)
        x_BTK, real_BT = context.sequences(x, site.name, rows)
        for index, x_TK in enumerate(x_BTK):
            x_NK = x_TK if real_BT is None else x_TK[real_BT[index].to(x.device)]
            if len(x_NK):
                observe(x_NK.float(), index)

    if site.side == "input":
        return site.module.register_forward_pre_hook(lambda _, args: show(*args))
    return site.module.register_forward_hook(lambda _, args, output: show(output))


def _visible(x_BHTS: Tensor, mask: Tensor | None, tokens: Tokens) -> Iterator[Tensor]:
    """Yield each sequence's entries [N, 1] at keys that its real queries see."""
    if mask is None and tokens.real_BT is None:
        yield from x_BHTS.flatten(1).unsqueeze(-1)
        return
    visible = torch.ones((), dtype=torch.bool, device=x_BHTS.device) if mask is None else mask
    if tokens.real_BT is not None:
        visible = visible & tokens.real_BT.to(x_BHTS.device)[:, None, :, None]
    for x_HTS, visible_HTS in zip(x_BHTS, visible.expand(x_BHTS.shape), strict=True):
        yield x_HTS[visible_HTS].unsqueeze(-1)


def runner(model: nn.Module, sites: Sequence[Site]) -> Callable[[Batch], None]:
    """Return what runs a batch through the part of the model that holds the sites.

    The head, whose logits are the largest tensor of a pass, is left out where nothing needs it.
    """
    body = getattr(model, "base_model", model)
    inside = {id(module) for module in body.modules()}
    part = body if all(id(site.module) in inside for site in sites) else model
    accepted = inspect.signature(part.forward).parameters
    device = next(model.parameters()).device

    def run(batch: Batch) -> None:
        real_BT = batch.attention_mask_BT.to(device)
        given: dict[str, object] = {"attention_mask": real_BT}
        # Positions count real tokens, or left padding would shift learned positions.
        given["position_ids"] = (real_BT.long().cumsum(-1) - 1).clamp(min=0)
        given["use_cache"] = False
        if "attention_mask" not in accepted and not bool(real_BT.all()):
            raise QuantizationError("the model takes no attention mask; calibrate without padding")
        known = {key: value for key, value in given.items() if key in accepted}
        part(input_ids=batch.input_ids_BT.to(device), **known)

    return run


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for as long as the context lasts."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _checked(span: Range | None, name: str) -> Range:
    if span is None:
        raise QuantizationError(
            f"{name}: saw no token of the calibration text, so it has no static range "
            "(calibrate on more text, or skip the module)"
        )
    if not bool(torch.isfinite(span.low).all() and torch.isfinite(span.high).all()):
        raise QuantizationError(f"{name}: activations on the calibration text are not finite")
    return span
