"""Compare renderings of well-known chat templates by the C++ engine and by Jinja, as transformers sets it up.

The templates are those in `models/templates` of llama.cpp. They are fetched and not kept here, because their licenses
differ.

    cmake -S runners/cpp/templates -B build/templates && cmake --build build/templates
    python runners/cpp/templates/compare.py build/templates/exportable_cache_render [CHECKOUT]
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exportable_cache.errors import InputError
from exportable_cache.generation.templates import render_chat

#: The commit whose engine CMakeLists.txt names.
COMMIT = re.search(r"set\(_commit (\w+)\)", Path(__file__).with_name("CMakeLists.txt").read_text())[1]
ARCHIVE = f"https://github.com/ggml-org/llama.cpp/archive/{COMMIT}.tar.gz"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    """Return a tool; the first property is required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def said(content: str, **further: Any) -> dict[str, Any]:
    """Return an assistant's message."""
    return {"role": "assistant", "content": content, **further}


def result(content: str, number: int = 1, name: str = "add") -> dict[str, Any]:
    """Return the result of a tool call."""
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}


TOOLS = [
    tool(
        "add",
        'Add two numbers, "exactly".',
        a={"type": "integer", "description": "The first."},
        b={"type": "number", "default": 1.5},
        unit={"type": "string", "enum": ["m", "ft"]},
        others={"type": "array", "items": {"type": "string"}},
    ),
    tool("weather", "Grüße, 世界 <b>&</b>", city={"type": "string", "description": "The city's name"}),
]
ADD = call(1, "add", a=2, b=3.5, unit="m")
SYSTEM = {"role": "system", "content": "Be brief.\nSpeak 'plainly'."}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "question": {"messages": [user("Hello <|im_end|> {{ x }} 世界 🙂")]},
    "system": {"messages": [SYSTEM, user("Hello"), said('Hi, "you"'), user("  How? \n")]},
    "turns": {"messages": [user("a"), said("b"), user("c"), said("d"), user("e")]},
    "tools": {"messages": [SYSTEM, user("What is 2 + 3.5?")], "tools": TOOLS},
    "call": {"messages": [user("What?"), said("", tool_calls=[ADD]), result("5.5")], "tools": TOOLS},
    "calls": {
        "messages": [
            SYSTEM,
            user("What?"),
            said("Let me see.", tool_calls=[ADD, call(2, "weather", city="Zürich")]),
            result("5.5"),
            result('{"t": 20}', 2, "weather"),
            said("It is 5.5"),
            user("And?"),
        ],
        "tools": TOOLS,
    },
    "reasoning": {"messages": [user("What?"), said("42", reasoning_content="I think\nhard"), user("And?")]},
    "inline": {"messages": [user("What?"), said("<think>\nhm\n</think>\n\n42"), user("And?")]},
}


class Tokenizer:
    """A tokenizer with a template and special tokens only.

    Args:
        template: The chat template.
    """

    special_tokens_map = SPECIAL

    def __init__(self, template: str) -> None:
        self.chat_template = template


def templates(checkout: Path | None) -> Iterator[tuple[str, str]]:
    """Yield names and texts of templates, from a checkout or the archive."""
    if checkout is not None:
        for path in sorted((checkout / "models" / "templates").glob("*.jinja")):
            yield path.stem, path.read_text("utf-8")
        return
    with urllib.request.urlopen(ARCHIVE) as answer:
        archive = tarfile.open(fileobj=io.BytesIO(answer.read()))
    for member in archive.getmembers():
        file = archive.extractfile(member) if re.search(r"/models/templates/[^/]+\.jinja$", member.name) else None
        if file is not None:
            yield Path(member.name).stem, file.read().decode("utf-8")


def wanted(template: str, conversation: dict[str, Any]) -> str | None:
    """Return what Jinja makes of a conversation; None if the template refuses it."""
    try:
        return render_chat(Tokenizer(template), **conversation)  # type: ignore[arg-type]
    except InputError:
        return None


def main() -> None:
    """Print what differs, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="exportable_cache_render")
    parser.add_argument("checkout", nargs="?", type=Path, help="of llama.cpp; fetched by default")
    arguments = parser.parse_args()
    engine = subprocess.Popen([arguments.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    specials = " ".join(f"{name}={text}" for name, text in SPECIAL.items())
    counts = dict.fromkeys(("equal", "both refuse", "engine refuses", "jinja refuses", "differ"), 0)
    whole = 0
    names = []
    for name, text in templates(arguments.checkout):
        names.append(name)
        outcomes = {}
        for kind, conversation in CONVERSATIONS.items():
            engine.stdin.write(f"{text.encode().hex()} {json.dumps(conversation).encode().hex()} {specials}\n")
            engine.stdin.flush()
            status, *parts = engine.stdout.readline().split()
            found = bytes.fromhex("".join(part[5:] for part in parts)).decode() if status == "ok" else None
            want = wanted(text, conversation)
            if found is None or want is None:
                outcome = "both refuse" if found == want else "engine refuses" if found is None else "jinja refuses"
            else:
                outcome = "equal" if found == want else "differ"
            counts[outcome] += 1
            outcomes[kind] = outcome
        odd = {kind: outcome for kind, outcome in outcomes.items() if outcome not in ("equal", "both refuse")}
        whole += not odd
        if odd:
            print(f"{name}: {', '.join(f'{kind} ({outcome})' for kind, outcome in odd.items())}")
    print(f"{len(names)} templates, {whole} of them equal in all {len(CONVERSATIONS)} conversations; {counts}")


if __name__ == "__main__":
    main()
