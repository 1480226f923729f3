"""The cache as transformers sees it: in a model call, in `generate`, in somebody's own loop; its
state and its limits.
"""

import json

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache

from exportable_cache import ExportableCache
from exportable_cache.cache.attention.functions import ATTENTION
from exportable_cache.common.compat.transformers import cache_argument
from exportable_cache.errors import BundleError, CacheFullError, InputError, UnsupportedModelError
from exportable_cache.models.layers.specs import layer_types_and_windows

from .support.layers import full_layer
from .support.models import FAMILIES, WINDOW, tiny_model, tokens
from .support.oracle import difference, reference_logits

TOLERANCE = 1e-4


def cache_of(model, max_cache_len: int = 96, **options) -> ExportableCache:
    return ExportableCache.from_config(model.config, max_cache_len=max_cache_len, **options)


def step_with(model, cache):
    return lambda ids: model(ids, **{cache_argument(model): cache}).logits[:, -1]


def snapshot(cache: ExportableCache) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in cache.named_state()}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_picked_by_layer_type(family: str) -> None:
    model = tiny_model(family)
    expected = {
        "llama": ["full", "full"],
        "qwen3": ["full", "full"],
        "mistral": ["ring", "ring"],
        "phi3": ["ring", "ring"],
    }.get(family, ["ring", "full"])
    by_config = cache_of(model, batch_size=2)
    by_model = ExportableCache.from_model(model, max_cache_len=96, batch_size=2)
    for cache in (by_config, by_model):
        assert [layer.label for layer in cache.layers] == expected
        assert [layer.capacity for layer in cache.layers] == [WINDOW if kind == "ring" else 96 for kind in expected]
    shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in by_config.named_state()]
    assert shapes == [(name, tensor.shape, tensor.dtype) for name, tensor in by_model.named_state()]


def test_a_window_larger_than_the_cache_needs_no_ring() -> None:
    model = tiny_model("mistral", sliding_window=64)
    cache = cache_of(model, max_cache_len=32)
    assert [layer.label for layer in cache.layers] == ["full", "full"]
    ids = tokens(30)
    assert difference(step_with(model, cache), reference_logits(model, ids, 9), ids, 9) <= TOLERANCE


def test_key_and_value_head_dims_may_differ() -> None:
    """DeepSeek V3 keeps the latent in the keys and the rotated part in the values: one head, two sizes."""
    model = tiny_model(
        "deepseek_v3",
        num_key_value_heads=4, head_dim=None, q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, first_k_dense_replace=2,
    )  # fmt: skip
    cache = cache_of(model)
    assert [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers] == [(24, 8), (24, 8)]
    ids = tokens(40)
    assert difference(step_with(model, cache), reference_logits(model, ids, 9), ids, 9) <= TOLERANCE


#: One layer before, two in each of three loops, one after.
LOOPS = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "n_recurrent_loops": 3}
LOOPED_TYPES = ["full_attention", "sliding_attention", "full_attention", "full_attention"]


def looped_config(**options):
    """A config with the fields of Dory, which transformers has from 5.24 on."""
    config = AutoConfig.for_model("mistral", num_hidden_layers=4, sliding_window=WINDOW, layer_types=LOOPED_TYPES)
    config.model_type = "dory"
    for name, value in {**LOOPS, "recurrent_kv_cache_mode": "per_loop", **options}.items():
        setattr(config, name, value)
    return config


def test_each_further_loop_over_layers_has_layers_of_its_own() -> None:
    full, ring = ("full_attention", None), ("sliding_attention", WINDOW)
    assert layer_types_and_windows(looped_config()) == [full, ring, full, full, *[ring, full] * 2]
    assert len(layer_types_and_windows(looped_config(n_recurrent_loops=1, recurrent_kv_cache_mode="last_loop"))) == 4
    with pytest.raises(UnsupportedModelError, match="recurrent_kv_cache_mode .* must be 'per_loop' .* got 'last_loop'"):
        layer_types_and_windows(looped_config(recurrent_kv_cache_mode="last_loop"))


