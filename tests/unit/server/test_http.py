"""The HTTP process without an engine: a scripted one answers, so that every shape of an answer can be shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from expertide.server import guard, messages
from expertide.server.app import Served, make_app
from expertide.server.client import EngineClient, Ticket
from expertide.server.errors import ApiError
from expertide.server.guard import Bodies
from expertide.server.messages import Accepted, Cancel, Delta, Done, Load, Step, Submit
from expertide.server.run import model_name
from expertide.server.sse import EventStream, unless_gone

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
ANSWER = 'So.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


class ScriptedClient(EngineClient):
    """Accepts everything and says `text` in pieces of three characters."""

    def __init__(self, text: str, **accepted: Any) -> None:
        super().__init__(Load("demo", {}, 0))
        self.state = "ready"
        self.facts = {"context": 100}
        self.text = text
        self.accepted = accepted
        self.submitted: list[Submit] = []

    def submit(self, request: Submit) -> Ticket:
        self.submitted.append(request)
        ticket = Ticket(self, request.id)
        ticket.accepted.set_result(Accepted(request.id, [4], **self.accepted))
        for index in range(request.n):
            for start in range(0, len(self.text), 3):
                ticket.push(Delta(request.id, index, self.text[start : start + 3], [start]))
            ticket.push(Delta(request.id, index, finish="stop"))
        ticket.push(Done(request.id, 4, 0, len(self.text), []))
        return ticket

    def _send(self, message: Any) -> None:
        assert isinstance(message, Cancel)


def call(client: EngineClient, method: str, path: str, body: Any = None, **door: Any) -> httpx.Response:
    served = Served(client, "demo", 4, Bodies(1 << 20))
    headers = door.pop("headers", {})
    app = make_app(served, **({"api_key": None, "is_loopback": False} | door))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.request(method, path, json=body, headers=headers)

    return asyncio.run(send())


def ask(client: EngineClient, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], **fields}
    return call(client, "POST", "/v1/chat/completions", body)


def joined(response: httpx.Response) -> dict[str, Any]:
    """The message that a client puts together from a stream."""
    message: dict[str, Any] = {"content": None, "tool_calls": {}}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        known = message["tool_calls"].setdefault(part["index"], {"arguments": ""})
                        known |= {key: part[key] for key in ("id", "type") if key in part}
                        known |= {"name": part["function"]["name"]} if "name" in part["function"] else {}
                        known["arguments"] += part["function"]["arguments"]
                elif name != "role":
                    message[name] = (message.get(name) or "") + value
            message["finish"] = choice["finish_reason"] or message.get("finish")
    return message


def test_reasoning_and_tool_calls_are_the_same_whole_and_streamed():
    client = ScriptedClient(ANSWER, thinking="open", tool_format="json")
    whole = ask(client).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "I look.")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    streamed = joined(ask(client, stream=True))
    assert streamed["finish"] == "tool_calls"
    assert (streamed["reasoning_content"], streamed["content"]) == ("So.", "I look.")
    (made_again,) = streamed["tool_calls"].values()
    assert made_again["id"].startswith("call_")
    assert (made_again["name"], made_again["arguments"]) == ("weather", '{"city": "Ulm"}')


def test_without_tools_nothing_is_taken_for_a_call_and_the_template_gets_none():
    client = ScriptedClient(ANSWER, thinking="open", tool_format="json")
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = ask(client, **fields).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and "<tool_call>" in choice["message"]["content"]
        assert client.submitted[-1].chat is not None and "tools" not in client.submitted[-1].chat["variables"]
    ask(client)
    assert client.submitted[-1].chat is not None and client.submitted[-1].chat["variables"]["tools"] == [TOOL]


def test_several_answers_are_split_each_by_itself():
    client = ScriptedClient(ANSWER, thinking="open", tool_format="json")
    choices = ask(client, n=2).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["I look."] * 2
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert ids[0] != ids[1]


def test_a_state_that_cannot_answer_says_which():
    client = ScriptedClient("")
    for state, status, code in (("loading", 503, "model_loading"), ("dead", 503, "engine_dead")):
        client.state = state  # type: ignore[assignment]
        response = ask(client)
        assert response.status_code == status and response.json()["error"]["code"] == code
        assert call(client, "GET", "/health").status_code == 503
    client.state = "ready"
    client.refuse_new()
    assert ask(client).json()["error"]["code"] == "shutting_down"


def test_cors_headers_go_to_allowed_origins_only():
    client = ScriptedClient("x")
    door = {"allowed_origins": frozenset({"https://chat.example"}), "api_key": "k"}
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    preflight = call(client, "OPTIONS", "/v1/chat/completions", headers=asked, **door)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    other = call(
        client, "OPTIONS", "/v1/chat/completions", headers={**asked, "Origin": "https://other.example"}, **door
    )
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    # The key is asked for all the same.
    assert call(client, "GET", "/v1/models", headers={"Origin": "https://chat.example"}, **door).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("evil.example", 403), ("[", 403), ("", 403)],
)
def test_on_a_loopback_address_only_names_of_this_machine_are_answered(host: str, status: int):
    client = ScriptedClient("x")
    assert call(client, "GET", "/v1/models", headers={"Host": host}, is_loopback=True).status_code == status
    if status == 403:
        door = {"is_loopback": True, "api_key": "k"}
        headers = {"Host": host, "Authorization": "Bearer k"}
        assert call(client, "GET", "/v1/models", headers=headers, **door).status_code == 200


def test_silence_is_broken_by_comments_from_a_clock_and_headers_do_not_wait():
    sent: list[tuple[float, dict[str, Any]]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def events() -> AsyncIterator[bytes]:
            await asyncio.sleep(0.25)
            yield b"data: 1\n\n"

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append((loop.time() - begin, message))

        stream = EventStream(events(), lambda: "prompt 1/2", on_close=lambda: None, keep_alive_s=0.1)
        await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert sent[0][1]["type"] == "http.response.start" and sent[0][0] < 0.1
    bodies = [message["body"] for _, message in sent[1:]]
    assert bodies == [b": prompt 1/2\n\n"] * 3 + [b"data: 1\n\n", b""]
    assert [message["more_body"] for _, message in sent[1:]] == [True] * 4 + [False]


def test_a_client_that_leaves_closes_the_events():
    closed: list[bool] = []

    async def run() -> None:
        async def events() -> AsyncIterator[bytes]:
            try:
                while True:
                    await asyncio.sleep(0.01)
                    yield b"data: 1\n\n"
            finally:
                closed.append(True)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return

        await EventStream(events(), str, on_close=lambda: None)({"type": "http"}, receive, send)

    asyncio.run(run())
    assert closed == [True]


def test_a_client_that_left_before_the_first_event_is_let_go_of_too():
    closed: list[bool] = []

    async def run() -> None:
        async def events() -> AsyncIterator[bytes]:
            raise AssertionError("nobody listens")
            yield b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            return

        stream = EventStream(events(), str, on_close=lambda: closed.append(True))
        await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert closed == [True]


def test_work_that_fails_is_not_taken_for_a_client_that_left():
    async def run() -> None:
        async def fail() -> None:
            raise ApiError(400, "no")

        async def never() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        with pytest.raises(ApiError, match="no"):
            await unless_gone(never, fail())

    asyncio.run(run())


def test_a_message_comes_out_as_it_went_in():
    step = Step([Delta("a", 1, "é\ud800", [5], [{"logprob": -1e-300}], "stop")], [Done("a", 1, 0, 1, [])], [], 3)
    for message in (step, Load("demo", {"ram": "4GiB"}, 5), Submit("a", ["x", [1]], None, 1, {"seed": 2**64 - 1})):
        frame = messages.encode(message)
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        assert messages.decode(frame[4:]) == message


def test_a_stream_of_messages_that_is_cut_is_a_process_that_is_gone():
    async def run(data: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await messages.read(reader)

    frame = messages.encode(Cancel("a"))
    assert asyncio.run(run(frame)) == Cancel("a")
    for end in range(len(frame)):
        assert asyncio.run(run(frame[:end])) is None
    assert asyncio.run(run(b"\xff\xff\xff\xff" + frame)) is None


@pytest.mark.parametrize(
    ("model", "name"),
    [("demo", "demo"), ("/a/b/Qwen3-Q4_K_M.gguf", "Qwen3-Q4_K_M"), ("/a/b/", "b"), ("org/name:Q4_0", "org/name:Q4_0")],
)
def test_a_model_is_called_by_its_file_or_by_its_name_on_the_hub(model: str, name: str):
    assert model_name(model) == name


def test_a_body_that_trickles_is_given_up():
    async def run() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        bodies = Bodies(100, timeout_s=0.1)
        lease = bodies.lease()
        with pytest.raises(ApiError) as error:
            await bodies.read_json(guard.Request({"type": "http", "headers": []}, receive), lease)
        assert error.value.status == 408 and bodies.open_bytes > 0
        lease.close()
        assert bodies.open_bytes == 0

    asyncio.run(run())
