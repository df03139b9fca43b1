# ruff: noqa: S105 - a token here is a piece of text, not a secret
"""Settings of the decoder, and the configurations that carry them next to a backbone's own.

The settings are orthogonal: how sublayers are wired, how a row of attention and a row of depth
logits become weights, which gate follows attention, whether the null mass of attention lowers
depth logits. `OasisSettings` is their only definition; a named variant (`variants.py`) is a value
of it, and `LlamaOasisConfig` and `Qwen3OasisConfig` inherit its fields, so that they are written
to `config.json` like any other.

Sources: AttnRes, arXiv 2603.15031; OASIS, arXiv 2605.17887; the normalizers' are in
`normalizers.py`, the gates' in `self_attention.py`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from transformers import PreTrainedConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from oasis_eval.errors import SpecError
from oasis_eval.modeling.normalizers import NormalizerName

Wiring = Literal[
    "residual",
    "attnres_block",
    "attnres_full",
    "oasis_repo",
    "cumulative",
    "cumulative_full",
    "reset",
    "delta",
]
DepthNormalizerName = Literal["softmax", "softmax1", "sparsemax", "entmax15"]
AttentionGate = Literal["none", "per_head", "g1"]

KIMI_WIRINGS: frozenset[Wiring] = frozenset({"attnres_block", "attnres_full"})
BLOCK_WIRINGS: frozenset[Wiring] = frozenset({"attnres_block", "cumulative", "reset"})
FINAL_READ_WIRINGS: frozenset[Wiring] = KIMI_WIRINGS | {"reset"}
RECOMMENDED_BLOCKS = 8


@dataclass(kw_only=True)
class OasisSettings:
    """Everything that distinguishes one variant from another.

    "Sublayer" means attention or MLP, each counts; N blocks, L = 2 x decoder layers sublayers,
    S sources of a depth read. Fields that default to None follow from other fields and hold the
    value in use once they are part of a configuration.
    """

    wiring: Wiring = "attnres_block"
    """What a sublayer reads and what becomes of its output, see `history.py`."""
    num_blocks: int | None = None
    """Blocks of `attnres_block` (of sublayers, at most L), `cumulative` and `reset` (of decoder
    layers). None: 8, or as many as there are."""

    token_normalizer: NormalizerName = "softmax"
    """Attention logits to weights."""
    token_log_n: float = 0.0
    """softmax1, sink: logit of the null, or what a learned one starts from."""
    token_null: Literal["fixed", "learned"] = "fixed"
    """softmax1: whether the logit of the null is learned per head; that of sink always is."""
    clip_alpha: float = 12.0
    """clipped_softmax: lower stretch gamma = -alpha / training length."""
    clip_train_length: int | None = None
    """clipped_softmax: training length; stays fixed in decoding. None: the context length."""
    clip_zeta: float = 1.0
    """clipped_softmax: upper stretch."""
    attention_gate: AttentionGate = "none"
    """Factor on the attention context before the output projection."""

    depth_router: Literal["pseudo_query", "lowrank_qk"] | None = None
    """One learned query per read over normed keys, or low-rank query and key projections with
    the newest source as query. None: `lowrank_qk` for `oasis_repo`, else `pseudo_query`."""
    depth_recency: Literal["none", "last", "linear"] | None = None
    """Learned bias on depth logits: on the newest source, or growing with position r as
    r / (S - 1). None: `linear` for `oasis_repo`, `last` for `cumulative` and `cumulative_full`."""
    depth_recency_init: float = 0.0
    """Initial value of that bias."""
    depth_normalizer: DepthNormalizerName = "softmax"
    """Depth logits to weights."""
    depth_log_n: float = 0.0
    """softmax1: logit of the depth null, or what a learned one starts from."""
    depth_null: Literal["fixed", "learned"] = "fixed"
    """softmax1: whether the logit of the depth null is learned per router."""
    depth_null_value: Literal["zero", "partial", "embedding"] = "zero"
    """softmax1: what the null contributes: nothing, the newest source (the block's partial sum
    where there is one), or source 0 (the embedding)."""
    depth_output_scale: Literal["none", "num_sources"] = "none"
    """`num_sources` multiplies a read by S, which makes wrapping a plain checkpoint exact."""

    null_coupling: bool = False
    """Whether the null mass psi of a source's attention lowers its depth logit by
    beta (psi - mean psi)."""
    coupling_beta: Literal["learned", "fixed"] = "learned"
    """beta = min(softplus(raw), 10) with one raw per router, or one constant."""
    coupling_beta_raw_init: float = -5.0
    """Initial raw of a learned beta; -5 is beta 0.0067."""
    coupling_beta_value: float | None = None
    """The constant of a fixed beta."""
    coupling_block_psi: Literal["mean", "last", "max"] = "mean"
    """psi of a source that sums several attention sublayers."""
    coupling_mlp_psi: Literal["attention", "zero"] = "attention"
    """psi of a source without attention sublayer: the same layer's attention, or 0."""
    coupling_embedding_psi: Literal["zero", "neutral"] = "zero"
    """psi of the embedding: 0, or the mean of the other sources."""
    coupling_centred: bool = True
    """Whether the mean over the sources is subtracted from psi."""
    coupling_psi_gradient: Literal["flows", "detached"] = "flows"
    """Whether gradients reach attention through psi."""
    coupling_logit_clamp: float | None = 50.0
    """Coupled depth logits are cut to [-clamp, clamp]; None: not at all."""
    coupling_final_read: bool = True
    """Whether the read before the final norm is coupled, too."""


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(OasisSettings))


