"""Engine settings: one frozen dataclass defines options, checks, defaults and docs rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import ConfigError
from .setting import Setting, problem_of, setting, settings_of
from .threads import MAX_THREADS

KV_TYPES = ("f16", "q8_0", "q4_0")
EXPERT_POLICIES = ("lru", "lfu")
SPEC_SOURCES = ("mtp", "dflash", "lookup")
# Most rows of a verify pass, because operations on trees take no more (MOEGRAPH_TREE_ROWS).
MAX_VERIFY_ROWS = 64
# Prompt tokens that are computed at a time on the CPU, as in llama.cpp.
CPU_ROWS = 512
# The headings of --help, in order.
DRAFT_GROUP = "Draft"
GROUPS = ("Common", "Server", "Sampling", "Context", "Expert", DRAFT_GROUP, "Diagnostic")


class ExpertPolicy(Protocol):
    """A policy of one's own; examples/policy.py is one."""

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> Any:
        """Return its state for n_slots slots of a layer: an `experts.policy.LayerPolicy`."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model. Immutable; `validate()` checks every field.

    policy may also be an `ExpertPolicy`.
    """

    device: str = setting(
        "device", "auto", ("--device",),
        "Device that runs the model, or several, such as cuda:0,cuda:1, which divide its layers. "
        "rpc://HOST:PORT: a device that `moegraph worker` lends (docs/worker.md). "
        "auto: the first CUDA device, all of them if more experts fit so, or else the CPU.",
        metavar="auto|cpu|cuda[:N]|rpc://HOST:PORT,...",
    )  # fmt: skip
    split: str = setting(
        "split", "", ("-ts", "--split", "--tensor-split"),
        "How several devices divide the layers, as shares (3,1) or GiB each (8GiB,12GiB). Default: "
        "so that a token takes least time, by each device's memory and speed.",
        metavar="N,...",
    )  # fmt: skip
    mode: str = setting(
        "choice", "auto", ("--mode",),
        "whole: one graph computes a pass; every expert must fit on the device. layered: several "
        "graphs compute it. auto: whole if every expert fits.",
        choices=("auto", "layered", "whole"), group="Diagnostic",
    )  # fmt: skip
    n_ctx: int = setting(
        "int", 4096, ("-c", "--max-ctx", "--ctx-size"),
        "Context length in tokens. 0: the length that the model was trained with. -1: as much of "
        "that as there is memory for, and at least 4096 (docs/server.md#the-context).",
        minimum=-1, maximum=1 << 22, group="Context",
    )  # fmt: skip
    n_ubatch: int | None = setting(
        "int", None, ("-ub", "--ubatch-size"),
        f"Prompt tokens that are computed at a time. Default: {CPU_ROWS} on the CPU; on a GPU up "
        "to 2048, the fastest number that takes little memory from experts.",
        minimum=1, maximum=1 << 16, group="Context",
    )  # fmt: skip
    n_threads: int | None = setting(
        "int", None, ("-t", "--threads"),
        "CPU threads for decode. Default: the physical cores that other programs leave free.",
        minimum=1, maximum=MAX_THREADS,
    )  # fmt: skip
    n_threads_batch: int | None = setting(
        "int", None, ("-tb", "--threads-batch"),
        "CPU threads for prompts. Default: the value of -t, or else the physical cores.", minimum=1,
        maximum=MAX_THREADS,
    )  # fmt: skip
    poll: int | None = setting(
        "int", None, ("--poll",),
        "How long waiting CPU threads spin before they sleep, 0 to 100. Default: 50, "
        "or 0 while there are more threads than free cores.",
        minimum=0, maximum=100,
    )  # fmt: skip
    context_shift: bool = setting(
        "flag", False, ("--context-shift",),
        "Go on when the context is full: keep the first tokens and the later half of the others, "
        "and compute them again.",
        group="Context",
    )  # fmt: skip
    n_keep: int = setting(
        "int", 0, ("--keep",),
        "How many of the first tokens, besides a BOS, --context-shift keeps. -1: the prompt.",
        minimum=-1, maximum=1 << 22, group="Context",
    )  # fmt: skip
    type_k: str = setting(
        "choice", "f16", ("-ctk", "--cache-type-k"), "Data type of the K cache.", choices=KV_TYPES,
        group="Context",
    )  # fmt: skip
    type_v: str = setting(
        "choice", "f16", ("-ctv", "--cache-type-v"), "Data type of the V cache.", choices=KV_TYPES,
        group="Context",
    )  # fmt: skip
    cache_ram: int = setting(
        "int", 8192, ("-cram", "--cache-ram"),
        "Host memory, in MiB, for beginnings of prompts that later prompts need not compute again. "
        "-1: no limit but the memory that is free. 0: keep none.",
        minimum=-1, maximum=1 << 24, group="Context",
    )  # fmt: skip
    pin_layers: int | None = setting(
        "int", None, ("--pin-layers",),
        "Number of full layers: layers with experts, all of which stay on the device. Default: "
        "chosen.", minimum=0, maximum=1 << 10, group="Expert",
    )  # fmt: skip
    cache_slots: int | None = setting(
        "int", None, ("--cache-slots",),
        "Number of expert slots of all other layers together. Default: chosen.", minimum=0,
        maximum=1 << 20, group="Expert",
    )  # fmt: skip
    vram: str = setting(
        "size", "auto", ("--vram",),
        "Limit of the memory that moegraph uses of each device, such as 8GiB, or different ones, "
        "such as 8GiB,12GiB. auto: the free memory, less a margin.",
        metavar="SIZE,...|auto", group="Expert",
    )  # fmt: skip
    mmproj_device: str = setting(
        "device", "auto", ("--mmproj-device",),
        "Device of the picture encoder, which takes 2.3 GiB of it. auto: the model's first GPU if "
        "4.5 GiB are left there.",
        metavar="auto|cpu|cuda:N",
    )  # fmt: skip
    profile: str = setting(
        "path", "", ("--profile",),
        "Routing profile: which experts earlier runs chose, and how right drafts were. It fills "
        "the slots at the start; run, chat, serve and daemon create or update it. Default: "
        "MODEL.routing.json if that file exists.",
        metavar="FILE|none", group="Expert",
    )  # fmt: skip
    profile_class: str = setting(
        "path", "", ("--profile-class",),
        "Class of prompts in the profile, such as code. Default: all classes fill the slots, and "
        "runs are added to the class 'default'.",
        metavar="NAME", group="Expert",
    )  # fmt: skip
    policy: str | ExpertPolicy = setting(  # noqa: RUF009 - it makes a field
        "choice", "lfu", ("--policy",),
        "Which experts keep their slots. lfu: those chosen most often. lru: those chosen last.",
        choices=EXPERT_POLICIES, group="Expert",
    )  # fmt: skip
    miss: str = setting(
        "choice", "auto", ("--miss",),
        "Who computes missing experts. cpu: the CPU, in passes of up to 32 tokens. stream: the "
        "device, after they are copied to it. auto: whichever is faster, or both at once, by "
        "measured times.",
        choices=("auto", "cpu", "stream"), group="Expert",
    )  # fmt: skip
    host_pin: str = setting(
        "choice", "auto", ("--host-pin",),
        "Copy experts that can be missing to pinned host memory, from which the device reads them "
        "faster. auto: on CUDA, as --host-mem allows. all: every layer, or an error. none: read "
        "them from the model file.",
        choices=("auto", "all", "none"), group="Expert",
    )  # fmt: skip
    host_mem: str = setting(
        "size", "auto", ("--host-mem",),
        "Limit of the host memory for copies of experts that can be missing. What has no room "
        "there is read from the file when a token chooses it. auto: on CUDA, free memory less a "
        "reserve.",
        metavar="SIZE|auto", group="Expert",
    )  # fmt: skip
    deterministic: bool = setting(
        "flag", False, ("--deterministic",),
        "Base no decision on timing, and on CUDA give each row the bits that it has alone with all "
        "experts on the GPU: then a text depends neither on drafts, nor on other requests, nor on "
        "what is cached. With --miss auto the device computes all missing experts. Slower.",
    )  # fmt: skip
    n_seq: int = setting(
        "int", 1, (), "Number of sequences that the KV cache has room for (Python API only).",
        minimum=1, maximum=256,
    )  # fmt: skip
    n_kv: int = setting(
        "int", 0, (),
        "Positions that all sequences have together (Python API only). 0: n_ctx for each of them. "
        "-1: n_ctx in all, of which one sequence may use everything.",
        minimum=-1, maximum=1 << 28,
    )  # fmt: skip
    spec: str = setting(
        "choice", "off", ("--spec",),
        "What drafts tokens, of which the model verifies several in one pass. auto: whatever makes "
        "it faster, step by step. off: nothing. Others: in every step. Greedy text may differ from "
        "text without drafts where two tokens are nearly equally likely.",
        choices=("auto", "off", *SPEC_SOURCES), group=DRAFT_GROUP,
    )  # fmt: skip
    draft: str = setting(
        "path", "", ("-md", "--spec-draft-model", "--model-draft", "--draft"),
        "Model that drafts: a DFlash or DSpark file (GGUF, or a folder with safetensors), or "
        "hf:OWNER/REPO[:QUANT], a GGUF file on Hugging Face.",
        metavar="FILE", group=DRAFT_GROUP,
    )  # fmt: skip
    draft_max: int | None = setting(
        "int", None, ("--spec-draft-n-max", "--draft-max"),
        "Maximum number of drafted tokens that follow one another. Default: what the drafter can; "
        "--spec auto chooses up to that.",
        minimum=1, maximum=MAX_VERIFY_ROWS - 1, group=DRAFT_GROUP,
    )  # fmt: skip
    draft_p_min: float = setting(
        "float", 0.0, ("--spec-draft-p-min", "--draft-p-min"),
        "A draft ends before a token that the drafter gives a smaller probability.", minimum=0,
        maximum=1, group=DRAFT_GROUP,
    )  # fmt: skip
    budget: int | None = setting(
        "int", None, ("--budget",),
        "Rows of a pass that verifies a draft, the last token of the text included. 1: no drafts. "
        "Default: chosen, up to the drafter's length.",
        minimum=1, maximum=MAX_VERIFY_ROWS, group=DRAFT_GROUP,
    )  # fmt: skip
    rejection_sampling: bool = setting(
        "flag", False, ("--speculative-use-rejection-sampling", "--rejection-sampling"),
        "Draft sampled text at random and accept tokens by rejection (p/q). The distribution stays "
        "the model's, but a seed gives another text. Default: accept what the sampler draws.",
        group=DRAFT_GROUP,
    )  # fmt: skip
    ddtree: bool = setting(
        "flag", False, ("--ddtree",),
        "Verify a tree of the likeliest paths (DDTree) instead of one path.",
        group=DRAFT_GROUP,
    )  # fmt: skip
    ddtree_budget: int = setting(
        "int", 64, ("--ddtree-budget",),
        f"Drafted tokens in a DDTree; a pass has room for {MAX_VERIFY_ROWS - 1}.", minimum=1,
        maximum=MAX_VERIFY_ROWS, group=DRAFT_GROUP,
    )  # fmt: skip
    ddtree_temp: float = setting(
        "float", 1.0, ("--ddtree-temp",),
        "Temperature of the drafter's probabilities by which a DDTree compares paths. Sampling is "
        "not affected.",
        minimum=0, maximum=100, group=DRAFT_GROUP,
    )  # fmt: skip
    ddtree_no_chain_seed: bool = setting(
        "flag", False, ("--ddtree-no-chain-seed",),
        "Begin a DDTree with the likeliest path of each length, not with the drafter's first "
        "choice at every depth.",
        group=DRAFT_GROUP,
    )  # fmt: skip
    draft_swa: int = setting(
        "int", 0, ("--draft-swa",),
        "Let all layers but the last of a DFlash drafter reach back N positions only, which saves "
        "memory and time. 0: what its file says.",
        metavar="N", minimum=0, maximum=1 << 30, group="Draft",
    )  # fmt: skip
    draft_ctx_max: int = setting(
        "int", 0, ("--draft-ctx-max",),
        "Most positions that the layers of a DFlash drafter without a window see. 0: all.",
        metavar="N", minimum=0, maximum=1 << 30, group="Draft",
    )  # fmt: skip
    draft_keep_bf16: bool = setting(
        "flag", False, ("--draft-keep-bf16",),
        "Keep BF16 weights of a DFlash drafter as they are. Otherwise they become Q8_0, which is "
        "half the size and twice as fast.",
        group="Draft",
    )  # fmt: skip
    n_draft: int = setting(
        "int", 0, (),
        "Drafted tokens of each sequence that one pass can verify without more device memory "
        "(Python API only). 0: as many as the other settings of drafts need.",
        minimum=0, maximum=MAX_VERIFY_ROWS - 1,
    )  # fmt: skip
    draft_vocab: int = setting(
        "int", 0, ("--draft-vocab",),
        "Number of tokens, the most frequent ones, that drafts may consist of. Fewer make drafting "
        "faster, and change no text. 0: all.",
        minimum=0, maximum=1 << 24, group=DRAFT_GROUP,
    )  # fmt: skip
    cpu_reference: bool = setting(
        "flag", False, ("--cpu-reference",),
        "Use CPU kernels whose results do not depend on the batch width or the number of threads.",
        group="Diagnostic",
    )  # fmt: skip

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the devices that `device` names, in order of the layers that they have."""
        return tuple(self.device.split(","))

    def ctx_within(self, n_trained: int) -> int:
        """Return n_ctx, or the trained length where that or the memory decides."""
        return self.n_ctx if self.n_ctx > 0 else n_trained

    @property
    def n_rows(self) -> int:
        """Return n_ubatch, or what it is on the CPU if nothing is set."""
        return CPU_ROWS if self.n_ubatch is None else self.n_ubatch

    def problems(self) -> list[str]:
        """Return every problem of this config as one line each; empty when it is valid."""
        own = hasattr(self.policy, "layer")  # an object
        checked = [s for s in settings() if s.name != "policy" or not own]
        found = [problem_of(s, getattr(self, s.name)) for s in checked]
        if not any(found):
            found += self._list_problems()
        if self.cpu_reference is True and str(self.device).startswith("cuda"):
            found.append(
                f"cpu_reference needs the CPU device, got device={self.device!r}; "
                "use device 'cpu' or drop --cpu-reference"
            )
        if self.spec == "auto" and self.deterministic is True and self.cpu_reference is not True:
            found.append(
                "spec auto (--spec) goes by measured times, and deterministic excludes that; name "
                "what drafts, such as --spec mtp, or drop --deterministic"
            )
        if self.n_keep and self.context_shift is False:
            found.append("n_keep (--keep) is for context_shift (--context-shift); give both")
        if self.rejection_sampling is True and self.ddtree is True:
            found.append("--rejection-sampling needs drafts of one path; drop --ddtree")
        return [line for line in found if line]

    def _list_problems(self) -> list[str]:
        """Return what is wrong with lists that have one entry for each device."""
        found, n = [], len(self.devices)
        if "," in self.host_mem:
            found.append(f"host_mem is {self.host_mem!r} (--host-mem); give one size")
        if self.host_mem != "auto" and self.host_pin == "none":
            found.append("--host-mem is for copies of experts, and --host-pin none makes none")
        for name, value in (("split (--split)", self.split), ("vram (--vram)", self.vram)):
            n_values = len(value.split(","))
            if value and n_values not in ((n,) if name[0] == "s" else (1, n)):
                found.append(
                    f"{name} has {n_values} entries for {n} device{'s' * (n > 1)} "
                    f"(--device {self.device}); give one for each"
                )
        return found

    def validate(self) -> EngineConfig:
        """Return self when every field is valid.

        Raises:
            ConfigError: names every wrong field, its value and the allowed range.
        """
        found = self.problems()
        if found:
            raise ConfigError("; ".join(found))
        return self


def settings() -> tuple[Setting, ...]:
    """Return the Setting of every EngineConfig field, in order."""
    return settings_of(EngineConfig)


def debug_level() -> int:
    """Return MOEGRAPH_DEBUG: 0 quiet, 1 tracebacks of moegraph's errors, 2 also native logs."""
    value = os.environ.get("MOEGRAPH_DEBUG", "")
    return int(value) if value.isdecimal() else 0
