"""The plan against the caches it predicts: ours, and transformers' own at the same length."""

import json
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from exportable_cache import ExportableCache
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.parallel.heads import check_type
from exportable_cache.pipeline.plan import MOST_TOKENS, plan

from .support.models import FAMILIES, WINDOW, tiny_model, tokens

LENGTH = 24


def dynamic_nbytes(model, length, batch_size):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(length, batch_size), past_key_values=cache)
    # Not `nbytes` of the storage: a sliding layer's tensors are views of what it was cut from.
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_plan_bytes_are_those_of_the_caches(family, batch_size):
    model = tiny_model(family)
    made = plan(model, LENGTH, batch_size)
    cache = ExportableCache.from_model(model, LENGTH, batch_size)
    assert made.cache_bytes == cache.nbytes
    assert [layer.bytes for layer in made.layers] == [layer.nbytes for layer in cache.layers]
    assert [layer.policy for layer in made.layers] == [layer.label for layer in cache.layers]
    assert [layer.slots for layer in made.layers] == [layer.capacity for layer in cache.layers]
    assert made.max_length == cache.max_length
    model.set_attn_implementation("eager")
    assert made.dynamic_bytes == dynamic_nbytes(model, LENGTH, batch_size)
    assert made.refusal is None


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_weights_are_those_of_the_model(family):
    model = tiny_model(family)
    assert plan(model.config, LENGTH).weights_bytes == sum(p.nbytes for p in model.parameters())


def test_plan_describes_each_layer():
    made = plan(tiny_model("gemma2"), LENGTH)
    ring, full = made.layers
    assert (ring.index, ring.layer_type, ring.policy, ring.slots, ring.window) == (
        0,
        "sliding_attention",
        "ring",
        WINDOW,
        WINDOW,
    )
    assert (full.index, full.layer_type, full.policy, full.slots, full.window) == (
        1,
        "full_attention",
        "full",
        LENGTH,
        None,
    )
    assert (ring.heads, ring.head_dim, ring.value_head_dim, ring.dtype) == (2, 8, 8, "float32")
    # keys and values [1, 2, 8, 8] float32, and one int64 length
    assert ring.bytes == 2 * (1 * 2 * 8 * 8) * 4 + 8
    assert made.architecture == "Gemma2ForCausalLM"
    assert made.model_type == "gemma2"


def test_plan_ring_layers_do_not_grow_with_max_cache_len():
    short, long = plan(tiny_model("gemma2"), 64), plan(tiny_model("gemma2"), 1024)
    assert short.layers[0].bytes == long.layers[0].bytes
    assert long.layers[1].bytes - 8 == 16 * (short.layers[1].bytes - 8)


def test_plan_has_no_limit_where_every_layer_is_a_ring():
    assert plan(tiny_model("mistral"), LENGTH).max_length is None
    assert plan(tiny_model("llama"), LENGTH).max_length == LENGTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_plan_dtype_sizes_cache_and_weights(dtype):
    config = tiny_model("llama").config
    half, single = plan(config, LENGTH, dtype=dtype), plan(config, LENGTH)
    assert half.dtype == "bfloat16"
    assert 2 * half.weights_bytes == single.weights_bytes
    assert 2 * half.dynamic_bytes == single.dynamic_bytes


def test_plan_for_a_target_is_in_the_dtype_that_is_exported():
    config = tiny_model("llama").config
    config.dtype = torch.bfloat16
    # Native operators, where they are installed, keep the stored dtype.
    stored, made = plan(config, LENGTH), plan(config, LENGTH, target="executorch", recipe="portable")
    assert (stored.dtype, stored.remark) == ("bfloat16", "")
    assert (made.dtype, made.stored_dtype, made.weights_bytes) == ("float32", "bfloat16", 2 * stored.weights_bytes)
    assert made.remark == "weights are stored in bfloat16; exported in float32, which executorch computes best"
    assert plan(config, LENGTH, target="pt2").dtype == "bfloat16"
    with pytest.raises(InputError, match="dtype must not be 'bfloat16' for target 'executorch'"):
        plan(config, LENGTH, dtype="bfloat16", target="executorch")
    with pytest.raises(InputError, match="unknown target 'abacus'"):
        plan(config, LENGTH, target="abacus")


_LATENT = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 64, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def test_sizes_of_latent_attention_with_experts_are_the_models():
    config = AutoConfig.for_model("deepseek_v3", **_LATENT)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = ExportableCache.from_model(model, LENGTH).nbytes
    assert plan(AutoConfig.for_model("deepseek_v3", **_LATENT), LENGTH, dtype="float32").cache_bytes == expected
    assert ExportableCache.from_config(config, LENGTH, dtype=torch.float32).nbytes == expected


