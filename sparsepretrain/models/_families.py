"""Roles of the linear layers in the model families of transformers.

Families name their layers in a few styles. A style is recognized by the names that occur, so a
family that is not listed works if it uses names of one that is. A layer without a role is reported
instead of being left dense: :func:`unassigned`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple


class Style(NamedTuple):
    """Globs of one style, separated by spaces; a dot stands before the first part of a name."""

    first: str
    """FFN layers before the activation, gates included."""
    last: str
    """FFN layers behind the activation."""
    attention: str


STYLES = (
    # GPT-2, GPT-BigCode; StarCoder 2 with the attention of Llama
    Style("*.mlp.c_fc", "*.mlp.c_proj", "*.attn.c_attn *.attn.c_proj"),
    # GPT-Neo: the FFN of GPT-2
    Style("", "", "*.attn.attention.[qkv]_proj *.attn.attention.out_proj"),
    # GPT-J, CodeGen
    Style(
        "*.mlp.fc_in",
        "*.mlp.fc_out",
        "*.attn.[qkv]_proj *.attn.qkv_proj *.attn.out_proj",
    ),
    # GPT-NeoX, Pythia, BLOOM, Falcon, Persimmon
    Style(
        "*.mlp.dense_h_to_4h",
        "*.mlp.dense_4h_to_h",
        "*[._]attention.query_key_value *[._]attention.dense *_attn.query_key_value *_attn.dense",
    ),
    # Llama, Mistral, Qwen, Gemma, OLMo, StableLM, Cohere, Granite, SmolLM, NomicBERT
    Style(
        "*.mlp.gate_proj *.mlp.up_proj",
        "*.mlp.down_proj",
        "*_attn.[qkv]_proj *_attn.o_proj",
    ),
    # Phi-3: fused
    Style("*.mlp.gate_up_proj", "*.mlp.down_proj", "*_attn.qkv_proj *_attn.o_proj"),
    # Phi: attention as Llama up to its last layer
    Style("*.mlp.fc1", "*.mlp.fc2", "*_attn.[qkv]_proj *_attn.dense"),
    # DeepSeek: latent attention
    Style(
        "",
        "",
        "*_attn.q_a_proj *_attn.q_b_proj *_attn.kv_a_proj_with_mqa *_attn.kv_b_proj *_attn.o_proj",
    ),
    # MPT
    Style("*.ffn.up_proj", "*.ffn.down_proj", "*.attn.Wqkv *.attn.out_proj"),
    # ModernBERT
    Style("*.mlp.Wi", "*.mlp.Wo", "*.attn.Wqkv *.attn.Wo"),
    # BERT, RoBERTa, ELECTRA, DeBERTa, ESM; the digit excludes attention.output
    Style(
        "*.intermediate.dense",
        "*[0-9].output.dense",
        "*.attention.self.* *.attention.output.dense",
    ),
    # MPNet: the FFN of BERT
    Style("", "", "*.attention.attn.[qkvo]"),
    # DistilBERT
    Style("*.ffn.lin1", "*.ffn.lin2", "*.attention.[qkv]_lin *.attention.out_lin"),
    # ALBERT
    Style(
        "*.ffn",
        "*.ffn_output",
        "*.attention.query *.attention.key *.attention.value *.attention.dense",
    ),
    # OPT, BART, Marian, Pegasus, M2M100, BlenderBot, XGLM, BioGPT
    Style("*.fc1", "*.fc2", "*_attn.[qkv]_proj *_attn.out_proj"),
    # LED, Longformer
    Style("*.fc1", "*.fc2", "*.longformer_self_attn.* *.self_attn.output"),
    # experts that see all tokens, next to others: Qwen2-MoE, DeepSeek
    Style(
        "*.shared_expert*.gate_proj *.shared_expert*.up_proj",
        "*.shared_expert*.down_proj",
        "",
    ),
    # experts in 3-D weights: Mixtral, Qwen-MoE, OLMoE, DeepSeek, GPT-OSS, Llama 4
    Style("*.experts.gate_up_proj *.experts.up_proj", "*.experts.down_proj", ""),
    # T5, mT5, UMT5, LongT5
    Style("*.DenseReluDense.wi*", "*.DenseReluDense.wo", "*Attention.[qkvo]"),
)

ROUTERS = ("*.mlp.gate", "*.block_sparse_moe.gate", "*.router", "*.shared_expert_gate")
"""Layers that choose experts: a few outputs, which are never sparse."""


def roles_of(layers: Iterable[str]) -> dict[str, list[str]]:
    """Return alias of ``sparsity.targets`` -> globs that match one of ``layers``."""
    names = [f".{name}" for name in layers]

    def present(globs: str) -> list[str]:
        return [g for g in globs.split() if any(fnmatchcase(name, g) for name in names)]

    first = _unique(g for style in STYLES for g in present(style.first))
    last = _unique(g for style in STYLES for g in present(style.last))
    attention = _unique(g for style in STYLES for g in present(style.attention))
    ffn = _unique([*first, *last])
    return {"ffn": ffn, "ffn_out": last, "attention": attention, "all": [*ffn, *attention]}


def unassigned(alias: str, weights: Iterable[str], roles: dict[str, list[str]]) -> list[str]:
    """Return weights without a role that belong to the same part of a block as those of ``alias``.

    Modules that have layers with the role attention are the attention of a block; the rest of the
    block is its FFN.

    Args:
        alias: ``ffn``, ``ffn_out``, ``attention`` or ``all``.
        weights: names of all modules with weights of two or more dimensions, and of such Parameters
            that belong to other modules.
        roles: see :func:`roles_of`.
    """
    weights = list(weights)
    parents = {
        name.rpartition(".")[0]
        for name in weights
        if any(fnmatchcase(f".{name}", glob) for glob in roles["attention"])
    }
    known = [*roles["all"], *ROUTERS]
    blocks: dict[str, list[str]] = {}
    for name in weights:
        block = re.match(r"(?:[^.]+\.)*?\d+\.", name)
        if block:
            blocks.setdefault(block[0], []).append(name)
    missing = []
    for names in blocks.values():
        others = [n for n in names if not any(fnmatchcase(f".{n}", g) for g in known)]
        if len(others) < len(names):
            missing += others
    if alias == "all":
        return missing
    is_attention = alias == "attention"
    return [name for name in missing if (name.rpartition(".")[0] in parents) == is_attention]


def as_globs(names: Iterable[str]) -> str:
    """Return names as a list of globs that match them in every block, the first eight."""
    globs = _unique("*." + re.sub(r"^.*?\d+\.", "", name) for name in names)
    more = ["…"] if len(globs) > 8 else []
    return str(globs[:8] + more).replace("'", '"')


def _unique(globs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(globs))
