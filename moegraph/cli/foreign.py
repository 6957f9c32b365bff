"""Options and commands of other programs: what to write instead, and what has no effect here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import click

_PLACED = "moegraph places experts automatically; --vram SIZE limits its device memory"
_DEVICES = "--device names one device, or several with commas, such as cuda:0,cuda:1"
_DOWNLOAD = "moegraph downloads only from Hugging Face: -hf OWNER/REPO:FILE.gguf"
_FREE_TEXT = "only a request to moegraph serve can ask for a grammar or a schema"
_CHAT = "use moegraph chat for a conversation, moegraph chat -p TEXT for one question"
_KEPT = (
    "chat and serve always go on from the beginnings of earlier prompts; --cache-ram N limits them"
)
_ROPE = "the model file says how positions are encoded"
_LOG = "notes go to stderr; -q drops them, and the server's log depends on --log-format"
_TLS = "put a proxy that does TLS before the server (docs/operation.md)"
_SHARED = "requests always share passes and the context; -np N limits how many"
_ALWAYS = "these paths are always there"
_DRAFTER = "the drafter has the devices, threads and context of the model"
# Options of llama.cpp that people try, by the reason why they do not exist here. Without this
# list, click would read -ngl 99 as -n gl. An option that a command has is not looked up.
_NOT_HERE: dict[str, str] = {
    "-ngl --gpu-layers --n-gpu-layers": f"{_PLACED}, --device cpu uses no GPU",
    "-ncmoe --n-cpu-moe -ot --override-tensor -fit --fit -fitt --fit-target -fitc --fit-ctx "
    "-ncffn --n-cpu-ffn": _PLACED,
    "-cmoe --cpu-moe": f"{_PLACED}, --cache-slots 0 keeps no experts there",
    "-fa --flash-attn": "flash attention is always on",
    "-b --batch-size": "-ub N sets the number of prompt tokens that are computed at a time",
    "-tb --threads-batch": "-t N sets the threads for prompts and for decode",
    "--mlock": "--host-pin all keeps the experts in memory",
    "-nommap --no-mmap -mmp --mmap -lm --load-mode": "the file is always mapped; moegraph copies "
    "what the device needs when it loads",
    "--keep --context-shift": "only run, chat and serve can go on when the context is full",
    "--no-context-shift": "that is the default",
    "--samplers --sampling-seq --sampler-seq": "the order of the samplers is fixed",
    "--mirostat --mirostat-lr --mirostat-ent": "there is no Mirostat; see --temp, --top-p",
    "--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n "
    "--dry-sequence-breaker": "there is no DRY sampler; see --repeat-penalty",
    "--xtc-probability --xtc-threshold --top-nsigma --top-n-sigma --dynatemp-range "
    "--dynatemp-exp": "there is no such sampler; see --temp, --top-p, --min-p",
    "--grammar --grammar-file": _FREE_TEXT,
    "-j -jf --json-schema --json-schema-file": f"{_FREE_TEXT}; --json sets the format of the "
    "report",
    "-hff --hf-file -mu --model-url": _DOWNLOAD,
    "-hft --hf-token": "set HF_TOKEN, which other users of the machine cannot read",
    "--prompt-cache --prompt-cache-all --prompt-cache-ro --slot-save-path": "moegraph serve "
    "--cache-dir DIR and moegraph run --prompt-cache DIR keep beginnings of prompts on disk",
    "-cram --cache-ram --cache-reuse --cache-prompt --no-cache-prompt -ctxcp --ctx-checkpoints "
    "-sps --slot-prompt-similarity": _KEPT,
    "--rpc": "--device rpc://HOST:PORT names a device that moegraph worker lends",
    "-cl --cache-list": "what was downloaded is in the folder that HF_HUB_CACHE names",
    "--offline": "set HF_HUB_OFFLINE=1",
    "-mg --main-gpu -dev --list-devices": f"{_DEVICES}; moegraph doctor lists them",
    "-sm --split-mode -ts --tensor-split": f"{_DEVICES}, which divide the layers; --split N,... "
    "sets their shares",
    "-nkvo --no-kv-offload -kvo --kv-offload": "the KV cache is always on the device",
    "-hfd -hfrd --hf-repo-draft --spec-draft-hf": "--draft hf:OWNER/REPO[:QUANT] downloads it",
    "-md --spec-draft-model --model-draft --draft": "only run, chat, serve, daemon and bench draft",
    "--draft-min --spec-draft-n-min": "--draft-p-min ends drafts early; short ones are used",
    "--spec-type": "--spec chooses what drafts",
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": "--spec lookup drafts from the text",
    "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd --device-draft "
    "--spec-draft-device -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
    "--spec-draft-threads-batch -cd --ctx-size-draft": _DRAFTER,
    "-ctkd --cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft "
    "--spec-draft-type-v": "the caches of a drafter have a fixed type",
    "-sys --system --system-prompt -sysf --system-prompt-file": "use moegraph chat --system TEXT; "
    "in a request to the server, a system prompt is the first message",
    "-st --single-turn -cnv --conversation -i --interactive -if --interactive-first -mli "
    "--multiline-input --in-prefix --in-suffix": _CHAT,
    "-no-cnv --no-conversation": "moegraph run never uses a chat template",
    "--jinja --no-jinja": "chat templates are always Jinja",
    "--chat-template": "--chat-template-file FILE replaces the template of the model",
    "--chat-template-kwargs": "--reasoning on|off sets enable_thinking; a request to the server "
    "may have chat_template_kwargs",
    "--reasoning-budget": "--reasoning off asks the template for no reasoning; -n N ends an answer",
    "--reasoning-format": "reasoning is always apart from the answer",
    "--lora --lora-scaled --control-vector": "adapters are not applied; merge them into the file",
    "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --image": "chat and serve read "
    "pictures, with --mmproj FILE|none",
    "--audio --video": "moegraph reads text and pictures only",
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor": _ROPE,
    "--override-kv": "metadata are what the model file says",
    "--numa --prio -C --cpu-mask -Cr --cpu-range --cpu-strict": "start moegraph with numactl, nice "
    "or taskset",
    "--warmup --no-warmup": "loading builds and measures what is needed; nothing else warms up",
    "-lv --verbosity --log-verbosity -v --verbose --log-verbose "
    "--verbose-prompt": "MOEGRAPH_DEBUG=1 shows tracebacks of errors, 2 also native logs",
    "--log-disable --log-file --log-colors --log-prefix --log-timestamps": _LOG,
    "-co --color": "colours appear on a terminal; NO_COLOR turns them off",
    "--perf --no-perf --show-timings --no-show-timings": "-q drops the line about speed",
    "-cb --cont-batching -nocb --no-cont-batching -kvu --kv-unified -no-kvu "
    "--no-kv-unified": _SHARED,
    "--metrics --slots --props --webui --ui": _ALWAYS,
    "--no-slots --no-webui --no-ui --path --api-prefix": f"{_ALWAYS}; a proxy can hide or rename "
    "them",
    "--ssl-key-file --ssl-cert-file": _TLS,
    "--threads-http": "HTTP needs no threads of its own",
    "--tools --agent -ag --mcp-servers-config --mcp-servers-json": "the server runs no tools; "
    "a request may have tools, which its client runs",
    "-to": "--timeout SECONDS ends each answer after that time",
    "--embedding --embeddings --rerank --reranking --pooling": "the model makes no embeddings",
    "--models-max --models-autoload --no-models-autoload": "one model is in memory at a time; a "
    "request loads the one that it names",
}
NOT_HERE = {flag: reason for flags, reason in _NOT_HERE.items() for flag in flags.split()}
# Commands of Ollama, llama.cpp and mlx-lm that people try, by what does it here.
_NO_COMMANDS = {
    "list ls": "`moegraph models` shows what was downloaded; other models are files",
    "show info": "`moegraph inspect TARGET` shows what is in a model file",
    "rm cp": "`moegraph models rm NAME` removes what was downloaded; other models are files",
    "ps stop": "GET /v1/models says which model is loaded, and --sleep-idle unloads it",
    "create push": "moegraph runs a GGUF file as it is",
    "generate complete completions cli main": "`moegraph run TARGET -p TEXT` continues a text",
    "server start up": "`moegraph serve TARGET` is the server",
    "quantize convert": "llama.cpp has programs for that",
}
NO_COMMANDS = {name: hint for names, hint in _NO_COMMANDS.items() for name in names.split()}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.I | re.A)
# An option is suggested if its similarity to the unknown one, without dashes, is at least this.
_ALIKE = 0.75


def refuse_command(name: str, known: Sequence[str], ctx: click.Context) -> None:
    """Refuse a command that does not exist, with what to write instead if that is known."""
    from ..gguf.hubnames import is_hub_name
    from ..gguf.resolve import SHIPPED

    near = difflib.get_close_matches(name, known, 1, _ALIKE)
    hint = NO_COMMANDS.get(name) or (f"did you mean {near[0]}?" if near else "")
    if name in SHIPPED or name.endswith(".gguf") or is_hub_name(name):
        hint = f"a command comes before the model, as in moegraph chat {name}"
    if hint:
        raise click.UsageError(f"there is no command {name!r}: {hint}", ctx)


def refuse_foreign(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse options of llama.cpp that do not exist here, and letters run together.

    click would read -pg as -p with the value g. A number may follow its letter (-n128). args: the
    arguments after the command's name.
    """
    options = {
        flag: param
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for flag in (*param.opts, *param.secondary_opts)
    }
    is_value = False
    for arg in args:
        if is_value:
            is_value = False
        elif arg == "--":
            return
        elif arg in options:
            option = options[arg]
            is_value = not option.is_flag and not option.count and not option.hidden
        elif (name := arg.partition("=")[0]) in NOT_HERE and name not in options:
            raise click.UsageError(f"there is no {name}: {NOT_HERE[name]}", ctx)
        elif len(arg) > 2 and arg[0] == "-" and arg[1] != "-":
            _refuse_cluster(arg, options, ctx)


def _refuse_cluster(arg: str, options: dict[str, click.Option], ctx: click.Context) -> None:
    letter, rest = arg[:2], arg[2:]
    option = options.get(letter)
    takes_value = option is not None and not option.is_flag and not option.hidden
    if _NUMBER.fullmatch(letter[1] + rest) or (takes_value and _NUMBER.fullmatch(rest)):
        return
    name = arg.partition("=")[0]
    hint = f"; for {letter}, write {letter} {rest.removeprefix('=')}" if takes_value else ""
    if f"-{name}" in options:
        hint = f"; did you mean -{name}?"
    raise click.UsageError(f"No such option: {name}{hint}", ctx)


def with_close_guesses(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return the error with only the suggestions that are close to what the user typed."""
    typed = error.option_name.lstrip("-")
    close = [
        name
        for name in error.possibilities or ()
        if difflib.SequenceMatcher(None, typed, name.lstrip("-")).ratio() >= _ALIKE
    ]
    return click.NoSuchOption(error.option_name, possibilities=close, ctx=error.ctx)
