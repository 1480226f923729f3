"""Modules that are wrong over a static cache, or keep their state elsewhere: right with a patch, wrong without it."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.common.patch import ORIGINAL
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.loading.support import WITHOUT_DYNAMIC_CACHE
from exportable_cache.models.patches.registry import PATCHES, patch_model
from exportable_cache.verification.verify import verify_session

from ..zoo.architectures import architectures
from ..zoo.build import STEPS, cached_logits, tiny_model, tokens
from ..zoo.check import check

#: Model type -> the patched class it shows.
SHOWN = {
    "deepseek_v4": "DeepseekV4CSACompressor",
    "fsmt": "FSMTDecoder",
    "gemma4_unified": "Gemma4UnifiedModel",
    "gpt_neo": "GPTNeoSelfAttention",
    "led": "LEDDecoderAttention",
    "minimax": "MiniMaxLightningAttention",
    "moonshine_streaming": "MoonshineStreamingDecoder",
    "moshi": "MoshiModel",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "prophetnet": "ProphetNetDecoder",
    "qwen4_exp_text": "Qwen4ExpTextQSAIndexer",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvForCausalLM",
    "xlm": "XLMWithLMHeadModel",
    "xlstm": "xLSTMModel",
}
DECODERS = ["gpt_neo", "minimax", "recurrent_gemma", "openai-gpt", "rwkv", "xlstm", "qwen4_exp_text", "deepseek_v4"]
#: Of these the fast tests take one of each kind.
ALWAYS = ("gpt_neo", "minimax", "openai-gpt", "recurrent_gemma", "rwkv", "led", "moonshine_streaming")


def shown(names):
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in names]


def row_of(model_type: str):
    return next(row for row in architectures() if row.model_type == model_type)


def outcome(model_type: str) -> dict:
    facts: dict = {}
    check(row_of(model_type), ["eager"], facts.update)
    return facts["targets"]["eager"]


@pytest.mark.parametrize("model_type", shown(SHOWN))
def test_patched_it_is_the_model(model_type: str) -> None:
    found = outcome(model_type)
    assert found["status"] == "pass", found


@pytest.mark.parametrize("model_type", shown(SHOWN))
def test_the_original_still_is_not(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once upstream is right: then the family's entry in PATCHES can go."""
    model = tiny_model(row_of(model_type))
    assert SHOWN[model_type] in patch_model(model)
    (kind,) = {type(module) for module in model.modules() if type(module).__name__ == SHOWN[model_type]}
    monkeypatch.setattr(kind, "forward", getattr(kind.forward, ORIGINAL))
    others = tuple(patch for patch in PATCHES[model_type] if patch.label != SHOWN[model_type])
    monkeypatch.setitem(PATCHES, model_type, others)
    assert outcome(model_type)["status"] != "pass"


def test_every_patch_is_shown() -> None:
    labels = {patch.label for model_type in SHOWN for patch in PATCHES[model_type]}
    # The first four go with another of the same model; LED's others are for tracing, the last has a test of its own.
    others = {
        "DeepseekV4HCACompressor",
        "DeepseekV4Model",
        "MiniMaxModel",
        "RecurrentGemmaModel",
        "LEDEncoder",
        "LEDLearnedPositionalEmbedding",
    }
    assert labels - set(SHOWN.values()) - others == {"Qwen4ExpTextNGramEmbedding", "torch_chunk_gated_delta_rule"}


