"""Messages made requests: what clients send, templates, and what stands in for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.fake_engine import BeginTokenizer, ByteTokenizer
from helpers.qwen_template import QWEN
from helpers.tag_tokenizer import TAGS, TagTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.engine.chat import (
    ChatModel,
    ChatRequest,
    Format,
    PromptRoom,
    TextRequest,
    thinking_variables,
)
from moegraph.errors import ContextOverflow, ModelFileError, RequestError
from moegraph.text.chat.parts import ContentPart, ReasoningPart
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.tokenizer import Tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"n": {"type": "integer"}}}},
}
STRANGE = {
    "type": "function",
    "function": {
        "name": "strange",
        "parameters": {"properties": {"n": {"type": "number", "minimum": math.nan}}},
    },
}
USER = {"role": "user", "content": "Hi"}


def model(source: str = QWEN) -> ChatModel:
    return ChatModel(cast(Tokenizer, ByteTokenizer()), ChatTemplate(source))


def prompt(messages: list[dict[str, Any]], source: str = QWEN, **fields: Any) -> str:
    with model(source) as chat:
        return bytes(chat.prepare(ChatRequest(messages=messages, **fields)).request.prompt).decode()


def shown(chat: ChatModel, content: str = "Hi") -> str:
    return chat.prompt(ChatRequest([{"role": "user", "content": content}])).text


class TestPrompt:
    def test_the_parser_knows_whether_the_prompt_opens_reasoning(self) -> None:
        with model() as chat:
            asked = ChatRequest(messages=[USER])
            assert chat.prepare(asked).parser.is_reasoning
            asked = ChatRequest(messages=[USER], variables=thinking_variables("none"))
            assert not chat.prepare(asked).parser.is_reasoning

    def test_variables_cannot_replace_the_messages(self) -> None:
        assert "Hi" in prompt([USER], variables={"messages": [], "add_generation_prompt": False})

    @pytest.mark.parametrize(
        ("show", "separator"),
        [
            ("{{ m.content if m.content is string else "
             "m.content | map(attribute='text') | join }}", ""),
            ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
             "{{ p.text }} |{% endfor %}{% endif %}", " |"),
            ("{{ m.content }}", "\n"),
            ("{{ m.content | tojson }}", r"\n"),
            ("{{ m.content | trim }}", "\n"),
            ("{{ m['content'] + '' }}", "\n"),
        ],
    )  # fmt: skip
    def test_parts_of_text_are_joined_as_the_template_does(self, show: str, separator: str) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for role in ("user", "tool", "system"):
            found = prompt(
                [{"role": role, "content": parts}], f"{{% for m in messages %}}{show}{{% endfor %}}"
            )
            assert f"a{separator}b" in found

    @pytest.mark.parametrize(
        "show",
        [
            "{{ a if a is string else a | tojson }}", "{{ a | tojson }}", "{{ '> ' + a }}",
            "{{ a.items() | list and a | tojson }}", "{{ a }}",
        ],
    )  # fmt: skip
    def test_calls_in_json_are_shown_as_in_training(self, show: str) -> None:
        source = (
            "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
            + show
            + "{% endfor %}{% endfor %}"
        )
        for arguments in ('{"c":"\\u00e9","l":[1,2]}', {"c": "é", "l": [1, 2]}):
            turn = {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "look", "arguments": arguments}}],
            }
            assert '{"c": "é", "l": [1, 2]}' in prompt([USER, turn], source)

    def test_a_form_of_its_own_wins_over_json(self) -> None:
        source = (
            "{% if tools %}{% endif %}{% for c in messages[-1].tool_calls or [] %}"
            "{% set a = c.function.arguments %}[{% if a is mapping %}"
            "{% for k, v in a | items %}{{ k }}:{{ v }}{% endfor %}"
            "{% else %}{{ a }}{% endif %}]{% endfor %}"
        )
        function = {"name": "look", "arguments": '{"n": 1}'}
        turn = {"role": "assistant", "tool_calls": [{"function": function}]}
        assert prompt([USER, turn], source) == "[n:1]"

    @pytest.mark.parametrize("broken", ["{", '["a"]', "5"])
    def test_a_call_that_the_model_wrote_wrongly_can_be_sent_back(self, broken: str) -> None:
        function = {"name": "look", "arguments": broken}
        turn = {"role": "assistant", "tool_calls": [{"function": function}]}
        assert broken in prompt([USER, turn, {"role": "tool", "content": "no"}])

    def test_a_conversation_with_tools(self) -> None:
        text = prompt(
            [
                {"role": "developer", "content": "Be brief."},
                USER,
                {
                    "role": "assistant", "content": None, "reasoning_content": "I look.",
                    "tool_calls": [
                        {"id": "1", "function": {"name": "look", "arguments": '{"n": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
            ],
            tools=[TOOL],
        )  # fmt: skip
        assert text.endswith(
            "Be brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
            "I look.\n</think>\n\n<tool_call>\n<function=look>\n<parameter=n>\n1\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
        )
        assert '"name": "look"' in text

    def test_tools_that_must_not_be_called_are_shown_and_calls_are_text(self) -> None:
        with model() as chat:
            found = chat.prepare(ChatRequest(messages=[USER], tools=[TOOL], tool_choice="none"))
        assert "look" in bytes(found.request.prompt).decode()
        found.parser.push("</think><tool_call>\n<function=look>\n</function>\n</tool_call>")
        assert found.parser.n_calls == 0

    def test_the_tag_of_a_call_is_forbidden_where_it_is_a_token(self) -> None:
        with ChatModel(cast(Tokenizer, TagTokenizer()), ChatTemplate(QWEN)) as chat:
            asked = ChatRequest(messages=[USER], tools=[TOOL], tool_choice="none")
            bias = chat.prepare(asked).request.sampling.logit_bias
        assert bias == {TagTokenizer().id_of("<tool_call>"): -math.inf}

    def test_the_state_before_a_call_is_kept(self) -> None:
        asked = ChatRequest(messages=[USER], tools=[TOOL])
        with ChatModel(cast(Tokenizer, TagTokenizer()), ChatTemplate(QWEN)) as chat:
            request = chat.prepare(asked).request
            assert request.keep_after == {TagTokenizer().id_of("<tool_call>")}
            assert not request.sampling.logit_bias
            assert not chat.prepare(ChatRequest(messages=[USER])).request.keep_after
        with model() as chat:
            assert not chat.prepare(asked).request.keep_after


class TestSystem:
    def test_messages_at_the_beginning_become_one(self) -> None:
        two = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER]
        assert prompt(two).startswith("<|im_start|>system\nA\n\nB<|im_end|>")

    def test_a_later_one_is_the_users_if_the_template_refuses_it(self) -> None:
        late = [USER, {"role": "system", "content": "Now"}]
        told = "<|im_start|>user\n<system-reminder>\nNow\n</system-reminder><|im_end|>"
        assert told in prompt(late)
        free = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        assert prompt(late, free) == "user:Hi;system:Now;"

    @pytest.mark.parametrize("rest", ["You are", "\nYou are", "\n\nYou are"])
    def test_a_line_that_differs_in_every_request_is_left_out(self, rest: str) -> None:
        line = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=6f5a1;"
        assert "system\nYou are<" in prompt([{"role": "system", "content": line + rest}, USER])
        alone = [{"role": "system", "content": line}, {"role": "system", "content": "You"}, USER]
        assert prompt(alone).startswith("<|im_start|>system\nYou<")
        assert prompt([{"role": "system", "content": line}, USER]) == prompt([USER])


class TestBegun:
    """The last message is the beginning of the answer."""

    def test_the_prompt_ends_in_it_and_reasoning_is_closed(self) -> None:
        with model() as chat:
            begun = {"role": "assistant", "content": "It is"}
            found = chat.prepare(ChatRequest(messages=[USER, begun]))
        end = "<|im_start|>assistant\n<think>\n\n</think>\n\nIt is"
        assert bytes(found.request.prompt).decode().endswith(end)
        assert not found.parser.is_reasoning

    @pytest.mark.parametrize("opens_turn", [True, False])
    @pytest.mark.parametrize(
        ("asked", "end"),
        [
            (None, "<|im_start|>assistant\n<think>\nWell,\n</think>\n\nIt is"),
            (True, "<|im_start|>assistant\n<think>\nWell,\n</think>\n\nIt is"),
            ("content", "<|im_start|>assistant\n<think>\nWell,\n</think>\n\nIt is"),
            ("reasoning_content", "<|im_start|>assistant\n<think>\nWell,"),
        ],
    )
    def test_what_goes_on(self, asked: Any, end: str, opens_turn: bool) -> None:
        begun = {"role": "assistant", "content": "It is", "reasoning_content": "Well,"}
        fields = {"continue_final_message": asked, "add_generation_prompt": opens_turn}
        assert prompt([USER, begun], **fields).endswith(end)

    @pytest.mark.parametrize("thinks", [True, False])
    def test_what_was_begun_is_told_if_asked_for(self, thinks: bool) -> None:
        field = "reasoning_content" if thinks else "content"
        begun = {"role": "assistant", field: "Well,"}
        with model() as chat:
            asked = ChatRequest([USER, begun], variables={"enable_thinking": thinks})
            found = [
                chat.prepare(replace(asked, echo=echo)).parser.push("!") for echo in (False, True)
            ]
        kind = ReasoningPart if thinks else ContentPart
        assert found == [[kind("!")], [kind("Well,"), kind("!")]]

    def test_a_last_answer_that_does_not_go_on(self) -> None:
        begun = {"role": "assistant", "content": "It is"}
        found = prompt([USER, begun], continue_final_message=False)
        assert found.endswith("It is<|im_end|>\n<|im_start|>assistant\n<think>\n")
        found = prompt([USER, begun], continue_final_message=False, add_generation_prompt=False)
        assert found.endswith("It is<|im_end|>\n")

    @pytest.mark.parametrize(
        "last", [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}]
    )
    def test_only_an_answer_without_calls_goes_on(self, last: dict[str, Any]) -> None:
        with pytest.raises(RequestError, match="continue_final_message: the last message"):
            prompt([USER, last], continue_final_message=True)


def test_tags_that_are_control_tokens_are_shown_to_the_reader_of_answers() -> None:
    class Hiding(TagTokenizer):
        hidden = frozenset(TAGS) - {"</think>"}

        def piece(self, token: int, special: bool = False) -> bytes:
            found = super().piece(token)
            return b"" if found.decode("latin-1") in self.hidden and not special else found

        def show(self, tokens: Iterable[int]) -> None:
            self.hidden -= {super(Hiding, self).piece(token).decode() for token in tokens}

    tokenizer = Hiding()
    with ChatModel(cast(Tokenizer, tokenizer), ChatTemplate(QWEN)):
        assert tokenizer.hidden == {"<|im_start|>", "<|im_end|>"}


class TestWithoutTools:
    """A template that knows no tools."""

    SOURCE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"

    def test_they_are_told_in_the_system_message(self) -> None:
        text = prompt([{"role": "system", "content": "S"}, USER], self.SOURCE, tools=[TOOL])
        assert text.startswith("[system]S\n\nYou can call these functions")
        assert '{"name": "look"' in text and text.endswith("[user]Hi\n")

    def test_calls_and_results_are_text(self) -> None:
        calls = [{"function": {"name": "look", "arguments": {"n": 1, "s": "a"}}}]
        turn = {"role": "assistant", "content": "Hm.", "tool_calls": calls}
        results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
        assert prompt([USER, turn, *results], self.SOURCE) == (
            "[user]Hi\n[assistant]Hm.\n\n<tool_call>\n<function=look>\n<parameter=n>\n1\n"
            "</parameter>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>\n[user]"
            "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\n"
        )


class TestRefused:
    @pytest.mark.parametrize(
        ("messages", "says"),
        [
            ([], "messages: there is none"),
            ([{"role": "robot", "content": ""}], r"messages\[0\].role: 'robot'"),
            ([{"role": "user", "content": 5}], r"messages\[0\].content: neither"),
            ([{"role": "user", "content": [5]}], r"content\[0\]: not a part"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; this model"),
            ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text: not text"),
            ([USER, {"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\].function"),
            ([USER, {"role": "assistant", "tool_calls": "x"}], r"tool_calls: not a list"),
        ],
    )
    def test_messages(self, messages: list[dict[str, Any]], says: str) -> None:
        with pytest.raises(RequestError, match=says):
            prompt(messages)

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"tools": [{}]}, r"tools\[0\].function.name"),
            ({"tool_choice": "required"}, "there are no tools"),
            ({"tool_choice": "look"}, "'look' is none of the tools"),
            ({"variables": {"x": object()}}, "not JSON serializable"),
            ({"variables": {"self": 1}}, "the chat template fails"),
            ({"tools": [STRANGE], "tool_choice": "strange"}, "tools: a schema is not JSON"),
            ({"tools": [STRANGE], "variables": {"tools": []}, "source": "x"}, "not JSON"),
        ],
    )
    def test_other_fields(self, fields: dict[str, Any], says: str) -> None:
        with pytest.raises(RequestError, match=says):
            prompt([USER], **fields)

    def test_a_template_that_fails_goes_on_with_the_next_request(self) -> None:
        source = "{{ 1 / (messages[0].content | length) }}"
        with model(source) as chat:
            with pytest.raises(RequestError, match="the chat template fails"):
                shown(chat, "")
            assert shown(chat, "1") == "1.0"


def test_many_threads_may_prepare_at_once() -> None:
    def asked(n: int) -> ChatRequest:
        said = {"role": "assistant", "content": f"Answer {n % 7}"}
        system = {"role": "system", "content": f"You are helper {n % 3}. " * 9}
        question = {"role": "user", "content": f"Question {n}"}
        schema = {"type": "object", "properties": {f"p{n % 5}": {"type": "integer"}}}
        return ChatRequest(
            [system, USER, said, question], [TOOL], tool_choice="none",
            format=Format("json_schema", schema), variables={"enable_thinking": False},
        )  # fmt: skip

    def prepared(chat: ChatModel, n: int) -> tuple[list[int], tuple[int, ...], int]:
        request = chat.prepare(asked(n)).request
        assert request.constraint is not None
        mask = request.constraint.allowed()
        assert mask is not None
        return list(request.prompt), request.marks, int(mask.sum())

    specials = {tag: tag.startswith("<|") for tag in TAGS}
    tokenizer = cast(Tokenizer, TagTokenizer())
    with (
        ChatModel(tokenizer, ChatTemplate(QWEN), specials) as chat,
        ChatModel(tokenizer, ChatTemplate(QWEN), specials) as single,
        ThreadPoolExecutor(8) as pool,
    ):
        found = [*pool.map(lambda n: prepared(chat, n), range(60))]
        assert found == [prepared(single, n) for n in range(60)]


class TestRoom:
    class Counting(ByteTokenizer):
        """Counts the texts that it encodes."""

        n_encoded = n_longest = 0

        def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
            self.n_encoded += 1
            self.n_longest = max(self.n_longest, len(text))
            return super().encode(text)

    def test_what_cannot_fit_is_refused_before_it_is_encoded(self) -> None:
        tokenizer = self.Counting()
        room = PromptRoom(n_ctx=10, n_longest=8)
        with ChatModel(cast(Tokenizer, tokenizer), ChatTemplate(QWEN), room=room) as chat:
            n = tokenizer.n_encoded
            assert len(chat.prepare_text(TextRequest(prompt="x" * 80)).request.prompt) == 80
            for prompt in ("x" * 81, [65] * 11):
                with pytest.raises(ContextOverflow, match="the context holds 10"):
                    chat.prepare_text(TextRequest(prompt=prompt))
            with pytest.raises(ContextOverflow, match="the context holds 10"):
                chat.prepare(ChatRequest([{"role": "user", "content": "x" * 80}]))
            assert tokenizer.n_encoded == n + 1

    def test_only_the_beginning_of_a_text_is_encoded_that_cannot_fit(self) -> None:
        tokenizer = self.Counting()
        room = PromptRoom(n_ctx=10, n_longest=40)
        with ChatModel(cast(Tokenizer, tokenizer), ChatTemplate(QWEN), room=room) as chat:
            asked = ChatRequest([{"role": "user", "content": "x" * 200}])
            refusals: tuple[Callable[[], object], ...] = (
                lambda: chat.prepare_text(TextRequest(prompt="x" * 300)),
                lambda: chat.prepare(asked),
            )
            for refused in refusals:
                with pytest.raises(ContextOverflow, match="first 80 have at least 40") as caught:
                    refused()
                assert (caught.value.n_prompt, caught.value.n_ctx) == (40, 10)
            assert tokenizer.n_longest == 80
            assert len(chat.prompt(asked).encoded.ids) > 200  # counting is no answer


class TestOf:
    def engine(self, **kv: str) -> Any:
        file = SimpleNamespace(path=Path("model.gguf"), kv=kv)
        return SimpleNamespace(tokenizer=ByteTokenizer(), file=file, n_ctx=100)

    def test_the_models_own_template(self) -> None:
        with ChatModel.of(self.engine(**{"tokenizer.chat_template": "{{ bos_token }}x"})) as chat:
            assert shown(chat) == "\x01x" and chat.warnings == []

    @pytest.mark.parametrize("source", ["{{ bos_token }}x", "x", "{{ bos_token }}{{ bos_token }}x"])
    def test_a_bos_is_added_where_the_template_writes_none(self, source: str) -> None:
        engine = self.engine(**{"tokenizer.chat_template": source})
        engine.tokenizer = BeginTokenizer()
        with ChatModel.of(engine) as chat:
            prompt = list(chat.prepare(ChatRequest([USER])).request.prompt)
            assert prompt == [1] * max(source.count("bos"), 1) + [120]

    def test_a_template_that_fails_for_all_messages_is_at_fault_itself(self) -> None:
        broken = self.engine(**{"tokenizer.chat_template": "{{ 1 / 0 }}"})
        with ChatModel.of(broken) as chat, pytest.raises(ModelFileError, match="division"):
            shown(chat)

    def test_a_model_without_one_gets_chatml_and_a_warning(self) -> None:
        with ChatModel.of(self.engine()) as chat:
            assert shown(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert len(chat.warnings) == 1 and "no chat template" in chat.warnings[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x", None])
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON | st.just('{"a": 1}')})}
    )
    | JSON,
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES},
        optional={"content": JSON, "tool_calls": CALLS | JSON, "reasoning_content": JSON},
    ),
    max_size=5,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": JSON, "parameters": JSON, "strict": JSON})}
    )
    | st.dictionaries(st.text(max_size=4), JSON)
    | st.just(TOOL),
    max_size=2,
)


@pytest.fixture(scope="module", params=[QWEN, "{{ messages }}"])
def any_model(request: pytest.FixtureRequest) -> Iterator[ChatModel]:
    with model(request.param) as chat:
        yield chat


@given(MESSAGES, TOOLS, st.sampled_from(["auto", "none", "required", "look"]), JSON)
@settings(deadline=None, max_examples=150)
def test_whatever_clients_send_is_refused_or_understood(
    any_model: ChatModel, messages: Any, tools: Any, choice: str, schema: Any
) -> None:
    format_ = Format("json_schema", schema) if isinstance(schema, dict) and schema else None
    with suppress(RequestError):
        asked = ChatRequest(messages, tools, tool_choice=choice, format=format_)
        assert any_model.prepare(asked).request.prompt
