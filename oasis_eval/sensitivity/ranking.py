"""Results as lines of text: a ranked table and the sentence that sums it up."""

from __future__ import annotations

import math

from oasis_eval.sensitivity.results import Effect, Sensitivity

HALF = 0.5
"""Share of the summed costs that the named parts carry."""
_MOST_NAMED = 3
_LEAST_WINDOWS = 6
"""Windows from which intervals decide what is chance; those of fewer hold almost anything."""


def lines(found: Sensitivity) -> list[str]:
    """Return the header, the ranking, the whole scheme beside it, and a summary."""
    effects = found.effects()
    what = "all but one" if found.all_but_one else "one at a time"
    num_tokens = sum(found.num_tokens)
    reference = sum(found.reference_nll_nats) / num_tokens if num_tokens else math.nan
    width = max([len("everything"), *(len(item.name) for item in effects)])
    title = "saves" if found.all_but_one else "costs"
    text = [
        f"{found.model}, {found.scheme} by {found.by}, {what}: {len(found.num_tokens)} windows, "
        f"{num_tokens} tokens of {found.task} ({found.protocol}), reference {reference:.4f} nats",
        "",
        f"{'':>4} {'part':<{width}} {title + ', nats':>12} {'95 % interval':>21} "
        f"{'KL, nats':>10} {'same top-1':>10}",
    ]
    text += [_row(f"{rank:>3}.", item, width) for rank, item in enumerate(effects, start=1)]
    if found.whole is not None:
        delta = found.delta(found.whole)
        has_ends = math.isfinite(delta.low)
        whole = Effect(
            name="everything",
            effect_nats=delta.estimate,
            low=delta.low if has_ends else None,
            high=delta.high if has_ends else None,
            delta_nll_nats=delta.estimate,
            kl_nats=sum(found.whole.kl_nats) / num_tokens,
            same_top1=found.whole.same_top1,
            num_parts=found.whole.num_parts,
        )
        text += [_row("", whole, width)]
    return [*text, "", summary(found)]


def summary(found: Sensitivity) -> str:
    """Return in one sentence which parts carry the loss.

    Named are the fewest parts whose costs make up half of what all parts cost, if they are few; a
    part counts whose interval is above 0 or, on few windows, whose cost is.
    """
    effects = found.effects()
    if any(math.isnan(item.effect_nats) for item in effects):
        broken = [item.name for item in effects if math.isnan(item.effect_nats)]
        return f"No finite loss with {', '.join(broken[:_MOST_NAMED])} quantized."
    is_certain = len(found.num_tokens) >= _LEAST_WINDOWS
    costs = [
        (item.name, item.effect_nats)
        for item in effects
        if (item.low if is_certain and item.low is not None else item.effect_nats) > 0.0
    ]
    total = sum(cost for _, cost in costs)
    noun = {"layer": "layers", "region": "regions", "kind": "kinds of module"}[found.by]
    if not costs:
        return f"None of {len(effects)} {noun} costs more than chance on these tokens."
    named, carried = [], 0.0
    for name, cost in costs:
        named.append(f"{name} ({cost / total:.0%})")
        carried += cost
        if carried >= HALF * total:
            break
    if len(named) > _MOST_NAMED:
        return (
            f"The loss is spread: it takes {len(named)} of {len(effects)} {noun} to carry half of "
            f"it, the costliest {costs[0][0]} ({costs[0][1] / total:.0%})."
        )
    if len(named) == 1:
        return f"{costs[0][0]} carries {carried / total:.0%} of what {len(effects)} {noun} cost."
    return f"{', '.join(named)} carry {carried / total:.0%} of what {len(effects)} {noun} cost."


def _row(rank: str, item: Effect, width: int) -> str:
    interval = ""
    if item.low is not None and item.high is not None:
        interval = f"{item.low:+.4f} .. {item.high:+.4f}"
    return (
        f"{rank:>4} {item.name:<{width}} {item.effect_nats:>+12.4f} {interval:>21} "
        f"{item.kl_nats:>10.4g} {item.same_top1:>10.1%}"
    )
