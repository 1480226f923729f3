"""Tool calls by clients of others, over a scripted model that calls a tool and then tells its result.

Each client is skipped where its package is not installed; docs/guides/serve.md has the versions that ran.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

from .scripted import HERMES, Scripted, scripted_tokenizer
from .serving import served

QUESTION = [{"role": "user", "content": "weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": PARAMETERS}}
ARGUMENTS = {"city": "Paris", "name": "Ann", "age": 5, "answer": "20"}


def reply(prompt: str) -> str:
    """Return a call of the last tool with those arguments that it has, or what the tool said."""
    if "[tool]" in prompt:
        return f"It is {prompt.rpartition('[tool]')[2].partition('(')[0]}."
    found = re.match(r"\[tools (\[.*?\])\]\[(?:system|user)\]", prompt, re.DOTALL)
    if found is None:
        return "Hello, 你好 🌍 café."
    function = json.loads(found[1])[0]["function"]
    arguments = {name: ARGUMENTS[name] for name in function["parameters"]["properties"]}
    call = {"name": function["name"], "arguments": arguments}
    return f"Let me look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL of a server, which clients also read from the environment."""
    with (
        served(Scripted(scripted_tokenizer(tmp_path_factory.mktemp("t"), HERMES), reply)) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        url = f"{address}/v1"
        for name, value in {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo"}.items():
            patch.setenv(name, value)
        # No client may look up anything elsewhere.
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        yield url


def test_executorchs_conformance_suite(url: str) -> None:
    package = importlib.util.find_spec("executorch")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    paths = [Path(one) / "examples/llm_server/conformance/test_openai_contract.py" for one in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        pytest.skip("executorch is not installed, or is older than 1.5 and has no conformance suite")
    spec = importlib.util.spec_from_file_location("conformance", path)
    assert spec is not None and spec.loader is not None
    suite: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    checks = [check for name, check in vars(suite).items() if name.startswith("test_")]
    assert len(checks) >= 7
    for check in checks:
        check()


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "tools": [TOOL]}
    message = litellm.completion(**asked, messages=QUESTION).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, messages=QUESTION, stream=True)))
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    told = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "20 C"}]
    assert litellm.completion(**asked, messages=told).choices[0].message.content == "It is 20 C."


def test_langchain(url: str) -> None:
    openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = openai.ChatOpenAI(model="demo", base_url=url, api_key="none").bind_tools([TOOL])
    question = HumanMessage("weather in Paris?")
    answer = model.invoke([question])
    assert answer.tool_calls[0]["args"] == {"city": "Paris"}
    first, *others = model.stream([question])
    assert sum(others, first).tool_calls[0]["args"] == {"city": "Paris"}
    result = ToolMessage("20 C", tool_call_id=answer.tool_calls[0]["id"])
    assert model.invoke([question, answer, result]).content == "It is 20 C."


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    import openai
    from pydantic import create_model

    person = create_model("Person", name=(str, ...), age=(int, ...))
    client = instructor.from_openai(openai.OpenAI())
    found = client.chat.completions.create(model="demo", response_model=person, messages=QUESTION, max_retries=0)
    assert isinstance(found.name, str) and isinstance(found.age, int)


def test_pydantic_ai(url: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    from pydantic import create_model
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"20 C in {city}"

    assert agent.run_sync("weather in Paris?").output == "It is 20 C in Paris."
    person = create_model("Person", name=(str, ...), age=(int, ...))
    assert isinstance(pydantic_ai.Agent(model, output_type=person).run_sync("Ann is 5").output, person)


@pytest.mark.parametrize("api", ["chat completions", "responses"])
def test_openai_agents(url: str, api: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        return f"20 C in {city}"

    client = openai.AsyncOpenAI(base_url=url, api_key="none")
    kind = agents.OpenAIChatCompletionsModel if api == "chat completions" else agents.OpenAIResponsesModel
    agent = agents.Agent(name="a", instructions="be short", tools=[weather], model=kind("demo", client))

    async def run() -> tuple[str, str]:
        whole = await agents.Runner.run(agent, "weather in Paris?")
        streamed = agents.Runner.run_streamed(agent, "weather in Paris?")
        async for _ in streamed.stream_events():
            pass
        return whole.final_output, streamed.final_output

    assert asyncio.run(run()) == ("It is 20 C in Paris.",) * 2


def test_smolagents(url: str) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")

    @smolagents.tool
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: A city.
        """
        return f"20 C in {city}"

    model = smolagents.OpenAIModel("demo", api_base=url, api_key="none")
    agent = smolagents.ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
    agent.run("weather in Paris?")
    assert any("20 C in Paris" in str(getattr(step, "observations", "")) for step in agent.memory.steps)
