"""Hold a conversation: the model's own template turns messages into prompts.

    python examples/chat.py [MODEL]

`reuse=True` does not compute again what the prompt has in common with those of earlier turns, up to
the last of their marks. A reasoning model thinks first; the splitter separates that text from the
answer. Without MODEL, the example uses the small shipped model, which was not trained to chat: do
not expect sensible answers.
"""

from __future__ import annotations

import sys

from moegraph import (
    ChatTemplate,
    Engine,
    EngineConfig,
    History,
    ReasoningSplitter,
    SamplingParams,
    parting_places,
    token_marks,
)

QUESTIONS = ("What is a mixture of experts?", "And what does the router do?")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    sampling = SamplingParams(temperature=0.7, seed=1)
    with (
        Engine.load(model, EngineConfig(device="auto", n_ctx=2048)) as engine,
        ChatTemplate.from_metadata(engine.file.kv, engine.file.path) as template,
    ):
        history = History(system="Answer in one sentence.")
        for question in QUESTIONS:
            history.ask(question)
            prompt = template.render(history.messages)
            splitter = ReasoningSplitter.after(prompt)
            answer = ""
            print(f"\n> {question}")
            ids = engine.tokenizer.encode(prompt)
            places = parting_places(template, history.messages, prompt)
            marks = token_marks(engine.tokenizer, prompt, ids, places)
            for event in engine.generate(ids, sampling, 48, reuse=True, marks=marks):
                _, text = splitter.push(event.text)
                answer += text
                print(text, end="", flush=True)
            _, text = splitter.flush()
            print(text)
            history.answer(answer + text)


if __name__ == "__main__":
    main()
