"""Hold a conversation in which the model may call a function.

    python examples/chat.py [MODEL]

`Engine.chat` takes messages and tools in OpenAI's form and yields the parts of the answer as they
come: reasoning, text and calls. Without MODEL, the example uses the small shipped model, which was
not trained to chat: do not expect sensible answers.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import Any

from moegraph import ContentPart, Engine, EngineConfig, SamplingParams

QUESTIONS = ("What is a mixture of experts?", "And what time is it in UTC?")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "now", "description": "Return the date and time in UTC."},
    }
]


def answer(engine: Engine, messages: list[dict[str, Any]]) -> None:
    """Answer the last message; call what the model asks for, and let it go on."""
    for _ in range(3):
        said = engine.chat(
            messages, TOOLS, sampling=SamplingParams(temperature=0.7, seed=1), max_tokens=48
        )
        for part in said:
            if isinstance(part, ContentPart):
                print(part.text, end="", flush=True)
        print()
        messages.append(said.reply.message())
        for call in said.reply.calls:
            result = json.dumps({"utc": datetime.now(timezone.utc).isoformat()})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if said.finish_reason != "tool_calls":
            return


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    with Engine.load(model, EngineConfig(device="auto", n_ctx=2048)) as engine:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer in one sentence."}]
        for question in QUESTIONS:
            print(f"\n> {question}")
            messages.append({"role": "user", "content": question})
            answer(engine, messages)


if __name__ == "__main__":
    main()
