"""Tiny configs by rule: every size of a default config is replaced by a small one, and what depends on sizes is derived
anew.

The rules go by field name, as transformers' names repeat; `overrides.py` holds what they do not reach.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

from transformers import PreTrainedConfig

from .overrides import OVERRIDES

VOCAB = 128
#: Ids below are special ones (padding, images, ...); prompts are drawn from the ones above.
FIRST_TOKEN = 48
WINDOW = 8
HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
#: Length where the RoPE of a shrunk published model changes: after every prompt, within the tokens that follow.
BORDER = 16
#: Tokens that the zoo feeds at most.
LENGTHS_TRIED = 48
#: Layers of a shrunk published model; where its kinds come later, only the first layer of each is kept.
MOST_LAYERS = 8

WINDOWS = (
    "sliding_window sliding_window_size attention_chunk_size local_attention attention_window_size window_size "
    "attention_window swa_window_size"
).split()

#: Field -> small value. Applied where the default is a number larger than it.
SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(
        "hidden_size d_model n_embd embed_dim dim emb_dim embedding_size hidden_dim attention_hidden_size lru_width "
        "word_embed_proj_dim cross_attention_hidden_size output_hidden_size input_embedding_size output_embedding_size "
        "text_hidden_size vision_hidden_size encoder_hidden_size out_hidden_size projection_dim audio_hidden_size "
        "image_text_hidden_size pooler_output_size decoder_hidden_size mm_hidden_size embedding_dim dim_model".split(),
        HIDDEN,
    ),
    **dict.fromkeys(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner dff ffn_hidden_size dim_ff "
        "mlp_dim moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
        "hidden_dim_ff expert_ffn_hidden_size moe_shared_expert_intermediate_size dense_intermediate_size "
        "feed_forward_size projector_hidden_size downsample_hidden_size shared_experts_intermediate_size "
        "t2u_encoder_ffn_dim t2u_decoder_ffn_dim speech_encoder_intermediate_size merged_hidden_size "
        "projection_intermediate_size adapter_out_dim share_expert_dim router_hidden_size moe_hidden_size".split(),
        HIDDEN,
    ),
    # heads
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "t2u_encoder_attention_heads t2u_decoder_attention_heads speech_encoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads "
        "decoder_num_attention_heads swa_num_attention_heads linear_num_value_heads cross_num_attention_heads "
        "num_sliding_attention_heads linear_num_heads resampler_n_heads".split(),
        HEADS,
    ),
    "linear_num_key_heads": 2,
    **dict.fromkeys(
        "head_dim d_kv swa_head_dim global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
        "kv_channels v_head_dim cross_head_dim attention_head_size d_head dim_head swa_v_head_dim index_head_dim "
        "resampler_head_dim".split(),
        HEAD_DIM,
    ),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "rotary_dim": 8,
    # Scores pass through a ReLU: with fewer heads many are zero in all of them, and ties of a top-k are broken anyhow.
    "index_n_heads": 16,
    "index_topk": 6,
    # layers of encoders and towers; the decoder's are chosen by `_layers`
    **dict.fromkeys(
        "encoder_num_hidden_layers depth speech_encoder_layers t2u_encoder_layers "
        "t2u_decoder_layers resampler_depth num_global_layers conf_num_hidden_layers".split(),
        1,
    ),
    **dict.fromkeys(
        "num_hidden_layers encoder_layers num_encoder_layers n_layer n_layers num_layers decoder_layers "
        "num_decoder_layers decoder_num_hidden_layers".split(),
        2,
    ),
    # experts
    **dict.fromkeys(
        "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts zero_expert_num".split(), 4
    ),
    **dict.fromkeys(
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts topk_group n_group num_expert_group".split(),
        2,
    ),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    **dict.fromkeys(WINDOWS, WINDOW),
    # states
    **dict.fromkeys("mamba_d_state state_size ssm_state_size".split(), 8),
    **dict.fromkeys("mamba_n_heads mamba_num_heads n_mamba_heads".split(), 4),
    **dict.fromkeys("mamba_d_head mamba_head_dim mamba_headdim".split(), 32),
    **dict.fromkeys("mamba_n_groups n_groups mamba_ngroups".split(), 1),
    **dict.fromkeys("mamba_chunk_size chunk_size".split(), 8),
    **dict.fromkeys("time_step_rank mamba_dt_rank".split(), 4),
    "mamba_d_ssm": 128,
    # tables
    **dict.fromkeys(
        "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions model_max_length context_length "
        "seq_len max_decoder_position_embeddings max_encoder_position_embeddings max_source_positions "
        "max_text_positions max_speech_positions".split(),
        256,
    ),
    # pictures and sound
    "image_size": 32,
    "num_mel_bins": 16,
    "num_patches": 4,
    "num_query_tokens": 4,
    "resampler_n_latents": 4,
    "codebook_size": 32,
}
#: Sizes of published models instead of those in `SIZES`, small enough that what the size belongs to changes logits.
PUBLISHED_SIZES: dict[str, Any] = {
    # Heads of Mamba 2 share states by group, so there are two groups.
    **dict.fromkeys("mamba_n_groups n_groups mamba_ngroups".split(), 2),
    "moe_latent_size": 32,
    # Iterations that a program unrolls in every layer: more of them are more of the same, and minutes of lowering.
    "hc_sinkhorn_iters": 3,
    # Positions from which queries are scaled by the logarithm of the position.
    **dict.fromkeys("floor_scale log_scaling_n_floor".split(), BORDER),
    # Limits of activations, scores and logits, which those of a tiny model would not reach.
    **dict.fromkeys("swiglu_limit clip_qkv".split(), 1.0),
    "attn_logit_softcapping": 2.0,
    **dict.fromkeys("final_logit_softcapping logits_soft_cap output_logit_soft_cap".split(), 4.0),
}
_VOCAB = re.compile(r"(^|_)vocab_size|_vocab_size$|^num_embeddings$|^vocab_size_per_layer_input$")
_TOKEN = re.compile(r"_token_(id|index)$|^(eos|bos|pad)_(index|id)$|^image_token_index$")
#: What stands for "none given" where a default leaves it open.
_OPEN = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_SPREAD = ("initializer_range", "init_std", "initializer_factor", "embed_init_std")


def tiny_config(
    config_class: type[PreTrainedConfig], window: int = WINDOW, published: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """The config of one architecture, hidden size 64, every kind of layer present.

    Args:
        window: Of sliding and chunked layers.
        published: Fields of a published config, whose kinds are kept; None for the default's.
    """
    return _shrink(config_class, window, iter(range(3, FIRST_TOKEN)), published=published)


def _shrink(
    config_class: type[PreTrainedConfig],
    window: int,
    special: Any,
    tower: bool = False,
    published: dict[str, Any] | None = None,
) -> PreTrainedConfig:
    own = dict(OVERRIDES.get(config_class.model_type, {}))
    base = {**own.pop("_base", {}), **copy.deepcopy(published or {})}
    default = config_class(**base)
    sections = own.pop("_mrope", None)
    names = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    fields: dict[str, Any] = dict(base)
    if published is not None:
        # Read back from the class, because `config.json` may state them under other names, which would win.
        fields = {name: copy.deepcopy(value) for name, value in vars(default).items() if name in names}
        own = _unlike_published(own, default)
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig) and name not in own:
            is_tower = (
                bool(re.search("vision|audio|image|encoder|qformer|tokenizer|vq|codec|acoustic|semantic", name))
                or tower
            )
            inner = None if published is None else published.get(name)
            fields[name] = _shrink(type(value), window, special, is_tower, inner)
        elif name in names and name not in own:
            small = _OPEN.get(name) if value is None else _small(name, value, special, published is not None)
            if small is not None and small != value:
                fields[name] = small
    fields.update(_heads(default, fields))
    if published is not None:
        fields.update(_routed(default) | _global_heads(default, base, fields))
    values = vars(default)
    if values.get("head_dim") is not None and values["head_dim"] == values.get("qk_rope_head_dim"):
        fields["head_dim"] = fields.get(
            "qk_rope_head_dim", values["qk_rope_head_dim"]
        )  # MLA models rotate that part alone
    if not tower:
        fields.update(_layers(default, names) if published is None else _published_layers(default, names))
    if "rope_parameters" in names and getattr(default, "rope_parameters", None):
        border = 64 if published is None else BORDER
        fields["rope_parameters"] = _rope(default.rope_parameters, fields, sections, border)
        if published is not None:
            fields.update(_borders(default, names))
    fields.update(own)
    if published is not None:
        # A window as long as the positions is never reached, as in Phi 3 with LongRoPE. Defaults of a class say nothing.
        longest = vars(default).get("max_position_embeddings") or 0
        stated = [name for name in WINDOWS if name in published and fields.get(name) == WINDOW]
        fields.update({name: 256 for name in stated if vars(default)[name] >= longest})
    fields.update({name: window for name in WINDOWS if name in fields and fields[name] == WINDOW and not tower})
    return config_class(**fields)


def _small(name: str, value: Any, special: Any, published: bool = False) -> Any:
    if _TOKEN.search(name):
        if isinstance(value, (list, tuple)):
            return [next(special) for _ in value]
        return (
            {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], None)
            if name[:3] in ("pad", "bos", "eos") and isinstance(value, int)
            else (next(special) if isinstance(value, int) else None)
        )
    if name in _SPREAD and isinstance(value, float):
        return 0.125 if value < 0.2 else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if _VOCAB.search(name) and value > VOCAB:
        return VOCAB
    if name.endswith("dropout") or name.endswith("layerdrop") or "dropout" in name:
        return type(value)(0)
    limit = PUBLISHED_SIZES.get(name, SIZES.get(name)) if published else SIZES.get(name)
    return limit if limit is not None and value > limit else None


def _heads(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Key heads: as many as query heads, a half of them, or one, as in the default."""
    found = {}
    for query, key in (
        ("num_attention_heads", "num_key_value_heads"),
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
        ("num_attention_heads", "num_global_key_value_heads"),
        ("num_attention_heads", "num_kv_heads"),
        ("num_attention_heads", "num_query_groups"),
        ("encoder_num_attention_heads", "encoder_num_key_value_heads"),
        ("decoder_num_attention_heads", "decoder_num_key_value_heads"),
        ("cross_num_attention_heads", "cross_num_key_value_heads"),
        ("n_heads", "kv_n_heads"),
    ):
        heads, keys = vars(default).get(query), vars(default).get(key)
        if isinstance(heads, int) and isinstance(keys, int):
            now = fields.get(query, heads)
            found[key] = now if keys == heads else 1 if keys == 1 else max(1, now // 2)
    return found


def _routed(default: Any) -> dict[str, Any]:
    """Return the sizes of a router that chooses groups of experts first: two of four groups of two experts."""
    values = vars(default)
    groups, chosen = values.get("n_group"), values.get("topk_group")
    if not isinstance(groups, int) or not isinstance(chosen, int) or chosen >= groups:
        return {}
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = {name: 8 for name in names if isinstance(values.get(name), int)}
    return {"n_group": 4, "topk_group": 2, **experts}


def _global_heads(default: Any, base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the key heads of full layers, which Gemma 4 states apart from those of the others and keeps in no field."""
    name = "num_global_key_value_heads"
    if base.get(name) is None or name in vars(default):
        return {}
    return {name: max(1, fields["num_key_value_heads"] * base[name] // vars(default)["num_key_value_heads"])}


def _layers(default: Any, names: set[str]) -> dict[str, Any]:
    """Fewest layers that show every kind, the default's last kind last."""
    kinds = {
        name: vars(default).get(name)
        for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
    }
    kinds = {
        name: list(dict.fromkeys(value)) + [value[-1]]
        for name, value in kinds.items()
        if name in names and isinstance(value, (list, tuple)) and value
    }
    if not kinds:
        return {}
    for name, values in kinds.items():
        last = values.pop()
        kinds[name] = [value for value in values if value != last] + [last]
    count = max(2, *map(len, kinds.values()))
    lists = {name: [values[0]] * (count - len(values)) + values for name, values in kinds.items()}
    return {"num_hidden_layers": count, **lists}


def _unlike_published(own: dict[str, Any], default: PreTrainedConfig) -> dict[str, Any]:
    """Return the overrides that a published config leaves: those of sizes, not those that choose kinds of layers.

    Layers that share keys are counted from the end, so their pattern stays that of the overrides.
    """
    if getattr(default, "num_kv_shared_layers", 0):
        return own
    depth = default.get_text_config(decoder=True).num_hidden_layers
    kinds = {name for name, value in vars(default).items() if isinstance(value, (list, tuple)) and len(value) == depth}
    return {
        name: value
        for name, value in own.items()
        if name not in kinds | {"num_hidden_layers", "num_kv_shared_layers", "hidden_size_per_layer_input"}
        and not (isinstance(value, int) and name.startswith(("attn_layer_", "expert_layer_")))
    }


def _published_layers(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Return the first layers of a published model, up to the one that shows the last combination of kinds.

    If they are more than `MOST_LAYERS`, return only the first layer of each combination.
    """
    depth = getattr(default, "num_hidden_layers", None)
    if not isinstance(depth, int) or getattr(default, "num_kv_shared_layers", 0):
        return {}
    lists = {
        name: list(value)
        for name, value in vars(default).items()
        if name in names and isinstance(value, (list, tuple)) and len(value) == depth > 1 and not _are_indices(value)
    }
    told = [*lists.values()]
    for name in ("layer_types", "layers_block_type", "layers_num_experts"):
        # Some configs compute them from periods.
        value = getattr(default, name, None)
        if name not in lists and isinstance(value, (list, tuple)) and len(value) == depth:
            told.append(list(value))
    if not told:
        return {}
    kinds = [str(one) for one in zip(*told, strict=True)]
    first = sorted({kind: kinds.index(kind) for kind in kinds}.values())
    chosen = list(range(first[-1] + 1)) if first[-1] < MOST_LAYERS or len(told) > len(lists) else first
    if len(chosen) < 2:
        chosen = [0, 1]
    return {"num_hidden_layers": len(chosen), **{name: [value[at] for at in chosen] for name, value in lists.items()}}


def _are_indices(values: Any) -> bool:
    """Return True for indices of layers: a list that names every layer is as long as a list with an entry per layer."""
    return all(isinstance(value, int) for value in values) and len(set(values)) == len(values) > 2


def _borders(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Return the lengths where a published model's RoPE changes, which are within those that are tried."""
    found: dict[str, Any] = {}
    rope = default.rope_parameters
    kinds = str([rope.get("rope_type"), *(one.get("rope_type") for one in rope.values() if isinstance(one, dict))])
    if "original_max_position_embeddings" in names:
        found["original_max_position_embeddings"] = BORDER
    if "dynamic" in kinds:
        found["max_position_embeddings"] = BORDER
    return found


def _rope(
    parameters: dict[str, Any], fields: dict[str, Any], sections: list[int] | None, border: int
) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in parameters.values()):
        return {
            name: _rope(value, fields, sections, border) if isinstance(value, dict) else value
            for name, value in parameters.items()
        }
    rope = dict(parameters)
    head_dim = fields.get("head_dim") or HEAD_DIM
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = border
    if "max_position_embeddings" in rope:
        rope["max_position_embeddings"] = 256
    section = rope.get("mrope_section") or sections
    if section:
        small = [max(1, round(part * half / sum(section))) for part in section]
        small[0] += half - sum(small)
        rope["mrope_section"] = small
    for name, least in (("long_factor", 1.0 if border > LENGTHS_TRIED else 2.0), ("short_factor", 1.0)):
        if name in rope:
            rope[name] = [least + 0.1 * index for index in range(half)]
    return rope
