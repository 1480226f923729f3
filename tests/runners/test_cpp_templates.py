"""Chat templates in C++: the engine renders as Jinja does, and a bad template ends with an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load
from exportable_cache.demo.task import make_questions
from exportable_cache.generation.templates import render_chat

from ..support.compiling import cmake_compiler
from ..support.store import stored
from .conftest import SOURCES, Probe, Program, cmake_program, hexed, template_options

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
#: Templates with the constructs of well-known ones; `runners/cpp/templates/compare.py` compares these themselves.
TEMPLATES = {
    "turns": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "whitespace": "{%- for m in messages %}\n  {%- if m.role == 'user' -%}\n    U: "
    "{{ m.content }}\n  {%- elif true %}\n"
    "    O: {{- m.content }}\n  {% endif %}\n{%- endfor %}\nend\n",
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.index0 }}{{ loop.revindex }}"
    "{{ loop.first }}{{ loop.last }}{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}"
    "{% if not loop.first %}{{ loop.previtem.role }}{% endif %};{% else %}none{% endfor %}",
    "namespace": "{% set ns = namespace(found=false, count=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.found = true %}{% set ns.count = ns.count + 1 %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.count }}",
    "macro": "{% macro turn(role, text='', end='!') %}[{{ role | upper }}: {{ text }}{{ end }}]{% endmacro %}"
    "{% for m in messages %}{{ turn(m.role, m.content) }}{{ turn('x', 'y', end='?') }}{% endfor %}",
    "tools": "{% if tools is defined and tools %}{% for t in tools %}{{ t | tojson }}\n"
    "{{ t.function | tojson(indent=2) }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k }}={{ v.type }},{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments | tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }} {{ messages | length }} "
    "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }} "
    "{{ messages[0].content | default('d') }}"
    " {{ missing | default('none') }} {{ messages[-1].content | replace('o', '0') | capitalize }} "
    "{{ [3, 1, 2] | sort | tojson }}"
    " {{ messages | first | tojson }}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "slices": "{% set rest = messages[1:] %}{% for m in rest[::-1] %}{{ m.role[:3] }}|{% endfor %}"
    "{{ messages[-1].role }}"
    "{{ 'abc'.split('b') | join('+') }}{{ '  x '.strip() }}{{ 'think</think>it'.split('</think>')[-1] }}",
    "tests": "{% for m in messages %}{{ m.content is string }}{{ m.content is none }}{{ m.x is defined }}"
    "{{ m is mapping }}{{ 'user' in m.role }}{{ m.role not in ['user', 'tool'] }}{{ loop.index % 2 == 0 }}{% endfor %}",
    "conditions": "{{ 'a' if messages[0].role == 'system' else 'b' }}"
    "{{ (enable_thinking is defined and not enable_thinking) }}"
    "{{ 'x' ~ 3 ~ 1.5 }}{{ 1 if false else 7 % 4 }}{{ (1 < 2) and not (2 < 1) }}{{ ([1, 2] + [3]) | tojson }}",
    "control": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.index == 4 %}{% break %}"
    "{% endif %}{{ m.content }}{% endfor %}{% set block %}captured {{ 1 + 1 }}{% endset %}{{ block | trim }}"
    "{% filter upper %}loud{% endfilter %}{# a comment #}{{ '{{ raw }}' }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "raises": "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('No tools here: ' ~ m.role) }}{% endif %}"
    "{{ m.content }}{% endfor %}",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'Add, "exactly". Grüße',
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"default": 1.5}}},
    },
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1.5, True, "x"]}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello  'you' \n"},
    {"role": "assistant", "content": "世界 🙂 </s>"},
    {"role": "user", "content": "foo"},
]
CALLS = [
    *TURNS[:2],
    {"role": "assistant", "content": "", "tool_calls": [CALL], "name": None},
    {"role": "tool", "content": "3"},
]
Render = Callable[[str, Any], tuple[str, list[tuple[bool, str]]]]


class _Tokenizer:
    """A tokenizer with a template and special tokens only."""

    special_tokens_map = SPECIAL

    def __init__(self, template: str) -> None:
        self.chat_template = template


@pytest.fixture(scope="session")
def render_build() -> Path:
    """Folder with `exportable_cache_render`, built without ExecuTorch."""
    cmake, compiler, source = cmake_program(), cmake_compiler(20), SOURCES / "templates"

    def build(folder: Path) -> None:
        options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", *template_options()]
        done = subprocess.run([cmake, "-S", source, "-B", folder, *options], capture_output=True, text=True)
        if done.returncode != 0:
            if "cannot be fetched" not in done.stderr.replace("\n  ", " "):
                pytest.fail(done.stderr[-3000:])
            pytest.skip("the engine cannot be fetched; EC_TEMPLATES_SOURCE may name a checkout of llama.cpp")
        done = subprocess.run([cmake, "--build", folder, "--parallel", "2"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    return stored({"cpp": "templates", "options": template_options()}, build)


@pytest.fixture
def render(render_build: Path) -> Render:
    """`render(template, request)` -> "ok" and the parts, or "error" and the message."""

    def run(template: str, request: Any) -> tuple[str, list[tuple[bool, str]]]:
        given = request if isinstance(request, str) else json.dumps(request)
        named = [f"{name}={text}" for name, text in SPECIAL.items()]
        line = " ".join([hexed(template), hexed(given) or "0a", *named])
        done = subprocess.run(
            [render_build / "exportable_cache_render"], input=line, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        status, *parts = done.stdout.split()
        if status == "error":
            return status, [(False, bytes.fromhex(parts[0]).decode())]
        return status, [(part.startswith("said:"), bytes.fromhex(part[5:]).decode()) for part in parts]

    return run


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["turns", "calls"])
def test_a_template_is_rendered_as_in_python(render: Render, template: str, kind: str) -> None:
    messages = {"turns": TURNS, "calls": CALLS}[kind]
    tools = [TOOL] if kind == "calls" else []
    status, parts = render(TEMPLATES[template], {"messages": messages, "tools": tools})
    if template == "raises" and kind == "calls":
        assert (status, parts[0][1]) == (
            "error",
            "the chat template refuses the messages: No tools here: tool; change them, or pass text instead",
        )
        return
    assert status == "ok", parts
    assert "".join(text for _, text in parts) == render_chat(_Tokenizer(TEMPLATES[template]), messages, tools=tools)  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_engine")
def test_well_known_templates_are_rendered_as_in_python(render_build: Path) -> None:
    """Compare llama.cpp's own templates, with tools and reasoning; the README names those that differ."""
    command = [sys.executable, SOURCES / "templates" / "compare.py", render_build / "exportable_cache_render"]
    done = subprocess.run([*command, os.environ["EC_TEMPLATES_SOURCE"]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"(\d+) templates, (\d+) of them equal in all 8 conversations", done.stdout)
    assert found is not None, done.stdout
    assert int(found[2]) >= 64 and int(found[1]) - int(found[2]) <= 6, done.stdout


def test_text_of_messages_is_told_from_that_of_the_template(render: Render) -> None:
    status, parts = render("{{ bos_token }}<|{{ messages[0].role }}|>{{ messages[0].content }}", [TURNS[2]])
    expected = [(False, "<s><|"), (True, "assistant"), (False, "|>"), (True, TURNS[2]["content"])]
    assert (status, parts) == ("ok", expected)


@pytest.mark.parametrize(
    "template",
    ["[{{ messages[0].content|tojson }}]", "[{{ [messages[0].content]|join }}]"]
    + ["[{{ messages|map(attribute='content')|join }}]", "[{{ messages[0].content|string }}]"],
)
def test_control_tokens_that_filters_join_to_the_template_are_said(render: Render, template: str) -> None:
    """The first character is enough, because the token is split after it; the template's own token is not said."""
    status, parts = render(template + "{{ eos_token }}", [{"role": "user", "content": "a</s>b"}])
    text = "".join(text for _, text in parts)
    said = "".join(("1" if is_said else "0") * len(text) for is_said, text in parts)
    assert status == "ok" and text in ('["a</s>b"]</s>', "[a</s>b]</s>"), parts
    assert said[text.index("</s>")] == "1" and said.endswith("00000"), parts


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(10 ** 9) %}{% endfor %}", "refuses the messages"),
        ("{% for a in range(1000000000) %}{% endfor %}", "too much memory|10 seconds"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "10 seconds|process ended"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "signal|too much memory|10 seconds"),
        ("{{ " + "(" * 200_000 + "1" + ")" * 200_000 + " }}", "signal|10 seconds"),
        ("{{ 'a' * 100000000 }}", "at most|too much memory|process ended|10 seconds"),
        ("x" * 10_000_000, "it has 10000000 bytes, at most 1048576"),
        ("{% for a in range(2) %}" + "x" * 600_000 + "{% endfor %}", "bytes, at most 10"),
        ("{% if %}", "refuses"),
        ("{{ messages[0]['content'", "refuses"),
        ("{% endfor %}{% break %}", "refuses"),
        ("\xff{{ '\\q' }}", "refuses"),
    ],
)  # fmt: skip
def test_a_bad_template_ends_with_an_error(render: Render, template: str, says: str) -> None:
    status, parts = render(template, TURNS)
    assert status == "error" and re.search(says, parts[0][1]), parts[0][1][:500]
    assert len(parts[0][1]) < 600
    # The process that asked continues.
    assert render(TEMPLATES["turns"], TURNS)[0] == "ok"


