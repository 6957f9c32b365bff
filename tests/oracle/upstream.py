"""The oracle: a server process that runs unpatched llama.cpp and answers one JSON request a line.

    python upstream.py ORACLE_FOLDER

Requests come on stdin, replies go to stdout; arrays go to the .npz file a request names. Every
reply has "ok"; with ok false, "error" says why. Operations (fields beside "op"):

    info                          versions and library files
    run     model cfg steps out   a fresh sequence: each step is one llama_decode. A step is
                                  {"tokens": [...], "rows": "all" | "last" | "none", "nodes": [..]}
                                  out gets logits{i} [rows, n_vocab] and node/{i}/{name}/{il}.
                                  nodes [] keeps none, ["*"] every named one; such a step must fit
                                  one ubatch. In place of tokens a step may have rows of a picture:
                                  {"embd": .npy [n, n_embd], "axes": [3][n], "n_positions": n}
    greedy  model cfg prompts n   free-running argmax text for each prompt; returns ids and the
                                  smallest top-two margin met
    draft   model cfg parts n out    model and MTP block read a text in parts; after each of them
                                  the block drafts n tokens after the argmax. out gets logits{i}
                                  [n + 1, n_vocab] of each part, the model's of the last row first
    block   model drafter cfg features anchor mask n out   a DFlash drafter takes K and V of
                                  positions with features (an .npy of [n_past, n_layers * n_embd]),
                                  then fills in a block of n rows, the anchor first; out gets logits
                                  [n, n_vocab]
    pictures  model mmproj mtmd text files n out    a text with pictures where its markers are, read
                                  with libmtmd of the folder mtmd; then n greedy tokens; out gets
                                  embd{i}, rows of each picture, and logits [n, n_vocab]
    tokenize model text           token ids
    unload                        drop all models

cfg: n_ctx, n_ubatch, n_batch, threads, flash_attn, type_k, type_v, extra_bufts (weight repacking),
device ("cpu" or "gpu"), n_cpu_moe (layers whose experts stay on the CPU, 999 for all), op_offload
(whether the device may compute such experts for 32 rows and more), mtp (load the MTP block). Model
and context are kept for the next request with the same settings.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from native import Array, BuftOverride, Tensor, Upstream, node_key

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
ALL_LAYERS = 999
# Kinds of contexts (llama_context_type): the model, and its MTP block.
MODEL, MTP = 0, 1
# Models of one run share the process; the least recently used go.
MAX_MODELS = 4


@dataclass(frozen=True)
class Config:
    """Settings of one context; the defaults are the matched settings of the CPU contract."""

    n_ctx: int = 4096
    n_ubatch: int = 512
    n_batch: int = 2048
    threads: int = 2
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    extra_bufts: bool = False
    device: str = "cpu"
    n_cpu_moe: int = 0
    op_offload: bool = True
    mtp: bool = False

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Config:
        """Return the settings of a request; unknown names are errors."""
        known = {f.name for f in fields(cls)}
        if unknown := set(raw) - known:
            raise ValueError(f"unknown settings {sorted(unknown)}, known are {sorted(known)}")
        return cls(**raw)


class Model:
    """A loaded model with the contexts made of it."""

    def __init__(self, up: Upstream, path: str, cfg: Config) -> None:
        self.up = up
        params = up.llama.llama_model_default_params()
        self._no_devices = (ctypes.c_void_p * 1)(None)
        gpu = cfg.device == "gpu"
        params.n_gpu_layers = ALL_LAYERS if gpu else 0
        if not gpu:
            params.devices = ctypes.cast(self._no_devices, ctypes.c_void_p)
        params.use_extra_bufts = cfg.extra_bufts
        params.load_mtp = cfg.mtp
        self._overrides = self._cpu_experts(cfg.n_cpu_moe)
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        self.handle = up.llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.handle:
            raise RuntimeError(f"upstream cannot load {path}: {up.log_tail()}")
        self.vocab = up.llama.llama_model_get_vocab(self.handle)
        self.n_vocab = int(up.llama.llama_vocab_n_tokens(self.vocab))
        self.contexts: dict[tuple[Config, bool], Context] = {}

    def _cpu_experts(self, n_layers: int) -> Any:
        """Return the overrides that keep the experts of the first layers on the CPU."""
        buft = self.up.base.ggml_backend_cpu_buffer_type()
        layers = [r"\d+"] if n_layers >= ALL_LAYERS else [str(il) for il in range(n_layers)]
        rows = [
            BuftOverride(rf"blk\.{il}\.ffn_(up|down|gate|gate_up)_exps".encode(), buft)
            for il in layers
        ]
        return (BuftOverride * (len(rows) + 1))(*rows, BuftOverride(None, None))

    def context(self, cfg: Config, dump: bool) -> Context:
        """Return an empty context with these settings."""
        key = (cfg, dump)
        if key not in self.contexts:
            self.close_contexts()
            self.contexts[key] = Context(self.up, self, cfg, dump)
        self.contexts[key].clear()
        return self.contexts[key]

    def close_contexts(self) -> None:
        for context in self.contexts.values():
            self.up.llama.llama_free(context.handle)
        self.contexts.clear()

    def close(self) -> None:
        self.close_contexts()
        self.up.llama.llama_model_free(self.handle)


class Context:
    """One context: decodes token lists and, when made for it, keeps the named nodes."""

    def __init__(
        self, up: Upstream, model: Model, cfg: Config, dump: bool, kind: int = MODEL,
        other: Context | None = None,
    ) -> None:  # fmt: skip
        """other: of the target, for a drafter that uses its embeddings and its head."""
        self.up, self.model, self.cfg = up, model, cfg
        params = up.llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cfg.n_ctx, cfg.n_batch, cfg.n_ubatch
        params.n_threads = params.n_threads_batch = cfg.threads
        params.flash_attn_type = 1 if cfg.flash_attn else 0
        params.type_k, params.type_v = KV_TYPES[cfg.type_k], KV_TYPES[cfg.type_v]
        params.offload_kqv = cfg.device == "gpu"
        params.op_offload = cfg.device == "gpu" and cfg.op_offload
        params.swa_full = True  # sums in layers with a window go by position, as ours do
        params.no_perf = True
        params.ctx_type = kind
        if other:
            params.ctx_other = other.handle
        self.wanted: set[str] = set()
        self.nodes: dict[tuple[str, int], Array] = {}
        if dump:
            self._callback = up.llama.ggml_backend_sched_eval_callback(self._on_node)
            params.cb_eval = self._callback
        self.handle = up.llama.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise RuntimeError(f"upstream cannot make a context: {up.log_tail()}")
        self.n_past = 0

    def clear(self) -> None:
        self.up.llama.llama_memory_clear(self.up.llama.llama_get_memory(self.handle), True)
        self.n_past = 0

    def cut(self, n_past: int) -> None:
        """Forget the positions from n_past on."""
        memory = self.up.llama.llama_get_memory(self.handle)
        self.up.llama.llama_memory_seq_rm(memory, 0, n_past, -1)
        self.n_past = n_past

    def _on_node(self, address: int, ask: bool, _: object) -> bool:
        tensor = Tensor.from_address(address)
        key = node_key(tensor.name.decode())
        if key is None or not ("*" in self.wanted or key[0] in self.wanted):
            return False
        if not ask:
            value = self.up.read(tensor)
            if value is not None:
                self.nodes[key] = value
        return True

    def decode(
        self, tokens: list[int], rows: str, hidden: npt.NDArray[np.float32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Run tokens through one llama_decode and return the logits of the wanted rows.

        hidden: for the MTP block, the hidden states that it takes, [n_tokens, n_embd].
        """
        n = len(tokens)
        batch = self.up.llama.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = self.n_past + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = rows == "all" or (rows == "last" and i == n - 1)
            if hidden is not None:
                rows_of = np.ascontiguousarray(hidden, np.float32)
                batch.embd = rows_of.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            status = self.up.llama.llama_decode(self.handle, batch)
        finally:
            batch.embd = None  # not its memory
            self.up.llama.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}: {self.up.log_tail()}")
        self.n_past += n
        n_rows = {"all": n, "last": 1, "none": 0}[rows]
        if n_rows == 0:
            self.up.llama.llama_synchronize(self.handle)
            return np.empty((0, self.model.n_vocab), np.float32)
        flat = self.up.llama.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(flat, (n_rows, self.model.n_vocab)).copy()

    def show(
        self, rows: npt.NDArray[np.float32], axes: list[list[int]], n_positions: int
    ) -> npt.NDArray[np.float32]:
        """Run rows of a picture, [n, n_embd]; return the logits of the last one.

        axes: positions on three axes, counted from the last position.
        """
        pos = np.zeros((4, len(rows)), np.int32)
        pos[:3] = self.n_past + np.array(axes)
        self._run_rows(rows, pos.reshape(-1))
        self.n_past += n_positions
        flat = self.up.llama.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(flat, (1, self.model.n_vocab)).copy()

    def inject(self, features: npt.NDArray[np.float32]) -> None:
        """Have a DFlash drafter make K and V of positions, [n, n_layers * n_embd]."""
        places = self.n_past + np.arange(len(features), dtype=np.int32)
        # one position for each axis of rope, if it has several
        pos = np.concatenate([places, places, places, np.zeros_like(places)])
        self._run_rows(features, pos)
        self.n_past += len(features)

    def _run_rows(self, features: npt.NDArray[np.float32], pos: npt.NDArray[np.int32]) -> None:
        rows = np.ascontiguousarray(features, np.float32)
        batch = self.up.llama.llama_batch()  # what is not given has its default
        batch.n_tokens = len(features)
        batch.pos = pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        status = self.up.llama.llama_decode(self.handle, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}: {self.up.log_tail()}")