def test_sizes_are_refused_rather_than_guessed(monkeypatch):
    def failing(model):
        raise RuntimeError("the meta device cannot")

    monkeypatch.setattr("exportable_cache.models.layers.specs.layer_specs_from_model", failing)
    config = AutoConfig.for_model("deepseek_v3", **_LATENT)
    made = plan(config, LENGTH)
    assert made.cache_bytes is None and "kv_lora_rank" in made.refusal and "from_model" in made.refusal
    with pytest.raises(UnsupportedModelError, match="from_model"):
        ExportableCache.from_config(config, LENGTH)
    assert plan(tiny_model("llama").config, LENGTH).refusal is None


def test_plan_of_a_model_counts_its_own_weights():
    model = tiny_model("llama", tie_word_embeddings=True)
    assert plan(model, LENGTH).weights_bytes == sum(p.nbytes for p in model.parameters())
    assert plan(model, LENGTH, dtype="bfloat16").weights_bytes == sum(p.nbytes for p in model.parameters()) // 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers in .* must be at most 2048, got 10000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in .* must be at least 1, got 0"),
        ({"hidden_size": -32}, "hidden_size in .* must be at least 1, got -32"),
        ({"vocab_size": 0}, "vocab_size in .* must be at least 1, got 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads in .* must be at least 1, got 0"),
        ({"head_dim": -8}, "head_dim in .* got -8"),
    ],
)
def test_plan_answers_at_once_where_a_config_names_sizes_of_no_model(fields, words, tmp_path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = {**json.loads(path.read_text()), **fields}
    written.pop("layer_types", None)
    path.write_text(json.dumps(written))
    start = time.thread_time()
    with pytest.raises(InputError, match=words):
        plan(tmp_path, LENGTH)
    config = tiny_model("llama").config
    for name, value in fields.items():
        setattr(config, name, value)
    for call in (plan, ExportableCache.from_config):
        with pytest.raises(InputError, match=words):
            call(config, LENGTH)
    # Building two layers takes longer than that.
    assert time.thread_time() - start < 1


def test_plan_looks_into_the_configs_inside():
    config = AutoConfig.for_model("t5", num_layers=1, num_decoder_layers=10**6)
    with pytest.raises(InputError, match="num_decoder_layers in .* got 1000000"):
        plan(config, LENGTH)
    config = AutoConfig.for_model("llava")
    config.text_config.num_hidden_layers = 0
    with pytest.raises(InputError, match="text_config.num_hidden_layers in .* got 0"):
        plan(config, LENGTH)


def test_the_length_is_1024_by_default_or_the_models_positions():
    config = tiny_model("llama").config
    config.max_position_embeddings = 4096
    assert plan(config).max_cache_len == 1024
    config.max_position_embeddings = 96
    assert plan(config).cache_bytes == plan(config, 96).cache_bytes


def test_plan_is_json():
    made = plan(tiny_model("gemma2"), LENGTH)
    read = json.loads(json.dumps(made.to_dict()))
    assert read["cache_bytes"] == sum(layer["bytes"] for layer in read["layers"]) == made.cache_bytes
    assert read["max_cache_len"] == LENGTH


def test_plan_refuses_layers_without_a_static_cache_in_a_sentence():
    made = plan(AutoConfig.for_model("qwen3", num_hidden_layers=1, layer_types=["window_attention"]), LENGTH)
    assert made.layers == () and made.cache_bytes is None and made.dynamic_bytes is None
    assert "layer 0" in made.refusal and "qwen3" in made.refusal and "full_attention" in made.refusal


def test_plan_of_states_does_not_grow_with_the_length():
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    made = plan(config, LENGTH)
    # Per layer: 32 channels x kernel of 4, 32 channels x 4 states, both float32, and the length.
    assert [layer.bytes for layer in made.layers] == [4 * 32 * 4 + 4 * 32 * 4 + 8] * 2
    assert {(layer.policy, layer.slots, layer.heads, layer.dtype) for layer in made.layers} == {
        ("recurrent", None, None, "float32")
    }
    assert made.cache_bytes == plan(config, 2 * LENGTH).cache_bytes and made.max_length is None
    assert made.dynamic_bytes == made.cache_bytes - 2 * 8


def test_plan_of_layers_that_share_their_keys():
    config = AutoConfig.for_model(
        "gemma3n_text", vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_kv_shared_layers=2, laurel_rank=4, altup_num_inputs=2, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    assert [(layer.policy, layer.bytes) for layer in plan(config, LENGTH).layers[2:]] == [("none", 0)] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_cache_len": 0}, ("max_cache_len", "0", "at least 1")),
        ({"max_cache_len": True}, ("max_cache_len", "True", "int")),
        ({"max_cache_len": LENGTH, "batch_size": -2}, ("batch_size", "-2", "at least 1")),
        ({"max_cache_len": LENGTH, "dtype": "int8"}, ("dtype", "int8", "float32")),
        ({"max_cache_len": LENGTH, "dtype": "float3"}, ("dtype", "float3", "float32")),
    ],
)
def test_plan_names_the_bad_value_and_the_remedy(arguments, words):
    with pytest.raises(InputError) as caught:
        plan(tiny_model("llama").config, **arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [{"kv_dtype": "int8"}, {"attention_sinks": 2, "attention_window": 6}, {"attention_sinks": 3, "kv_dtype": "int8"}],
)
def test_plan_takes_the_options_of_the_cache(family, options):
    model = tiny_model(family)
    made = plan(model, LENGTH, 2, **options)
    cache = ExportableCache.from_model(model, LENGTH, 2, **options)
    assert [layer.bytes for layer in made.layers] == [layer.nbytes for layer in cache.layers]
    assert [layer.policy for layer in made.layers] == [layer.label for layer in cache.layers]
    assert made.max_length == cache.max_length
    assert made.layers[1].window == (
        None if "attention_sinks" not in options else 8 if "attention_window" in options else LENGTH
    )
    assert made.layers[1].dtype == ("int8" if "kv_dtype" in options else "float32")