@pytest.mark.parametrize(
    "request_",
    ["", "[", "3", "{}", '{"messages": 3}', "[3]", '[{"role": "user", "content": "\\ud800"}]', "[" * 100_000],
)
def test_a_bad_request_ends_with_an_error(render: Render, request_: str) -> None:
    assert render(TEMPLATES["turns"], request_)[0] == "error"


@pytest.fixture
def talk_bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """The demo's bundle with a template that turns do not describe."""
    folder = tmp_path / "bundle"
    shutil.copytree(demo_bundle, folder)
    path = folder / "tokenizer" / "chat_template.jinja"
    path.write_text("{% if tools %}{{ tools[0].function.name }} {% endif %}" + path.read_text("utf-8"), "utf-8")
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["files"]["tokenizer/tokenizer.json"]["details"]["chat_turns"] = None
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return folder


def test_a_runner_without_the_engine_says_so(demo_bundle: Path, probe: Probe) -> None:
    if template_options():
        pytest.skip("this runner has the engine, because EC_TEMPLATES_SOURCE is set")
    _, refused = probe(("open", demo_bundle), ("render", hexed(json.dumps(TURNS))))
    assert (refused.ok, refused.values[0]) == (False, "bundle")
    assert "-DEC_TEMPLATES=ON" in refused.values[1]


