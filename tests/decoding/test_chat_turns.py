"""Chat templates as texts between turns: those of the field's families, written here after what they put out."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from exportable_cache.demo import demo_path
from exportable_cache.generation.templates import ChatTurns, chat_turns


def loop(system: str, user: str, assistant: str, generation: str, opening: str = "", trim: bool = False) -> str:
    """A template that writes each message by its role; `@` stands for what is said."""
    said = "{{ m['content'] | trim }}" if trim else "{{ m['content'] }}"
    branches = [
        f"{{% {word} m['role'] == '{role}' %}}{text.replace('@', said)}"
        for word, role, text in (("if", "system", system), ("elif", "user", user), ("elif", "assistant", assistant))
        if text
    ]
    if not system:
        branches[0] = branches[0].replace("elif", "if", 1)
        branches.append("{% else %}{{ raise_exception('roles are user and assistant') }}")
    return (
        f"{opening}{{% for m in messages %}}{''.join(branches)}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{generation}{{% endif %}}"
    )


def headed(
    start: str, middle: str, end: str, opening: str = "", roles: tuple[str, ...] = (), trim: bool = False
) -> str:
    """A template that writes every message in the same way, under a head."""
    names = roles or ("system", "user", "assistant")
    texts = [f"{start}{name}{middle}@{end}" for name in names]
    return loop(*texts, f"{start}{names[2]}{middle}", opening, trim)


#: What each family's template puts out, by the name of the family.
TEMPLATES = {
    "ChatML": headed("<|im_start|>", "\n", "<|im_end|>\n"),
    "Qwen 2.5": "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    + headed("<|im_start|>", "\n", "<|im_end|>\n"),
    "Llama 2": "{% if messages[0]['role'] == 'system' %}"
    "{% set s = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if m['role'] == 'user' %}<s>[INST] {{ (s if loop.first else '') + m['content'] }} [/INST]{% else %}"
    " {{ m['content'] }} </s>{% endif %}{% endfor %}",
    "Llama 3": headed("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "<|begin_of_text|>", trim=True),
    "Gemma": loop(
        "", "<start_of_turn>user\n@<end_of_turn>\n", "<start_of_turn>model\n@<end_of_turn>\n", "<start_of_turn>model\n",
        "<bos>", trim=True,
    ),
    "Gemma 3": "<bos>{% if messages[0]['role'] == 'system' %}{% set s = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ (s if loop.first else '') }}"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
    "Mistral 0.1": loop("", "[INST] @ [/INST]", "@</s>", "", "<s>"),
    "Mistral 7": loop("[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]", "[INST]@[/INST]", "@</s>", "", "<s>"),
    "Zephyr": headed("<|", "|>\n", "</s>\n"),
    "Phi 3": headed("<|", "|>\n", "<|end|>\n"),
    "Phi 4": headed("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "Vicuna": loop("@ ", "USER: @ ", "ASSISTANT: @</s>", "ASSISTANT:"),
    "Alpaca": loop("@\n\n", "### Instruction:\n@\n\n", "### Response:\n@\n\n", "### Response:\n"),
    "DeepSeek": loop("@\n\n", "User: @\n\n", "Assistant: @<|end|>", "Assistant:", "<|begin|>"),
    "DeepSeek 3": loop("@", "<|User|>@", "<|Assistant|>@<|end|>", "<|Assistant|>", "<|begin|>"),
    "Command R": headed(
        "<|START|>", "", "<|END|>", "<BOS>", ("<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>"), trim=True
    ),
    "Granite": headed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
    "OLMo": headed("<|", "|>\n", "\n", "<|endoftext|>"),
    "Falcon": loop("@\n\n", "User: @\n\n", "Falcon: @\n\n", "Falcon:", trim=True),
    "SmolLM": headed("<|im_start|>", "\n", "<|im_end|>\n"),
    "MiniCPM": loop("@", "<User>@", "<AI>@", "<AI>", "<s>", trim=True),
    "GLM 4": headed("<|", "|>\n", "", "[gMASK]<sop>"),
    "EXAONE": headed("[|", "|]", "[|endofturn|]\n"),
}  # fmt: skip
#: That do more, and what that is.
NOT_TURNS = {
    "earlier reasoning left out": "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}A: "
    "{{ m['content'].split('</think>')[-1].strip() }}{{ 'x' if 'here' in m['content'] else '' }}\n{% else %}"
    "U: {{ m['content'] }}\n{% endif %}{% endfor %}A:",
    "system message in the last question": "{% for m in messages %}{% if m['role'] == 'user' %}{% if loop.last and "
    "messages[0]['role'] == 'system' %}[S]{{ messages[0]['content'] }}[/S]{% endif %}[INST]{{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}</s>{% endif %}{% endfor %}",
    "turns are counted": "{% for m in messages %}[Round {{ loop.index }}] {{ m['content'] }}\n{% endfor %}",
    "refuses everything": "{{ raise_exception('no') }}",
    "cannot be read": "{% for",
    "for ever": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_path())


def conversation(seed: int, system: bool) -> list[dict[str, str]]:
    draw = random.Random(seed)
    words = ["code", "of", "amber", "\n", "  ", "4821.", "<b>", "{{x}}", "né", "世界", "'", '"', "|", "-"]
    roles = ["user", "assistant"] * draw.randrange(0, 4) + ["user"]
    roles = ["system", *roles] if system else roles
    return [{"role": role, "content": "x" + " ".join(draw.choices(words, k=8)) + "x"} for role in roles]


@pytest.mark.parametrize("family", TEMPLATES)
def test_turns_are_the_template(tokenizer: PreTrainedTokenizerBase, family: str) -> None:
    tokenizer.chat_template = TEMPLATES[family]
    turns = chat_turns(tokenizer)
    assert turns is not None
    assert (turns.system is None) == (family in ("Gemma", "Mistral 0.1"))
    for seed in range(12):
        messages = conversation(seed, system=turns.system is not None and seed % 2 == 0)
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert turns.render(messages) == expected


@pytest.mark.parametrize("what", NOT_TURNS)
def test_what_is_no_turns_is_not_taken_for_it(
    tokenizer: PreTrainedTokenizerBase, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exportable_cache.generation.templates.MOST_SECONDS", 0.5)
    tokenizer.chat_template = NOT_TURNS[what]
    assert chat_turns(tokenizer) is None


def test_no_template_and_several_have_no_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in (None, {"default": TEMPLATES["ChatML"], "tool_use": "x"}):
        tokenizer.chat_template = template
        assert chat_turns(tokenizer) is None


def test_white_space_is_trimmed_where_the_template_does() -> None:
    turns = ChatTurns("<s>", ("[S]", "[/S]"), "[A]", "[A] ", "[Q]", trims=True)
    said = [{"role": "system", "content": " be "}, {"role": "user", "content": "\n x "}]
    assert turns.render(said) == "[S]be[/S]x[A]"
    assert turns.render([said[1], {"role": "assistant", "content": "y"}, said[1]]) == "<s>x[A] y[Q]x[A]"
    assert turns.to_dict()["system"] == ["[S]", "[/S]"]