def test_inkling_2_mini_has_layers_for_each_further_pass() -> None:
    config = looped_config(loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=3)
    config.model_type = "inkling2_loop_text"
    full, ring = ("full_attention", None), ("sliding_attention", WINDOW)
    assert layer_types_and_windows(config) == [full, ring, full, full, *[ring, full] * 2]


@pytest.mark.skipif("dory" not in CONFIG_MAPPING, reason="transformers has Dory from 5.24 on")
def test_a_model_that_loops_over_its_layers() -> None:
    model = tiny_model("dory", **LOOPS, num_hidden_layers=4, sliding_window=WINDOW, layer_types=LOOPED_TYPES)
    cache, ids = cache_of(model), tokens(40)
    assert len(cache.layers) == 8
    assert difference(step_with(model, cache), reference_logits(model, ids, 9), ids, 9) <= TOLERANCE
    assert len(cache.layers) == 8


@pytest.mark.parametrize("implementation", [ATTENTION, "eager", "sdpa"])
@pytest.mark.parametrize("prompt", [3, 7, 8, 9, 40])
def test_mistral_in_a_plain_loop(implementation: str, prompt: int) -> None:
    model = tiny_model("mistral")
    ids = tokens(prompt + 40)
    reference = reference_logits(model, ids, prompt)
    cache = cache_of(model, attn_implementation=implementation)
    assert difference(step_with(model, cache), reference, ids, prompt) <= TOLERANCE


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
def test_prefill_may_continue(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(60)
    reference = reference_logits(model, ids, 60)[:, 0]
    cache, step = cache_of(model), None
    step = step_with(model, cache)
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 20), (20, 28), (28, 60)):
            last = step(ids[:, start:stop])
    assert (last - reference).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_the_tokens_of_dynamic_cache(family: str, beams: int) -> None:
    model = tiny_model(family)
    ids = tokens(11)
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    cache = cache_of(model, batch_size=beams)
    assert model.generate(ids, past_key_values=cache, **options).tolist() == expected.tolist()
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_rows_alone(family: str, side: str) -> None:
    """Prompts of 12 and 5 tokens in one batch, then 20 tokens each, past the window."""
    model = tiny_model(family)
    width, lengths, steps = 12, [12, 5], 20
    rows = [tokens(length + steps, seed=length) for length in lengths]
    references = [reference_logits(model, row, length) for row, length in zip(rows, lengths, strict=True)]
    cache = cache_of(model, batch_size=2)
    prompt, mask = torch.zeros(2, width, dtype=torch.int64), torch.zeros(2, width + steps, dtype=torch.int64)
    for row, length in enumerate(lengths):
        start = width - length if side == "left" else 0
        prompt[row, start : start + length] = rows[row][0, :length]
        mask[row, start : start + length] = 1
    mask[:, width:] = 1
    last = [width - 1 if side == "left" else length - 1 for length in lengths]
    with torch.no_grad():
        positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
        output = model(prompt, attention_mask=mask[:, :width], position_ids=positions, past_key_values=cache).logits
        got = [[output[row, last[row]]] for row in range(2)]
        for step in range(steps):
            token = torch.stack([rows[row][0, length + step] for row, length in enumerate(lengths)])[:, None]
            seen = mask[:, : width + step + 1]
            positions = torch.tensor(lengths)[:, None] + step
            output = model(token, attention_mask=seen, position_ids=positions, past_key_values=cache).logits
            for row in range(2):
                got[row].append(output[row, -1])
    compared = steps + 1
    for row in range(2):
        # A sliding window counts the pads between a right-padded prompt and its continuation: only full layers look
        # past.
        if side == "right" and family != "llama" and lengths[row] < width:
            compared = 1
        gap = (torch.stack(got[row])[:compared] - references[row][0, :compared]).abs().max()
        assert gap <= TOLERANCE, (row, gap)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
