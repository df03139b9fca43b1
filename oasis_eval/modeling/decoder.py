"""One decoder for every wiring, normalizer and gate, on the parts of any backbone.

A backbone lends its attention, MLP, norm and rotary classes (`llama.py`, `qwen3.py`);
`decoder_layer.py` has the two sublayers, `history.py` decides what they read and where their
output goes.

Parameters have the backbone's own names, so that a plain checkpoint lacks only these:

    model.layers.{i}.attn_res_sa.*, model.layers.{i}.attn_res_mlp.*, model.final_res.*
        query [D], key_norm.weight [D]                pseudo-query router
        q_proj.weight, k_proj.weight [D/4, D]         low-rank router
        recency_bias [1], oasis_beta_raw [1], null_logit [1]    where the settings ask for them
    model.layers.{i}.self_attn.null_logit [H]         learned token null, and the logit of sink
    model.layers.{i}.self_attn.gate.heads.{h}.weight, .bias     per-head gate
    model.layers.{i}.self_attn.gate.proj.weight       elementwise gate

Shapes: B batch, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from oasis_eval.errors import SpecError
from oasis_eval.modeling.config import FINAL_READ_WIRINGS, OasisConfig
from oasis_eval.modeling.decoder_layer import (
    Backbone,
    Byproducts,
    OasisDecoderLayer,
    ReadWeights,
    make_port,
    weights_of,
)
from oasis_eval.modeling.history import DepthHistory
from oasis_eval.modeling.masks import Masks, visible_masks
from oasis_eval.modeling.outputs import OasisCausalLMOutput, OasisModelOutput
from oasis_eval.modeling.routing import DepthQueryProjection, DepthRouter, DepthTaps
from oasis_eval.modeling.self_attention import (
    PER_HEAD_GATE_START,
    HeadGate,
    OasisAttentionMixin,
    Wanted,
)

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


class OasisPreTrainedModel(PreTrainedModel):
    """What the decoder with and without head have in common."""

    config: OasisConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["OasisDecoderLayer"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set initial values, through helpers that leave loaded parameters alone."""
        super()._init_weights(module)
        # By the type of the module that owns the parameter: a module without parameters of its
        # own counts as initialized and is never passed.
        if isinstance(module, DepthRouter):
            # Equal logits: the first step of training starts from a uniform mix.
            if module.router == "pseudo_query":
                init.zeros_(module.query)
            if module.recency_bias is not None:
                init.constant_(module.recency_bias, self.config.depth_recency_init)
            if module.oasis_beta_raw is not None:
                init.constant_(module.oasis_beta_raw, self.config.coupling_beta_raw_init)
            if module.null_logit is not None:
                init.constant_(module.null_logit, self.config.depth_log_n)
        elif isinstance(module, DepthQueryProjection):
            init.zeros_(module.weight)
        elif isinstance(module, OasisAttentionMixin) and module.null_logit is not None:
            init.constant_(module.null_logit, self.config.token_log_n)
        elif isinstance(module, HeadGate):
            init.constant_(module.bias, math.log(PER_HEAD_GATE_START / (1.0 - PER_HEAD_GATE_START)))


