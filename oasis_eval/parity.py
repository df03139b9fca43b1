"""Does real execution compute what fake execution says? The same scheme both ways, same tokens.

Layer by layer, on identical inputs, the answer is a matter of arithmetic: integer sums must be
exact, and outputs equal up to the rounding of floating point. End to end it is not: a value that
rounds up in one and down in the other moves everything after it. How much that does is measured
with fake execution alone, by summing every matrix product in another order: that is the floor, and
real may be off from fake by no more than 3 times the floor.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oasis_eval import corpus
from oasis_eval.diagnose import cut, default_window
from oasis_eval.divergence import Difference, Execution, Run, differences, largest
from oasis_eval.errors import CheckpointError, UnsupportedSchemeError
from oasis_eval.loading import Reference, load, prepare
from oasis_eval.pretrained import DTYPES
from oasis_eval.quant.integer_layers import (
    IntegerLayer,
    accumulate,
    integer_layers,
)
from oasis_eval.quant.packing import relative_codes
from oasis_eval.quant.support import unsupported
from oasis_eval.spec import Dtype, ModelCard, QuantScheme

FACTOR = 3.0
"""How many times the floor real execution may be off."""
OUTPUT_LIMIT = 1e-6
"""Largest difference of a layer's outputs in fp32, relative to its largest output."""
SHARES = (1 / 2, 1 / 3, 3 / 4)
"""Where matrix products are cut in two to sum them in another order."""
MORE_SHARES = tuple(step / 16 for step in (1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15))
"""Further cuts, tried before a scheme fails: where few values lie close to a rounding edge, some
orders of summation move none of them by chance."""
_LAYER_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to compare."""

    schemes: tuple[QuantScheme, ...]
    """Of real execution."""
    text: Path | None = None
    """None: the prose that ships with the suite."""
    window: int | None = None
    """Tokens of a window; None: 512, or as many as the model has positions."""
    num_windows: int = 4
    device: str = "cpu"
    dtype: Dtype | None = None
    """None: fp32 on the CPU, bf16 elsewhere."""


class LayerParity(NamedTuple):
    """One layer on identical inputs."""

    name: str
    is_exact: bool
    """Whether its integer sums are those of int64; True also where it has none."""
    output_error: float
    """Largest difference of an output, relative to the largest."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Real against fake execution of one scheme."""

    scheme: str
    dtype: Dtype
    text: str
    num_tokens: int
    """Scored."""
    kernel: str | None
    """None: weights are dequantized for floating-point products."""
    layers: tuple[LayerParity, ...]
    output_limit: float
    real: Difference
    floor: Difference
    """The largest over several orders of summation; of `mean_nll_nats` the largest in size."""
    num_orders: int
    fake_execution: Execution
    real_execution: Execution

    @property
    def failures(self) -> tuple[str, ...]:
        """Why real is not fake execution; empty: it is."""
        inexact = [layer.name for layer in self.layers if not layer.is_exact]
        off = [layer for layer in self.layers if not layer.output_error <= self.output_limit]
        found = [f"inexact sums in {', '.join(inexact[:3])}"] if inexact else []
        found += [f"output of {layer.name} off by {layer.output_error:.1e}" for layer in off[:3]]
        for what, value, limit in (
            ("KL", self.real.kl_nats, FACTOR * self.floor.kl_nats),
            ("loss of a token", self.real.nll_nats, FACTOR * self.floor.nll_nats),
            ("top-1 flips", self.real.flips, self.flips_limit),
        ):
            if not value <= limit:
                found.append(f"{what} {value:.2g} is above {FACTOR:g} x floor = {limit:.2g}")
        return tuple(found)

    @property
    def flips_limit(self) -> float:
        """Most flips allowed; a floor of none counts as one, which is chance."""
        return FACTOR * max(1, self.floor.flips)

    @property
    def passes(self) -> bool:
        """Whether real execution is fake execution up to rounding."""
        return not self.failures

    def as_json(self) -> dict[str, object]:
        """Return everything measured, in plain types."""
        content = dataclasses.asdict(self)
        content["layers"] = [layer._asdict() for layer in self.layers]
        return content | {"passes": self.passes, "failures": list(self.failures)}