def test_ragged_rows_equal_the_rows_alone(family: str) -> None:
    """Rows at 14, 3 and 9 tokens, each with its own length, decoded together past the window."""
    model = tiny_model(family)
    lengths, steps = [14, 3, 9], 20
    rows = [tokens(length + steps, seed=length) for length in lengths]
    cache = cache_of(model, batch_size=3)
    with torch.no_grad():
        for row, length in enumerate(lengths):
            alone = cache_of(model)
            model(rows[row][:, :length], past_key_values=alone)
            for (_, whole), (_, single) in zip(cache.named_state(), alone.named_state(), strict=True):
                whole[row] = single[0]
        worst = 0.0
        references = [reference_logits(model, row, length) for row, length in zip(rows, lengths, strict=True)]
        for step in range(steps):
            token = torch.stack([rows[row][0, length + step] for row, length in enumerate(lengths)])[:, None]
            positions = torch.tensor(lengths)[:, None] + step
            logits = model(token, position_ids=positions, past_key_values=cache).logits[:, -1]
            worst = max(worst, *((logits[row] - references[row][0, step + 1]).abs().max().item() for row in range(3)))
    assert worst <= TOLERANCE
    assert cache.cumulative_length.tolist() == [length + steps for length in lengths]
    with pytest.raises(InputError, match="pass position_ids"):
        cache.get_seq_length()


def test_crop_then_continue_equals_never_having_gone_there() -> None:
    model = tiny_model("gemma3_text")
    ids = tokens(40)
    cache = cache_of(model, rollback_slots=4)
    step = step_with(model, cache)
    reference = reference_logits(model, ids, 20)
    with torch.no_grad():
        step(ids[:, :20])
        step(tokens(5, seed=9))
        cache.crop(-5)
        assert cache.get_seq_length() == 20
        for position in range(20, 40):
            logits = step(ids[:, position : position + 1])
            assert (logits - reference[:, position - 19]).abs().max() <= TOLERANCE


def test_crop_of_one_layer_that_cannot_leaves_all_alone() -> None:
    model = tiny_model("gemma3_text")
    cache = cache_of(model)
    with torch.no_grad():
        step_with(model, cache)(tokens(20))
    before = snapshot(cache)
    with pytest.raises(InputError, match="at most 1"):
        cache.crop(-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())


def test_save_load_one_more_step(tmp_path) -> None:
    model = tiny_model("gemma2")
    cache = cache_of(model)
    ids = tokens(25)
    with torch.no_grad():
        step_with(model, cache)(ids[:, :24])
        cache.save(tmp_path / "prefix.safetensors")
        expected = step_with(model, cache)(ids[:, 24:])
        loaded = ExportableCache.load(tmp_path / "prefix.safetensors")
        assert torch.equal(step_with(model, loaded)(ids[:, 24:]), expected)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(cache.named_state(), loaded.named_state(), strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prefix.safetensors"]


def test_a_damaged_or_foreign_file_is_refused(tmp_path) -> None:
    path = tmp_path / "prefix.safetensors"
    with pytest.raises(BundleError, match="cannot read"):
        ExportableCache.load(path)
    cache_of(tiny_model("llama")).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(BundleError, match="cannot read"):
        ExportableCache.load(path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(BundleError, match="was not written by save"):
        ExportableCache.load(path)


def test_a_full_cache_refuses_the_step_before_touching_state() -> None:
    model = tiny_model("gemma3_text")
    cache = cache_of(model, max_cache_len=12)
    ids = tokens(13)
    with torch.no_grad():
        step_with(model, cache)(ids[:, :12])
        before = snapshot(cache)
        with pytest.raises(CacheFullError, match="holds 12 of at most 12 tokens, 1 more do not fit"):
            step_with(model, cache)(ids[:, 12:])
        assert all(torch.equal(tensor, before[name]) for name, tensor in cache.named_state())
        cache.reset()
        with pytest.raises(CacheFullError, match="holds 0 of at most 12 tokens, 13 more"):
            step_with(model, cache)(ids)
        assert not any(tensor.any() for _, tensor in cache.named_state())


def test_rings_alone_have_no_limit() -> None:
    assert cache_of(tiny_model("mistral")).max_length is None
    assert cache_of(tiny_model("gemma3_text")).max_length == 96
    assert cache_of(tiny_model("mistral")).nbytes == cache_of(tiny_model("mistral"), max_cache_len=4096).nbytes


def test_pytree_keys_and_constant_spec() -> None:
    model = tiny_model("gemma3_text")
    cache = cache_of(model)
    leaves, spec = pytree.tree_flatten_with_path(cache)
    assert [pytree.keystr(path) for path, _ in leaves][:4] == [
        ".layers[0].keys",
        ".layers[0].values",
        ".layers[0].cumulative_length",
        ".layers[1].keys",
    ]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    json.loads(pytree.treespec_dumps(spec))
    with torch.no_grad():
        for count in (9, 1, 1, 7):
            step_with(model, cache)(tokens(count))
            assert pytree.tree_structure(cache) == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_cache_len": 0}, "max_cache_len must be .*, got 0"),
        ({"max_cache_len": 8.5}, "max_cache_len must be .*, got 8.5"),
        ({"batch_size": 0}, "batch_size must be .*, got 0"),
        ({"dtype": torch.int8}, "torch.int8"),
        ({"rollback_slots": -1}, "rollback_slots must be an int of at least 0, got -1"),
    ],
)
def test_bad_sizes(options: dict, message: str) -> None:
    model = tiny_model("mistral", sliding_window=4)
    with pytest.raises(InputError, match=message):
        cache_of(model, **options)
    assert model.config._attn_implementation == "eager"