class OasisConfigMixin(OasisSettings):
    """`OasisSettings` on top of a transformers configuration; validates them as a whole."""

    __repr__ = PreTrainedConfig.__repr__  # all fields, not the settings alone

    if TYPE_CHECKING:
        hidden_size: int
        head_dim: int
        rms_norm_eps: float
        num_hidden_layers: int
        num_attention_heads: int
        max_position_embeddings: int

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the settings that follow from others, then check."""
        super().__post_init__(**kwargs)  # type: ignore[misc]  # the backbone's, next in line
        if self.depth_router is None:
            self.depth_router = "lowrank_qk" if self.wiring == "oasis_repo" else "pseudo_query"
        if self.depth_recency is None:
            self.depth_recency = _default_recency(self.wiring)
        if self.num_blocks is None and self.wiring in BLOCK_WIRINGS:
            self.num_blocks = min(RECOMMENDED_BLOCKS, self._most_blocks)
        if self.token_normalizer == "clipped_softmax" and self.clip_train_length is None:
            self.clip_train_length = self.max_position_embeddings
        self.check_settings()

    @property
    def num_sublayers(self) -> int:
        """L, attention and MLP sublayers together."""
        return 2 * self.num_hidden_layers

    @property
    def settings(self) -> OasisSettings:
        """The settings alone, as a copy."""
        return OasisSettings(**{name: getattr(self, name) for name in SETTING_NAMES})

    @property
    def _most_blocks(self) -> int:
        whole_layers = self.wiring in ("cumulative", "reset")
        return self.num_hidden_layers if whole_layers else self.num_sublayers

    def check_settings(self) -> None:
        """Refuse what is not a choice, does not fit together or would have no effect.

        Raises:
            SpecError: Names the field, what it holds and what is expected.
        """
        _check_choices(self)
        self._check_blocks()
        self._check_token_level()
        self._check_depth_level()
        self._check_coupling()
        self._check_unused()

    def _check_blocks(self) -> None:
        if self.wiring not in BLOCK_WIRINGS:
            if self.num_blocks is not None:
                raise SpecError(
                    f"num_blocks is {self.num_blocks}, but wiring {self.wiring!r} has no blocks; "
                    "leave it out"
                )
            return
        most = self._most_blocks
        if self.num_blocks is None or not 1 <= self.num_blocks <= most:
            raise SpecError(
                f"num_blocks is {self.num_blocks}; wiring {self.wiring!r} of "
                f"{self.num_hidden_layers} layers takes 1 to {most}"
            )

    def _check_token_level(self) -> None:
        kind = self.token_normalizer
        if self.token_log_n != 0.0 and kind not in ("softmax1", "sink"):
            raise SpecError(f"token_log_n is {self.token_log_n}, but {kind} has no null; use 0")
        if self.token_null == "learned" and kind != "softmax1":
            raise SpecError(f"token_null 'learned' goes with softmax1, found {kind}")
        if kind == "clipped_softmax" and (self.clip_train_length or 0) < 1:
            raise SpecError(
                f"clip_train_length is {self.clip_train_length}; expected the training length"
            )
        if self.clip_alpha < 0.0:
            raise SpecError(f"clip_alpha is {self.clip_alpha}; expected 0 or more")
        if self.clip_zeta < 1.0:
            raise SpecError(f"clip_zeta is {self.clip_zeta}; expected 1 or more")
        if self.attention_gate == "per_head" and self.hidden_size % self.num_attention_heads:
            raise SpecError(
                f"attention_gate 'per_head' slices hidden_size {self.hidden_size} into "
                f"{self.num_attention_heads} heads, which does not divide it"
            )

    def _check_depth_level(self) -> None:
        kind = self.depth_normalizer
        if self.wiring == "residual" and kind != "softmax":
            raise SpecError(
                f"depth_normalizer is {kind!r}, but wiring 'residual' reads no depth; use 'softmax'"
            )
        for name, off in (
            ("depth_log_n", 0.0),
            ("depth_null", "fixed"),
            ("depth_null_value", "zero"),
        ):
            if getattr(self, name) != off and kind != "softmax1":
                raise SpecError(
                    f"{name} is {getattr(self, name)!r}, but depth_normalizer {kind!r} has no "
                    f"null; use {off!r} or depth_normalizer 'softmax1'"
                )
        if self.depth_output_scale != "none" and self.wiring not in KIMI_WIRINGS:
            raise SpecError(
                f"depth_output_scale is {self.depth_output_scale!r}; only under "
                f"{' and '.join(sorted(KIMI_WIRINGS))} do the sources add up to the residual, "
                f"found wiring {self.wiring!r}"
            )

    def _check_coupling(self) -> None:
        if (self.coupling_beta == "fixed") != (self.coupling_beta_value is not None):
            raise SpecError(
                f"coupling_beta_value is {self.coupling_beta_value}, but coupling_beta is "
                f"{self.coupling_beta!r}; a value goes with 'fixed' and with nothing else"
            )
        if self.coupling_beta_value is not None and self.coupling_beta_value < 0.0:
            raise SpecError(
                f"coupling_beta_value is {self.coupling_beta_value}; expected 0 or more"
            )
        if self.coupling_logit_clamp is not None and self.coupling_logit_clamp <= 0.0:
            raise SpecError(
                f"coupling_logit_clamp is {self.coupling_logit_clamp}; expected a positive number "
                "or none"
            )
        if not self.null_coupling:
            return
        if self.wiring == "residual":
            raise SpecError("null_coupling needs depth routing; wiring 'residual' has none")
        if self.token_normalizer in ("clipped_softmax", "softpick"):
            raise SpecError(
                f"null_coupling needs the null mass of attention; token_normalizer "
                f"{self.token_normalizer!r} leaves out mass without defining a null"
            )

    def _check_unused(self) -> None:
        """Refuse what nothing reads: the name of an ablation would say what the model is not."""
        idle = {
            "coupling_": "null_coupling is off" if not self.null_coupling else "",
            "clip_": ""
            if self.token_normalizer == "clipped_softmax"
            else f"token_normalizer is {self.token_normalizer!r}",
            "depth_recency_init": "depth_recency is 'none'" if self.depth_recency == "none" else "",
        }
        for field in dataclasses.fields(OasisSettings):
            reason = "".join(text for name, text in idle.items() if field.name.startswith(name))
            value = getattr(self, field.name)
            if reason and value != field.default:
                raise SpecError(
                    f"{field.name} is {value!r}, which does nothing where {reason}; leave it out"
                )


class LlamaOasisConfig(OasisConfigMixin, LlamaConfig):
    """A Llama configuration with `OasisSettings`."""

    model_type = "llama_oasis"


class Qwen3OasisConfig(OasisConfigMixin, Qwen3Config):
    """A Qwen3 configuration with `OasisSettings`."""

    model_type = "qwen3_oasis"


OasisConfig = LlamaOasisConfig | Qwen3OasisConfig
CONFIG_BY_BACKBONE: MappingProxyType[str, type[OasisConfig]] = MappingProxyType(
    {"llama": LlamaOasisConfig, "qwen3": Qwen3OasisConfig}
)
"""Configuration class of each backbone, by the backbone's own `model_type`."""


