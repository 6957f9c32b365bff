#!/usr/bin/env python3
"""Write docs/cli.md from the commands' own help, or check that it is up to date (--check)."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from _pages import write_or_check

from moegraph import errors
from moegraph.cli import main as program
from moegraph.cli.options import group_of
from moegraph.config import GROUPS
from moegraph.config import settings as engine_settings
from moegraph.sampling import settings as sampling_settings

PAGE = ROOT / "docs" / "cli.md"

HEAD = """\
# Command line

This page is generated from the commands' help by `scripts/gen_cli_docs.py`.

Text and reports go to stdout, everything else (notes, speed, progress bars, errors) to stderr.
Progress bars and colours appear only on a terminal; `NO_COLOR` turns colours off. Options have
llama.cpp's names if they mean the same. An error is one line; with `MOEGRAPH_DEBUG=1` a traceback
follows. Every command has `-h/--help`. `moegraph --version` prints the versions of the libraries,
the commit of llama.cpp and the patch set.

On the CPU, moegraph measures two things when it loads a model: how many threads decode fastest,
and whether they should spin or sleep while they wait for each other. It measures again when
tokens become slower, for example because other programs need the cores, and now and then while it
uses fewer threads than cores. `-t` and `--poll` fix these choices; `moegraph doctor` shows the
current speed of each choice with the shipped model. The number of threads in use does not change
results. As in llama.cpp, results depend on the value of `-t`, or without it on the number of
cores.

`moegraph completion bash` (or `zsh`, `fish`) prints a script with which the shell completes
commands, options and files. To turn it on, put `eval "$(moegraph completion bash)"` into
`~/.bashrc`.

