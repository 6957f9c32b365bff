"""Model files as a whole: what opens, what is refused and how, mapping, reading, parts, names."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.ggufbytes import (
    REAL_35B,
    File,
    Q,
    Shape,
    T,
    Tensor,
    add,
    drop,
    edit,
    kv,
    kv_array,
    model_file,
    model_pairs,
    model_tensors,
)
from helpers.modelfiles import Write, refused, write

from moegraph.arch import open_model
from moegraph.arch.tensors import MATRIX_TYPES
from moegraph.errors import InternalError, ModelFileError, UnsupportedModel
from moegraph.gguf import resolve, resolve_target

__all__ = ["write"]
TOKENIZER = "tokenizer.ggml."


SHAPES = {
    "plain": {},
    "merged and tied": {"merged": True, "tied": True},
    "with MTP": {"n_nextn": 1},
    "attention only": {"interval": 1},
    "odd number of layers": {"n_layer": 3},
    "MXFP4": {"expert_type": Q.MXFP4, "matrix_type": Q.Q8_0},
}


@pytest.mark.parametrize("shape", [Shape(**sizes) for sizes in SHAPES.values()], ids=SHAPES)
def test_bytes_come_back_by_map_and_by_read(write: Write, shape: Shape) -> None:
    path = write(model_file(shape))
    with open_model(path) as model:
        assert model.warnings == () and model.paths == (path,)
        assert model.n_bytes == path.stat().st_size and model.version == 3
        for tensor in model_tensors(shape):
            info = model.tensors[str(tensor.name)]
            assert (info.type, info.n_dims) == (tensor.kind, len(tensor.ne))
            view, out = model.map(info), np.empty(info.nbytes, np.uint8)
            model.read(info, out)
            assert view.tobytes() == out.tobytes() == tensor.payload()
            assert not view.flags.writeable


def test_a_file_that_was_written_to_is_refused(write: Write) -> None:
    path = write(model_file())
    size, ticks = path.stat().st_size, path.stat().st_mtime_ns
    for end, words in ((size, "its size is the same"), (size - 1, f"and has {size - 1}")):
        with open_model(path) as model:
            model.check_unchanged()
            os.truncate(path, end)
            os.utime(path, ns=(0, ticks + 1_000_000 * (1 + size - end)))
            with pytest.raises(ModelFileError, match=words):
                model.check_unchanged()


@pytest.mark.parametrize("kind", sorted(MATRIX_TYPES))
def test_every_supported_type_serves_as_weight(write: Write, kind: Q) -> None:
    sizes = {"n_embd": 256, "n_ff_exp": 256, "n_ff_shexp": 256, "n_head": 4, "head_dim": 64}
    sizes |= {"n_expert": 4, "d_state": 64, "n_v_heads": 4}
    shape = Shape(**sizes, matrix_type=kind, expert_type=kind)
    with open_model(write(model_file(shape))) as model:
        assert model.tensors["blk.0.ffn_up_exps.weight"].type == kind


F32_ONLY = """output_norm.weight blk.0.attn_norm.weight blk.0.ssm_a blk.0.ssm_dt.bias
blk.0.ssm_conv1d.weight blk.0.ssm_norm.weight blk.3.attn_q_norm.weight blk.3.attn_k_norm.weight
blk.2.post_attention_norm.weight"""


@pytest.mark.parametrize("name", F32_ONLY.split())
def test_norms_and_recurrent_vectors_must_be_f32(write: Write, name: str) -> None:
    message = refused(write(model_file(tensors=edit(name, kind=Q.F16))), UnsupportedModel)
    assert f"tensor {name} has type F16; moegraph runs F32 here" in message


@pytest.mark.parametrize("kind", [Q.IQ2_XXS, Q.TQ1_0, Q.Q8_K, Q.F64, Q.I8, Q.NVFP4])
def test_a_weight_type_that_is_not_run_is_named(write: Write, kind: Q) -> None:
    shape = Shape(n_embd=256, expert_type=Q.F32)
    path = write(model_file(shape, tensors=edit("blk.1.ffn_up_exps.weight", kind=kind)))
    message = refused(path, UnsupportedModel)
    assert f"blk.1.ffn_up_exps.weight has type {kind.name}" in message and "Q4_K" in message


ALL_NAMES = [str(t.name) for t in model_tensors(Shape())]


@pytest.mark.parametrize("name", [n for n in ALL_NAMES if n != "output.weight"])
def test_every_tensor_is_required_but_the_head(write: Write, name: str) -> None:
    message = refused(write(model_file(tensors=drop(name))))
    assert f"tensor {name} missing" in message


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_shape_is_checked(write: Write, name: str) -> None:
    tensor = next(t for t in model_tensors(Shape()) if t.name == name)
    wrong = (*tensor.ne[:-1], tensor.ne[-1] + 1)
    message = refused(write(model_file(tensors=edit(name, ne=wrong))))
    if name == "token_embd.weight":
        assert "40 tokens but token_embd.weight has 41 rows" in message
    else:
        assert f"tensor {name} has shape" in message and str(list(tensor.ne)) in message


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (Tensor("blk.3.attn_qkv.weight", (32, 192)), "stores q, k and v as one tensor"),
        (Tensor("blk.3.attn_q.bias", (128,)), "attention biases"),
        (Tensor("blk.3.attn_output.bias", (32,)), "attention biases"),
        (Tensor("blk.3.attn_sinks.weight", (2,)), "attention sinks"),
        (Tensor("blk.0.ffn_up_exps.bias", (16, 8)), "biases of a router or experts"),
        (Tensor("blk.0.ffn_gate_inp.bias", (8,)), "biases of a router or experts"),
        (Tensor("blk.0.ffn_up_exps.scale", (8,)), "per-tensor scales"),
        (Tensor("output.input_scale", (1,)), "per-tensor scales"),
        (Tensor("rope_freqs.weight", (4,)), "rope frequency factors"),
    ],
)
def test_known_variants_are_unsupported_and_named(write: Write, extra: Tensor, words: str) -> None:
    message = refused(write(model_file(tensors=add(extra))), UnsupportedModel)
    assert words in message and f"tensor {extra.name}" in message


def test_unknown_tensors_and_trailing_bytes_are_warnings(write: Write) -> None:
    extra = [Tensor("blk.0.mystery.weight", (4,)), Tensor("vision.weight", (4,))]
    file = model_file(tensors=add(*extra))
    file.tail = b"abc"
    with open_model(write(file)) as model:
        assert len(model.warnings) == 2
        assert "blk.0.mystery.weight and 1 more" in model.warnings[0]
        assert "3 bytes follow the last tensor" in model.warnings[1]


def test_prediction_blocks_are_recognised_and_never_fatal(write: Write) -> None:
    shape = Shape(n_nextn=1)
    with open_model(write(model_file(shape))) as model:
        assert (model.hparams.n_layer, model.hparams.n_layer_nextn) == (4, 1)
        assert len(model.hparams.recurrent) == 4 and model.warnings == ()
    with open_model(write(model_file(shape, tensors=drop("blk.4.nextn.enorm.weight")))) as model:
        assert model.warnings == ("prediction block 4 lacks nextn.enorm.weight; it is not run",)
    wrong = edit("blk.4.attn_k.weight", ne=(32, 16))
    with open_model(write(model_file(shape, tensors=wrong))) as model:
        assert "attn_k.weight has shape [32, 16], expected [32, 32]" in model.warnings[0]
    path = write(model_file(shape, tensors=drop("blk.0.attn_norm.weight")))
    assert "only prediction (MTP) blocks" in refused(path, UnsupportedModel)


@pytest.mark.parametrize("arch", ["llama", "qwen2moe", "qwen35", "", "Qwen35MoE"])
def test_another_architecture_is_named(write: Write, arch: str) -> None:
    pairs = {"general.architecture": kv("general.architecture", T.STRING, arch)}
    message = refused(write(model_file(pairs=pairs)), UnsupportedModel)
    assert f"architecture {arch!r} is not supported" in message


def test_files_without_architecture_or_tensors_are_refused(write: Write) -> None:
    assert "general.architecture is missing" in refused(write(File()))
    pairs = {"general.architecture": kv("general.architecture", T.UINT32, 1)}
    assert "expected a string" in refused(write(model_file(pairs=pairs)))
    assert "holds no tensors" in refused(write(File(pairs=[*model_pairs(Shape()).values()])))


def tokens(values: list[str | bytes]) -> bytes:
    return kv_array(TOKENIZER + "tokens", T.STRING, values)


@pytest.mark.parametrize(
    ("name", "pair", "words"),
    [
        ("tokens", None, "tokens is missing"),
        ("merges", None, "merges is missing"),
        ("tokens", kv(TOKENIZER + "tokens", T.STRING, "a"), "expected an array of strings"),
        ("tokens", kv_array(TOKENIZER + "tokens", T.INT32, [1] * 40), "an array of int32"),
        ("tokens", tokens(["x"]), "has 40 elements for 1 tokens"),
        ("tokens", tokens([]), "has 0 tokens"),
        ("tokens", tokens(["a"] * 40), "contains b'a' more than once"),
        ("tokens", tokens(["", "[EMPTY_0]", *map(str, range(38))]), "more than once"),
        ("tokens", tokens([b"\xff", *map(str, range(39))]), "not UTF-8"),
        ("tokens", tokens(["a", "a\0b", *map(str, range(38))]), "NUL"),
        ("tokens", tokens([b"\xc3", b"\xa9", *map(str, range(38))]), "not UTF-8"),
        ("merges", kv_array(TOKENIZER + "merges", T.INT32, [1]), "expected an array of strings"),
        ("token_type", kv_array(TOKENIZER + "token_type", T.INT32, [1] * 39), "has 39 elements"),
        ("token_type", kv_array(TOKENIZER + "token_type", T.UINT8, [1] * 40), "array of int32"),
        ("scores", kv_array(TOKENIZER + "scores", T.FLOAT32, [0] * 41), "has 41 elements"),
        ("scores", kv_array(TOKENIZER + "scores", T.FLOAT64, [0] * 40), "float32 or int32"),
        ("eos_token_id", kv(TOKENIZER + "eos_token_id", T.UINT32, 40), "allowed are 0 to 39"),
        ("bos_token_id", kv(TOKENIZER + "bos_token_id", T.INT32, -1), "allowed are 0 to 39"),
        ("padding_token_id", kv(TOKENIZER + "padding_token_id", T.STRING, "0"), "expected an int"),
        ("add_bos_token", kv(TOKENIZER + "add_bos_token", T.UINT32, 1), "expected a boolean"),
        ("pre", kv(TOKENIZER + "pre", T.UINT32, 1), "expected a string"),
    ],
)
def test_a_malformed_vocabulary_is_refused(
    write: Write, name: str, pair: bytes | None, words: str
) -> None:
    message = refused(write(model_file(pairs={TOKENIZER + name: pair})))
    assert words in message and TOKENIZER in message


def test_a_bos_that_is_to_be_added_must_exist(write: Write) -> None:
    flag = {TOKENIZER + "add_bos_token": kv(TOKENIZER + "add_bos_token", T.BOOL, True)}
    open_model(write(model_file(pairs=flag))).close()
    assert "add_bos_token is true but there is no" in refused(
        write(model_file(Shape(n_vocab=11), pairs=flag))
    )


def test_other_tokenizers_are_unsupported(write: Write) -> None:
    pair = {TOKENIZER + "model": kv(TOKENIZER + "model", T.STRING, "llama")}
    message = refused(write(model_file(pairs=pair)), UnsupportedModel)
    assert "'llama'; moegraph runs byte-level BPE" in message


def test_paths_that_are_no_files_are_refused_in_words(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.gguf").endswith("no such file")
    assert "is a directory" in refused(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "is a pipe" in refused(tmp_path / "fifo")  # to open it would wait for a writer
    assert "is a device" in refused(Path("/dev/null"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(tmp_path / "s"))
        assert "cannot open" in refused(tmp_path / "s")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot open" in refused(tmp_path / "loop")
    assert "cannot open" in refused(tmp_path / ("x" * 300))
    with pytest.raises(ModelFileError, match="not a file name"):
        open_model("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(write: Write) -> None:
    path = write(model_file())
    path.chmod(0)
    assert "Permission denied" in refused(path)


def test_read_takes_a_range_and_refuses_one_outside(write: Write) -> None:
    with open_model(write(model_file())) as model:
        info = model.tensors["blk.1.ffn_up_exps.weight"]
        whole, some = np.empty(info.nbytes, np.uint8), np.empty(100, np.uint8)
        model.read(info, whole)
        model.read(info, some, 64)
        assert some.tobytes() == whole[64:164].tobytes()
        model.read(info, some[:0], info.nbytes)
        for start in (-1, info.nbytes - 99, info.nbytes + 1):
            with pytest.raises(InternalError, match=r"read of bytes"):
                model.read(info, some, start)
        with pytest.raises(InternalError, match="not rows of bytes"):
            model.read(info, np.empty(8, np.float32))
        with pytest.raises(InternalError, match="not rows of bytes"):
            model.read(info, whole[::2])
        with pytest.raises(InternalError, match="not rows of bytes"):
            model.read(info, model.map(info))


@pytest.mark.parametrize("longest", [None, 5, 24])
def test_read_fills_rows_at_any_distance(
    write: Write, monkeypatch: pytest.MonkeyPatch, longest: int | None
) -> None:
    """longest: bytes that the system reads in one call."""
    real = os.preadv
    if longest:
        monkeypatch.setattr(
            os, "preadv", lambda fd, views, at: _short(real, fd, views, at, longest)
        )
    with open_model(write(model_file())) as model:
        info = model.tensors["blk.1.ffn_up_exps.weight"]
        whole = model.map(info)
        for n_rows in (1, 3, 1500):  # the last is more than one call takes
            n = min(12, info.nbytes // n_rows)
            memory = np.full((n_rows, n + 4), 0xA5, np.uint8)
            model.read(info, memory[:, 2 : n + 2], info.nbytes - n_rows * n)
            assert memory[:, 2 : n + 2].tobytes() == whole[-n_rows * n :].tobytes()
            assert (memory[:, :2] == 0xA5).all() and (memory[:, n + 2 :] == 0xA5).all()


def _short(real: Any, fd: int, views: list[memoryview], at: int, longest: int) -> int:
    n = min(longest, sum(map(len, views)))
    data = bytearray(n)
    got: int = real(fd, [data], at)
    for view in views:
        view[: len(data)] = data[: len(view)]
        data = data[len(view) :]
    return got


def test_a_file_truncated_while_open_is_an_error(write: Write) -> None:
    path = write(model_file())
    with open_model(path) as model:
        info = model.tensors["blk.3.ffn_down_shexp.weight"]
        os.truncate(path, info.offset + 10)
        with pytest.raises(ModelFileError, match="shrank from"):
            model.read(info, np.empty(info.nbytes, np.uint8))
        with pytest.raises(ModelFileError, match="shrank from"):
            model.map(info)


def test_a_file_replaced_while_open_keeps_serving_the_old_bytes(write: Write) -> None:
    path = write(model_file())
    with open_model(path) as model:
        info = model.tensors["output_norm.weight"]
        path.unlink()
        path.write_bytes(b"other")
        out = np.empty(info.nbytes, np.uint8)
        model.read(info, out)
        assert model.map(info).tobytes() == out.tobytes()


def test_views_outlive_the_file_and_a_closed_file_says_so(write: Write) -> None:
    model = open_model(write(model_file()))
    info = model.tensors["output_norm.weight"]
    view = model.map(info)
    want = view.tobytes()
    model.close()
    model.close()
    assert view.tobytes() == want
    with pytest.raises(InternalError, match="closed"):
        model.map(info)
    with pytest.raises(InternalError, match="closed"):
        model.read(info, np.empty(1, np.uint8))


def test_shipped_names_and_paths_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_MODELS", tmp_path)
    with pytest.raises(ModelFileError, match="shipped model 'tiny' is missing"):
        resolve_target("tiny")
    (tmp_path / "tiny.gguf").write_bytes(b"x")
    assert resolve_target("tiny") == tmp_path / "tiny.gguf"
    assert resolve_target("./tiny") == Path("tiny")
    assert resolve_target("a/b.gguf") == Path("a/b.gguf")
    assert resolve_target(tmp_path / "x") == tmp_path / "x"
    with pytest.raises(ModelFileError, match=r"no shipped model \(tiny, .*\) has that name"):
        resolve_target("tny")
    with pytest.raises(ModelFileError, match="name is empty"):
        resolve_target("")
    for text, name in (
        ("Owner/Repo-GGUF", "Owner/Repo-GGUF"),
        ("owner/repo:UD-Q4_K_XL", "owner/repo:UD-Q4_K_XL"),
        ("hf.co/owner/repo:Q8_0", "owner/repo:Q8_0"),
        ("https://huggingface.co/owner/repo/tree/main", "owner/repo"),
    ):
        with pytest.raises(ModelFileError, match=f"a model of Hugging Face is hf:{name}$"):
            resolve_target(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    assert resolve_target("owner/repo") == Path("owner/repo")


def full_size() -> File:
    """Return the header of the real 35B-A3B shape: 22 GB, 248,320 tokens, 247,587 merges."""
    shape = Shape(
        **REAL_35B,
        n_vocab=248_320,
        matrix_type=Q.Q8_0,
        expert_type=Q.Q4_K,
    )
    merges = [f"t{i} x{i}" for i in range(247_587)]
    name = TOKENIZER + "merges"
    return model_file(shape, {name: kv_array(name, T.STRING, merges)})


def test_a_model_of_full_size_opens_in_well_under_a_second(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    full_size().write_sparse(path)
    assert path.stat().st_size > 20e9
    assert min(_seconds(path) for _ in range(3)) < 0.6


def _seconds(path: Path) -> float:
    started = time.process_time()
    with open_model(path) as model:
        last = list(model.tensors.values())[-1]
        assert not model.map(last).any()
    return time.process_time() - started