@pytest.mark.parametrize("model_type", shown(DECODERS))
def test_two_rows_are_each_row_alone(model_type: str) -> None:
    model = tiny_model(row_of(model_type))
    ids = torch.cat([tokens(seed=0), tokens(seed=1)])
    if model_type in WITHOUT_DYNAMIC_CACHE:
        expected = torch.stack(
            [model(ids[row : row + 1], use_cache=False).logits[0, 5 : 6 + STEPS] for row in range(2)]
        )
    else:
        expected = torch.stack([cached_logits(model, ids[row : row + 1], 6) for row in range(2)])
    session = Session.from_model(model, ExportableCache.from_model(model, 64, batch_size=2), prefill_chunk=16)
    rows = [session.prefill(ids[:, :6])] + [session.decode(ids[:, at]) for at in range(6, 6 + STEPS)]
    assert (torch.stack(rows, 1) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("model_type", ["gpt_neo", "recurrent_gemma"])
def test_a_cache_from_the_config_is_the_one_from_the_model(model_type: str) -> None:
    model = tiny_model(row_of(model_type))
    from_config = ExportableCache.from_config(model.config, 32, attn_implementation=None)
    assert repr(from_config) == repr(ExportableCache.from_model(model, 32, attn_implementation=None))


@pytest.mark.parametrize("model_type", shown(DECODERS))
@torch.no_grad()
def test_transformers_own_caches_go_to_the_original(model_type: str) -> None:
    model, ids = tiny_model(row_of(model_type)), tokens()[:, :12]
    before = model(ids, use_cache=True).logits
    patch_model(model)
    assert torch.equal(model(ids, use_cache=True).logits, before)


@pytest.mark.full
def test_without_its_patch_the_n_grams_of_qwen4_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros stand for the end of text in its state, and for a token in upstream's."""
    model = tiny_model(row_of("qwen4_exp_text"))
    patch_model(model)
    kind = type(model.model.layers[0].ple.ple_embedding)
    assert kind.__name__ == "Qwen4ExpTextNGramEmbedding"
    monkeypatch.setattr(kind, "forward", getattr(kind.forward, ORIGINAL))
    others = tuple(patch for patch in PATCHES["qwen4_exp_text"] if patch.label != kind.__name__)
    monkeypatch.setitem(PATCHES, "qwen4_exp_text", others)
    assert outcome("qwen4_exp_text")["status"] != "pass"


@pytest.mark.parametrize("model_type", shown(["openai-gpt", "rwkv", "xlm", "xlstm", "minimax", "moshi", "prophetnet"]))
def test_what_they_are_verified_with_is_their_own(model_type: str) -> None:
    """Without a cache of transformers, or token by token where several in one call are another model."""
    model = tiny_model(row_of(model_type))
    session = Session.from_model(model, ExportableCache.from_model(model, 64), prefill_chunk=16)
    assert verify_session(session, model, prompts=[11], decode_steps=3).passed


def test_a_cache_in_8_bits_has_nothing_to_be_compared_with() -> None:
    model = tiny_model(row_of("openai-gpt"))
    session = Session.from_model(model, ExportableCache.from_model(model, 64, kv_dtype="int8"), prefill_chunk=16)
    with pytest.raises(UnsupportedModelError, match="nothing to compare kv_dtype with.*verify=False"):
        verify_session(session, model, prompts=[5], decode_steps=1)


def test_a_state_counts_in_plain_use() -> None:
    """xLSTM has no convolution, whose inputs are counted elsewhere."""
    model = tiny_model(row_of("xlstm"))
    cache = ExportableCache.from_model(model, 64)
    with torch.no_grad():
        for count in (5, 1):
            model(tokens()[:, :count], cache_params=cache)
    assert cache.get_seq_length() == 6


def test_prophetnets_buckets_are_those_of_upstream() -> None:
    from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

    from exportable_cache.models.patches.families.prophetnet import _buckets

    relative = torch.arange(-700, 50)
    for count, most in ((32, 128), (8, 16), (6, 40)):
        expected = compute_relative_buckets(count, most, relative, False)
        assert torch.equal(_buckets(relative, count, most), expected.long())


def test_a_saved_model_of_speech_is_built_as_one() -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, SeamlessM4TConfig

    from exportable_cache.models.loading.loading import auto_class

    config = SeamlessM4TConfig(architectures=["SeamlessM4TForSpeechToText"])
    assert auto_class(config) is AutoModelForSpeechSeq2Seq
    assert auto_class(SeamlessM4TConfig(architectures=["SeamlessM4TForTextToText"])) is AutoModelForSeq2SeqLM
    assert auto_class(SeamlessM4TConfig()) is AutoModelForSeq2SeqLM


def test_an_encoder_that_is_wrong_in_float16_is_refused() -> None:
    from exportable_cache.models.layers.encoder import encoder_of

    model = SimpleNamespace(config=SimpleNamespace(model_type="longt5"), dtype=torch.float16)
    with (
        mock.patch("exportable_cache.models.layers.encoder._input_of"),
        pytest.raises(
            UnsupportedModelError, match="in float16: its encoder adds -1e10.*load it in bfloat16 or float32"
        ),
    ):
        encoder_of(model)