def compare(card: ModelCard, plan: Plan) -> Iterator[Comparison]:
    """Run every scheme of the plan both ways on the same tokens.

    Args:
        card: A checkpoint in floating point.
        plan: Schemes, text and device.

    Yields:
        One comparison a scheme.

    Raises:
        UnsupportedSchemeError: A scheme, or its fake twin, cannot be run, or is not of real
            execution; nothing has run then.
        CheckpointError: The checkpoint is quantized already, or cannot be loaded.
        DataError: The text fills no window.
    """
    twins = [_twin(scheme) for scheme in plan.schemes]
    dtype: Dtype = plan.dtype or ("fp32" if plan.device == "cpu" else "bf16")
    reference = load(card, dtype=dtype, device=plan.device)
    if reference.applied is not None:
        raise CheckpointError(
            f"{card.name}: the checkpoint is quantized already, as "
            f"{reference.applied.scheme.name!r}; parity needs the one that it was made from"
        )
    text = corpus.builtin() if plan.text is None else corpus.load_text_file(plan.text)
    window = plan.window or default_window(reference)
    windows = cut(reference, text, window=window, num_windows=plan.num_windows)
    for scheme, twin in zip(plan.schemes, twins, strict=True):
        yield _compare(reference, scheme, twin, windows, text.name)


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return comparisons as text, a block of lines each."""
    lines: list[str] = []
    for found in comparisons:
        worst = max(found.layers, key=lambda layer: layer.output_error)
        num_exact = sum(layer.is_exact for layer in found.layers)
        how = found.kernel or "weights dequantized"
        fake, real = found.fake_execution, found.real_execution
        verdict = "passes" if found.passes else "FAILS"
        lines += [
            f"{found.scheme} {verdict}: {found.dtype}, {found.num_tokens} tokens of {found.text}, "
            f"{how}",
            f"  layers: {num_exact} of {len(found.layers)} with exact sums, outputs within "
            f"{worst.output_error:.1e} of the largest (limit {found.output_limit:.0e})",
            f"  {'real against fake':<28}{'real':>10}{'floor':>10}{'limit':>10}",
        ]
        for what, value, floor, limit in (
            ("KL, nats", found.real.kl_nats, found.floor.kl_nats, True),
            ("loss of a token, nats", found.real.nll_nats, found.floor.nll_nats, True),
            ("mean loss, nats", found.real.mean_nll_nats, found.floor.mean_nll_nats, False),
            ("largest logit difference", found.real.logit, found.floor.logit, False),
        ):
            bound = f"{FACTOR * floor:.2e}" if limit else "-"
            lines.append(f"  {what:<28}{value:>10.2e}{floor:>10.2e}{bound:>10}")
        flips, floor_flips = found.real.flips, found.floor.flips
        lines += [
            f"  {'top-1 flips':<28}{flips:>10}{floor_flips:>10}{found.flips_limit:>10.0f}",
            f"  tokens/s: {fake.tokens_per_second:.0f} fake, {real.tokens_per_second:.0f} real; "
            f"MiB: {fake.num_bytes / 2**20:.1f} fake, {real.num_bytes / 2**20:.1f} real",
            *(f"  {failure}" for failure in found.failures),
            "",
        ]
    return lines[:-1]


# --- one scheme -------------------------------------------------------------------------------


def _twin(scheme: QuantScheme) -> QuantScheme:
    """Return the scheme of fake execution that should compute the same."""
    if scheme.backend != "torch":
        raise UnsupportedSchemeError(
            f"scheme {scheme.name!r}: parity compares integer execution (schemes that end in "
            f"-real) with fake; this one runs on backend {scheme.backend!r}"
        )
    name = scheme.name.removesuffix("-real")
    twin = scheme.model_copy(update={"name": name, "backend": "fake", "execution": "fake"})
    reason = unsupported(scheme) or unsupported(twin)
    if reason is not None:
        raise UnsupportedSchemeError(reason)
    return twin


def _compare(
    reference: Reference,
    scheme: QuantScheme,
    twin: QuantScheme,
    windows: list[list[int]],
    text: str,
) -> Comparison:
    other = dataclasses.replace(reference, model=copy.deepcopy(reference.model))
    dtype = reference.dtype
    with (
        torch.no_grad(),
        prepare(reference, twin, dtype=dtype) as fake,
        prepare(other, scheme, dtype=dtype, last=True) as real,
    ):
        layers = _layers(fake.model, real.model, windows[0], reference.device)
        fake_run, real_run = (Run(item.model, reference.device) for item in (fake, real))
        orders = [Run(fake.model, reference.device, share=share) for share in SHARES]
        real_difference, *floors = differences([fake_run, real_run, *orders], windows)
        executions = fake_run.execution(), real_run.execution()
        kernels = [layer.integer.kernel for layer in integer_layers(real.model).values()]
        found = Comparison(
            scheme=scheme.name,
            dtype=dtype,
            text=text,
            num_tokens=sum(len(window) - 1 for window in windows),
            kernel=None if kernels[0] is None else kernels[0].name,
            layers=layers,
            output_limit=_output_limit(DTYPES[dtype]),
            real=real_difference,
            floor=largest(floors),
            num_orders=len(floors),
            fake_execution=executions[0],
            real_execution=executions[1],
        )
        if not found.passes:
            more = [Run(fake.model, reference.device, share=share) for share in MORE_SHARES]
            floors += differences([fake_run, *more], windows)
            found = dataclasses.replace(found, floor=largest(floors), num_orders=len(floors))
        return found


def _output_limit(dtype: torch.dtype) -> float:
    """Return how far outputs may be apart.

    In 16 bits fake execution rounds weights, activations and sums, which real execution does not.
    """
    return OUTPUT_LIMIT if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


# --- layers -----------------------------------------------------------------------------------


def _layers(
    fake: nn.Module, real: nn.Module, window: list[int], device: str
) -> tuple[LayerParity, ...]:
    """Run every layer both ways on some of the rows that enter it in fake execution."""
    rows: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        x_MK = x.detach().reshape(-1, x.shape[-1])
        step = max(1, len(x_MK) // _LAYER_ROWS)
        rows.setdefault(name, x_MK[::step][:_LAYER_ROWS].clone())

    names = integer_layers(real)
    handles = [
        fake.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: keep(name, args[0])
        )
        for name in names
    ]
    try:
        fake(input_ids=torch.tensor([window], device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, layer in names.items():
        if name in rows:
            twin: Any = fake.get_submodule(name)
            # Not through the module's own call: hooks have acted on these rows already.
            expected_MN = type(twin).forward(twin, rows[name])
            actual_MN = type(layer).forward(layer, rows[name])
            error = _relative(actual_MN - expected_MN, expected_MN)
            found.append(LayerParity(name, _sums_are_exact(layer, rows[name]), error))
    return tuple(found)


def _sums_are_exact(layer: IntegerLayer, x_MK: Tensor) -> bool:
    """Compare the kernel's sums with those of float64, which holds them all exactly."""
    state = layer.integer
    if state.quantizer is None:
        return True
    rows = state.quantizer(x_MK, state.name)
    weight_NK = relative_codes(layer.stored, state.layout).double()
    for stretch in layer.stretches():
        codes_MK = rows.codes_MK[:, stretch.inputs].double()
        if rows.offset_MG is not None:
            column = min(stretch.input_group, rows.offset_MG.shape[1] - 1)
            codes_MK -= rows.offset_MG[:, column : column + 1]
        sums_MN = codes_MK @ weight_NK[:, stretch.inputs].T
        if not torch.equal(accumulate(stretch, rows).double(), sums_MN):
            return False
    return True


def _relative(difference: Tensor, values: Tensor) -> float:
    largest = float(values.abs().max())
    return float(difference.abs().max()) / largest if largest else float(difference.abs().max())