If you give an option of llama.cpp that moegraph does not have, the error says what to use instead.
Option letters cannot be run together: moegraph refuses `-qe`. Only a number may follow its letter,
as in `-n128`.
"""

CHAT_HEAD = """\
`--json` prints one object for each answer, on one line. If a message is empty or cannot be
answered, its object has only `question`, an empty `answer`, and `error`: the reason, or null for
an empty message."""

RUN_JSON = {
    "model": "path, name, architecture, size and the main dimensions of the model",
    "config": "the settings in effect: device, mode, n_ctx, n_ubatch, ...; `n_threads` and `poll` "
    "are those of the last token, `threads_chosen` is `measured` or `given`, `cpus_taken` is how "
    "many CPUs of this process other programs used at the end (null if unknown)",
    "sampling": "the sampler settings, with the seed that was used; `from_file` lists those that "
    "the model file recommends",
    "prompt_tokens": "ids of the prompt",
    "tokens": "generated ids, the end token included",
    "text": "generated text, without the stop text",
    "finish_reason": "`stop` (end token or stop text), `length` (-n or context) or `cancelled`",
    "n_prompt": "number of prompt tokens",
    "n_computed": "number of computed prompt tokens; less than n_prompt after Ctrl-C",
    "n_generated": "number of generated tokens",
    "prefill_tps": "prompt tokens per second",
    "decode_tps": "generated tokens per second, without the first one",
    "timings": "`process_s` (from the start of the process to that of the command), `load_s`, "
    "`tokenizer_s`, `prefill_s` (to the first token), `decode_s` (from there to the last); "
    "`first_token_s` is from the start of the process to the first token; `load` has the seconds "
    "of each phase of loading (`Engine.load_times`)",
    "memory": "`device_peak_bytes`, `host_peak_bytes`, `host_pinned_bytes` (copies of experts), "
    "`host_mapped_bytes` (parts of the file that are read in place), and the device memory of each "
    "part",
    "experts": "what the expert cache did, see below; null in mode whole",
    "stages": "one for each device: `device`, `layers` (the first, and the one after the last), "
    "`mode`, `n_slots`, `resident_share` (of the experts of these layers), `device_peak_bytes`",
    "profile": "path, class, tokens, whether it was written, and why not; null without a profile, "
    "or if no expert can be missing",
    "spec": "what was drafted, see below; null if nothing drafts",
}

CHAT_JSON = {
    "question": "the message",
    "answer": "text of the answer",
    "reasoning": "text between `<think>` and `</think>`",
    "finish_reason": "as for run",
    "n_prompt": "number of tokens of the conversation before the answer",
    "n_computed": "how many of these were computed for this answer",
    "n_generated": "number of generated tokens, with the reasoning",
    "n_forgotten_turns": "number of oldest turns that chat forgot to make room",
    "n_held": "context positions in use after the answer",
    "n_ctx": "context positions in all",
    "prefill_tps": "prompt tokens per second",
    "decode_tps": "generated tokens per second, without the first one",
    "timings": "`prefill_s` (to the first token), `decode_s` (from there to the last)",
    "hit_rate": "share of the router's choices that were resident, 0 to 1; null in mode whole",
    "spec": "as for run, of this answer",
    "sampling": "as for run",
}


EXPERTS_JSON = {
    "n_slots_by_layer": "expert slots of each layer (`run` only)",
    "n_passes": "forward passes, of one token or of many",
    "hits, misses, hit_rate, hit_rate_by_layer": "choices of the router that were resident, or not",
    "missing": "distinct experts that each pass missed, summed over layers and passes",
    "admitted, evicted, declined": "experts that got a slot, lost it, or were refused one",
    "uploaded_bytes, uploaded_bytes_per_pass": "expert bytes that crossed to the device, "
    "uploaded by the host or fetched by graphs",
    "n_cpu_experts": "experts that the CPU computed",
    "n_fetching_layers": "number of layers whose graphs fetch missing experts",
    "phases_us_per_pass": "host time by phase: `launch`, `wait`, `resolve`",
    "guard": "`bypassed`: whether the cache is bypassed, because that is faster; `n_probes`, "
    "`n_bypassed_tokens`",
}
SPEC_JSON = {
    "source": "what drafted in most steps: `mtp`, `dflash`, `dspark` or `lookup`; null if nothing "
    "was drafted",
    "steps, plain_steps": "steps that verified drafts, and all others",
    "drafted, accepted": "tokens that were drafted and verified, and those that the text took",
    "tokens_per_step": "tokens of the text for each step with drafts: the accepted ones and one "
    "more",
    "accepted_by_position": "of the steps that drafted a first, second, ... token in a row: the "
    "share in which it was accepted",
    "drafter_ms, verify_ms, commit_ms": "time of a step with drafts: making the draft, the pass "
    "that verifies it, taking the accepted rows",
    "speedup": "estimated speed over that of single tokens, by the steps without drafts; null if "
    "unknown",
    "chosen": "by source and number of rows of the verify pass: steps",
}
PLAN_JSON = {
    "path, n_layer, n_expert, n_expert_used": "the model",
    "n_ctx, type_k, type_v, policy, miss": "the settings",
    "slot_bytes_by_layer": "bytes of one expert of each layer",
    "trace": "the routing trace as `moegraph trace --json` has it",
    "budgets[]": "one for each --vram: `budget_bytes`, `refusal` (null or one line), "
    "`upstream_n_cpu_moe`, `n_ubatch`, `cards`, `plan`, `machine` (the name of the machine of "
    "`predicted` and `prompts`), `predicted`, `prompts`, `drafters`",
    "budgets[].cards[]": "empty for one card, else of each `budget_bytes`, `layers` (first, and "
    "the one after the last), `resident_share`, `left_over`",
    "budgets[].plan": "`n_slots_by_layer`, `full_layers`, `all_resident`, `resident_share`, "
    "`host_bytes` (host memory for the experts of layers that are not full), and `bytes` on the "
    "device by purpose, which add up to the budget",
    "budgets[].predicted": "as a row of `moegraph simulate --json`",
    "budgets[].prompts[]": "as in `moegraph simulate --json`",
    "budgets[].drafters": "null if nothing drafts, else `loaded` (mtp, dflash, dspark), their "
    "`bytes` on the device, `displaced_experts`, predicted speeds beside those without a drafter "
    "where drafts are accepted as often as is usual (`drafting_speedup`) and where nothing is "
    "drafted (`idle_speedup`), and `notes` on what `auto` does not load",
}
SIMULATE_JSON = {
    "trace, machine, miss, slot_bytes_by_layer": "what was replayed",
    "rows[]": "`resident_share`, `policy`, `n_tokens`, `hits`, `misses`, `hit_rate`, "
    "`hit_rate_by_layer`, `missing_per_token`, `missing_per_token_by_quarter`, `admitted`, "
    "`evicted`, `declined`, `n_streamed`, `n_cpu_experts`, `n_promoted`",
    "rows[].uploaded_bytes_per_token": "null if the size of an expert is not known",
    "rows[].token_us, rows[].decode_tps": "predicted; null where the machine's experts are of a "
    "far other size",
    "rows[].stages[], rows[].sequences[]": "with --split: of each device, `layers` (first, and the "
    "one after the last), `hit_rate`, `token_us`; and estimates for several sequences in groups: "
    "`n`, `n_groups`, `tokens_per_s`, `busy` (share of their time in which devices compute)",
    "rows[].prompts[]": "estimated for prompts of some lengths, from an empty context and with the "
    "slots filled as at the start: `n_tokens`, `n_sweeps` (parts that go through all layers), "
    "`sent_bytes` (of missing experts), `link_s` (seconds of sending them), `seconds`, "
    "`tokens_per_s`; null where the machine does not know",
}
TRACE_JSON = {
    "sha256, source": "what identifies the trace",
    "n_tokens, n_prompt, n_layer, n_expert, n_expert_used": "its sizes",
    "overlap, entropy": "share of the experts that the token before also chose; how evenly experts "
    "are chosen, 0 to 1",
    "lru_hit_rate_by_quarter": "hit rates of an LRU with slots for 26.9 % of all experts, in the "
    "quarters of the first 256 tokens",
    "slot_bytes_by_layer": "bytes of one expert of each layer; null if unknown",
}
INSPECT_JSON = {
    "paths, n_bytes, warnings, metadata": "the file; long arrays only by their length",
    "hparams": "hyper-parameters; absent if `unsupported` is there",
    "n_params, n_active_params": "parameters in all, and those that one token uses",
    "dense_bytes, expert_bytes, unused_bytes": "bytes of the weights outside experts, of the "
    "experts, and of tensors that moegraph does not use",
    "types[], layers[], tensors[]": "totals by type and by layer; tensors only with --tensors or "
    "--tensor",
    "budgets[]": "one for each --vram, as in `moegraph plan --json`, without `predicted` and "
    "`prompt`",
    "nonfinite[]": "with --check: tensors that hold NaN or infinity",
    "unsupported": "why moegraph cannot run the file; absent if it can",
}
BENCH_JSON = {
    "(llama-bench's)": "`model_filename`, `model_type`, `model_size`, `n_prompt`, `n_gen`, "
    "`n_depth`, `test_time`, `avg_ns`, `stddev_ns`, `avg_ts`, `stddev_ts`, `samples_ns`, "
    "`samples_ts` and the settings",
    "test": "name of the test: pp512, tg128, pp512+tg128, tg128 @ d4096, run128, ttft512",
    "experts": "as in `moegraph run --json`; csv and sql have `hit_rate` and "
    "`uploaded_bytes_per_pass` in its place",
    "sampling": "of a run test, as in `moegraph run --json`; null otherwise; not in csv and sql",
    "drafts": "of a run test, as `spec` in `moegraph run --json`; null otherwise. csv and sql have "
    "`drafted`, `accepted` and `tokens_per_step` in its place",
    "process_ms, load_ms, tokenizer_ms, prefill_ms, other_ms": "with `--ttft`: parts of the mean "
    "time to the first token, which is `avg_ns`. process: until the command line is read. "
    "prefill: with the first token",
    "load_phases_ms": "with `--ttft`: the parts of `load_ms`; not in csv and sql",
}
DOCTOR_JSON = {
    "moegraph, python, platform, packages, native, driver": "versions",
    "checks[]": "`name`, `ok`, `detail`, `required`",
    "devices[]": "`device`, `kind`, `description`, `free_bytes`, `total_bytes`",
    "memory": "`total_bytes`, `available_bytes`, `limit_bytes` of the host; "
    "`for_experts_bytes`: what `--host-pin auto` may take",
    "cpu": "`model`, `logical` CPUs, physical `cores` that moegraph may use, `features`",
    "threads": "CPU threads that the shipped model chose, and the speed of each way `tried`; null "
    "if it does not run",
}
MACHINE_JSON = {
    "name, about": "texts",
    "n_layer, expert_bytes": "of the model it was measured with",
    "whole_us": "microseconds of a token if every expert is resident",
    "host_layer_us, fetch_layer_us": "what each layer that is not full adds, even without misses: "
    "if the host handles its misses, and if its graph does",
    "fixed_us, overlap_us": "of the wait for missing experts: the constant part, and the time that "
    "other work hides",
    "stream_us, cpu_us, fetch_us": "points [experts, microseconds]: the host uploads them, the CPU "
    "computes them, the graph fetches them",
    "measured": "for people: model, device, notes, bandwidths, `cpu_us_by_threads`",
}
JSON_TABLES = {
    "run": [("`--json` prints one object:", RUN_JSON),
            ("`experts`, counted over all passes:", EXPERTS_JSON),
            ("`spec`, see [drafting](drafting.md):", SPEC_JSON)],
    "chat": [(CHAT_HEAD, CHAT_JSON)],
    "inspect": [("`--json` prints one object:", INSPECT_JSON)],
    "plan": [("`--json` prints one object:", PLAN_JSON)],
    "trace": [("`--json` prints one object:", TRACE_JSON)],
    "simulate": [("`--json` prints one object:", SIMULATE_JSON)],
    "bench": [("`-o json` prints an array of objects, `-o jsonl` one a line:", BENCH_JSON)],
    "doctor": [("`--json` prints one object:", DOCTOR_JSON),
               ("`--measure` prints one object, which `--machine FILE` reads:", MACHINE_JSON)],
}  # fmt: skip


def page() -> str:
    """Return the whole page."""
    context = click.Context(program, info_name="moegraph", **program.context_settings)
    chat = click.Context(program.commands["chat"], info_name="chat", parent=context)
    parts = [HEAD, exit_codes(), *shared_sections(chat)]
    for name, command in program.commands.items():
        parts.append(section(command, context))
        parts += [json_table(*table) for table in JSON_TABLES.get(name, [])]
    return "\n".join(parts)


def exit_codes() -> str:
    """Return the table of exit codes, from the error classes."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    rows = [(0, "success", "")]
    rows += [
        (kind.exit_code, f"`{kind.__name__}`", (kind.__doc__ or "").splitlines()[0])
        for kind in kinds
        if issubclass(kind, errors.MoegraphError) and kind is not errors.MoegraphError
    ]
    rows += [
        (2, "usage", "The command line is wrong: unknown option, missing argument."),
        (141, "closed pipe", "The reader of stdout closed the pipe, as in `| head`."),
    ]
    lines = ["## Exit codes", "", "| code | error | meaning |", "|---:|---|---|"]
    lines += [f"| {code} | {name} | {text} |" for code, name, text in sorted(rows)]
    return "\n".join(lines) + "\n"


