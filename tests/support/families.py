"""Small models of the families of transformers, of the real classes, with random weights."""

import contextlib
import warnings

import torch
import transformers

CAUSAL = [
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "olmo",
    "olmo2",
    "olmoe",
    "stablelm",
    "starcoder2",
    "codegen",
    "mpt",
    "cohere",
    "granite",
    "deepseek_v3",
    "smollm3",
    "xglm",
    "biogpt",
    "gpt_bigcode",
    "persimmon",
]
MASKED = [
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta",
    "deberta-v2",
    "mpnet",
    "modernbert",
    "xlm-roberta",
    "camembert",
    "nomic_bert",
    "esm",
]
SEQ2SEQ = [
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "m2m_100",
    "blenderbot",
    "led",
]
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")
"""Families whose experts are 3-D weights."""
FAMILIES = {
    **dict.fromkeys(CAUSAL, "AutoModelForCausalLM"),
    **dict.fromkeys(MASKED, "AutoModelForMaskedLM"),
    **dict.fromkeys(SEQ2SEQ, "AutoModelForSeq2SeqLM"),
}

WIDTHS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("original_max_position_embeddings", "max_seq_len"), 64),
    "word_embed_proj_dim": 32,
    "vocab_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "pooler_hidden_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def small_config(family):
    """Return a configuration of two blocks of width 32 and 256 tokens."""
    made = transformers.CONFIG_MAPPING[family]
    if family == "gpt_neo":
        return made(
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=64,
            vocab_size=256,
            intermediate_size=64,
        )
    config = made()
    for key, value in WIDTHS.items():
        with contextlib.suppress(AttributeError):  # a property without a setter
            if hasattr(config, key):
                setattr(config, key, value)
    if hasattr(config, "qk_rope_head_dim"):
        config.head_dim = config.qk_rope_head_dim
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return made.from_dict(config.to_dict())


def small_model(family, device="meta"):
    """Return a model of the class that pre-trains the family."""
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        return getattr(transformers, FAMILIES[family]).from_config(small_config(family))
