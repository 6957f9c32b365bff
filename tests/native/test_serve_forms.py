"""A call in the forms of harmony and GLM, whose tags are tokens, and what follows it, served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.server_process import serving
from helpers.shared import model_writer

from modelgen import vocab  # isort: skip # helpers.shared finds it
from modelgen.presets import PRESETS  # isort: skip

TEMPLATES = Path(__file__).resolve().parents[2] / "build" / "llama.cpp" / "models" / "templates"
if not TEMPLATES.is_dir():
    pytest.skip("llama.cpp's source was not fetched", allow_module_level=True)

PARAMETERS: Any = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
HARMONY = "<|channel|> <|start|> <|message|> <|constrain|> <|end|> <|call|> <|return|>".split()
GLM = "<|user|> <|assistant|> <|observation|> <tool_call> </tool_call> <arg_key> </arg_key>".split()
GLM += "<arg_value> </arg_value> <tool_response> </tool_response>".split()


@pytest.mark.parametrize(
    ("preset", "template", "tags"),
    [("gptoss", "openai-gpt-oss-120b", HARMONY), ("glm47flash", "GLM-4.7-Flash", GLM)],
)
def test_a_call_that_must_come_makes_its_round(
    preset: str, template: str, tags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specials = (*vocab.SPECIALS, *((tag, vocab.CONTROL) for tag in tags))
    monkeypatch.setattr(vocab, "SPECIALS", specials)
    path = model_writer(tmp_path, seed=0)(preset)
    # reasoning of a random model has no end: its header must not come
    first = PRESETS[preset].shape.n_vocab - len(tags)
    bias = {str(first): -100} if tags is HARMONY else {}
    given: Any = {"model": "m", "tools": [TOOL], "logit_bias": bias}
    ask: list[Any] = [{"role": "user", "content": "weather?"}]
    file = TEMPLATES / f"{template}.jinja"
    with serving("-c", 4096, "--reasoning", "off", "--chat-template-file", file, target=path) as s:
        client = openai.OpenAI(base_url=f"{s.url}/v1", api_key="-", max_retries=0, timeout=120)
        chunks = client.chat.completions.create(
            **given, messages=ask, tool_choice="required", max_tokens=400,
            parallel_tool_calls=False, stream=True,
        )  # fmt: skip
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        calls = [one for choice in choices for one in choice.delta.tool_calls or ()]
        text = "".join(one.function.arguments or "" for one in calls if one.function)
        assert choices[-1].finish_reason == "tool_calls"
        assert json.loads(text)["city"] in ("Oslo", "Lima")
        function = {"name": "weather", "arguments": text}
        call = {"id": calls[0].id, "type": "function", "function": function}
        ask.append({"role": "assistant", "tool_calls": [call]})
        ask.append({"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"})
        said = client.chat.completions.create(**given, messages=ask, max_tokens=8)
    assert said.usage and said.usage.completion_tokens
    details = said.usage.prompt_tokens_details
    assert details and (details.cached_tokens or 0) > said.usage.prompt_tokens // 2
