"""The shipped configuration of a connector for Kafka sends bodies that the service accepts.

The connector itself is not run. Its mappings are rendered here: they use `root.NAME = EXPRESSION`,
`this`, `a | b` for a default, metadata (`@NAME`), `format` and one division.
"""

import json
import re
from pathlib import Path

import yaml

CONNECTOR = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "kafka.yaml").read_text())
META = {"kafka_topic": "shop", "kafka_partition": 2, "kafka_offset": 7, "kafka_timestamp_ms": 1500}
BATCH, SINGLE, REFUSED = CONNECTOR["output"]["broker"]["outputs"][0]["fallback"]


def evaluate(expression, this):
    """The value of an expression of a mapping."""
    expression = expression.strip()
    if " | " in expression:
        value, default = (evaluate(part, this) for part in expression.split(" | "))
        return default if value is None else value
    if expression == "this":
        return this
    if expression == "[this]":
        return [this]
    if found := re.fullmatch(r"this\.(\w+)", expression):
        return this.get(found[1])
    if found := re.fullmatch(r'"([^"]*)"\.format\((.*)\)', expression):
        values = [str(META[name.strip().removeprefix("@")]) for name in found[2].split(",")]
        return found[1].replace("%v", "{}").format(*values)
    found = re.fullmatch(r"@(\w+) / (\d+)", expression)
    assert found, expression
    return META[found[1]] / int(found[2])


def mapped(mapping, this):
    """The message that a mapping makes of one."""
    root = {}
    for line in mapping.strip().splitlines():
        target, _, expression = line.strip().partition(" = ")
        value = evaluate(expression, this)
        if target == "root":
            root = dict(value)
        else:
            root[target.removeprefix("root.")] = value
    return root


def body(branch, messages):
    """What a branch of the output sends of a batch; one message if it archives nothing."""
    (mapping,) = (step["mapping"] for step in CONNECTOR["pipeline"]["processors"])
    mapped_ones = [mapped(mapping, message) for message in messages]
    *archives, last = branch["processors"]
    if archives:
        assert archives == [{"archive": {"format": "json_array"}}]
        return mapped(last["mapping"], mapped_ones)
    (message,) = mapped_ones
    return mapped(last["mapping"], message)


async def send(client, branch, messages):
    request = branch["http_client"]
    path = request["url"].removeprefix("${RECSYS_URL}")
    headers = {"Content-Type": request["headers"]["Content-Type"]}
    content = json.dumps(body(branch, messages))
    return await client.request(request["verb"], path, content=content, headers=headers)


async def test_a_batch_and_single_events_are_accepted_and_recognised(client):
    named = {"event_id": "own", "user": "ada", "item": "item-2", "timestamp": 1700000000}
    messages = [{"user": "ada", "item": "item-1", "type": "click"}, named]
    counts = (await send(client, BATCH, messages)).json()
    assert (counts["accepted"], counts["duplicates"]) == (2, 0)
    for message in messages:  # as after a crash
        counts = (await send(client, SINGLE, [message])).json()
        assert (counts["accepted"], counts["duplicates"]) == (0, 1)
    history = (await client.get("/v1/users/ada/history")).json()["events"]
    assert {event["item"] for event in history} == {"item-1", "item-2"}


async def test_what_is_refused_for_good_is_kept_and_all_else_tried_again(client):
    kept, rejected = REFUSED["switch"]["cases"]
    pattern = re.search(r're_match\("(.*)"\)', kept["check"])[1].replace(r"\\", "\\")
    dropped = BATCH["http_client"]["drop_on"]
    refusals = [
        await send(client, SINGLE, [{"user": "ada"}]),
        await send(client, SINGLE, [{"event_id": "e", "user": "u", "item": "i"}]),
        await send(client, SINGLE, [{"event_id": "e", "user": "u", "item": "other"}]),
    ]
    assert [response.status_code for response in refusals] == [422, 200, 409]
    for status in dropped:
        assert re.search(pattern, f"HTTP request returned unexpected response code ({status}): x")
    for status in BATCH["http_client"]["backoff_on"]:
        assert not re.search(pattern, f"HTTP request returned unexpected response code ({status})")
    assert {409, 422} <= set(dropped)
    assert "file" in kept["output"]
    assert "reject" in rejected["output"]