class Server:
    """Answers requests with cached models and contexts."""

    def __init__(self, up: Upstream) -> None:
        self.up = up
        self.models: dict[tuple[str, bool, str, int, bool], Model] = {}

    def model(self, path: str, cfg: Config) -> Model:
        key = (path, cfg.extra_bufts, cfg.device, cfg.n_cpu_moe, cfg.mtp)
        model = self.models.pop(key, None) or Model(self.up, path, cfg)
        self.models[key] = model
        while len(self.models) > MAX_MODELS:
            self.models.pop(next(iter(self.models))).close()
        return model

    def op_info(self, _: dict[str, Any]) -> dict[str, Any]:
        base = self.up.base
        return {
            "ggml": base.ggml_version().decode(),
            "commit": base.ggml_commit().decode(),
            "libraries": self.up.paths,
            "defaults": asdict(Config()),
            "gpu": bool(self.up.llama.llama_supports_gpu_offload()),
        }

    def op_unload(self, _: dict[str, Any]) -> dict[str, Any]:
        for model in self.models.values():
            model.close()
        self.models.clear()
        return {}

    def op_tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        model = self.model(request["model"], Config())
        text = request["text"].encode()
        ids = (ctypes.c_int32 * (len(text) + 8))()
        n = self.up.llama.llama_tokenize(model.vocab, text, len(text), ids, len(ids), False, False)
        return {"ids": list(ids[:n])}

    def op_run(self, request: dict[str, Any]) -> dict[str, Any]:
        cfg = Config.parse(request.get("cfg", {}))
        steps = request["steps"]
        dump = any(step.get("nodes") for step in steps)
        context = self.model(request["model"], cfg).context(cfg, dump)
        arrays: dict[str, Array] = {}
        seconds = []
        for i, step in enumerate(steps):
            context.wanted, context.nodes = set(step.get("nodes", ())), {}
            if context.wanted and len(step["tokens"]) > cfg.n_ubatch:
                raise ValueError(f"step {i} keeps nodes but does not fit n_ubatch {cfg.n_ubatch}")
            start = time.perf_counter()
            if step.get("embd"):
                logits = context.show(np.load(step["embd"]), step["axes"], step["n_positions"])
            else:
                logits = context.decode(step["tokens"], step.get("rows", "all"))
            seconds.append(time.perf_counter() - start)
            if len(logits):
                arrays[f"logits{i}"] = logits
            for (name, il), value in context.nodes.items():
                arrays[f"node/{i}/{name}/{il}"] = value
        np.savez(request["out"], **arrays)  # type: ignore[arg-type]
        return {"seconds": seconds}

    def op_greedy(self, request: dict[str, Any]) -> dict[str, Any]:
        cfg = Config.parse(request.get("cfg", {}))
        model = self.model(request["model"], cfg)
        texts, margins = [], []
        for prompt in request["prompts"]:
            ids, margin = self._continue(model.context(cfg, False), prompt, request["n"])
            texts.append(ids)
            margins.append(margin)
        return {"ids": texts, "margins": margins}

    def op_draft(self, request: dict[str, Any]) -> dict[str, Any]:
        cfg = Config.parse({**request.get("cfg", {}), "mtp": True})
        model = self.model(request["model"], cfg)
        target, block = model.context(cfg, True), Context(self.up, model, cfg, True, MTP)
        # the target's is called result_norm where nothing is between them
        target.wanted, block.wanted = {"h_nextn", "result_norm"}, {"h_nextn"}
        found, last = {}, None
        try:
            for i, part in enumerate(request["parts"]):
                logits = [target.decode(part, "all")[-1]]
                kept = target.nodes
                h = kept.get(("h_nextn", -1), kept.get(("result_norm", -1))).reshape(len(part), -1)
                before = np.zeros_like(h[:1]) if last is None else last
                block.decode(part, "none", np.concatenate([before, h[:-1]]))
                row = last = h[-1:]
                for _ in range(request["n"]):
                    logits.append(block.decode([int(logits[-1].argmax())], "last", row)[0])
                    row = block.nodes["h_nextn", -1].reshape(1, -1)
                found[f"logits{i}"] = np.stack(logits)
                block.cut(target.n_past)
        finally:
            self.up.llama.llama_free(block.handle)
        np.savez(request["out"], **found)  # type: ignore[arg-type]
        return {}

    def op_block(self, request: dict[str, Any]) -> dict[str, Any]:
        cfg, llama = Config.parse(request.get("cfg", {})), self.up.llama
        target = self.model(request["model"], cfg).context(cfg, False)
        drafter = Model(self.up, request["drafter"], cfg)
        block = Context(self.up, drafter, cfg, False, MODEL, target)
        try:
            llama.llama_set_causal_attn(block.handle, request["causal"])
            features = np.load(request["features"])
            if len(features):
                block.inject(features)
            rows = [request["anchor"]] + [request["mask"]] * (request["n"] - 1)
            logits = block.decode(rows, "all")
        finally:
            llama.llama_free(block.handle)
            drafter.close()
        np.savez(request["out"], logits=logits)
        return {}

    def op_pictures(self, request: dict[str, Any]) -> dict[str, Any]:
        cfg, mt = Config.parse(request["cfg"]), self.up.mtmd(Path(request["mtmd"]))
        model = self.model(request["model"], cfg)
        context = model.context(cfg, False)
        params = mt.mtmd_context_params_default()
        params.use_gpu, params.warmup, params.print_timings = False, False, False
        params.n_threads, params.flash_attn_type = cfg.threads, 1
        ctx = mt.mtmd_init_from_file(os.fsencode(request["mmproj"]), model.handle, params)
        text = request["text"].encode()
        given = [
            mt.mtmd_helper_bitmap_init_from_file(ctx, os.fsencode(file), False)
            for file in request["files"]
        ]
        chunks, n_past = mt.mtmd_input_chunks_init(), ctypes.c_int32()
        asked = mt.mtmd_input_text(text, len(text), False, True)
        bitmaps = (ctypes.c_void_p * len(given))(*given)
        if mt.mtmd_tokenize(ctx, chunks, ctypes.byref(asked), bitmaps, len(given)):
            raise RuntimeError(f"mtmd_tokenize: {self.up.log_tail()}")
        found: dict[str, Array] = {}
        for i in range(mt.mtmd_input_chunks_size(chunks)):
            chunk = mt.mtmd_input_chunks_get(chunks, i)
            if mt.mtmd_input_chunk_get_type(chunk) == mt.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                mt.mtmd_encode_chunk(ctx, chunk)
                n_embd = self.up.llama.llama_model_n_embd(model.handle)
                size = mt.mtmd_input_chunk_get_n_tokens(chunk), n_embd
                rows = np.ctypeslib.as_array(mt.mtmd_get_output_embd(ctx), size)
                found[f"embd{len(found)}"] = rows.copy()
        status = mt.mtmd_helper_eval_chunks(
            ctx, context.handle, chunks, 0, 0, cfg.n_ubatch, True, ctypes.byref(n_past)
        )
        if status:
            raise RuntimeError(f"mtmd_helper_eval_chunks returned {status}: {self.up.log_tail()}")
        context.n_past = n_past.value
        flat = self.up.llama.llama_get_logits_ith(context.handle, -1)
        rows = [np.ctypeslib.as_array(flat, (1, model.n_vocab)).copy()]
        for _ in range(request["n"] - 1):
            rows.append(context.decode([int(rows[-1].argmax())], "last"))
        np.savez(request["out"], logits=np.concatenate(rows), **found)  # type: ignore[arg-type]
        return {}

    @staticmethod
    def _continue(context: Context, prompt: list[int], n: int) -> tuple[list[int], float]:
        ids: list[int] = []
        margin = np.inf
        tokens = prompt
        while len(ids) < n:
            logits = context.decode(tokens, "last")[0]
            second, first = np.partition(logits, -2)[-2:]
            margin = min(margin, float(first - second))
            tokens = [int(logits.argmax())]
            ids += tokens
        return ids, margin

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one request."""
        try:
            return {"ok": True, **getattr(self, "op_" + request["op"])(request)}
        except Exception as e:  # noqa: BLE001 - the parent shows it
            return {"ok": False, "error": f"{type(e).__name__}: {e}"}


def main() -> None:
    """Serve until stdin ends. Whatever the libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server(Upstream(Path(sys.argv[1])))
    print(json.dumps({"ok": True, "ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
