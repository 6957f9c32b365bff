"""The programs in examples/, and the one in README.md, run as they stand and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments: str) -> str:
    """Run Python from another folder than the checkout's; return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=ROOT / "docs",
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def example(name: str) -> str:
    return run(str(ROOT / "examples" / f"{name}.py"))


def test_generate_prints_a_text_and_its_speed() -> None:
    text, _, last = example("generate").rstrip("\n").rpartition("\n")
    assert len(text) > 40
    assert re.fullmatch(r"\d+ tokens, \d+ tok/s, (stop|length)", last)


def test_chat_answers_both_questions() -> None:
    first, second = example("chat").split("\n> ")[1:]
    assert first.startswith("What is a mixture of experts?\n")
    assert second.startswith("And what time is it in UTC?\n")
    # the model may have nothing to say to one of them, which it was not trained to answer
    assert first.partition("\n")[2].strip() or second.partition("\n")[2].strip()


def test_logits_become_probabilities_and_a_perplexity() -> None:
    printed = example("logits")
    shares = [float(share) for share in re.findall(r"^ +([\d.]+)%", printed, re.MULTILINE)]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.1
    assert 1 < float(printed.rpartition(":")[2]) < 50, "the small model was trained on Python"


def test_each_sequence_goes_on_with_its_own_prompt() -> None:
    parts = re.split(r"^--- (\d+) tokens\n", example("sequences"), flags=re.MULTILINE)[1:]
    counts, texts = parts[::2], parts[1::2]
    prompts = ["def add(a, b):", "import os", "class Stack:"]
    assert [text[: len(prompt)] for text, prompt in zip(texts, prompts)] == prompts
    assert all(len(text) > len(prompt) + 10 for text, prompt in zip(texts, prompts))
    assert all(int(count) > 24 for count in counts)


def test_simulate_hits_more_with_more_slots() -> None:
    printed = example("simulate")
    found = re.findall(r"(\d+)% of the experts on the device, (\w+): ([\d.]+)%", printed)
    assert [(share, name) for share, name, _ in found] == [
        (share, name) for share in ("25", "50", "75") for name in ("lru", "lfu")
    ]
    for policy in ("lru", "lfu"):
        rates = [float(rate) for _, name, rate in found if name == policy]
        assert rates == sorted(set(rates))


def test_a_policy_of_ones_own_hits_more_than_lru() -> None:
    lru, counts = map(float, re.findall(r"(?:lru|counts): ([\d.]+)% hits", example("policy")))
    assert lru < counts


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    missing = [path.stem for path in EXAMPLES if f'example("{path.stem}")' not in text]
    assert len(EXAMPLES) >= 5 and missing == []


def readme_blocks() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", readme_blocks())
def test_the_example_in_the_readme_runs_on_this_machine(code: str) -> None:
    assert code.count('"model.gguf"') == 1, "the model is the one thing that a reader replaces"
    printed = run("-c", code.replace('"model.gguf"', '"tiny"'))
    assert re.search(r"\n\d+ tok/s, (stop|length)\n$", printed)


def test_the_readme_has_an_example() -> None:
    assert readme_blocks()
