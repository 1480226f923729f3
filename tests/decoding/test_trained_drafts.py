"""Trained drafts: MTP modules predict as in transformers, and never change what the model generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.manifest import Acceptance
from exportable_cache.cli.runtime import check_head
from exportable_cache.decoding import (
    Completer,
    CompletionOptions,
    DraftModel,
    Piece,
    Sampler,
    Sampling,
    SpeculationStatistics,
    TrainedDraft,
    generate_speculative,
)
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.generation.speculative import Proposal, _judge
from exportable_cache.models.draft_heads import attach_head, attach_predictor, draft_head_of
from exportable_cache.models.eagle import EagleModel, load_eagle
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.models.rotations import find_rotations
from exportable_cache.session.native import NativeSession
from exportable_cache.session.opening import Use
from exportable_cache_runner.library import found_library

from ..support.distributions import check_draws
from ..support.drafts import KNOWN, eagle_folder, sometimes_right_eagle
from ..support.forked import run_python
from ..support.letters import letter_tokenizer
from ..support.models import WINDOW, tiny_model, tokens

_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: Config fields by model type: latent attention, several modules, a sliding window.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_EXPERTS, **_LATENTS, "num_mtp_layers": 1},
    "glm4_moe": {**_EXPERTS, "num_mtp_layers": 2},
    "mellum": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_mtp_layers": 1,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
}


def model_and_mtp(family: str, **overrides: Any) -> tuple[PreTrainedModel, MtpModel]:
    """Return a tiny model and random MTP modules for it, which are not attached."""
    model = tiny_model(family, **{**FAMILIES[family], **overrides})
    mtp = MtpModel(model, model.config.num_mtp_layers).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            values = 0.3 * torch.randn_like(parameter)
            parameter.copy_(values if parameter.dim() > 1 else 1 + values / 3)
    return model, mtp


def agreeing_model(family: str = "glm4_moe", **overrides: Any) -> PreTrainedModel:
    """Return a model whose next token depends on the last one only, with MTP modules that compute the same."""
    model, mtp = model_and_mtp(family, **overrides)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *mtp.layers.named_parameters()]:
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
        for layer in mtp.layers:
            half = layer.eh_proj.out_features
            layer.eh_proj.weight.copy_(torch.cat([torch.eye(half), torch.zeros(half, half)], dim=1))
    attach_predictor(model, mtp)
    return model


def sometimes_right_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a model whose MTP modules propose a right token sometimes."""
    model = agreeing_model(family, **overrides)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.draft_head.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def drafted(session: Session, prompt: torch.Tensor, count: int, draft: TrainedDraft) -> tuple[list[int], Any]:
    """Return generated tokens and the counts of proposals."""
    statistics = SpeculationStatistics()
    chooser = Sampler(Sampling(), prompt, session.vocab_size)
    return list(generate_speculative(session, prompt, count, chooser, (), draft, statistics)), statistics


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_predict_as_in_transformers(family: str) -> None:
    """After a prompt in chunks, single tokens, rejected proposals and a rollback, past the window."""
    model, mtp = model_and_mtp(family)
    ids, count = tokens(30), model.config.num_mtp_layers
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=-1).hidden_states[-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        following = torch.cat([ids[:, 1:], torch.tensor([[7]])], dim=1)
        wanted, logits, _ = mtp(following, hidden, None, torch.arange(1, 31)[None], cache)
        if count == 1:
            # The module again, from its own state in place of the model's.
            state = mtp.forward_layer(
                0, hidden, torch.arange(1, 31)[None], MtpCache(config=mtp.config), input_ids=following
            )
            inputs = torch.cat([hidden, state[:, -1:]], dim=1), torch.arange(1, 32)[None], MtpCache(config=mtp.config)
            state = mtp.forward_layer(0, *inputs, input_ids=torch.cat([following, wanted], dim=1))
            logits = torch.cat([logits, mtp.shared_head(state[:, -1:])], dim=1)
    attach_predictor(model, mtp)
    session = Session.from_model(model, max_cache_len=64, prefill_chunk=12)
    session.prefill(ids[:, :25])
    session.decode(ids[0, 25:26])
    session.stepper.draft(5, 0), session.stepper.draft(9, 1)
    session.score(torch.cat([ids[:, 26:30], tokens(3, seed=5)], dim=1))
    session.rewind(3)
    for link, token in enumerate([7, int(wanted[0, 0])]):
        found = session.stepper.draft(token, link)
        assert (found - logits[:, link]).abs().max() < 1e-4
    assert session.length.tolist() == [30]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_plain_decoding(family: str) -> None:
    model, mtp = model_and_mtp(family)
    prompt = tokens(20)
    expected = list(Session.from_model(model, max_cache_len=96).generate(prompt, 20))
    attach_predictor(model, mtp)
    session = Session.from_model(model, max_cache_len=96)
    assert len(session.layers) == 2 + model.config.num_mtp_layers
    found, statistics = drafted(session, prompt, 20, TrainedDraft(session))
    assert found == expected and statistics.proposed > 15
    session.reset()
    assert list(session.generate(prompt, 20)) == expected


@pytest.mark.parametrize("compile", [False, pytest.param("wait", marks=pytest.mark.full)])
def test_modules_that_agree_are_always_right(compile: bool | str) -> None:
    model = agreeing_model()
    prompt = tokens(20)
    session = Session.from_model(model, max_cache_len=96, compile=compile)
    found, statistics = drafted(session, prompt, 41, TrainedDraft(session, 4))
    assert statistics.accepted == statistics.proposed == 32 and statistics.steps == 8
    session.reset()
    assert found == list(session.generate(prompt, 41))


@pytest.mark.parametrize(
    ("target", "family", "overrides"),
    [
        ("executorch", "eagle", {}),
        pytest.param("executorch", "deepseek_v3", {"first_k_dense_replace": 9}, marks=pytest.mark.full),
        pytest.param("executorch", "mellum", {}, marks=pytest.mark.full),
        pytest.param("pt2", "eagle", {"family": "qwen3"}, marks=pytest.mark.full),
        pytest.param("executorch", "glm4_moe", {"num_mtp_layers": 2}, marks=pytest.mark.full),
        pytest.param("pt2", "glm4_moe", {"num_mtp_layers": 1}, marks=pytest.mark.full),
    ],
)
def test_a_bundle_proposes_as_the_live_model(
    target: str, family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """After a prompt, single tokens, rejected proposals and a rollback, past the window."""
    prompt, ids, draft = tokens(20), tokens(30), "mtp"
    if family == "eagle":
        draft = str(tmp_path / "head")
        model = sometimes_right_eagle(tmp_path / "head", **overrides)
    else:
        model = sometimes_right_model(family, **overrides)
    text = tmp_path / "text.txt"
    text.write_text("a cat sat on the mat, and a dog sat by it. " * 20)
    sizes = {"max_cache_len": 96, "rollback_slots": 4, "draft_text": text, "tokenizer": letter_tokenizer()}
    bundle = export(model, target, output_dir=tmp_path / "bundle", draft=draft, **sizes)
    record = bundle.manifest.draft
    assert record is not None and record.head == Path(draft).name and record.acceptance is not None
    measured = record.acceptance
    # Each of the eight generations has one token of its prompt, and fills the cache with and after its prompt.
    assert measured.tokens == 8 * 47 == sum(measured.accepted) + measured.steps
    assert len(measured.accepted) == 3 and 0 < measured.accepted[2] < measured.accepted[0] < measured.proposed[0]
    assert f"{measured.tokens / measured.steps:.2f} tokens per step" in str(measured)
    session, live = load(bundle.path), Session.from_model(model, max_cache_len=96)
    assert session.score_length == 4
    found = []
    for one in (session, live):
        one.prefill(ids[:, :25])
        one.decode(ids[0, 25:26])
        one.stepper.draft(5, 0), one.stepper.draft(9, 1)
        one.score(torch.cat([ids[:, 26:28], tokens(2, seed=5)], dim=1))
        one.rewind(2)
        found.append(torch.stack([one.stepper.draft(7 + link, link)[0] for link in range(3)]))
        one.reset()
    assert (found[0] - found[1]).abs().max() < 1e-4
    expected = list(live.generate(prompt, 60))
    live.reset()
    speculated = [drafted(one, prompt, 60, TrainedDraft(one, 3)) for one in (session, live)]
    assert speculated[0] == speculated[1] and speculated[0][0] == expected
    statistics = speculated[0][1]
    assert 20 < statistics.accepted < statistics.proposed
    wanted, proposer = second_token(model, prompt), TrainedDraft(session, 3)
    check_draws(torch.tensor([_second_drawn(session, prompt, proposer, seed) for seed in range(_DRAWS)]), wanted)
    if target != "executorch" or found_library() is None:
        return
    done = run_python(_NATIVE, bundle.path, json.dumps(prompt[0].tolist()), _DRAWS)
    assert done.returncode == 0, done.stderr
    native = json.loads(done.stdout)
    assert native["tokens"] == [expected, expected]
    assert native["counts"] == [[0, 0], [statistics.proposed, statistics.accepted]]
    check_draws(torch.tensor(native["drawn"]), second_token(model, prompt, _END))


_DRAWS = 1500
#: The tokenizer's end token, which ends a generation of the native runner.
_END = 2
_NATIVE = """
import json, sys
from exportable_cache_runner import Options, Session

found = {"tokens": [], "counts": []}
prompt = json.loads(sys.argv[2])
with Session(sys.argv[1]) as session:
    def run(**options):
        session.reset()
        return session.generate(prompt, Options(**options))

    for count in (0, 3):
        tokens, statistics = run(max_new_tokens=60, draft_tokens=count)
        found["tokens"].append(tokens)
        found["counts"].append([statistics.proposed_tokens, statistics.accepted_tokens])
    drawn = (run(max_new_tokens=3, draft_tokens=3, temperature=1.0, seed=seed) for seed in range(int(sys.argv[3])))
    found["drawn"] = [tokens[1] for tokens, _ in drawn if len(tokens) > 1]
print(json.dumps(found))
"""


@torch.no_grad()
def second_token(model: PreTrainedModel, prompt: torch.Tensor, other_than: int | None = None) -> torch.Tensor:
    """Return the probabilities [vocab] of the second token after a prompt, for all first tokens but one."""
    size = model.config.vocab_size
    first = model(prompt).logits[0, -1].double().softmax(0)
    if other_than is not None:
        first[other_than] = 0
        first /= first.sum()
    continued = torch.cat([prompt.expand(size, -1), torch.arange(size)[:, None]], dim=1)
    return first @ model(continued).logits[:, -1].double().softmax(-1)


def _second_drawn(session: Session, prompt: torch.Tensor, draft: TrainedDraft, seed: int) -> int:
    """Return the second of three sampled tokens, which is the first that the draft head proposes."""
    session.reset()
    sampler = Sampler(Sampling(temperature=1.0, seed=seed), prompt, session.vocab_size)
    return list(generate_speculative(session, prompt, 3, sampler, (), draft))[1]


def test_what_a_program_with_a_head_cannot_have_is_refused(tmp_path: Path) -> None:
    model = agreeing_model(num_mtp_layers=1)
    for refused in (
        {"target": "tensorrt"},
        {"delegate": "openvino"},
        {"form": "static"},
        {"shift": True},
        {"vocabulary": [1, 2]},
        {"batch_size": 2},
        {"dry_run": True},
    ):
        with pytest.raises(InputError, match="draft='mtp' cannot be combined with"):
            given = {"target": "executorch", "max_cache_len": 64, "output_dir": tmp_path, "draft": "mtp", **refused}
            export(model, **given)
    text = tmp_path / "text.txt"
    text.write_text("too short")
    given = {"max_cache_len": 64, "output_dir": tmp_path / "bundle", "draft_text": text}
    with pytest.raises(InputError, match="draft_text='.*' needs a draft head"):
        export(model, **given)
    with pytest.raises(InputError, match="draft_text cannot be combined with verify=False"):
        export(model, draft="mtp", verify=False, **given)
    with pytest.raises(InputError, match="draft_text needs score_length=2 or more"):
        export(model, draft="mtp", score_length=0, **given)
    with pytest.raises(InputError, match="draft_text must be a file of text, got 'nowhere'"):
        export(model, draft="mtp", **{**given, "draft_text": "nowhere"})
    with pytest.raises(InputError, match="draft_text must be a text of at least 256 tokens, got 9 in"):
        export(model, draft="mtp", tokenizer=letter_tokenizer(), **given)
    with pytest.raises(InputError, match="a model with a draft head must be exported for target 'pt2' or 'executorch'"):
        export(model, target="aoti", max_cache_len=64, output_dir=tmp_path / "other")
    for dry_run in (False, True):
        given = {"target": "pt2", "max_cache_len": 64, "output_dir": tmp_path / "other", "dry_run": dry_run}
        with pytest.raises(InputError, match="batch_size must be 1 for a model with a draft head, got 2"):
            export(model, batch_size=2, **given)
    with pytest.raises(InputError, match="a draft head cannot be combined with shift"):
        export(model, shift=True, **{**given, "dry_run": False})


def test_quantized_experts_of_modules_are_computed() -> None:
    """Transformers leaves out submodels of the model's config class when experts are switched to quantised ones."""
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 0}
    model = sometimes_right_model("glm4_moe", num_mtp_layers=1, **sizes)
    made = quantize(model, Quantization("8da4w", 32, experts="8da4w")).model
    session, prompt = Session.from_model(made, max_cache_len=64), tokens(20)
    expected = list(session.generate(prompt, 30))
    session.reset()
    found, statistics = drafted(session, prompt, 30, TrainedDraft(session, 3))
    assert found == expected and statistics.accepted > 0


def test_records_of_a_head_may_be_anything() -> None:
    """A manifest from elsewhere chooses no number of proposals, and impossible counts are refused."""
    record = {"head": "eagle-8b"}
    for draft in (None, "mtp", "heads/eagle-8b/"):
        check_head(Use(draft=draft), record)
    check_head(Use(draft="other"), None)
    check_head(Use(draft="none"), record)
    with pytest.raises(InputError, match="--draft must be 'mtp' or 'eagle-8b', the draft head of this bundle, got 'x'"):
        check_head(Use(draft="x"), record)
    with pytest.raises(InputError, match="--draft must be 'mtp', the draft head of this bundle, got 'x'; leave it out"):
        check_head(Use(draft="x"), {"head": "mtp"})
    with pytest.raises(InputError, match="--draft mtp cannot be combined with --draft-model demo"):
        Use(draft="mtp", draft_model="demo")
    counts = {"text_tokens": 9, "sha256": "", "tokens": 8, "steps": 4, "proposed": [4, 4], "accepted": [2, 2]}
    methods = {"draft": {}, "forward": {"scored_tokens": 3}}
    less, none = {**counts, "tokens": 7}, {**counts, "steps": 0}
    for acceptance, expected in [(counts, 2), (less, 0), (none, 0), ([1], 0), ("x", 0)]:
        fields = {"program": {"methods": methods}, "draft": {"head": "mtp", "acceptance": acceptance}}
        session = NativeSession(Path(), None, 9, None, None, fields)  # type: ignore[arg-type]
        assert (session.most_drafted, session.drafted_by_default) == (2, expected)
    assert str(Acceptance(**counts)).endswith("accepted proposals by position 50%, 50%")
    for accepted in ([2], [2, 5]):
        with pytest.raises(ValueError, match="must be at most proposed"):
            Acceptance(**{**counts, "accepted": accepted})


def test_a_checkpoint_gives_its_modules(tmp_path: Path) -> None:
    """The names are those of DeepSeek V3: the layers after the last one, with the shared tensors again."""
    model, mtp = model_and_mtp("deepseek_v3")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, parameter in mtp.layers.state_dict().items():
        rest = name.removeprefix("0.").removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if "mlp.experts.gate_up_proj" in rest:
            for expert, joined in enumerate(parameter):
                for part, value in zip(("gate", "up"), joined.chunk(2), strict=True):
                    weights[f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"] = value.clone()
        elif "mlp.experts.down_proj" in rest:
            for expert, value in enumerate(parameter):
                weights[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"] = value.clone()
        else:
            weights[f"model.layers.2.{rest}"] = parameter.clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    session = Session.from_model(loaded, max_cache_len=64, draft="mtp")
    attach_predictor(model, mtp)
    other = Session.from_model(model, max_cache_len=64)
    for one in (session, other):
        one.prefill(tokens(9))
    assert torch.allclose(session.stepper.draft(3, 0), other.stepper.draft(3, 0), atol=1e-5)
    assert attach_head(loaded, "mtp") is draft_head_of(loaded)
    del weights["model.layers.2.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"cannot be loaded from .*eh_proj"):
        Session.from_model(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), max_cache_len=64, draft="mtp")


def test_what_cannot_work_is_refused() -> None:
    llama = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="got LlamaForCausalLM, whose config has no num_mtp_layers"):
        Session.from_model(llama, max_cache_len=64, draft="mtp")
    with pytest.raises(InputError, match="draft must be 'mtp' or the folder of an EAGLE-3 head"):
        Session.from_model(llama, max_cache_len=64, draft="medusa")
    with pytest.raises(InputError, match="session must have a draft head, got one without"):
        TrainedDraft(Session.from_model(llama, max_cache_len=64))
    model, mtp = model_and_mtp("glm4_moe")
    before = ExportableCache.from_model(model, 64)
    attach_predictor(model, mtp)
    with pytest.raises(InputError, match="the cache must have 4 layers like the model, got 2"):
        Session.from_model(model, before)
    with pytest.raises(InputError, match="a draft head cannot be combined with a batch of 2 rows"):
        Session.from_model(model, ExportableCache.from_model(model, 64, 2))
    with pytest.raises(InputError, match="max_tokens of a trained draft must be at most 15, got 16"):
        TrainedDraft(Session.from_model(model, max_cache_len=64), 16)


def eagle_logits(model: PreTrainedModel, head: EagleModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [40] of the head after the newest of `ids`, which the model has not seen, without a cache."""
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states
    hidden = head.fc(torch.cat([states[index] for index in (2, 4, 5)], dim=-1))
    layer, positions = head.layers[0], torch.arange(1, ids.shape[1])[None]
    length = positions.shape[1]
    mask = torch.full((length, length), -1e9).triu(1)[None, None]
    hidden = layer(
        model.get_input_embeddings()(ids[:, 1:]),
        hidden,
        position_embeddings=head.rotary(hidden, position_ids=positions),
        attention_mask=mask,
    )
    return head.lm_head(head.norm(hidden))[0, -1]


@torch.no_grad()
def test_an_eagle_head_predicts_as_without_a_cache(tmp_path: Path) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=8), tokens(30)
    head = eagle_folder(tmp_path, model)
    wanted = eagle_logits(model, head, torch.cat([ids, torch.tensor([[7]])], dim=1))
    expected = list(Session.from_model(model, max_cache_len=96).generate(ids, 10))
    session = Session.from_model(model, max_cache_len=96, prefill_chunk=12, draft=str(tmp_path))
    session.prefill(ids[:, :28])
    session.score(torch.cat([ids[:, 28:], tokens(2, seed=5)], dim=1))
    session.rewind(2)
    found = session.stepper.draft(7, 0)[0]
    known = 3 * torch.arange(40)
    assert (found[known] - wanted).abs().max() < 1e-4
    assert found.argmax() in known and (found > torch.finfo(torch.float32).min).sum() == 40
    session.reset()
    assert drafted(session, ids, 10, TrainedDraft(session))[0] == expected


def test_an_eagle_head_for_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=8)
    eagle_folder(tmp_path, tiny_model("llama", num_hidden_layers=8, hidden_size=64))
    with pytest.raises(InputError, match="hidden_size of the draft head must be that of the model, 32, got 64"):
        attach_head(model, tmp_path)
    eagle_folder(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "d2t": weights["d2t"] + 100}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="d2t maps to tokens 100 to 217 of 128"):
        attach_head(model, tmp_path)
    save_file({name: one for name, one in weights.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="must have d2t, which maps the 40 tokens of the head to the 128 of the model"):
        attach_head(model, tmp_path)
    with pytest.raises(
        UnsupportedModelError, match="draft must be left out for GPT2LMHeadModel: an EAGLE-3 head takes"
    ):
        attach_head(tiny_model("gpt2"), tmp_path)
    save_file({name: one for name, one in weights.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"Missing key.*fc\.weight"):
        attach_head(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(
        InputError, match=r"model\.safetensors must be a whole safetensors file, got 6 bytes .*download"
    ):
        attach_head(model, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="is a pickle, which can run code; save the head with safetensors"):
        attach_head(model, tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"must have model\.safetensors, got .* without it"):
        attach_head(model, tmp_path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    with pytest.raises(UnsupportedModelError, match="Medusa, EAGLE-1 and EAGLE-2 heads are not supported"):
        attach_head(model, tmp_path)


#: Fields of a config that no head has.
BAD_FIELDS: list[dict[str, Any]] = [
    {"num_key_value_heads": 0},
    {"head_dim": 0},
    {"intermediate_size": -1},
    {"draft_vocab_size": "9"},
    {"draft_vocab_size": -3},
    {"draft_vocab_size": 10**12},
    {"hidden_act": "evil"},
    {"rms_norm_eps": "x"},
    {"rope_scaling": {"rope_type": "evil"}},
    {"rope_scaling": {"rope_type": "yarn", "factor": "x"}},
    {"rope_theta": "abc"},
    {"eagle_config": "x"},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 5}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a", "b", "c"]}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.0, 2.0, 3.0]}},
    {"num_hidden_layers": 2},
]


def test_configs_of_heads_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad fields are errors of input, and none makes transformers load code."""
    model = tiny_model("llama", num_hidden_layers=8)
    eagle_folder(tmp_path, model)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for bad in BAD_FIELDS:
        path.write_text(json.dumps({**fields, **bad}))
        with pytest.raises(InputError, match="an EAGLE-3 head|must be those of its config and fit the model"):
            load_eagle(model, tmp_path)
    path.write_text(json.dumps({**fields, "_attn_implementation": "kernels-community/flash-attn"}))
    assert load_eagle(model, tmp_path).config._attn_implementation == "sdpa"
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    scaled["rope_scaling"]["original_max_position_embeddings"] = 64
    path.write_text(json.dumps({**fields, **scaled}))
    expected = EagleModel(LlamaConfig.from_dict({**fields, **scaled}), model).rotary.inv_freq
    assert torch.equal(load_eagle(model, tmp_path).rotary.inv_freq, expected)


def test_a_head_without_finite_logits_proposes_nothing(tmp_path: Path) -> None:
    """Sampled tokens are then those of the model."""
    model, ids = tiny_model("llama", num_hidden_layers=8), tokens(9)
    eagle_folder(tmp_path, model)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    expected = list(Session.from_model(model, max_cache_len=64).generate(ids, 8, **sampling))
    head = attach_head(model, tmp_path)
    head.predictor.lm_head.weight.fill_(torch.nan)
    session = Session.from_model(model, max_cache_len=64)
    assert list(session.generate(ids, 8, **sampling, draft=TrainedDraft(session, 3))) == expected
    # Probabilities of a draft of another kind are judged, too.
    logits = torch.tensor([[0.0, 50.0, 0.0], [0.0, 50.0, 0.0]])
    judge = Sampler(Sampling(**sampling), ids[:, :1], 3)
    for bad in (torch.nan, 0.0):
        assert _judge(logits, Proposal([0], torch.full((1, 3), bad)), judge) == ([1], 0)


@torch.no_grad()
def test_frequencies_of_a_head_stay_exact(tmp_path: Path) -> None:
    """They are wrong past a few hundred positions in 16 bits. A shift rotates the keys of the head, too."""
    model = sometimes_right_eagle(tmp_path)
    session = Session.from_model(model, max_cache_len=32, draft=str(tmp_path))
    rotations, _ = find_rotations(model, session.cache)
    assert rotations[-1] is not None and rotations[-1].tensor == "keys"
    assert [one and one.pairs for one in rotations] == [4] * 4
    model = sometimes_right_eagle(tmp_path, dtype=torch.bfloat16)
    assert attach_head(model, tmp_path).predictor.rotary.inv_freq.dtype == torch.float32
    assert {one.dtype for one in draft_head_of(model).parameters()} == {torch.bfloat16}


class Counted(TrainedDraft):
    """A draft that counts its calls."""

    calls = 0

    def propose(self, *arguments: Any) -> Proposal:
        self.calls += 1
        return super().propose(*arguments)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_completions_with_a_draft_are_those_without(kind: str, tmp_path: Path) -> None:
    """Over several requests of one session: stops, ends of the cache, shifts, cancellation, log probabilities."""
    model = sometimes_right_eagle(tmp_path)
    model.generation_config.eos_token_id = None
    given = {"max_cache_len": 48, "tokenizer": letter_tokenizer()}
    smaller = sometimes_right_eagle(tmp_path)
    # It does not know all tokens either.
    torch.nn.init.zeros_(smaller.lm_head.weight[KNOWN:])
    small = Session.from_model(smaller, max_cache_len=48)
    # A head that is attached later changes nothing in this session.
    plain = Completer(Session.from_model(model, **given))
    session = Session.from_model(model, **given, draft=str(tmp_path) if kind == "head" else None)
    draft: Any = Counted(session, 3) if kind == "head" else DraftModel(small, 4)
    drafted = Completer(session, draft=draft)
    first = tokens(20)[0].tolist()

    def both(ids: list[int], reused: bool = True, **options: Any) -> list[Piece]:
        found = []
        for completer in (plain, drafted):
            completion = completer.complete(ids, CompletionOptions(**options))
            found.append(([*completion], completion.finish_reason, completion.dropped_tokens))
            # The newest token of a response was not fed.
            whole = [*ids, *(one.token for one in found[-1][0]), 5]
            assert completion.dropped_tokens or completer.common(whole) == completer.length
            if reused:
                found[-1] += (completion.reused_tokens, completer.length)
        assert found[0] == found[1]
        return found[0][0]

    pieces = both(first, max_new_tokens=9)
    longer = [*first, *(one.token for one in pieces), 5, 6]
    both(longer, max_new_tokens=5)
    text = "".join(one.text for one in both(first))
    both(first, stop=(text[6:8],))
    begun = drafted.complete(first, CompletionOptions())
    next(begun), next(begun)
    begun.close()
    both(longer, reused=False, max_new_tokens=4)
    # This one is closed after another one.
    begun = drafted.complete(first, CompletionOptions())
    next(begun), next(begun)
    both(longer, reused=False, max_new_tokens=4)
    begun.close()
    both(longer, max_new_tokens=4)
    for completer in (plain, drafted):
        completer.use("shift")
    pieces = both(first, max_new_tokens=90)
    both([*first, *(one.token for one in pieces), 5, 6], max_new_tokens=20)
    statistics = drafted.statistics
    assert statistics is not None and 10 < statistics.accepted < statistics.proposed
    if kind == "head":
        calls = draft.calls
        pieces = both(first, max_new_tokens=4, alternatives=1)
        assert draft.calls == calls and pieces[0].logprob is not None


def test_a_draft_that_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    model = sometimes_right_eagle(tmp_path)
    session = Session.from_model(
        model, ExportableCache.from_model(model, 48), tokenizer=letter_tokenizer(), score_length=0
    )
    small = Session.from_model(tiny_model("llama", vocab_size=64), max_cache_len=48)
    with pytest.raises(InputError, match="score_length must be at least 2 for a draft, got 0"):
        Completer(session, draft=DraftModel(small))
    session = Session.from_model(model, max_cache_len=48, tokenizer=letter_tokenizer())
    with pytest.raises(InputError, match="must have the vocabulary of this model, 128 tokens, got 64"):
        Completer(session, draft=DraftModel(small))