def json_table(title: str, keys: dict[str, str]) -> str:
    """Return the table of the JSON keys that a command prints; several keys may share a row."""
    lines = [title, "", "| key | value |", "|---|---|"]
    lines += [f"| {_code(key)} | {value} |" for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def _code(keys: str) -> str:
    """Return keys as Markdown code; a remark in parentheses stays text."""
    if keys.startswith("("):
        return keys
    return ", ".join(f"`{key}`" for key in keys.split(", "))


def section(command: click.Command, parent: click.Context) -> str:
    """Return the section of one command."""
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    lines = [f"## {context.command_path}", "", "```", usage, "```", "", text.strip(), ""]
    lines += ["```sh", inspect.cleandoc(examples), "```", ""]
    usual = [option for options in shared().values() for option in options]
    own = [p for p in visible(command) if not is_shared(p, usual, command)]
    lines += table(own, context)
    for title, options in shared().items():
        lines += shared_line(title, options, [p for p in visible(command) if p not in own])
    return "\n".join(lines) + "\n"


def visible(command: click.Command) -> list[click.Option]:
    """Return the options of a command that --help lists."""
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def shared() -> dict[str, list[click.Option]]:
    """Return the options that many commands have, as `chat` has them, by the title of a section."""
    engine = {setting.name for setting in engine_settings()}
    sampling = {setting.name for setting in sampling_settings()} | {"logit_bias", "ignore_eos"}
    options = visible(program.commands["chat"])
    return {
        "Engine options": [option for option in options if option.name in engine],
        "Sampling options": [option for option in options if option.name in sampling],
    }


def is_shared(option: click.Option, usual: list[click.Option], command: click.Command) -> bool:
    """Return whether the page has an option elsewhere; bench has lists, but the same meaning."""
    for other in usual:
        if other.name == option.name:
            same = (other.help, other.default) == (option.help, option.default)
            return same or (command.name == "bench" and "as the tests need" not in str(option.help))
    return False


def shared_line(title: str, usual: list[click.Option], has: list[click.Option]) -> list[str]:
    """Return a line that says which of the usual options a command also has, if any."""
    names = {option.name for option in has}
    found, missing = ([o for o in usual if (o.name in names) is here] for here in (True, False))
    where = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    if not found:
        return []
    if len(missing) <= len(found):
        but = f" but {_flags(missing)}" if missing else ""
        return [f"Also the {where}{but}.", ""]
    return [f"Also, of the {where}: {_flags(found)}.", ""]


def _flags(options: list[click.Option]) -> str:
    return ", ".join(f"`{option.opts[-1]}`" for option in options)


def shared_sections(context: click.Context) -> list[str]:
    """Return the sections of options that many commands have."""
    return [
        "\n".join([f"## {title}", "", *table(options, context)])
        for title, options in shared().items()
    ]


def table(options: list[click.Option], context: click.Context) -> list[str]:
    """Return the lines of a table of options, by group."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for group in GROUPS:
        rows = [row(option, context) for option in options if group_of(option) == group]
        if rows and group != group_of(options[0]):
            lines.append(f"| **{group} options** | | |")
        lines += rows
    return [*lines, ""]


def row(option: click.Option, context: click.Context) -> str:
    """Return the table row of one option."""
    names = ", ".join((*option.opts, *option.secondary_opts))
    metavar = "" if option.is_flag else f" {option.make_metavar(context)}"
    default = option.get_help_extra(context).get("default", "")
    return f"| `{cell(names + metavar)}` | {default} | {cell(option.help or '')} |"


def cell(text: str) -> str:
    """Return text escaped for a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, page))
