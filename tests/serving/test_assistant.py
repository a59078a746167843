"""Tools for assistants: their definitions, their answers, and the official client of MCP."""

import json
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
from typer.testing import CliRunner

from recsys.errors import ConfigError
from recsys.serving.assistant import TOOLS, ToolError, call, make_server, openai_tools
from recsys.serving.client import Client

CHEAP = {"must": [{"key": "price", "range": {"lt": 3}}]}
NAMES = ["recommend", "explain", "similar", "search_items", "find_items"]


@pytest.fixture
def away():
    def refuse(request):
        raise httpx.ConnectError("connection refused", request=request)

    with Client("http://nowhere", retries=0, transport=httpx.MockTransport(refuse)) as client:
        yield client


@pytest.fixture
def shop(settings, recommender, serving):
    with serving(settings, recommender=recommender) as url, Client(url) as client:
        yield client


def ids(answer):
    return [item["item_id"] for item in answer["items"]]


def test_definitions_have_the_shape_of_openai_tools():
    tools = openai_tools()
    assert [tool["function"]["name"] for tool in tools] == NAMES
    for tool in tools:
        assert tool["type"] == "function"
        function = tool["function"]
        assert set(function) == {"name", "description", "parameters"}
        assert function["description"]
        parameters = function["parameters"]
        assert parameters["type"] == "object"
        assert parameters["additionalProperties"] is False
        assert "$ref" not in json.dumps(parameters), "some models do not follow references"
        assert set(parameters.get("required", ())) <= set(parameters["properties"])
        for example in parameters["examples"]:
            TOOLS[function["name"]].arguments.model_validate(example)


def test_no_tool_changes_anything(shop):
    asked = []
    shop._http.event_hooks["request"].append(lambda r: asked.append((r.method, r.url.path)))
    for name, arguments in [
        ("recommend", {"history": ["item-1"]}),
        ("explain", {"user": "ada"}),
        ("similar", {"item_id": "item-7"}),
        ("search_items", {"filter": CHEAP}),
        ("find_items", {"text": "no. 7"}),
    ]:
        call(shop, name, arguments)
    posts = {path for method, path in asked if method != "GET"}
    assert posts == {"/v1/recommendations"}
    assert {method for method, _ in asked} == {"GET", "POST"}


def test_recommendations_are_those_of_the_service(shop, recommender):
    wanted = recommender.expected(["item-1"], 4, exclude_items=["item-9"], filter=CHEAP)
    arguments = {"history": ["item-1"], "k": 4, "exclude_items": ["item-9"], "filter": CHEAP}
    found = call(shop, "recommend", arguments)
    assert ids(found) == wanted
    assert all(item["metadata"]["price"] < 3 for item in found["items"])
    assert ids(call(shop, "recommend", {"user": "ada", "k": 3}))


def test_an_explanation_has_a_reason_and_a_certificate(shop):
    found = call(shop, "explain", {"history": ["item-1"], "k": 2})
    assert {item["because"] for item in found["items"]} == {"item-1"}
    assert found["certificate"] == "beam-exact"


def test_similar_items_are_those_of_the_service(shop):
    assert ids(call(shop, "similar", {"item_id": "item-7", "k": 2})) == ["item-8", "item-9"]


def test_a_search_finds_items_that_match(shop):
    found = call(shop, "search_items", {"filter": CHEAP, "k": 20})
    assert sorted(ids(found)) == sorted(f"item-{i}" for i in range(1, 6))  # item 0 has no price


def test_items_are_found_by_their_titles(shop):
    found = call(shop, "find_items", {"text": "NO. 7", "k": 3})
    assert len(found["items"]) == 3
    assert all("no. 7" in item["title"] for item in found["items"])
    assert "price" in found["items"][0]["metadata"]
    assert len(call(shop, "find_items", {"text": "no. 77", "k": 3})["items"]) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("buy", {}, "there is no tool 'buy'; there are recommend, explain"),
        ("recommend", {}, "exactly one of 'user' and 'history'"),
        ("recommend", {"history": ["a"], "k": 500}, "k: Input should be less than"),
        ("similar", {"item_id": "item-7", "delete": True}, "delete: Extra inputs"),
        ("similar", {"item_id": "gone"}, "refused: unknown_item"),
        ("recommend", {"user": "x", "filter": {"must": [{"key": "gone"}]}}, "invalid_filter"),
    ],
)
def test_a_mistake_is_explained(shop, name, arguments, message):
    with pytest.raises(ToolError, match=message):
        call(shop, name, arguments)


def test_a_service_that_is_away_is_reported(away):
    with pytest.raises(ToolError, match="did not answer: connection refused"):
        call(away, "similar", {"item_id": "a"})


def test_the_command_prints_the_definitions():
    from recsys.cli import app

    result = CliRunner().invoke(app, ["mcp", "--schema"])
    assert result.exit_code == 0
    assert json.loads(result.output) == openai_tools()


def test_the_tools_and_the_client_need_no_torch():
    code = "import sys, recsys.serving.assistant; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def session():
    mcp = pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

    @asynccontextmanager
    async def connect(client):
        async with mcp.Client(make_server(client)) as session:
            yield session

    return connect


async def test_an_assistant_sees_the_tools(session, away):
    async with session(away) as assistant:
        listed = (await assistant.list_tools()).tools
        assert [tool.name for tool in listed] == list(TOOLS)
        wanted = {t["function"]["name"]: t["function"]["parameters"] for t in openai_tools()}
        for tool in listed:
            assert tool.input_schema == wanted[tool.name]
            assert tool.annotations.read_only_hint


async def test_an_assistant_gets_what_the_client_gets(session, shop):
    async with session(shop) as assistant:
        for name, arguments in [
            ("explain", {"history": ["item-1"], "k": 3}),
            ("similar", {"item_id": "item-7"}),
            ("search_items", {"filter": CHEAP}),
            ("find_items", {"text": "no. 7"}),
        ]:
            answer = await assistant.call_tool(name, arguments)
            assert not answer.is_error
            wanted = call(shop, name, arguments) | {"recommendation_id": None}
            found = answer.structured_content | {"recommendation_id": None}
            assert found == wanted
            assert json.loads(answer.content[0].text) == answer.structured_content


async def test_an_assistant_is_told_of_a_mistake(session, away):
    async with session(away) as assistant:
        for name, text in [("similar", "did not answer"), ("recommend", "exactly one")]:
            arguments = {"item_id": "a"} if name == "similar" else {}
            answer = await assistant.call_tool(name, arguments)
            assert answer.is_error
            assert text in answer.content[0].text


async def test_an_assistant_starts_the_command(settings, recommender, serving, tmp_path):
    mcp = pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
    (tmp_path / "key.txt").write_text("rk_unused\n")
    with serving(settings, recommender=recommender) as url:
        command = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "recsys", "mcp", "--url", url, "--key-file", str(tmp_path / "key.txt")],
        )
        async with mcp.Client(command) as assistant:
            answer = await assistant.call_tool("similar", {"item_id": "item-7", "k": 1})
            assert ids(answer.structured_content) == ["item-8"]


def test_a_missing_key_file_is_named():
    from recsys.cli import app

    result = CliRunner().invoke(app, ["mcp", "--key-file", "gone.txt"])
    assert isinstance(result.exception, ConfigError)
    assert "--key-file gone.txt" in str(result.exception)