def test_plan_refuses_options_as_the_cache_does():
    with pytest.raises(InputError, match="kv_dtype must be one of .*, got 'int2'"):
        plan(tiny_model("llama"), LENGTH, kv_dtype="int2")
    with pytest.raises(InputError, match="there are no attention_sinks"):
        plan(tiny_model("llama"), LENGTH, attention_window=4)
    assert (
        "position bias"
        in plan(AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2), LENGTH, attention_sinks=2).refusal
    )


def test_plan_of_several_ranks():
    config = tiny_model("gemma3_text").config
    whole, made = plan(config, 64), plan(config, 64, tensor_parallel=2)
    ranks = made.tensor_parallel
    assert made.cache_bytes == whole.cache_bytes and whole.tensor_parallel is None
    lengths = 8 * len(made.layers)
    assert ranks.split_layers == (0, 1) and ranks.replicated_bytes == lengths
    assert ranks.cache_bytes == lengths + (whole.cache_bytes - lengths) // 2
    # Sums of each layer and of the embedding, the logits, and the token.
    assert (ranks.messages, ranks.sums) == (2 * 2 + 1 + 1 + 1, 2 * 2 + 1)
    assert json.loads(json.dumps(made.to_dict()))["tensor_parallel"]["ranks"] == 2


def test_plan_of_more_ranks_than_key_and_value_heads():
    config = tiny_model("llama").config
    two, four = (plan(config, 64, tensor_parallel=ranks).tensor_parallel for ranks in (2, 4))
    # Each of its two heads is kept by two ranks.
    assert two.cache_bytes == four.cache_bytes


@pytest.mark.parametrize("ranks", [0, 1, True, 2.0, 3, 8])
def test_plan_refuses_ranks_that_cannot_have_equal_parts(ranks):
    words = {3: "2 and 4 heads; use 1 or 2", 8: "of 4 heads; use 1 or 2 or 4"}.get(ranks, "int of at least 2")
    with pytest.raises(InputError, match=words):
        plan(tiny_model("llama").config, 64, tensor_parallel=ranks)


def test_plan_of_several_ranks_needs_a_plan_of_transformers():
    with pytest.raises(UnsupportedModelError, match="no tensor parallel plan"):
        config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
        plan(config, 64, tensor_parallel=2)


def test_plan_refuses_ranks_of_models_that_are_wrong_when_split():
    config = AutoConfig.for_model("hrm_text")
    with pytest.raises(UnsupportedModelError, match="'hrm_text' gives other logits"):
        check_type(config)


@pytest.mark.parametrize("split", [{}, {"tensor_parallel": 2}])
def test_the_largest_context_that_fits_a_given_memory(split):
    config = tiny_model("gemma3_text").config
    made = plan(config, 64, memory="1M", **split)

    def taken(tokens):
        found = plan(config, tokens, **split)
        ranks = found.tensor_parallel or found
        return ranks.weights_bytes + ranks.cache_bytes

    assert made.memory == 1 << 20
    assert taken(made.longest) <= made.memory < taken(made.longest + 1)
    assert plan(config, 64, memory=1000).longest == 0
    assert json.loads(json.dumps(made.to_dict()))["longest"] == made.longest


def test_only_rings_fit_any_number_of_tokens():
    assert plan(tiny_model("mistral").config, 64, memory="1G").longest == MOST_TOKENS


@pytest.mark.parametrize("memory", ["0", "16X", "-1", "", True])
def test_what_is_no_memory(memory):
    with pytest.raises(InputError, match="a size such as 800M or 16G"):
        plan(tiny_model("llama").config, 64, memory=memory)
