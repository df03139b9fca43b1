"""What a run would need, without text and without training.

Shapes, parameters and memory are counted on tensors without content, in the real model code. A
small model is timed for a few steps on random tokens; the time of a large one is estimated from
the speed of matrix products on this machine. Each line says which it is.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oasis_eval import loading, pretrained, registry
from oasis_eval.errors import SpecError
from oasis_eval.modeling.config import CONFIG_BY_BACKBONE, OasisConfig
from oasis_eval.modeling.formats.folder import causal_class
from oasis_eval.modeling.routing import DepthRouter
from oasis_eval.modeling.variants import build_config, variant_name
from oasis_eval.training import schedule
from oasis_eval.training.memory import peak_bytes
from oasis_eval.training.models import decaying, freeze_, plain_config, settings_of
from oasis_eval.training.run import Plan, checkpoint_activations, load_tokenizer

_TIMED_FLOPS = 4e11
"""Largest pass that is timed, some 10 seconds of one core."""
_REPEATS = 3
_MATRIX = 1024
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes and counts of one process."""

    num_parameters: int
    num_trained: int
    num_router_parameters: int
    num_decaying: int
    """Tensors under weight decay."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """AdamW's two means."""
    pass_bytes: int
    """Peak of one forward and backward pass of a micro-batch above these."""
    flops: float
    """Of that pass, matrix products alone."""

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.pass_bytes


def dry_run(plan: Plan) -> list[str]:
    """Check a plan and return what it would take, a line at a time.

    Raises:
        SpecError: Settings do not fit.
        CheckpointError: The checkpoint to start from cannot be loaded.
    """
    recipe = plan.recipe
    config = _config(plan)
    needs = count(config, plan)
    shape = f"{recipe.micro_batch_size} x {recipe.context} tokens"
    blocks = "" if config.num_blocks is None else f", {config.num_blocks} blocks"
    tokens = plan.steps * recipe.batch_size * recipe.context
    wiring = config.wiring
    lines = [
        f"{recipe.name}: {config.model_type}, {variant_name(plan.variant, wiring, plan.settings)}, "
        f"{wiring}{blocks}",
        f"Parameters (counted): {needs.num_parameters:,}, {needs.num_router_parameters:,} of them "
        f"in depth routers; {needs.num_trained:,} learn, {needs.num_decaying} tensors decay",
        f"Run: {plan.steps:,} steps of {recipe.batch_size} x {recipe.context} tokens, {tokens:,} "
        f"tokens; {recipe.batch_size // recipe.micro_batch_size} passes of {shape} a step on one "
        "device",
        f"Schedule: {schedule.describe(recipe, steps=plan.steps)}",
        f"Memory (counted, one device, {plan.compute_dtype}): {_gib(needs.total_bytes)} = weights "
        f"{_gib(needs.weight_bytes)} + gradients {_gib(needs.gradient_bytes)} + AdamW "
        f"{_gib(needs.optimizer_bytes)} + one pass {_gib(needs.pass_bytes)}; the allocator's waste "
        "is not in it",
    ]
    return [*lines, _time_line(plan, config, needs)]


def count(config: Any, plan: Plan) -> Needs:
    """Count what one process of a plan needs, on tensors without content."""
    recipe = plan.recipe
    dtype = pretrained.DTYPES[plan.compute_dtype]
    with FakeTensorMode():
        model = _model(config, plan)
        ids_BT = torch.zeros(recipe.micro_batch_size, recipe.context, dtype=torch.long)
        pass_bytes = peak_bytes(model, ids_BT, dtype=dtype)
    parameters = list(model.parameters())
    num_trained = sum(item.numel() for item in parameters if item.requires_grad)
    routers = [module for module in model.modules() if isinstance(module, DepthRouter)]
    return Needs(
        num_parameters=sum(item.numel() for item in parameters),
        num_trained=num_trained,
        num_router_parameters=sum(p.numel() for router in routers for p in router.parameters()),
        num_decaying=len(decaying(model, recipe.decay)),
        weight_bytes=sum(item.numel() for item in parameters) * _FP32_BYTES,
        gradient_bytes=num_trained * _FP32_BYTES,
        optimizer_bytes=2 * num_trained * _FP32_BYTES,
        pass_bytes=pass_bytes,
        flops=_flops(config, model, plan),
    )