def apply_settings(base_config: PreTrainedConfig, settings: OasisSettings) -> OasisConfig:
    """Put settings on top of a plain backbone's configuration.

    Args:
        base_config: Of a Llama or Qwen3 model, plain or already one of ours, whose settings are
            then replaced.
        settings: The variant.

    Raises:
        SpecError: Another backbone, or settings that do not fit it.
    """
    backbone = str(base_config.model_type).removesuffix("_oasis")
    if backbone not in CONFIG_BY_BACKBONE:
        raise SpecError(
            f"model_type is {base_config.model_type!r}; depth routing exists for "
            f"{', '.join(sorted(CONFIG_BY_BACKBONE))}"
        )
    own = {"model_type", "architectures", "transformers_version", *SETTING_NAMES}
    values = {name: value for name, value in base_config.to_dict().items() if name not in own}
    return CONFIG_BY_BACKBONE[backbone](**values, **dataclasses.asdict(settings))


def _default_recency(wiring: Wiring) -> Literal["none", "last", "linear"]:
    if wiring == "oasis_repo":
        return "linear"
    return "last" if wiring in ("cumulative", "cumulative_full") else "none"


def _check_choices(settings: OasisSettings) -> None:
    """Check every field against its annotation: a closed set of names, or a kind of value."""
    for name, hint in get_type_hints(OasisSettings).items():
        value = getattr(settings, name)
        options = (hint,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
        choices: list[Any] = []
        kinds: list[type] = []
        for option in options:
            if get_origin(option) is Literal:
                choices.extend(get_args(option))
            else:
                kinds.append(option)
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{name} is {value}; expected a finite number")
        if value in choices or type(value) in kinds or (float in kinds and type(value) is int):
            continue
        expected = [repr(choice) for choice in choices]
        expected += ["none" if kind is type(None) else kind.__name__ for kind in kinds]
        raise SpecError(f"{name} is {value!r}; expected {', '.join(expected)}")