class OasisModel(OasisPreTrainedModel):
    """The decoder without head."""

    backbone: ClassVar[Backbone]
    """Set by the family."""

    def __init__(self, config: OasisConfig) -> None:
        config.check_settings()  # again: a configuration can be changed after it was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            OasisDecoderLayer(config, index, self.backbone)
            for index in range(config.num_hidden_layers)
        )
        self.norm = self.backbone.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = self.backbone.rotary(config=config)
        self.taps = DepthTaps()
        has_final_read = config.wiring in FINAL_READ_WIRINGS
        self.final_res = make_port(config, reads=has_final_read, is_final=True)
        self.history = DepthHistory.of(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def depth_read_names(self) -> tuple[str, ...]:
        """Module name of each depth read, relative to this model, in order of execution."""
        names = [
            f"layers.{index}.{name}"
            for index in range(self.config.num_hidden_layers)
            for name in ("attn_res_sa", "attn_res_mlp")
            if isinstance(getattr(self.layers[index], name), DepthRouter)
        ]
        if self.config.wiring == "delta":
            names = names[1:]  # nothing to read yet
        return (*names, "final_res") if isinstance(self.final_res, DepthRouter) else tuple(names)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # noqa: PLR0913, PLR0917 - transformers' signature
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool = False,
        output_null_mass: bool = False,
        **kwargs: Any,
    ) -> OasisModelOutput:
        """Run the decoder; see `OasisModelOutput` for what the `output_*` switches add."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        _check_implementation(self.config)
        wanted = Wanted(
            attentions=_either(output_attentions, self.config.output_attentions),
            null_mass=output_null_mass,
            depth_weights=output_depth_weights,
            hidden_states=_either(output_hidden_states, self.config.output_hidden_states),
        )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            length = inputs_embeds.shape[1]
            position_ids = (torch.arange(length, device=inputs_embeds.device) + start).unsqueeze(0)
        masks = visible_masks(
            self.config,
            inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        layout, tensors = self.history.start(inputs_embeds, self.taps).flatten()
        seen: list[Byproducts] = []
        for index, layer in enumerate(self.layers):
            layout, *rest = layer(
                *tensors,
                layout=layout,
                position_embeddings=position_embeddings,
                attention_mask=masks[self._layer_type(index)],
                cache=cache,
                wanted=wanted,
            )
            seen.append(Byproducts(*rest[: len(Byproducts._fields)]))
            tensors = tuple(rest[len(Byproducts._fields) :])
        hidden_BTD, final_read = self.history.finish(
            self.history.unflatten(layout, tensors), self.final_res
        )
        hidden_BTD = self.norm(hidden_BTD)
        return _collect(hidden_BTD, cache, seen, weights_of(final_read, wanted), wanted)

    def _layer_type(self, index: int) -> str:
        layer_types = getattr(self.config, "layer_types", None)
        return layer_types[index] if layer_types else "full_attention"


class OasisForCausalLM(OasisPreTrainedModel, GenerationMixin):
    """The decoder with its language-model head."""

    model_class: ClassVar[type[OasisModel]]
    """Set by the family."""
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: OasisConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(  # noqa: PLR0913, PLR0917 - transformers' signature
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool = False,
        output_null_mass: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> OasisCausalLMOutput:
        """Run the language model; see `OasisModelOutput` for what the `output_*` switches add.

        Args:
            input_ids: [B, T].
            attention_mask: [B, S], 0 for padding.
            position_ids: [B, T].
            cache: Keys and values so far.
            inputs_embeds: [B, T, D] instead of `input_ids`.
            labels: [B, T], -100 where nothing is to be predicted; adds the loss.
            use_cache: Whether to fill and return a cache.
            output_attentions: Whether to return attention weights.
            output_hidden_states: Whether to return what each layer reads.
            output_depth_weights: Whether to return depth weights.
            output_null_mass: Whether to return the null mass of attention.
            logits_to_keep: Number of last positions, or which positions, to have logits for;
                0: all.
            kwargs: Passed on to the loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_depth_weights=output_depth_weights,
            output_null_mass=output_null_mass,
            return_dict=True,
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits_BTV = self.lm_head(kept)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return OasisCausalLMOutput(
            loss=loss,
            logits=logits_BTV,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            null_mass=outputs.null_mass,
            depth_weights=outputs.depth_weights,
            depth_null_mass=outputs.depth_null_mass,
        )

    @staticmethod
    def create_masks_for_generate(
        config: OasisConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Masks:
        """Return the masks of one step of `generate` with a static cache."""
        return visible_masks(
            config,
            inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )


def _check_implementation(config: OasisConfig) -> None:
    if config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        raise SpecError(
            f"attn_implementation is {config._attn_implementation!r}; this model takes "
            f"{' or '.join(ATTENTION_IMPLEMENTATIONS)}, and what normalizes attention is its "
            f"setting token_normalizer ({config.token_normalizer!r})"
        )


def _either(asked: bool | None, default: bool | None) -> bool:
    return bool(default) if asked is None else bool(asked)


def _collect(
    hidden_BTD: Tensor,
    cache: Cache | None,
    seen: list[Byproducts],
    final: ReadWeights | None,
    wanted: Wanted,
) -> OasisModelOutput:
    reads = [read for layer in seen for read in layer.reads]
    reads += [] if final is None else [final]
    hidden_states = (*(layer.hidden for layer in seen), hidden_BTD)
    return OasisModelOutput(
        last_hidden_state=hidden_BTD,
        cache=cache,
        hidden_states=hidden_states if wanted.hidden_states else None,
        attentions=tuple(layer.probs for layer in seen) if wanted.attentions else None,
        null_mass=tuple(layer.null_mass for layer in seen) if wanted.null_mass else None,
        depth_weights=tuple(read.weights for read in reads) if wanted.depth_weights else None,
        depth_null_mass=tuple(read.null_mass for read in reads) if wanted.depth_weights else None,
    )