def _config(plan: Plan) -> Any:
    recipe = plan.recipe
    if plan.start is None:
        needs_tokenizer = recipe.backbone.vocab_size is None
        tokenizer = load_tokenizer(plan) if needs_tokenizer else None
        base: Any = plain_config(recipe.backbone, context=recipe.context, tokenizer=tokenizer)
        return build_config(base, settings_of(recipe, plan.variant, plan.wiring, plan.settings))
    loaded: Any = loading.load(registry.resolve(plan.start), dtype="fp32").model
    if loaded.config.model_type in CONFIG_BY_BACKBONE:
        return build_config(
            loaded.config, settings_of(recipe, plan.variant, plan.wiring, plan.settings)
        )
    if not isinstance(loaded.config, OasisConfig):
        raise SpecError(f"{plan.start}: {loaded.config.model_type} cannot be trained as a variant")
    return loaded.config


def _model(config: Any, plan: Plan) -> Any:
    model: Any = causal_class(config)(config)
    freeze_(model, plan.train, variant=plan.variant)
    if plan.recipe.gradient_checkpointing:
        checkpoint_activations(model)
    return model.train()


def _flops(config: Any, model: Any, plan: Plan) -> float:
    """6 a weight and token, and 6 T^2 a channel and head of causal attention."""
    recipe = plan.recipe
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    num_tokens = recipe.micro_batch_size * recipe.context
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    flops: float = 6.0 * num_tokens * (weights + recipe.context * width)
    return flops * 4.0 / 3.0 if recipe.gradient_checkpointing else flops


def _time_line(plan: Plan, config: Any, needs: Needs) -> str:
    passes = plan.recipe.batch_size // plan.recipe.micro_batch_size
    tokens = plan.recipe.micro_batch_size * plan.recipe.context
    threads = f"{torch.get_num_threads()} threads" if plan.device == "cpu" else plan.device
    if needs.flops <= _TIMED_FLOPS:
        seconds = time_pass(config, plan)
        how = f"measured, {threads}, random tokens, median of {_REPEATS}"
    else:
        speed = _matrix_flops(plan)
        seconds = needs.flops / speed
        how = f"estimated at {speed / 1e9:,.0f} GFLOP/s, a matrix product's on {threads}"
    step = seconds * passes
    hours = step * plan.steps / 3600
    return (
        f"Time ({how}): {seconds:.3g} s a pass, {step:.3g} s a step, {tokens / seconds:,.0f} "
        f"tokens/s, {hours:.3g} hours in all on one device"
    )


def time_pass(config: Any, plan: Plan) -> float:
    """Return the median seconds of a pass with its update, on random tokens."""
    recipe = plan.recipe
    device = torch.device(plan.device)
    dtype = pretrained.DTYPES[plan.compute_dtype]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = _model(config, plan).to(device)
        ids_BT = torch.randint(config.vocab_size, (recipe.micro_batch_size, recipe.context))
    ids_BT = ids_BT.to(device)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=recipe.learning_rate, fused=True)
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, recipe.clip_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # an accelerator has finished by then
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _matrix_flops(plan: Plan) -> float:
    """Return the speed of a square matrix product in the compute dtype, operations a second."""
    dtype, device = pretrained.DTYPES[plan.compute_dtype], torch.device(plan.device)
    left = torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device)
    times = []
    for _ in range(_REPEATS + 2):
        start = time.perf_counter()
        (left @ left)[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2.0 * _MATRIX**3 / statistics.median(times[2:])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
