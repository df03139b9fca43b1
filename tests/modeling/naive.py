"""A second implementation of the decoder, literal and slow: loops over tokens, heads and sources.

Written from the equations in float64, for one unpadded sequence. It shares nothing with the
package but the configuration and the parameters' names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NaiveModel:
    """Logits of one sequence, token by token."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.config = model.config
        self.parameters = {
            name: value.detach().double() for name, value in model.state_dict().items()
        }

    def logits(self, ids: Tensor) -> Tensor:
        """[T, V] for ids [T]."""
        config = self.config
        embedding = [self.parameters["model.embed_tokens.weight"][token] for token in ids.tolist()]
        zero = [torch.zeros((), dtype=torch.float64) for _ in embedding]
        run = {
            "residual": self._residual,
            "attnres_block": self._blocks,
            "attnres_full": self._blocks,
            "cumulative": self._cumulative,
            "cumulative_full": self._cumulative,
            "reset": self._reset,
            "delta": self._delta,
            "oasis_repo": self._repo,
        }[config.wiring]
        hidden = run(embedding, zero)
        final = [self._rms_norm(row, "model.norm.weight") for row in hidden]
        return torch.stack([self.parameters["lm_head.weight"] @ row for row in final])

    # wirings ----------------------------------------------------------------------------------

    def _residual(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        stream = embedding
        for layer in range(self.config.num_hidden_layers):
            for kind in ("sa", "mlp"):
                output, _ = self._sublayer(layer, kind, stream)
                stream = _add(stream, output)
        return stream

    def _blocks(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        count = 2 * self.config.num_hidden_layers
        number = count if self.config.wiring == "attnres_full" else self.config.num_blocks
        size = count // number
        sizes = [size] * (number - 1) + [count - size * (number - 1)]
        finished = [(embedding, zero)]
        layer_psi = zero
        index = 0
        for length in sizes:
            partial: list[Tensor] | None = None
            attention_psis: list[list[Tensor]] = []
            last_psi = zero
            for _ in range(length):
                layer, kind = index // 2, ("sa", "mlp")[index % 2]
                sources = list(finished)
                if partial is not None:
                    sources.append((partial, self._block_psi(attention_psis, last_psi)))
                hidden = self._read(f"model.layers.{layer}.attn_res_{kind}", sources)
                output, null = self._sublayer(layer, kind, hidden)
                if kind == "sa":
                    layer_psi = null
                    attention_psis.append(null)
                else:
                    last_psi = self._mlp_psi(layer_psi)
                partial = output if partial is None else _add(partial, output)
                index += 1
            finished.append((partial, self._block_psi(attention_psis, last_psi)))
        return self._read("model.final_res", finished, is_final=True)

    def _cumulative(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        config = self.config
        every_sublayer = config.wiring == "cumulative_full"
        if not every_sublayer:
            layers_per_block = math.ceil(config.num_hidden_layers / config.num_blocks)
        states = [(embedding, zero)]
        stream, attention_psis = embedding, []
        for layer in range(config.num_hidden_layers):
            for kind in ("sa", "mlp"):
                newest = (stream, self._block_psi(attention_psis, zero))
                hidden = self._read(f"model.layers.{layer}.attn_res_{kind}", [*states, newest])
                output, null = self._sublayer(layer, kind, hidden)
                if kind == "sa":
                    attention_psis.append(null)
                stream = _add(stream, output)
                if every_sublayer:
                    states.append((stream, self._block_psi(attention_psis, zero)))
            if not every_sublayer and (layer + 1) % layers_per_block == 0:
                states.append((stream, self._block_psi(attention_psis, zero)))
        return stream

    def _reset(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        config = self.config
        layers_per_block = math.ceil(config.num_hidden_layers / config.num_blocks)
        states = [(embedding, zero)]
        partial, attention_psis = embedding, []
        for layer in range(config.num_hidden_layers):
            for kind in ("sa", "mlp"):
                newest = (partial, self._block_psi(attention_psis, zero))
                hidden = self._read(f"model.layers.{layer}.attn_res_{kind}", [*states, newest])
                if kind == "sa" and layer > 0 and layer % layers_per_block == 0:
                    states.append(newest)
                    partial, attention_psis = [torch.zeros_like(row) for row in partial], []
                output, null = self._sublayer(layer, kind, hidden)
                if kind == "sa":
                    attention_psis.append(null)
                partial = _add(partial, output)
        newest = (partial, self._block_psi(attention_psis, zero))
        return self._read("model.final_res", [*states, newest], is_final=True)

    def _delta(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        outputs: list[tuple[list[Tensor], list[Tensor]]] = []
        stream = embedding
        layer_psi = zero
        for layer in range(self.config.num_hidden_layers):
            for kind in ("sa", "mlp"):
                hidden = stream
                if outputs:
                    read = self._read(f"model.layers.{layer}.attn_res_{kind}", outputs)
                    hidden = _add(stream, read)
                output, null = self._sublayer(layer, kind, hidden)
                layer_psi = null if kind == "sa" else layer_psi
                outputs.append((output, null if kind == "sa" else self._mlp_psi(layer_psi)))
                stream = _add(stream, output)
        return stream

    def _repo(self, embedding: list[Tensor], zero: list[Tensor]) -> list[Tensor]:
        entries = [(embedding, zero)]
        hidden = embedding
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}.attn_res"
            output, psi = self._sublayer(layer, "sa", hidden)
            after_attention = (_add(hidden, output), psi)
            hidden = self._read(f"{name}_sa", [*entries, after_attention])
            output, _ = self._sublayer(layer, "mlp", hidden)
            after_mlp = (_add(hidden, output), self._mlp_psi(psi))
            hidden = self._read(f"{name}_mlp", [*entries, after_attention, after_mlp])
            entries.append((hidden, psi))
        return hidden

    # psi --------------------------------------------------------------------------------------

    def _mlp_psi(self, layer_psi: list[Tensor]) -> list[Tensor]:
        if self.config.coupling_mlp_psi == "attention":
            return layer_psi
        return [torch.zeros_like(value) for value in layer_psi]

    def _block_psi(self, attention_psis: list[list[Tensor]], otherwise: list[Tensor]) -> list:
        if not attention_psis:
            return otherwise
        per_token = [torch.stack(values) for values in zip(*attention_psis, strict=True)]
        choose = {"mean": torch.mean, "max": torch.max, "last": lambda values: values[-1]}
        return [choose[self.config.coupling_block_psi](values) for values in per_token]

    # depth read -------------------------------------------------------------------------------

    def _read(
        self,
        name: str,
        sources: list[tuple[list[Tensor], list[Tensor]]],
        is_final: bool = False,
    ) -> list[Tensor]:
        return [
            self._read_token(
                name,
                [values[token] for values, _ in sources],
                [psi[token] for _, psi in sources],
                is_final=is_final,
            )
            for token in range(len(sources[0][0]))
        ]

    def _read_token(
        self, name: str, values: list[Tensor], psi: list[Tensor], *, is_final: bool
    ) -> Tensor:
        config = self.config
        count = len(values)
        scores = []
        for value in values:
            if config.depth_router == "lowrank_qk":
                query = self.parameters[f"{name}.q_proj.weight"] @ values[-1]
                key = self.parameters[f"{name}.k_proj.weight"] @ value
                scores.append(query @ key / math.sqrt(len(key)))
            else:
                key = self._rms_norm(value, f"{name}.key_norm.weight")
                scores.append(self.parameters[f"{name}.query"] @ key)
        if config.depth_recency != "none":
            bias = self.parameters[f"{name}.recency_bias"][0]
            for index in range(count):
                linear = index / (count - 1) if count > 1 else 0.0
                step = linear if config.depth_recency == "linear" else float(index == count - 1)
                scores[index] = scores[index] + bias * step
        if config.null_coupling and (config.coupling_final_read or not is_final):
            scores = self._couple(name, scores, list(psi))
        weights, null = self._depth_weights(name, scores)
        mixture = torch.zeros_like(values[0])
        for weight, value in zip(weights, values, strict=True):
            mixture = mixture + weight * value
        if config.depth_null_value == "partial":
            mixture = mixture + null * values[-1]
        elif config.depth_null_value == "embedding":
            mixture = mixture + null * values[0]
        return mixture * count if config.depth_output_scale == "num_sources" else mixture

    def _couple(self, name: str, scores: list[Tensor], psi: list[Tensor]) -> list[Tensor]:
        config = self.config
        if config.coupling_beta == "fixed":
            beta = config.coupling_beta_value
        else:
            raw = self.parameters[f"{name}.oasis_beta_raw"][0].item()
            beta = min(math.log1p(math.exp(raw)), 10.0)
        if config.coupling_embedding_psi == "neutral" and config.wiring != "delta" and psi[1:]:
            psi[0] = sum(psi[1:]) / len(psi[1:])
        centre = sum(psi) / len(psi) if config.coupling_centred else 0.0
        scores = [score - beta * (value - centre) for score, value in zip(scores, psi, strict=True)]
        if config.coupling_logit_clamp is not None:
            limit = config.coupling_logit_clamp
            scores = [score.clamp(-limit, limit) for score in scores]
        return scores

    def _depth_weights(self, name: str, scores: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        config = self.config
        exponentials = [torch.exp(score) for score in scores]
        rest = torch.zeros((), dtype=torch.float64)
        if config.depth_normalizer == "softmax1":
            log_n = torch.tensor(config.depth_log_n, dtype=torch.float64)
            if config.depth_null == "learned":
                log_n = self.parameters[f"{name}.null_logit"][0]
            rest = torch.exp(log_n)
        total = sum(exponentials) + rest
        return [value / total for value in exponentials], rest / total

    # sublayers --------------------------------------------------------------------------------

    def _sublayer(
        self, layer: int, kind: str, hidden: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Output of f(h) per token and, for attention, the heads' mean null mass."""
        name = f"model.layers.{layer}"
        if kind == "sa":
            normed = [self._rms_norm(row, f"{name}.input_layernorm.weight") for row in hidden]
            return self._attention(f"{name}.self_attn", normed)
        normed = [self._rms_norm(row, f"{name}.post_attention_layernorm.weight") for row in hidden]
        gate, up, down = (
            self.parameters[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        outputs = []
        for row in normed:
            pre = gate @ row
            outputs.append(down @ (pre / (1.0 + torch.exp(-pre)) * (up @ row)))
        return outputs, []

    def _attention(self, name: str, rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        config = self.config
        width = config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        projected = {
            part: [self._heads(f"{name}.{part}", row, width) for row in rows] for part in "qkv"
        }
        outputs, psis = [], []
        for time in range(len(rows)):
            context, nulls = [], []
            for head in range(heads):
                group = head // (heads // groups)
                query = self._rotate(projected["q"][time][head], time)
                scores = [
                    query @ self._rotate(projected["k"][past][group], past) / math.sqrt(width)
                    for past in range(time + 1)
                ]
                rest = torch.zeros((), dtype=torch.float64)
                if config.token_normalizer in ("softmax1", "sink"):
                    log_n = torch.tensor(config.token_log_n, dtype=torch.float64)
                    if f"{name}.null_logit" in self.parameters:
                        log_n = self.parameters[f"{name}.null_logit"][head]
                    rest = torch.exp(log_n)
                exponentials = [torch.exp(score) for score in scores]
                total = sum(exponentials) + rest
                value = torch.zeros(width, dtype=torch.float64)
                for past, exponential in enumerate(exponentials):
                    value = value + exponential / total * projected["v"][past][group]
                context.append(value * self._gate(name, head, rows[time]))
                nulls.append(rest / total)
            outputs.append(self.parameters[f"{name}.o_proj.weight"] @ torch.cat(context))
            psis.append(sum(nulls) / heads)
        return outputs, psis

    def _gate(self, name: str, head: int, row: Tensor) -> Tensor | float:
        config = self.config
        if config.attention_gate == "per_head":
            size = config.hidden_size // config.num_attention_heads
            part = row[head * size : (head + 1) * size]
            weight = self.parameters[f"{name}.gate.heads.{head}.weight"][0]
            logit = weight @ part + self.parameters[f"{name}.gate.heads.{head}.bias"][0]
            return 1.0 / (1.0 + torch.exp(-logit))
        if config.attention_gate == "g1":
            logits = self.parameters[f"{name}.gate.proj.weight"] @ row
            part = logits[head * config.head_dim : (head + 1) * config.head_dim]
            return 1.0 / (1.0 + torch.exp(-part))
        return 1.0

    def _heads(self, name: str, row: Tensor, width: int) -> list[Tensor]:
        projected = self.parameters[f"{name}_proj.weight"] @ row
        heads = list(projected.split(width))
        norm = f"{name}_norm.weight"
        return [self._rms_norm(head, norm) for head in heads] if norm in self.parameters else heads

    def _rotate(self, vector: Tensor, position: int) -> Tensor:
        base = self.config.rope_parameters["rope_theta"]
        half = len(vector) // 2
        rotated = vector.clone()
        for index in range(half):
            angle = position / base ** (2 * index / len(vector))
            first, second = vector[index], vector[index + half]
            rotated[index] = first * math.cos(angle) - second * math.sin(angle)
            rotated[index + half] = second * math.cos(angle) + first * math.sin(angle)
        return rotated

    def _rms_norm(self, row: Tensor, name: str) -> Tensor:
        scale = math.sqrt(row.pow(2).mean().item() + self.config.rms_norm_eps)
        return self.parameters[name] * row / scale


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(left, right, strict=True)]