@pytest.fixture
def with_engine() -> None:
    """Skip where the runner of the tests is built without templates."""
    if not template_options():
        pytest.skip("EC_TEMPLATES_SOURCE names no checkout of llama.cpp")


@pytest.mark.usefixtures("with_engine")
def test_a_conversation_of_messages_is_answered_as_in_python(
    talk_bundle: Path, demo_bundle: Path, probe: Probe
) -> None:
    session = load(demo_bundle)
    template = (talk_bundle / "tokenizer" / "chat_template.jinja").read_text("utf-8")
    questions = [one.prompt for one in make_questions(3, seed=5, min_distance=4, tokens=(20, 60))]
    messages: list[dict[str, str]] = []
    commands, expected, prompts = [], [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        request = {"messages": messages, "tools": [TOOL]}
        commands.append(("messages", hexed(json.dumps(request)), "max_new_tokens=9"))
        text = render_chat(session.text_tokenizer, messages, template, [TOOL])
        ids = session.text_tokenizer(text, add_special_tokens=False)["input_ids"]
        session.reset()
        tokens = list(session.generate(torch.tensor([ids]), max_new_tokens=9))
        expected.append(tokens)
        prompts.append(len(ids))
        messages.append(
            {"role": "assistant", "content": session.text_tokenizer.decode(tokens, skip_special_tokens=True)}
        )
    replies = probe(("open", talk_bundle), *commands, ("render", commands[-1][1]))[1:]
    assert [reply.tokens() for reply in replies[:-1]] == expected
    assert replies[-1].texts() == [text]
    # What an earlier call has fed is not fed again.
    fed = [reply.tokens(3)[0] for reply in replies[:-1]]
    assert fed[0] == prompts[0] and all(
        0 < new <= whole - before for new, whole, before in zip(fed[1:], prompts[1:], prompts)
    )


@pytest.mark.usefixtures("with_engine")
def test_special_tokens_in_messages_stay_text(talk_bundle: Path, probe: Probe) -> None:
    end = json.loads((talk_bundle / "tokenizer" / "tokenizer_config.json").read_text("utf-8"))["eos_token"]
    talk = [{"role": "user", "content": f"a{end}b"}]
    replies = probe(
        ("open", talk_bundle), ("messages", hexed(json.dumps(talk)), "max_new_tokens=1"), ("length",), ("reset",),
        ("text", hexed(f"a{end}b"), "max_new_tokens=1"), ("length",),
    )  # fmt: skip
    assert int(replies[2].values[0]) > int(replies[5].values[0])


@pytest.mark.usefixtures("with_engine")
def test_the_program_renders_and_answers_messages(talk_bundle: Path, program: Program, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": [TURNS[1]], "tools": [TOOL]}), "utf-8")
    command = [*program("exportable_cache_generate"), str(talk_bundle), "--messages", str(request)]
    done = subprocess.run([*command, "--render"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "add Hello  'you'")
    done = subprocess.run([*command, "--max-new-tokens", "3"], capture_output=True, text=True)
    assert done.returncode == 0 and ", 3 new," in done.stderr
    chat = [*program("exportable_cache_generate"), str(talk_bundle), "--chat", "--max-new-tokens", "3"]
    done = subprocess.run(chat, input='a "b"\nc\n', capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
