"""Checkpoint folders in the public formats, as their publishers write them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from oasis_eval import loading, registry
from oasis_eval.loading import Reference
from tests.tiny import VOCABULARY, build_tokenizer

Config = dict[str, object]
Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

WIDTH, LAYERS, HEADS, GROUPS, HEAD_WIDTH, MIDDLE = 48, 4, 4, 2, 16, 80


def backbone_config(**changes: object) -> Config:
    """What every `config.json` here says about the backbone; head width is not width / heads."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_WIDTH,
        "intermediate_size": MIDDLE,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.57.0",
        **changes,
    }


def backbone_shapes(*, head_norms: bool, layers: int = LAYERS) -> Shapes:
    """Names and shapes of a Llama or Qwen3 with tied embeddings."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (WIDTH,),
            f"{prefix}post_attention_layernorm.weight": (WIDTH,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_WIDTH, WIDTH),
            f"{prefix}self_attn.k_proj.weight": (GROUPS * HEAD_WIDTH, WIDTH),
            f"{prefix}self_attn.v_proj.weight": (GROUPS * HEAD_WIDTH, WIDTH),
            f"{prefix}self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_WIDTH),
            f"{prefix}mlp.gate_proj.weight": (MIDDLE, WIDTH),
            f"{prefix}mlp.up_proj.weight": (MIDDLE, WIDTH),
            f"{prefix}mlp.down_proj.weight": (WIDTH, MIDDLE),
        }
        if head_norms:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (HEAD_WIDTH,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (HEAD_WIDTH,)
    return shapes


def query_shapes(place: str) -> Shapes:
    """A router with one query: Linear(D, 1) and the norm of its keys."""
    return {f"{place}_proj.weight": (1, WIDTH), f"{place}_norm.weight": (WIDTH,)}


def open_attnres(
    mode: str, *, biases: bool = True, final: bool = False, layers: int = LAYERS, **changes: object
) -> tuple[Config, Shapes]:
    """An open-attention-residuals checkpoint."""
    config = backbone_config() | {
        "model_type": "qwen3_attnres",
        "architectures": ["Qwen3AttnResForCausalLM"],
        "attnres_num_blocks": 2,
        "attnres_mode": mode,
        "attnres_gate_type": "bias",
        "attnres_recency_bias_init": 0.0,
        "num_hidden_layers": layers,
        **changes,
    }
    shapes = backbone_shapes(head_norms=True, layers=layers)
    places = [f"model.layers.{i}.{kind}_res" for i in range(layers) for kind in ("attn", "mlp")]
    for place in [*places, *(["model.final_res"] if final else [])]:
        shapes |= query_shapes(place)
        if biases:
            shapes[f"{place}_bias"] = ()
    return config, shapes


def oasis_repo(model_type: str, **changes: object) -> tuple[Config, Shapes]:
    """A checkpoint of the OASIS authors' script: a plain configuration."""
    shapes = backbone_shapes(head_norms=model_type == "qwen3")
    for layer in range(LAYERS):
        for kind in ("sa", "mlp"):
            place = f"model.layers.{layer}.attn_res_{kind}"
            shapes |= {
                f"{place}.q_proj.weight": (64, WIDTH),
                f"{place}.k_proj.weight": (64, WIDTH),
                f"{place}.recency_bias": (1,),
                f"{place}.oasis_beta_raw": (1,),
            }
    return backbone_config(model_type=model_type, **changes), shapes


def fla(*, head_norms: bool, block_size: int | None) -> tuple[Config, Shapes]:
    """A flash-linear-attention transformer; the head width is width / heads there."""
    config: Config = {
        "model_type": "transformer",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": GROUPS,
        "qk_norm": head_norms,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 5000.0,
        "max_position_embeddings": 128,
        "hidden_ratio": 4,
        "intermediate_size": None,
        "hidden_act": "swish",
        "norm_eps": 1e-5,
        "fuse_norm": True,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "attnres_block_size": block_size,
    }
    head, middle = WIDTH // HEADS, 256  # 48 * 4 * 2 / 3 = 128, rounded up
    shapes: Shapes = {
        "model.embeddings.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}attn_norm.weight": (WIDTH,),
            f"{prefix}mlp_norm.weight": (WIDTH,),
            f"{prefix}attn.q_proj.weight": (WIDTH, WIDTH),
            f"{prefix}attn.k_proj.weight": (GROUPS * head, WIDTH),
            f"{prefix}attn.v_proj.weight": (GROUPS * head, WIDTH),
            f"{prefix}attn.o_proj.weight": (WIDTH, WIDTH),
            f"{prefix}mlp.gate_proj.weight": (middle, WIDTH),
            f"{prefix}mlp.up_proj.weight": (middle, WIDTH),
            f"{prefix}mlp.down_proj.weight": (WIDTH, middle),
        }
        if head_norms:
            shapes[f"{prefix}attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}attn.k_norm.weight"] = (head,)
        if block_size is not None:
            shapes |= query_shapes(f"{prefix}attn_res") | query_shapes(f"{prefix}mlp_res")
    if block_size is not None:
        shapes |= query_shapes("model.res")
    return config, shapes


def kimi() -> tuple[Config, Shapes]:
    """A Qwen3 under the names of Kimi K3."""
    shapes = backbone_shapes(head_norms=True) | query_shapes("model.output_attn_res")
    for layer in range(LAYERS):
        shapes |= query_shapes(f"model.layers.{layer}.self_attention_res")
        shapes |= query_shapes(f"model.layers.{layer}.mlp_res")
    return backbone_config(model_type="qwen3", attn_res_block_size=2), shapes


def random_tensors(shapes: Shapes, seed: int = 0) -> Tensors:
    """Values at which every tensor matters."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1.0 + 0.2 * noise
        elif name.endswith("beta_raw"):
            tensors[name] = 1.0 + noise
        elif name.endswith(("_bias", "_res_proj.weight", "res_proj.weight")):
            tensors[name] = 0.25 * noise
        elif "attn_res" in name:
            tensors[name] = 0.05 * noise
        else:
            tensors[name] = 0.12 * noise
    return tensors


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Write a checkpoint folder with the character tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "fp32") -> Reference:
    """Load a folder the way `evaluate` does."""
    return loading.load(registry.resolve(str(folder)), dtype=dtype)


OPEN_FORMS: dict[str, tuple[Config, Shapes]] = {
    "cumulative": open_attnres("block"),
    "cumulative, uneven": open_attnres("block", layers=5),
    "cumulative, more blocks than layers": open_attnres("block", attnres_num_blocks=8),
    "reset": open_attnres("block", final=True),
    "reset, uneven": open_attnres("block", final=True, layers=5),
    "full": open_attnres("full"),
    "delta": open_attnres("delta"),
    "block without biases": open_attnres("block", biases=False, final=True),
    "full without biases": open_attnres("full", biases=False, final=True),
}
"""Every wiring of open-attention-residuals, with blocks that fit and blocks that do not."""
