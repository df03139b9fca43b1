"""What a scheme does to a model's predictions, and which layers do it, on a few windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oasis_eval import progress
from oasis_eval.baseline import NO_REFERENCE
from oasis_eval.cells import versions
from oasis_eval.fidelity import WORST_TOKENS, Fidelity, compare
from oasis_eval.harness.protocols import Window
from oasis_eval.loading import Reference as Loaded
from oasis_eval.loading import prepare
from oasis_eval.prepared import PreparedModel
from oasis_eval.quant import schemes
from oasis_eval.quant.parts import Parts
from oasis_eval.quant.support import indivisible
from oasis_eval.references import Reference
from oasis_eval.sensitivity.measure import Subject, measure
from oasis_eval.sensitivity.ranking import summary
from oasis_eval.sensitivity.results import Sensitivity
from oasis_eval.spec import Dtype

LAYER_WINDOWS = 2
"""Windows on which layers are quantized one at a time."""
LAYER_TOKENS = 256
"""Most tokens of such a window."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The unquantized model on the windows of a first look."""

    reference: Reference
    windows: list[Window]
    short: list[Window]
    """The beginnings of the first of them."""

    @classmethod
    def of(
        cls, loaded: Loaded, windows: list[list[int]], num_special: int, dtype: Dtype
    ) -> Comparison:
        """Run the unquantized model where that is not stored.

        Args:
            loaded: The checkpoint; nothing is quantized in it now.
            windows: Token ids.
            num_special: Tokens at the start of each that are not of the text.
            dtype: Of the reference.
        """
        whole = [_scored(ids, num_special) for ids in windows]
        short = [_scored(ids[:LAYER_TOKENS], num_special) for ids in windows[:LAYER_WINDOWS]]
        with prepare(loaded, schemes.resolve(dtype), dtype=dtype) as prepared:
            reference = Reference(prepared, versions=versions())
            if reference.is_usable:
                for window in (*whole, *short):
                    reference.fill(window)
        return cls(reference, whole, short)

    def lines(self, prepared: PreparedModel) -> Iterator[str]:
        """Yield what changes under a scheme, and which layers carry it."""
        if not self.reference.is_usable:
            yield f"Fidelity: {NO_REFERENCE}"
            return
        yield from _fidelity(compare(prepared, self.windows, self.reference))
        reason = indivisible(prepared.scheme)
        yield f"Layers: {reason}" if reason else f"Layers: {self._layers(prepared)}"

    def _layers(self, prepared: PreparedModel) -> str:
        assert prepared.applied is not None
        with Parts(prepared.model, prepared.applied) as parts:
            found = Sensitivity(
                key="",
                model=prepared.card.label,
                scheme=prepared.scheme.name,
                by="layer",
                all_but_one=False,
                task="",
                protocol="",
                dtype=prepared.dtype,
                reference_dtype=self.reference.dtype,
                num_tokens=(),
                reference_nll_nats=(),
                part_names=tuple(parts.groups("layer")),
            )
            subject = Subject(prepared, parts, self.short, self.reference)
            steps = progress.bar(
                measure(subject, found),
                what="layer by layer",
                quiet=None,
                total=1 + len(found.part_names),
                leave=False,
            )
            *_, whole = steps  # the last one has them all
        return summary(whole)


def _scored(ids: list[int], num_special: int) -> Window:
    first = max(1, num_special)
    return Window(ids, ids[first:], first - 1)


def _fidelity(found: Fidelity) -> Iterator[str]:
    metrics, delta = found.metrics(), found.delta()
    yield (
        f"Fidelity: KL {metrics['kl_nats']:.4g} nats a token to the unquantized model in "
        f"{found.dtype}, same top-1 for {metrics['same_top1']:.1%}"
    )
    reach = "" if delta is None else f" (95 %: {delta.low:+.4g} to {delta.high:+.4g})"
    yield (
        f"  loss {metrics['delta_nll_nats']:+.4g} nats a token{reach}; the worst "
        f"{WORST_TOKENS:.0%} of tokens carry {metrics['increase_tail_share']:.1%} of all increase"
    )
    yield (
        f"  KL of half the tokens below {metrics['kl_p50_nats']:.4g}, of 99 % below "
        f"{metrics['kl_p99_nats']:.4g}, largest {metrics['kl_max_nats']:.4g}"
    )
