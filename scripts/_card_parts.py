"""The parts of scripts/measure_card, the most wanted first: commands, times, what they show.

A command names a script of this folder, `moegraph`, `pytest` or a program of llama.cpp. Names in
braces stand for the values of `_card.values`. A command with {out} writes its lines there;
otherwise the lines of JSON that it prints are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import _card_figures as figures


@dataclass(frozen=True)
class Part:
    """One measurement.

    seconds: what it takes on an H200 with the 35B. share: of the experts that must fit on the card.
    needs: upstream (unpatched llama.cpp), rival (the newest), mtp, before (an older tree), cuda,
        tests (pytest).
    """

    name: str
    about: str
    steps: tuple[str, ...]
    seconds: int
    shows: figures.Shows
    share: float = 0.0
    needs: tuple[str, ...] = ()


def part(name: str, seconds: int, about: str, *steps: str, shows: figures.Shows,
         share: float = 0.0, needs: str = "") -> Part:  # fmt: skip
    """Return a part; needs are separated by spaces."""
    return Part(name, about, steps, seconds, shows, share, tuple(needs.split()))


_DRAFTS = (
    "bench_drafts.py {model} {draft_option} {device} --tokens {tokens} --depth {depth}"
    " --repeat {samples} --mtp {mtp} --dflash {dflash} --out {out}"
)
_SERVER = (
    "bench_server.py {model} {device} --llama-server {bin}/llama-server -ub {server_ub} -c {ctx}"
    " --out {out}"
)
_UPSTREAM = (
    "bench_upstream.py {model} --llama-bench {bin}/llama-bench {device} --out {out} --warm {warm}"
)
_WHOLE = _UPSTREAM + " --threads {threads}"
_DECODE = (
    _UPSTREAM + " --samples {five} --ubatch {decode_ub} --prompt {prompt} --traces {traces}"
    " --sweep {sweep}"
)
_RIVAL = (
    "bench_rival.py {model} --batched-bench {rival}/llama-batched-bench {device} --out {out}"
    " --prompt {prompt} --gen {gen} --ubatch {decode_ub}"
    " --samples {five}"
)
# The two ways of the newest llama.cpp of which one was best in every test of rival.md.
_BEST_WAYS = _RIVAL + " --threads {threads} --ways 'cache unmapped'"
_TREES = "bench_trees.py {model} now={root} {device}"
_BEFORE = (
    "bench_trees.py {model} before={before} after={root} {device} --miss stream --gen {gen}"
    " --rows {rows} --prompt {two_prompts} --samples {samples} --warm {warm} --out {out}"
)
_PROGRAM = (
    "bench_trees.py {model} before={before} after={root} {device} --samples {few}"
    " --tokens {long_answer} --out {out}"
)
_BATCHED = (
    "llama-batched-bench -m {model} {ngl} -t {threads} -fa on -npp 16 -ntg 32"
    " -c 4096 --output-format jsonl"
)


def _rows(rows: str, threads: str) -> tuple[str, str]:
    """Return what measures passes of the rows of one setting, with the threads of another."""
    return (
        _TREES + " --samples {five} --settings whole 60 25 --gen {gen} --rows {" + rows + "}"
        " --prompt --warm {warm} --out {out}",
        "llama-bench -m {model} {ngl} -t {" + threads + "} -fa 1 -p {" + rows + "_comma} -n 0"
        " -ncmoe 0,{ncmoe_60},{ncmoe_25} -lm auto,none -r {five} -o jsonl",
    )


# Names for several parts. page: those whose figures README and docs/benchmarks.md show. targets:
# what docs/benchmarks/targets.md shows, the most wanted first.
GROUPS = {
    "page": (
        "whole", "residency-60", "residency-25", "residency-none", "rival-whole", "rival-60",
        "rival-25", "rival-10", "rows", "run", "lookup", "server-all", "first", "tests",
        "tests-alone",
    ),
    "targets": (
        "whole", "rival-whole", "best-60", "best-25", "best-10", "few-rows", "sequences-whole",
        "drafts-clients", "slow-60", "slow-25", "tiers",
    ),
    "before": (
        "before-whole", "before-60", "before-25", "before-none", "before-server", "before-mixed",
        "before-lookup", "before-drafts",
    ),
}  # fmt: skip

PARTS: Sequence[Part] = (
    part("whole", 30, "decoding and prompts with all experts beside llama-bench",
         _WHOLE + " --prompt {prompt} --gen {gen} --ubatch {decode_ub} --samples {five}",
         shows=figures.upstream, share=1.0, needs="upstream"),
    part("residency-60", 65, "decoding by routing and prompts with 60 % of the experts",
         _DECODE + " --ncmoe {ncmoe_60} --gen {gen}", shows=figures.upstream, share=0.6,
         needs="upstream"),
    part("residency-25", 95, "the same with 25 % of the experts",
         _DECODE + " --ncmoe {ncmoe_25} --gen {gen}", shows=figures.upstream, share=0.25,
         needs="upstream"),
    part("residency-none", 90, "the same with no expert on the card",
         _DECODE + " --ncmoe {ncmoe_none} --gen {few_gen}", shows=figures.upstream,
         needs="upstream"),
    part("rival-whole", 45, "decoding and a prompt with all experts beside the newest llama.cpp",
         _RIVAL + " --threads {threads}", shows=figures.upstream, share=1.0, needs="rival"),
    *(part(f"rival-{share}", 120,
           f"the same with {share} % of the experts, beside -ncmoe and its expert cache",
           _RIVAL + f" --sweep {{sweep}} --ncmoe {{ncmoe_{share}}}", shows=figures.upstream,
           share=share / 100, needs="rival") for share in (60, 25, 10)),
    part("rows", 75, "passes of a few rows, other ids each time, beside llama-bench",
         *_rows("rows", "sweep_comma"), shows=figures.rows_alone, share=1.0, needs="upstream"),
    part("run", 20, "generations through sampler and text beside the loop of bench",
         "moegraph bench {model} {device} -p 0 -n {gen} --run {runs} --temp 0,1 --top-k 0,40"
         " -r {five} -o jsonl", shows=figures.run_rows),
    part("lookup", 40, "look-up in dictated texts that repeat themselves, or do not; all experts",
         "bench_lookup.py {model} {device} --tokens {long_answer} --repeat {samples} --out {out}",
         shows=figures.lookup, share=1.0),
    part("server-all", 80, "many clients beside llama-server",
         _SERVER + " --clients {clients} --samples {samples} --theirs '{ngl} -t {threads}'",
         shows=figures.server, share=1.0, needs="upstream"),
    part("server-mixed", 95, "8 clients that ask again and again, prompts of 50 to 3,000",
         _SERVER + " --clients --mixed {mixed} --theirs '{ngl} -t {threads} -cram 0 -ctxcp 0'",
         shows=figures.mixed, share=1.0, needs="upstream"),
    part("first", 100, "from the start of a process to its first text, beside llama-completion",
         "bench_first.py {model} {device} --llama-completion {bin}/llama-completion"
         " --prompt {first} --vram {gib_25} --theirs '{ngl} -t {threads} -ncmoe {ncmoe_25}'"
         " --samples {samples} --out {out}",
         "moegraph bench {model} {device} --ttft -p {first_comma} --vram {gib_25} -r {samples}"
         " -o jsonl",
         shows=figures.first, share=0.25, needs="upstream"),
    part("before-whole", 70, "an older tree beside this one, all experts",
         _BEFORE + " --settings whole", shows=figures.before, share=1.0, needs="before"),
    part("before-60", 70, "the same with 60 % of the experts",
         _BEFORE + " --settings 60", shows=figures.before, share=0.6, needs="before"),
    part("before-25", 80, "the same with 25 % of the experts",
         _BEFORE + " --settings 25", shows=figures.before, share=0.25, needs="before"),
    part("before-none", 90, "the same with no expert on the card",
         _BEFORE + " --settings 0", shows=figures.before, needs="before"),
    part("before-server", 120, "one client of both trees' servers",
         _PROGRAM + " --programs server", shows=figures.before, share=1.0, needs="before"),
    part("before-mixed", 80, "the mixed load of both trees' servers",
         "bench_server.py {model} {device} --before {before} -ub {server_ub} -c {ctx} --clients"
         " --mixed {mixed} --out {out}", shows=figures.mixed, share=1.0, needs="before"),
    part("before-lookup", 120, "look-up of both trees",
         _PROGRAM + " --programs lookup", shows=figures.before, share=1.0, needs="before"),
    part("before-drafts", 200, "drafting of both trees",
         _PROGRAM + " --programs drafts {draft_option}", shows=figures.before, share=1.0,
         needs="before mtp"),
    part("tests", 200, "tests/cuda, many at a time",
         "pytest {root}/tests/cuda -q -n {test_processes} --dist worksteal -m 'not alone'"
         " -p no:cacheprovider --junitxml {xml}", shows=figures.tests, needs="cuda tests"),
    part("tests-alone", 40, "tests of tests/cuda that need the card for themselves",
         "pytest {root}/tests/cuda -q -m alone -p no:cacheprovider --junitxml {xml}",
         shows=figures.tests, needs="cuda tests"),
    part("drafts-100", 100, "drafting with all experts: fixed lengths, auto, none",
         _DRAFTS + " --kind {kinds}", shows=figures.drafts, share=1.0, needs="mtp"),
    part("drafts-60", 130, "drafting with 60 % of the experts",
         _DRAFTS + " --kind {kinds} --vram {gib_60}", shows=figures.drafts, share=0.6, needs="mtp"),
    part("drafts-25", 160, "drafting with 25 % of the experts",
         _DRAFTS + " --kind {kinds} --share 25", shows=figures.drafts, share=0.25,
         needs="mtp"),
    part("server-long", 60, "a long prompt beside 8 clients, and a second turn",
         _SERVER + " --clients 1 --tokens 16 {long_prompt} --theirs '{ngl} -t {threads}'",
         shows=figures.server, share=1.0, needs="upstream"),
    part("server-60", 220, "the same with 60 % of the experts",
         _SERVER + " --clients {clients_60} {long_prompt} --ours '--pin-layers 0 --cache-slots"
         " {slots_60}' --theirs '{ngl} -t {threads} -ncmoe {ncmoe_60}'",
         shows=figures.server, share=0.6, needs="upstream"),
    part("rival-server-60", 120, "8 clients with 60 % of the experts beside its server",
         "bench_server.py {model} {device} --llama-server {rival}/llama-server -ub {server_ub}"
         " -c {ctx} --out {out} --clients 8 --ours '--pin-layers 0 --cache-slots {slots_60}'"
         " --theirs '{ngl} -t {threads} --load-mode none -ncmoe {ncmoe_none} --moe-cache-mib"
         " {cache_60}'", shows=figures.server, share=0.6, needs="rival cuda"),
    part("server-60-many", 160, "16 and 32 clients with 60 % of the experts",
         _SERVER + " --clients {many_60} --tokens 64 --ours '--pin-layers 0 --cache-slots"
         " {slots_60}' --theirs '{ngl} -t {threads} -ncmoe {ncmoe_60}'",
         shows=figures.server, share=0.6, needs="upstream"),
    part("lengths", 60, "prompts of 64 to 2,048 tokens, all experts, beside llama-bench",
         _WHOLE + " --prompt {lengths} --gen 0 --ubatch {ub} --samples {samples}",
         shows=figures.upstream, share=1.0, needs="upstream"),
    part("depth", 150, "prompts and decoding at depth beside llama-bench at its best -ub",
         _WHOLE + " --depth 0 {depths} --prompt {prompts} --gen {gen} --ubatch {ub} 512"
         " --samples {few}",
         shows=figures.upstream, share=1.0, needs="upstream"),
    part("prompts", 130, "prompts with 60 and 25 % of the experts beside llama-bench",
         _UPSTREAM + " --samples {samples} --ncmoe {ncmoe_60} {ncmoe_25} --ubatch {ub}"
         " --prompt {prompts} --gen 0",
         shows=figures.upstream, share=0.6, needs="upstream"),
    part("sequences", 120, "sequences that decode together beside llama-batched-bench",
         _TREES + " --samples {samples} --settings 60 0 --seqs {seqs} --gen 32 --out {out}",
         _BATCHED + " -npl {seqs_comma} -ncmoe {ncmoe_60}", shows=figures.sequences, share=0.6,
         needs="upstream"),
    *(part(f"best-{share}", seconds, f"decoding with {share} % of the experts beside the two best"
           " ways of the newest llama.cpp", _BEST_WAYS + f" --ncmoe {{ncmoe_{share}}}",
           shows=figures.upstream, share=share / 100, needs="rival")
      for share, seconds in ((60, 45), (25, 55), (10, 70))),
    part("few-rows", 60, "passes of 8 and 16 rows, other ids each time, beside llama-bench",
         *_rows("few_rows", "threads"), shows=figures.rows_alone, share=1.0, needs="upstream"),
    part("sequences-whole", 30, "sequences that decode together, all experts, beside"
         " llama-batched-bench",
         _TREES + " --samples {five} --settings whole --seqs {most_seqs} --gen 32 --out {out}",
         _BATCHED + " -npl {most_seqs_comma}", shows=figures.sequences, share=1.0,
         needs="upstream"),
    part("drafts-clients", 45, "8 clients with drafts and without, structured text, all experts",
         "bench_drafts_clients.py {model} {draft_option} {device} --clients {few_clients}"
         " --tokens {tokens} --samples {five} --out {out}", shows=figures.drafts_clients, share=1.0,
         needs="mtp"),
    *(part(f"slow-{share}", seconds, f"the same as best-{share} over a link 4 times slower",
           _BEST_WAYS + f" --slow-link 4 --ncmoe {{ncmoe_{share}}}", shows=figures.upstream,
           share=share / 100, needs="rival cuda") for share, seconds in ((60, 60), (25, 75))),
    part("tiers", 45, "8 GiB of device memory, 8 of host memory, the rest in the file",
         "bench_tiers.py {model} {device} --samples {five} --out {out}", shows=figures.tiers,
         share=0.25, needs="cuda"),
)  # fmt: skip
