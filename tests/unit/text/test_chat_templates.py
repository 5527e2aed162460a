"""Chat templates: what real ones use works, what hostile ones try does not, and every failure is one sentence."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from expertide.errors import RequestError
from expertide.text import template_sandbox
from expertide.text.chat import ChatTemplate
from expertide.text.template_sandbox import MAX_RENDERED_CHARS
from expertide.text.tokenizer import Tokenizer
from text_samples import toy_metadata

# The shape of DeepSeek-V2's template; the second is the same without its begin token.
WITH_BOS = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")
HI = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    chat = ChatTemplate(template, bos_token="<b>", eos_token="<e>", now=lambda: datetime(2026, 2, 3))
    return chat.render(HI if messages is None else messages, **variables)


def toy(template: str | None, **keys: object) -> Tokenizer:
    metadata = toy_metadata(add_bos_token=True, **keys)  # type: ignore[arg-type]
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_metadata(metadata)


def test_a_conversation_in_deepseek_v2_s_form() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "你好"},
    ]
    text = toy(WITH_BOS).apply_chat_template(messages)
    assert text == "<|bos|>Be brief.\n\nUser: Hi\n\nAssistant: Hello.<|eos|>User: 你好\n\nAssistant:"
    assert toy(WITH_BOS).apply_chat_template(HI, add_generation_prompt=False) == "<|bos|>User: Hi\n\n"


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_the_begin_token_stands_once_whether_the_template_writes_it_or_not(template: str) -> None:
    tokenizer = toy(template)
    ids = tokenizer.encode(tokenizer.apply_chat_template(HI))
    assert ids[0] == tokenizer.bos_id
    assert ids.count(256) == 1


def test_a_model_that_wants_no_begin_token_gets_none() -> None:
    tokenizer = toy(WITHOUT_BOS)
    tokenizer.add_bos = False
    assert 256 not in tokenizer.encode(tokenizer.apply_chat_template(HI))


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = toy(None)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*--raw"):
        tokenizer.apply_chat_template(HI)


# What real templates use


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2026"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
            "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("a\n{% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{{ undefined_name }}{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[-1]['content'] | trim) }}", "[Hi]"),
        ("{{ messages[0].content.split('i')[0] }}{{ 'a' in 'abc' }}{{ bos_token }}{{ eos_token }}", "HTrue<b><e>"),
        ("{{ enable_thinking is defined and enable_thinking }}", "False"),
        ("{{ '-' * 3 }}{{ 2 ** 10 }}", "---1024"),
    ],
)
def test_features_of_real_templates(template: str, expected: str) -> None:
    assert render(template) == expected


def test_more_names_reach_the_template() -> None:
    assert render("{{ enable_thinking }}{{ tools[0].name }}", enable_thinking=True, tools=[{"name": "f"}]) == "Truef"


# Message shapes


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(WITHOUT_BOS, [{"role": "user", "content": parts}]) == "User: ab\n\nAssistant:"


def test_missing_content_is_empty_but_stays_none_beside_tool_calls() -> None:
    assert render("{{ messages[0].content == '' }}", [{"role": "user", "content": None}]) == "True"
    assert render("{{ messages[0].content == '' }}", [{"role": "user"}]) == "True"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert render("{{ messages[0].content is none }}", [call]) == "True"


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("Hi", r"messages\[0\]: found str, expected an object"),
        ({"content": "Hi"}, r"messages\[0\]\.role: expected a string"),
        ({"role": "user", "content": 3}, r"messages\[0\]\.content: found int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content: part of type 'image_url'"),
        ({"role": "user", "content": ["x"]}, r"messages\[0\]\.content: part of type 'str'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[0\]\.content: part of type 'text'"),
    ],
)
def test_a_message_of_the_wrong_shape_is_named(message: Any, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        render(WITHOUT_BOS, [message])


# Failures


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ 'a' | no_such_filter }}", "chat template: No filter named 'no_such_filter'"),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].content + 3 }}", "chat template: TypeError: "),
        ("{{ undefined_name.attribute }}", "chat template: 'undefined_name' is undefined"),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: RecursionError: "),
    ],
)
def test_a_failing_template_gives_its_own_message(template: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(template)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x.join(n.x) %}{% endfor %}",
        "{{ 'x'.center(2000000000)|length }}",
        "{{ 'x'|center(2000000000)|length }}",
        "{{ 'x\ny'|indent(2000000000)|length }}",
        "{{ [1]|batch(2000000000, 0)|list|length }}",
        "{{ 1.5|round(2000000000, 'ceil') }}",
        "{{ [1]|tojson(indent=2000000000) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d'|format(2000000000, 1) }}",
        "{{ '{:2000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_hostile_template_is_stopped(template: str) -> None:
    with pytest.raises(RequestError, match=r"^chat template: "):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[]] recursive %}{{ loop([[]] if loop.depth > 50 else [[], []]) if loop.depth < 60 }}{% endfor %}",
    ],
)
def test_a_template_that_would_never_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 0.1)
    with pytest.raises(RequestError, match=r"^chat template: computes for more than 0.1 s"):
        render(template)


def test_ordinary_padding_joining_and_formatting_is_not_in_the_way() -> None:
    template = (
        "{{ 'a'.center(3) }}|{{ 'a'|center(3) }}|{{ ['a', 1]|join(', ') }}|{{ 'a-b'.replace('-', '--') }}|"
        "{{ '%05.1f%%' % 2.5 }}|{{ '%s=%d'|format('x', 3) }}|{{ '{:>4}'.format(7) }}|{{ 1 ~ 'b' ~ none }}|"
        "{{ {'a': [1]}|tojson(indent=1)|replace('\n', '') }}|{{ [1] + [2] }}|{{ 1 + 2 }}|{{ 2.345|round(2) }}|"
        "{{ [1, 2, 3]|batch(2)|list }}|{{ 'a\nb'|indent(2) }}|{{ ['a', {'b': 1}]|map(attribute='b')|join('-') }}"
    )
    assert render(template) == (
        ' a | a |a, 1|a--b|002.5%|x=3|   7|1bNone|{ "a": [  1 ]}|[1, 2]|3|2.35|[[1, 2], [3]]|a\n  b|-1'
    )


def test_inner_parts_of_python_print_as_nothing() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ messages.__class__ }}") == ""


def test_the_bound_on_rendered_text_is_far_above_real_prompts() -> None:
    long = "x" * 4_000_000
    assert len(render("{{ messages[0].content }}", [{"role": "user", "content": long}])) == 4_000_000
    assert MAX_RENDERED_CHARS >= 8 * 4_000_000


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": None}]
    render(WITHOUT_BOS, messages)
    assert messages == [{"role": "user", "content": None}]


def test_a_broken_template_does_not_stop_raw_text() -> None:
    tokenizer = toy("{% if %}")
    assert tokenizer.encode("a", add_bos=False) == [97]
    with pytest.raises(RequestError, match=r"^chat template: "):
        tokenizer.apply_chat_template(HI)
