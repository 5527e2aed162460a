"""The served demo model, with the clients people use: answers equal to `LLM`'s, and failures stay in their request.

One server for most tests; those that end one start their own (2 s each).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from expertide import LLM, SamplingParams
from served import ServedDemo

QUESTION = "What is the capital of France?"
PROMPT = f"User: {QUESTION}\n\nAssistant:"
STORY = "User: Tell me a story about a fox.\n\nAssistant:"
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedDemo]:
    with ServedDemo() as server:
        yield server


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", context=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server: ServedDemo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: ServedDemo) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The envelope, checked: one sentence, all four keys."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


# What it says


def test_a_completion_is_what_the_python_door_says(client: openai.OpenAI, llm: LLM):
    right = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == right.text
    assert answer.choices[0].finish_reason == right.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(right.prompt_token_ids)
    assert answer.usage.completion_tokens == len(right.token_ids)
    stats = answer.model_extra["expertide"]
    assert stats["memory"]["ram_peak_bytes"] > stats["memory"]["server_peak_bytes"] > 10 << 20
    assert set(stats["timings"]) == set(right.stats["timings"])


def test_a_seeded_answer_and_a_stop_text_are_what_the_python_door_says(client: openai.OpenAI, llm: LLM):
    params = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=7, stop=(" was",), frequency_penalty=0.5)
    right = llm.generate(STORY, params)
    answer = client.completions.create(
        model="demo", prompt=STORY, max_tokens=40, temperature=0.9, top_p=0.9, seed=7, stop=[" was"],
        frequency_penalty=0.5, extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].text == right.text
    assert answer.choices[0].finish_reason == right.finish_reason
    assert answer.choices[0].model_extra["token_ids"] == right.token_ids


def test_a_streamed_answer_is_the_whole_one_in_pieces(client: openai.OpenAI, llm: LLM):
    right = llm.chat(CHAT, SamplingParams(max_tokens=24))
    whole = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=24, temperature=0)
    assert whole.choices[0].message.content == right.text
    assert whole.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_completion_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == right.text and len([piece for piece in pieces if piece]) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_gets_several_answers_at_once(server: ServedDemo, llm: LLM):
    right = {prompt: llm.generate(prompt, SamplingParams(max_tokens=16)).text for prompt in (PROMPT, STORY)}

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="demo", prompt=prompt, max_tokens=16, temperature=0)
                    for prompt in [PROMPT, STORY] * 3
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [right[PROMPT], right[STORY]] * 3


def test_several_prompts_and_several_answers_are_numbered_prompt_by_prompt(client: openai.OpenAI, llm: LLM):
    ids = llm.encode(STORY)
    for prompts in ([PROMPT, STORY], [llm.encode(PROMPT), ids]):
        answer = client.completions.create(
            model="demo", prompt=prompts, max_tokens=8, temperature=0.8, seed=3, n=2, echo=False
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice in answer.choices:
            params = SamplingParams(max_tokens=8, temperature=0.8, seed=3 + choice.index % 2)
            assert choice.text == llm.generate((PROMPT, STORY)[choice.index // 2], params).text
        assert answer.usage is not None and answer.usage.completion_tokens == 32
    alone = client.completions.create(model="demo", prompt=ids, max_tokens=8, temperature=0)
    assert alone.choices[0].text == llm.generate(ids, SamplingParams(max_tokens=8)).text


def test_echo_with_logprobs_agrees_with_loglikelihood(client: openai.OpenAI, llm: LLM):
    context, continuation = "User: What is the capital of France?\n\nAssistant: The capital of", " France is Paris."
    right = llm.loglikelihood(context, continuation)
    num_context = len(llm.encode(context))
    # As lm_eval's local-completions asks: token ids, one token more, which it leaves out again.
    ids = llm.encode(context + continuation)
    for prompt in (ids, context + continuation):
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and len(logprobs.token_logprobs) == len(ids) + 1
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        found = sum(logprobs.token_logprobs[num_context:-1])
        assert found == pytest.approx(right, abs=1e-4)
        is_greedy = [
            max(top, key=top.get) == token
            for token, top in zip(logprobs.tokens[num_context:-1], logprobs.top_logprobs[num_context:-1], strict=True)
        ]
        scores = llm.score(ids[:num_context], ids[num_context:])
        assert is_greedy == [score.is_greedy for score in scores]
        assert answer.choices[0].text.endswith(llm.generate(ids, SamplingParams(max_tokens=1)).text)
        assert answer.choices[0].text.startswith(context)
    # The tokens lie in the text where they say, but for those that begin and end it and have no text.
    assert (logprobs.tokens[0], logprobs.tokens[-1]) == ("<|bos|>", "<|eos|>")
    text = answer.choices[0].text
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:-1]:
        assert text[offset : offset + len(token)] == token


def test_echo_without_an_answer_gives_the_prompt_alone(client: openai.OpenAI):
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.prompt_tokens


def test_chat_logprobs_are_of_the_full_distribution_whatever_the_bias(client: openai.OpenAI, llm: LLM):
    right = llm.chat(CHAT, SamplingParams(max_tokens=4, logprobs=3))
    answer = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [entry.logprob for entry in right.logprobs]
    assert ["".join(map(chr, entry.bytes)) for entry in content] == [entry.token for entry in content]
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    other = right.logprobs[0].top[1][0]
    forced = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=1, temperature=0, logprobs=True, logit_bias={str(other): 100}
    )
    entry = forced.choices[0].logprobs.content[0]
    assert entry.logprob == pytest.approx(right.logprobs[0].top[1][1], abs=1e-9)
    assert entry.top_logprobs == []


def test_a_streamed_completion_carries_the_same_logprobs_and_echo(client: openai.OpenAI):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole.logprobs, name)


def test_an_answer_that_is_asked_for_as_json_is_json(client: openai.OpenAI):
    def ask(response_format: dict[str, Any], **more: Any) -> Any:
        answer = client.chat.completions.create(
            model="demo", messages=CHAT, max_tokens=100, temperature=0.7, response_format=response_format, **more
        )
        return [(choice.message.content, choice.finish_reason) for choice in answer.choices]

    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "year": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    for content, finish in ask({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, n=4, seed=1):
        assert finish == "stop"
        value = json.loads(content)
        assert set(value) == {"city", "year"} and value["city"] in ("Paris", "Rome") and 0 <= value["year"] <= 99
    short = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    ((content, _),) = ask({"type": "json_schema", "json_schema": {"schema": short}})
    assert set(json.loads(content)) <= {"a"}
    ((content, finish),) = ask({"type": "json_object"}, seed=2)
    # A small model may fill its strings to the limit: then the reason says that the JSON is not complete.
    assert content.lstrip().startswith("{")
    assert finish == "length" or isinstance(json.loads(content), dict)


@pytest.mark.parametrize(
    ("response_format", "pattern"),
    [
        ({"type": "yaml"}, "text, json_object or json_schema"),
        ({"type": "json_schema"}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}, "schema cannot be used"),
        ("json", "text, json_object or json_schema"),
    ],
)
def test_a_response_format_that_cannot_be_followed_is_refused(http: httpx.Client, response_format: Any, pattern: str):
    response = http.post("/v1/chat/completions", json={"messages": CHAT, "response_format": response_format})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == "response_format" and re.search(pattern, error["message"]), error


def test_tokens_there_and_back(http: httpx.Client, llm: LLM):
    answer = http.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True}).json()
    assert answer["tokens"] == llm.encode("hello there") and answer["count"] == len(answer["tokens"])
    plain = http.post("/tokenize", json={"prompt": "hello there", "add_special_tokens": False}).json()["tokens"]
    assert plain == llm.tokenizer.encode("hello there", add_bos=False)
    assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": "hello there"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert chat == llm.chat_prompt_ids(CHAT)
    info = http.get("/tokenizer_info").json()
    assert info["eos_token_id"] == llm.tokenizer.eos_id and info["chat_template"] == llm.tokenizer.chat_template


def test_health_models_metrics_and_the_document(http: httpx.Client, client: openai.OpenAI):
    assert http.get("/health").json()["status"] == "ok"
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"
    before = _metric(http, "expertide_prompt_tokens_total")
    client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=2)
    assert _metric(http, "expertide_prompt_tokens_total") == before + 3
    assert _metric(http, "expertide_engine_up") == 1 and _metric(http, "expertide_requests_open") == 0
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"}
    assert "CompletionRequest" in document["components"]["schemas"]


def _metric(http: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_each_request_leaves_one_line_with_its_figures(server: ServedDemo, client: openai.OpenAI):
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=5, temperature=0)
    line = server.wait_for_log(rf"(?m)^.*id={answer.id} .*$")[0]
    assert re.search(
        r"path=/v1/completions status=200 prompt=15 cached=0 ttft_s=\d+\.\d+ out=5 tok_s=[\d.]+ hit_rate=[\d.]+ "
        r"read_bytes=\d+ total_s=[\d.]+ finish=length$",
        line,
    )
    assert server.log().count(answer.id) == 1


# What is refused


@pytest.mark.parametrize(
    ("body", "status", "param", "pattern"),
    [
        (b"", 400, None, "empty"),
        (b"{", 400, None, "not JSON"),
        (b'{"prompt": "\xff\xfe"}', 400, None, "not UTF-8"),
        (b"[" * 100_000, 400, None, "nested too deeply|not JSON"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "prompt", "expected a text"),
        (b"[]", 400, None, "expected a JSON object"),
        (b"null", 400, None, "expected a JSON object"),
        (b"{}", 400, "prompt", "is missing"),
        (b'{"prompt": 3}', 400, "prompt", "expected a text"),
        (b'{"prompt": []}', 400, "prompt", "expected a text"),
        (b'{"prompt": ["a", 1]}', 400, "prompt", "expected a text"),
        (b'{"prompt": "\\ud800"}', 400, None, "surrogate"),
        (b'{"prompt": ""}', 200, None, ""),
        (b'{"prompt": [99999999]}', 400, None, "token id 99999999"),
        (b'{"prompt": [1e999]}', 400, None, "too large"),
        (b'{"prompt": "x", "temperature": NaN}', 400, None, "NaN"),
        (b'{"prompt": "x", "temperature": "hot"}', 400, "temperature", "number"),
        (b'{"prompt": "x", "temperature": -1}', 400, "temperature", "greater than or equal to 0"),
        (b'{"prompt": "x", "top_p": 2}', 400, "top_p", "less than or equal to 1"),
        (b'{"prompt": "x", "max_tokens": true}', 400, "max_tokens", "integer"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens", "echo"),
        (b'{"prompt": "x", "n": 0}', 400, "n", "greater than or equal to 1"),
        (b'{"prompt": "x", "n": 129}', 400, "n", "less than or equal to 128"),
        (b'{"prompt": "x", "n": 2, "best_of": 3}', 400, "best_of", "value of n"),
        (b'{"prompt": "x", "suffix": "y"}', 400, "suffix", "not supported"),
        (b'{"prompt": "x", "logprobs": 21}', 400, "logprobs", "20"),
        (b'{"prompt": "x", "stop": [""]}', 400, "stop", "none of them empty"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias", "token ids"),
        (b'{"prompt": "x", "logit_bias": {"5000": 1}}', 400, None, "token id 5000"),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', 400, "stream_options", "stream: true"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400, None, "not JSON"),
        (b'{"prompt": "x", "model": "gpt-5"}', 404, "model", "'gpt-5' is not served"),
        (b'{"prompt": "' + b"x" * (2 << 20) + b'"}', 413, None, "larger than"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else None,
)
def test_a_bad_body_is_refused_in_one_sentence(http: httpx.Client, body: bytes, status: int, param: str, pattern: str):
    response = http.post("/v1/completions", content=body)
    assert response.status_code == status, response.text
    if status != 200:
        error = error_of(response)
        assert error["param"] == param and re.search(pattern, error["message"]), error
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "pattern"),
    [
        ({"messages": []}, "messages", "1 to 4,096 messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "role of system"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "'image_url'"),
        ({"messages": [{"role": "user", "content": 5}]}, None, "found int"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "set by the server"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template knows no tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "type function"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tool_choice": "auto"}, "tool_choice", "no tools"),
    ],
)
def test_a_bad_chat_is_refused_in_one_sentence(http: httpx.Client, fields: dict[str, Any], param: str, pattern: str):
    response = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2} | fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert re.search(pattern, error["message"]), error
    assert param is None or error["param"] == param


def test_bodies_of_all_open_requests_together_are_bounded(server: ServedDemo, http: httpx.Client):
    body = b'{"prompt": "x", "max_tokens": 1}' + b" " * 900_000

    def ask(_: int) -> int:
        try:
            return httpx.post(server.url + "/v1/completions", content=body, timeout=1).status_code
        except httpx.ReadTimeout:
            return 0

    long = {"prompt": [7] * 10, "max_tokens": 490, "n": 64, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as response, ThreadPoolExecutor(6) as pool:
        lines = response.iter_lines()
        next(lines)
        # Four wait behind the long one, the rest find no room.
        assert sorted(pool.map(ask, range(6))) == [0, 0, 0, 0, 503, 503]
    assert http.post("/v1/completions", content=body).status_code == 200


def test_a_prompt_over_the_context_says_so_with_the_code_that_clients_know(http: httpx.Client):
    for body in ({"prompt": [5] * 513}, {"prompt": "word " * 600}):
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded" and "the context is 512" in error["message"]


def test_message_shapes_that_clients_send_are_taken(http: httpx.Client):
    for messages in (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}],
            }
        ],
        [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": None}, *CHAT],
    ):
        response = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "temperature": 0})
        assert response.status_code == 200, response.text
        assert "capital" in response.json()["choices"][0]["message"]["content"]


def test_a_developer_message_is_a_system_message_where_the_template_knows_no_developers(http: httpx.Client):
    tokens = [
        http.post("/tokenize", json={"messages": [{"role": role, "content": "Be brief."}, *CHAT]}).json()["tokens"]
        for role in ("developer", "system", "tool")
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_unknown_fields_are_named_and_known_idle_ones_are_not(http: httpx.Client):
    body = {"prompt": "x", "max_tokens": 1, "wat": 1, "user": "me", "metadata": {}}
    assert http.post("/v1/completions", json=body).json()["expertide"]["unknown_fields"] == ["wat"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/other", 404),
        ("PUT", "/health", 405),
    ],
)
def test_unknown_paths_and_methods_get_the_envelope_too(http: httpx.Client, method: str, path: str, status: int):
    response = http.request(method, path)
    assert response.status_code == status
    error_of(response)


def test_pages_of_other_sites_and_names_that_are_not_ours_are_refused(http: httpx.Client):
    body = {"prompt": "x", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"Origin": "http://evil.example"}).status_code == 403
    assert http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    allowed = http.get("/v1/models", headers={"Origin": str(http.base_url).rstrip("/")})
    assert allowed.status_code == 200 and "access-control-allow-origin" not in allowed.headers


# Who waits for what


def test_a_client_that_leaves_stops_the_engine_within_a_second(server: ServedDemo, http: httpx.Client):
    before = server.log().count("finish=cancelled")
    for is_stream in (True, False):
        # 490 tokens take seconds; the client stays for a fraction of one.
        body = {"prompt": [7] * 10, "max_tokens": 490, "n": 8, "ignore_eos": True, "stream": is_stream}
        with (
            contextlib.suppress(httpx.ReadTimeout),
            http.stream("POST", "/v1/completions", json=body, timeout=0.3) as response,
        ):
            next(response.iter_lines())
        left = time.monotonic()
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
        assert time.monotonic() - left < 1
    assert server.log().count("finish=cancelled") == before + 2
    assert _metric(http, "expertide_requests_open") == 0


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: ServedDemo, http: httpx.Client):
    long = {"prompt": [7] * 10, "max_tokens": 490, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long) as response:
        lines = response.iter_lines()  # kept: the response is closed with it
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=0.3)
        end = time.monotonic() + 2
        while _metric(http, "expertide_requests_open") != 1:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_slow_connections_do_not_keep_a_good_one_waiting(server: ServedDemo, http: httpx.Client):
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            if number % 2:  # half of them are in the middle of their body
                connection.sendall(b"Content-Length: 1000\r\n\r\n{")
        begin = time.monotonic()
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - begin < 1
    finally:
        for connection in connections:
            connection.close()


def test_a_full_queue_is_refused_and_headers_of_a_stream_come_while_it_waits():
    with ServedDemo("--max-queue", "2") as server, httpx.Client(base_url=server.url, timeout=30) as http:
        long = {"prompt": [7] * 10, "max_tokens": 490, "n": 8, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as first:
            lines = first.iter_lines()
            next(lines)
            begin = time.monotonic()
            with http.stream("POST", "/v1/completions", json=long) as second:
                assert second.status_code == 200 and time.monotonic() - begin < 1
                waiting = second.iter_lines()
                assert next(waiting).startswith(": keep-alive")
                third = http.post("/v1/completions", json={"prompt": "x"})
                assert third.status_code == 429 and third.headers["retry-after"] == "1"
                assert error_of(third)["code"] == "queue_full"
        # The server needs some milliseconds to see that the clients have left.
        end = time.monotonic() + 1
        while http.post("/v1/completions", json={"prompt": "x"}).status_code != 200:
            assert time.monotonic() < end


# Life and death


def test_the_key_is_asked_for_everywhere_but_at_health():
    with ServedDemo(EXPERTIDE_API_KEY="sesame") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer sesame"}, 200),
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                response = httpx.get(server.url + path, headers=headers)
                assert response.status_code == status
                if status == 401:
                    assert error_of(response)["code"] == "invalid_api_key"
        assert httpx.get(server.url + "/health").status_code == 200
        with openai.OpenAI(base_url=server.url + "/v1", api_key="sesame") as client:
            assert client.completions.create(model="demo", prompt="x", max_tokens=1).usage.completion_tokens == 1
        assert "sesame" not in server.log()
        assert b"sesame" not in Path(f"/proc/{server.engine().pid}/environ").read_bytes()
        assert server.stop(signal.SIGINT) == 130


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones():
    with ServedDemo() as server, ThreadPoolExecutor() as pool:
        engine = server.engine()
        with httpx.Client(base_url=server.url, timeout=30) as http:
            long = {"prompt": [7] * 10, "max_tokens": 300, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=long) as response:
                lines = response.iter_lines()
                next(lines)
                ended = pool.submit(server.stop)
                server.wait_for_log("1 requests under way")
                rest = list(lines)
            assert "data: [DONE]" in rest[-2:]
            assert sum('"text":' in line for line in rest) > 100
        assert ended.result(10) == 0
        assert not engine.is_running()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


def test_a_drain_is_bounded_and_a_second_signal_ends_it_at_once():
    body = {"prompt": [7] * 10, "max_tokens": 490, "n": 64, "ignore_eos": True, "stream": True}
    for arguments, signals in ((("--drain", "0.5"), 1), ((), 2)):
        with ServedDemo(*arguments) as server:
            engine = server.engine()
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
                lines = response.iter_lines()
                next(lines)
                begin = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_log("under way")
                if signals == 2:
                    server.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(httpx.RemoteProtocolError):
                    rest = list(lines)
                    assert '"code":"shutting_down"' in "".join(rest[-3:])
            assert server.process.wait(5) == 1
            assert time.monotonic() - begin < 4
            engine.wait(5)
            assert not engine.is_running()


def test_a_dead_engine_fails_what_runs_with_a_5xx_and_health_says_so():
    with ServedDemo() as server, ThreadPoolExecutor() as pool:
        body = {"prompt": [7] * 10, "max_tokens": 490, "n": 64, "ignore_eos": True}
        waiting = pool.submit(httpx.post, server.url + "/v1/completions", json=body, timeout=30)
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.engine().kill()
            events = [line for line in lines if line.startswith("data: ")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        response = waiting.result(10)
        assert response.status_code == 503 and error_of(response)["code"] == "engine_dead"
        health = httpx.get(server.url + "/health")
        assert health.status_code == 503 and "killed by SIGKILL" in health.json()["error"]
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 503
        assert server.stop() == 1


def test_the_engine_does_not_outlive_the_http_process():
    with ServedDemo() as server:
        engine = server.engine()
        body = {"prompt": [7] * 10, "max_tokens": 490, "n": 64, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            next(response.iter_lines())
            server.process.kill()
        engine.wait(5)


def test_a_disk_that_fails_fails_that_request_only(tmp_path: Any):
    # The file is cut short under the running server: what is not in memory cannot be read any more.
    import shutil

    from expertide.prepare import model_path

    path = tmp_path / "model.gguf"
    shutil.copy(model_path("demo"), path)
    with (
        ServedDemo("--expert-cache", "4MiB", "--startup-fill", "off", model=(str(path), "--context", "512")) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        size = path.stat().st_size
        os.truncate(path, size // 8)
        failed = http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0})
        assert failed.status_code == 500 and error_of(failed)["code"] == "storage_error"
        assert "model.gguf" in error_of(failed)["message"]
        shutil.copyfile(model_path("demo"), path)
        answer = http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "model": "model"})
        assert "Paris" in answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("arguments", "code", "pattern"),
    [
        (["serve", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["serve", "demo", "--ram", "80MiB"], 1, r"server 11\d MiB"),
        (["serve", "demo", "--port", "70000"], 2, "--port"),
        (["serve", "demo", "--api-key", "a b"], 2, "--api-key"),
        (["serve", "demo", "--cors-origin", "example.org"], 2, "--cors-origin"),
        (["serve", "demo", "--host", "no.such.host.invalid"], 1, "--host no.such.host.invalid"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(arguments: list[str], code: int, pattern: str):
    done = subprocess.run(
        [sys.executable, "-m", "expertide", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == code, done.stderr
    assert re.search(pattern, done.stderr) and "Traceback" not in done.stderr
    assert 1 <= len(done.stderr.strip().splitlines()) <= 3


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded(server: ServedDemo):
    done = subprocess.run(
        [sys.executable, "-m", "expertide", "serve", "demo", "--port", str(server.port)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(rf"port {server.port}: Address already in use \(.*--port", done.stderr)


def test_the_http_process_imports_no_torch_no_numpy_and_no_tokenizer():
    code = (
        "import sys, expertide.server.run\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers', 'jinja2', 'expertide.llm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_hundreds_of_requests_leave_no_memory_no_files_and_no_requests_behind(server: ServedDemo, http: httpx.Client):
    import psutil

    processes = [psutil.Process(server.process.pid), server.engine()]

    def burst() -> None:
        def one(number: int) -> int:
            body: dict[str, Any] = {"prompt": [7, number], "max_tokens": 1 + number % 3, "stream": number % 2 == 0}
            with contextlib.suppress(httpx.ReadTimeout):
                timeout = 0.05 if number % 5 == 0 else 30
                return httpx.post(server.url + "/v1/completions", json=body, timeout=timeout).status_code
            return 0

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(one, range(100))) <= {0, 200}

    burst()
    before = [(process.num_fds(), process.memory_info().rss) for process in processes]
    burst()
    end = time.monotonic() + 3
    while _metric(http, "expertide_requests_open") or any(
        process.num_fds() > fds + 2 for process, (fds, _) in zip(processes, before, strict=True)
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    for process, (_, rss) in zip(processes, before, strict=True):
        # Allocators keep some of what they had; a leak of a connection's buffers would be 64 KiB a request.
        assert process.memory_info().rss < rss + (4 << 20)
