"""The publishers' models, written a second time: literal, in float64, from public tensor names.

Nothing of the package is used. One unpadded sequence of T tokens; every hidden state is [T, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Config = dict[str, object]
Tensors = dict[str, Tensor]


class Published:
    """A Llama or Qwen3 in pieces; subclasses wire them."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        self.config = config
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.heads = int(config["num_attention_heads"])
        self.groups = int(config["num_key_value_heads"])
        self.layers = int(config["num_hidden_layers"])
        self.softmax: Callable[[Tensor], Tensor] = lambda row: row.softmax(dim=-1)

    def logits(self, ids: Tensor) -> Tensor:
        """[T, V] of ids [T]."""
        embedding = self.tensors[self.name("model.embed_tokens.weight")]
        hidden = self.norm(self.run(embedding[ids]), "model.norm.weight")
        head = self.tensors.get("lm_head.weight", embedding)
        return hidden @ head.T

    def run(self, embedding: Tensor) -> Tensor:
        raise NotImplementedError

    def name(self, name: str) -> str:
        """Stored name of a tensor of the backbone."""
        return name

    def norm(self, hidden: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = torch.sqrt(hidden.pow(2).mean(-1, keepdim=True) + (eps or self.eps))
        return self.tensors[self.name(name)] * hidden / scale

    def attention(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the attention sublayer, pre-norm included, and the heads' mean null mass."""
        prefix = f"model.layers.{layer}."
        hidden = self.norm(hidden, f"{prefix}input_layernorm.weight")
        length = len(hidden)
        parts = {}
        for part, count in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
            weight = self.tensors[self.name(f"{prefix}self_attn.{part}_proj.weight")]
            heads = (hidden @ weight.T).view(length, count, -1)
            norm = f"{prefix}self_attn.{part}_norm.weight"
            if self.name(norm) in self.tensors:
                heads = self.norm(heads, norm, self.head_eps)
            parts[part] = heads if part == "v" else self.rotate(heads)
        out, null = [], []
        for head in range(self.heads):
            group = head // (self.heads // self.groups)
            scores = parts["q"][:, head] @ parts["k"][:, group].T
            scores = scores / math.sqrt(scores.new_tensor(parts["q"].shape[-1]))
            future = torch.ones(length, length).triu(1).bool()
            probs = self.softmax(scores.masked_fill(future, -math.inf))
            null.append(1.0 - probs.sum(-1))
            out.append(probs @ parts["v"][:, group])
        weight = self.tensors[self.name(f"{prefix}self_attn.o_proj.weight")]
        return torch.cat(out, dim=-1) @ weight.T, torch.stack(null).mean(0)

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """Output of the MLP sublayer, pre-norm included."""
        prefix = f"model.layers.{layer}."
        hidden = self.norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate, up, down = (
            self.tensors[self.name(f"{prefix}mlp.{part}_proj.weight")]
            for part in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T

    @property
    def head_eps(self) -> float:
        return self.eps

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotary embedding of [T, heads, C], the halves paired."""
        half = heads.shape[-1] // 2
        frequency = float(self.config["rope_theta"]) ** (-torch.arange(half).double() / half)
        angle = torch.arange(len(heads)).double()[:, None, None] * frequency
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat(
            [
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ],
            dim=-1,
        )

    def read(self, sources: list[Tensor], proj: str, norm: str, bias: str | None = None) -> Tensor:
        """Softmax over sources by one query; `bias` is added to the last logit."""
        query = self.tensors[proj][0]
        scores = [self.norm(source, norm) @ query for source in sources]
        if bias is not None:
            scores[-1] = scores[-1] + self.tensors[bias]
        weights = torch.stack(scores, dim=-1).softmax(dim=-1)
        total = torch.zeros_like(sources[0])
        for index, source in enumerate(sources):
            total = total + weights[:, index, None] * source
        return total


class OpenAttnRes(Published):
    """open-attention-residuals: `attnres_mode` block, full and delta."""

    def run(self, embedding: Tensor) -> Tensor:
        has_final = "model.final_res_proj.weight" in self.tensors
        has_bias = "model.layers.0.attn_res_bias" in self.tensors
        mode = self.config["attnres_mode"]
        blocks = int(self.config.get("attnres_num_blocks", 8))
        size = max(1, math.ceil(self.layers / blocks))
        if mode == "block" and has_bias:
            wire = self.reset if has_final else self.cumulative
            return wire(embedding, size)
        if mode == "block":
            return self.later_block(embedding, size)
        if mode == "full":
            return self.later_full(embedding) if has_final else self.full(embedding)
        return self.delta(embedding)

    def pick(self, sources: list[Tensor], place: str) -> Tensor:
        bias = f"model.{place}_res_bias"
        return self.read(
            sources,
            f"model.{place}_res_proj.weight",
            f"model.{place}_res_norm.weight",
            bias if bias in self.tensors else None,
        )

    def cumulative(self, embedding: Tensor, size: int) -> Tensor:
        history, stream = [embedding], embedding
        for layer in range(self.layers):
            hidden = self.pick([*history, stream], f"layers.{layer}.attn")
            stream = stream + self.attention(layer, hidden)[0]
            hidden = self.pick([*history, stream], f"layers.{layer}.mlp")
            stream = stream + self.mlp(layer, hidden)
            if (layer + 1) % size == 0:
                history = [*history, stream]
        return stream

    def reset(self, embedding: Tensor, size: int) -> Tensor:
        history, partial = [embedding], embedding
        for layer in range(self.layers):
            hidden = self.pick([*history, partial], f"layers.{layer}.attn")
            if layer > 0 and layer % size == 0:
                history = [*history, partial]
                partial = torch.zeros_like(partial)
            partial = partial + self.attention(layer, hidden)[0]
            hidden = self.pick([*history, partial], f"layers.{layer}.mlp")
            partial = partial + self.mlp(layer, hidden)
        return self.pick([*history, partial], "final")

    def full(self, embedding: Tensor) -> Tensor:
        history, stream = [embedding], embedding
        for layer in range(self.layers):
            hidden = self.pick([*history, stream], f"layers.{layer}.attn")
            stream = stream + self.attention(layer, hidden)[0]
            history = [*history, stream]
            hidden = self.pick([*history, stream], f"layers.{layer}.mlp")
            stream = stream + self.mlp(layer, hidden)
            history = [*history, stream]
        return stream

    def delta(self, embedding: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        stream = embedding
        for layer in range(self.layers):
            hidden = stream
            if outputs:
                hidden = stream + self.pick(outputs, f"layers.{layer}.attn")
            outputs.append(self.attention(layer, hidden)[0])
            stream = stream + outputs[-1]
            hidden = stream + self.pick(outputs, f"layers.{layer}.mlp")
            outputs.append(self.mlp(layer, hidden))
            stream = stream + outputs[-1]
        return stream

    def later_block(self, embedding: Tensor, size: int) -> Tensor:
        history: list[Tensor] = []
        partial = embedding
        for layer in range(self.layers):
            hidden = self.pick([*history, partial], f"layers.{layer}.attn")
            if layer % size == 0:
                history = [*history, partial]
                partial = torch.zeros_like(partial)
            partial = partial + self.attention(layer, hidden)[0]
            hidden = self.pick([*history, partial], f"layers.{layer}.mlp")
            partial = partial + self.mlp(layer, hidden)
        return self.pick([*history, partial], "final")

    def later_full(self, embedding: Tensor) -> Tensor:
        history: list[Tensor] = []
        newest = embedding
        for layer in range(self.layers):
            hidden = self.pick([*history, newest], f"layers.{layer}.attn")
            history, newest = [*history, newest], self.attention(layer, hidden)[0]
            hidden = self.pick([*history, newest], f"layers.{layer}.mlp")
            history, newest = [*history, newest], self.mlp(layer, hidden)
        return self.pick([*history, newest], "final")


class OasisRepo(Published):
    """The OASIS authors' code; `null` is 1 for softmax1 and 0 for softmax at that level."""

    def __init__(
        self, config: Config, tensors: Tensors, *, token_null: float, depth_null: float
    ) -> None:
        super().__init__(config, tensors)
        self.softmax = lambda row: _softmax_with_null(row, token_null)
        self.depth_softmax = lambda row: _softmax_with_null(row, depth_null)

    def run(self, embedding: Tensor) -> Tensor:
        residual = embedding
        history = [embedding]
        psis = [torch.zeros(len(embedding), dtype=torch.float64)]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            output, psi = self.attention(layer, residual)
            attended = residual + output
            residual = self.route([*history, attended], [*psis, psi], f"{prefix}attn_res_sa")
            output = self.mlp(layer, residual)
            residual = self.route(
                [*history, attended, residual + output], [*psis, psi, psi], f"{prefix}attn_res_mlp"
            )
            history.append(residual)
            psis.append(psi)
        return residual

    def route(self, sources: list[Tensor], psis: list[Tensor], name: str) -> Tensor:
        query = sources[-1] @ self.tensors[f"{name}.q_proj.weight"].T
        keys = self.tensors[f"{name}.k_proj.weight"]
        beta = torch.nn.functional.softplus(self.tensors[f"{name}.oasis_beta_raw"]).clamp(max=10.0)
        mean = torch.stack(psis).mean(0)
        scores = []
        for index, source in enumerate(sources):
            score = (query * (source @ keys.T)).sum(-1) / math.sqrt(len(keys))
            place = index / max(len(sources) - 1, 1)
            score = score + self.tensors[f"{name}.recency_bias"] * place
            scores.append(score - beta * (psis[index] - mean))
        weights = self.depth_softmax(torch.stack(scores, dim=-1).clamp(-50.0, 50.0))
        total = torch.zeros_like(sources[0])
        for index, source in enumerate(sources):
            total = total + weights[:, index, None] * source
        return total


class Fla(Published):
    """The `transformer` model of flash-linear-attention."""

    NAMES = (
        ("model.embed_tokens", "model.embeddings"),
        (".self_attn.", ".attn."),
        (".input_layernorm.", ".attn_norm."),
        (".post_attention_layernorm.", ".mlp_norm."),
    )

    def name(self, name: str) -> str:
        for ours, theirs in self.NAMES:
            name = name.replace(ours, theirs)
        return name

    @property
    def head_eps(self) -> float:
        return 1e-5

    def run(self, embedding: Tensor) -> Tensor:
        size = self.config.get("attnres_block_size")
        total = embedding
        if size is None:
            for layer in range(self.layers):
                total = total + self.attention(layer, total)[0]
                total = total + self.mlp(layer, total)
            return total
        states: list[Tensor] = []
        for index in range(2 * self.layers):
            layer, is_mlp = divmod(index, 2)
            place = f"model.layers.{layer}.{'mlp' if is_mlp else 'attn'}_res"
            hidden = self.read([*states, total], f"{place}_proj.weight", f"{place}_norm.weight")
            output = self.mlp(layer, hidden) if is_mlp else self.attention(layer, hidden)[0]
            if index % int(size) == 0:
                states, total = [*states, total], torch.zeros_like(total)
            total = total + output
        return self.read([*states, total], "model.res_proj.weight", "model.res_norm.weight")


class Kimi(Published):
    """A Qwen3 under the names of Kimi K3; blocks of whole layers."""

    def run(self, embedding: Tensor) -> Tensor:
        size = int(self.config["attn_res_block_size"])
        states: list[Tensor] = []
        prefix_sum = embedding
        for layer in range(self.layers):
            place = f"model.layers.{layer}."
            hidden = prefix_sum
            if states:
                hidden = self.pick([*states, prefix_sum], f"{place}self_attention_res")
            output = self.attention(layer, hidden)[0]
            if layer % size == 0:
                states, prefix_sum = [*states, prefix_sum], output
            else:
                prefix_sum = prefix_sum + output
            hidden = self.pick([*states, prefix_sum], f"{place}mlp_res")
            prefix_sum = prefix_sum + self.mlp(layer, hidden)
        return self.pick([*states, prefix_sum], "model.output_attn_res")

    def pick(self, sources: list[Tensor], place: str) -> Tensor:
        return self.read(sources, f"{place}_proj.weight", f"{place}_norm.weight")


def _softmax_with_null(row: Tensor, null: float) -> Tensor:
    exponentials = row.exp()
    return exponentials / (null + exponentials.sum(-1, keepdim=True))