def test_bad_models() -> None:
    with pytest.raises(InputError, match="pass model.config"):
        ExportableCache.from_config({"model_type": "llama"}, max_cache_len=8)
    with pytest.raises(UnsupportedModelError, match="layer 0 of this 'qwen3' model is of type"):
        ExportableCache.from_config(
            AutoConfig.for_model("qwen3", num_hidden_layers=1, layer_types=["window_attention"]), max_cache_len=8
        )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        ExportableCache.from_config(AutoConfig.for_model("t5", num_layers=1), max_cache_len=8)
    with pytest.raises(InputError, match="at least one layer"):
        ExportableCache([])
    with pytest.raises(InputError, match="layers must be CacheLayers, got a str at index 0"):
        ExportableCache(["layer"])
    with pytest.raises(InputError, match=r"layers must have one batch size, got \[1, 2\]"):
        ExportableCache([full_layer(1, 1, 1, 1), full_layer(2, 1, 1, 1)])


def test_wrong_batch_and_dtype_are_refused_by_the_first_layer() -> None:
    model = tiny_model("llama")
    cache = cache_of(model)
    with torch.no_grad(), pytest.raises(InputError, match="allocated for"):
        step_with(model, cache)(tokens(3, batch_size=2))
    cache = cache_of(model, dtype=torch.bfloat16)
    with torch.no_grad(), pytest.raises(InputError, match="allocate it with dtype=torch.float32"):
        step_with(model, cache)(tokens(3))


def test_too_much_memory_is_a_sentence() -> None:
    model = tiny_model("llama")
    for length in (10**13, 99999999999999999999):
        with pytest.raises(InputError, match="cannot allocate keys of a cache layer, .* pass a smaller max_cache_len"):
            cache_of(model, max_cache_len=length)


@pytest.mark.parametrize("implementation", ["eager", ATTENTION])
def test_a_loaded_batch_works_under_any_attention(implementation: str, tmp_path) -> None:
    model = tiny_model("mistral")
    ids = tokens(14, batch_size=2)
    cache = cache_of(model, batch_size=2, attn_implementation=implementation)
    with torch.no_grad():
        step_with(model, cache)(ids[:, :9])
        cache.save(tmp_path / "batch.safetensors")
        loaded = ExportableCache.load(tmp_path / "batch.safetensors")
        for position in range(9, 14):
            piece = ids[:, position : position + 1]
            assert (step_with(model, loaded)(piece) - step_with(model, cache)(piece)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("falcon", {"alibi": True}, "'falcon' with alibi=True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "with use_bidirectional_attention=True"),
        ("xlm", {}, "'xlm' with causal=False cannot use a static cache: its tokens see later ones"),
    ],
)
def test_models_that_no_static_cache_fits(model_type: str, options: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ExportableCache.from_config(AutoConfig.for_model(model_type, **options), max_cache_len=8)
