"""The table of handcrafted malformations: name, bytes, and words that the one line must contain."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.ggufbytes import (
    File,
    Q,
    Shape,
    T,
    Tensor,
    add,
    drop,
    edit,
    key,
    kv,
    kv_array,
    model_file,
    model_tensors,
    string,
    u32,
    u64,
)

TOK = "tokenizer.ggml."
Case = tuple[str, bytes, str]


def head(body: bytes, n_kv: int = 1, n_tensors: int = 0, version: int = 3) -> bytes:
    """Return a file that is a preamble and whatever follows."""
    return b"GGUF" + u32(version) + u64(n_tensors) + u64(n_kv) + body


def array(kind: T, n: int, body: bytes = b"") -> bytes:
    """Return a file with one array key that claims n elements."""
    return head(string("k") + u32(T.ARRAY) + u32(kind) + u64(n) + body)


def with_key(suffix: str, kind: T, v: object) -> bytes:
    """Return a whole model with one architecture key replaced."""
    return model_file(pairs={key(suffix): kv(key(suffix), kind, v)}).build()


def with_tensors(editor: object) -> bytes:
    """Return a whole model with its tensor list edited."""
    return model_file(tensors=editor).build()  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """Yield every case."""
    yield from _preambles()
    yield from _lengths()
    yield from _keys()
    yield from _tensors()
    yield from _hparams()
    yield from _vocab()
    yield from _large()


def _preambles() -> Iterator[Case]:
    yield "empty", b"", "empty"
    yield "one byte", b"G", "not a GGUF file"
    yield "magic only", b"GGUF", "truncated"
    yield "lower-case magic", b"gguf" + bytes(60), "not a GGUF file"
    yield "version 1", head(b"", version=1), "version 1"
    yield "version 4", head(b"", version=4), "version 4"
    yield "version 2^32-1", head(b"", version=2**32 - 1), "version"
    yield "big endian", b"GGUF\0\0\0\x03" + bytes(60), "big-endian"
    yield "byte-swapped", b"FUGG" + bytes(60), "byte-swapped"
    yield "safetensors", u64(90) + b'{"a":{"dtype":"F32"}}' + bytes(90), "safetensors"
    yield "pytorch", b"PK\x03\x04" + bytes(99), "PyTorch"
    yield "pickle", b"\x80\x02ccollections\n", "pickle"
    yield "html", b"<!doctype html><html><body>Not Found", "web page"
    yield "lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs"
    yield "zeros", bytes(4096), "zero bytes"
    yield "no keys, no tensors", head(b"", n_kv=0), "general.architecture is missing"
    yield "counts only", b"GGUF" + u32(3) + u64(5), "truncated"
    yield "n_tensors 2^64-1", head(b"", n_kv=0, n_tensors=2**64 - 1), "allowed are 65536"
    yield "n_kv 2^63", head(b"", n_kv=2**63), "allowed are 65536"
    yield "n_kv 65537", head(bytes(99), n_kv=65_537), "allowed are 65536"
    yield "n_kv beyond the file", head(bytes(99), n_kv=60_000), "a header with"
    yield "n_tensors beyond the file", head(bytes(99), n_kv=0, n_tensors=60_000), "a header with"


def _lengths() -> Iterator[Case]:
    for n in (2**30 - 1, 2**31, 2**32, 2**60, 2**61, 2**63, 2**64 - 1):
        yield f"u8 array of {n}", array(T.UINT8, n, bytes(50)), "array of"
        yield f"u64 array of {n}", array(T.UINT64, n, bytes(50)), "array of"
        yield f"string array of {n}", array(T.STRING, n, bytes(50)), "array of"
    for n in (2**31, 2**63, 2**64 - 1, 2**64 - 8):
        yield f"key of {n} bytes", head(u64(n) + bytes(50)), "key 0 has"
        yield f"string of {n} bytes", head(string("k") + u32(8) + u64(n) + bytes(9)), "truncated"
        yield f"array string of {n} bytes", array(T.STRING, 1, u64(n) + bytes(9)), "truncated"
    yield "array of arrays", array(T.ARRAY, 1, u32(9) + u64(1)), "array of arrays"
    nested = (u32(T.ARRAY) + u64(1)) * 2000 + u32(T.UINT8) + u64(0)
    yield "arrays 2,000 deep", head(string("k") + u32(T.ARRAY) + nested), "array of arrays"
    yield "array of kind 13", array(T.UINT8, 0)[:-12] + u32(13) + u64(0), "unknown value type"
    yield "string array cut", array(T.STRING, 2, string("a") + bytes(6)), "truncated"


def _keys() -> Iterator[Case]:
    yield "empty key", head(u64(0) + bytes(50)), "key 0 has 0 bytes"
    yield "key not UTF-8", head(string(b"\xc0\x80") + bytes(50)), "not UTF-8"
    yield "key with NUL", head(string("a\0") + bytes(50)), "NUL"
    yield "key twice", head(kv("k", T.UINT8, 1) * 2, n_kv=2), "appears twice"
    yield "kind 2^32-1", head(string("k") + u32(2**32 - 1) + bytes(50)), "unknown value type"
    yield "boolean 255", head(string("k") + u32(T.BOOL) + b"\xff" + bytes(50)), "boolean"
    arch = "general.architecture"
    for name in ("llama", "", "../../etc/passwd", "\x1b]0;x\x07", "x" * 5000):
        pairs: dict[str, bytes | None] = {arch: kv(arch, T.STRING, name)}
        yield f"architecture {name[:9]!a}", model_file(pairs=pairs).build(), "architecture"
    yield "architecture is a number", model_file(pairs={arch: kv(arch, T.UINT8, 1)}).build(), arch
    align = "general.alignment"
    for n in (0, 1, 3, 4, 33, 8192, 2**31, 2**32 - 1):
        yield f"alignment {n}", model_file(pairs={align: kv(align, T.UINT32, n)}).build(), align
    yield "alignment as string", model_file(pairs={align: kv(align, T.STRING, "32")}).build(), align
    count = "split.count"
    yield "split.count 3", model_file(pairs={count: kv(count, T.UINT16, 3)}).build(), count
    yield "split.count -1", model_file(pairs={count: kv(count, T.INT32, -1)}).build(), count


def _tensors() -> Iterator[Case]:
    a = Tensor("a", (32, 4))
    for label, listed, words in (
        ("long name", [Tensor("n" * 5000, (4,))], "allowed are 1 to 63"),
        ("empty name", [Tensor("", (4,))], "0 bytes"),
        ("name with NUL", [Tensor("a\0b", (4,))], "NUL"),
        ("name not UTF-8", [Tensor(b"\xff", (4,))], "UTF-8"),
        ("name twice", [a, a], "appears twice"),
        ("no dimensions", [Tensor("a", (4,), n_dims=0)], "0 dimensions"),
        ("2^32-1 dimensions", [Tensor("a", (4,), n_dims=2**32 - 1)], "dimensions"),
        ("zero dimension", [Tensor("a", (0, 4))], "zero dimension"),
        ("dimension 2^63", [Tensor("a", (2**63,), data=b"x")], "larger than any memory"),
        ("product 2^64", [Tensor("a", (2**32, 2**32), data=b"x")], "larger than any memory"),
        ("product wraps to 0", [Tensor("a", (2**16,) * 4, data=b"x")], "larger than any memory"),
        ("bytes wrap", [Tensor("a", (2**62,), data=b"x")], "larger than any memory"),
        ("half a block", [Tensor("a", (48,), Q.Q8_0, data=bytes(51))], "block size"),
        ("type 999", [Tensor("a", (4,), type_number=999)], "unknown type"),
        ("type 2^32-1", [Tensor("a", (4,), type_number=2**32 - 1)], "unknown type"),
        ("offset past the end", [Tensor("a", (4,), offset=2**40)], "gap"),
        ("offset 2^64-32", [Tensor("a", (4,), offset=2**64 - 32)], "gap"),
        ("offset unaligned", [a, Tensor("b", (4,), offset=513)], "alignment"),
        ("same bytes twice", [a, Tensor("b", (32, 4), offset=0)], "overlaps"),
        ("gap", [a, Tensor("b", (4,), offset=1024)], "gap"),
        ("data missing", [Tensor("a", (2**20, 2**10), data=b"x")], "truncated"),
    ):
        yield f"tensor: {label}", File(tensors=listed).build(), words
    whole = model_file().build()
    for cut in (1, len(whole) // 3, len(whole) // 2, len(whole) * 9 // 10):
        yield f"cut to {cut} bytes", whole[:cut], ""
    yield "last byte of data gone", model_file().build()[:-32], "truncated"


def _hparams() -> Iterator[Case]:
    big = 2**32 - 1
    for suffix in (
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "ssm.conv_kernel",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
        "ssm.group_count",
    ):
        yield f"{suffix} = 0", with_key(suffix, T.UINT32, 0), suffix
        yield f"{suffix} = 2^32-1", with_key(suffix, T.UINT32, big), ""
        yield f"{suffix} = -1", with_key(suffix, T.INT64, -1), suffix
        yield f"{suffix} = 'x'", with_key(suffix, T.STRING, "x"), suffix
        if suffix != "context_length":
            yield f"{suffix} = 33", with_key(suffix, T.UINT32, 33), ""
    yield "interval 0", with_key("full_attention_interval", T.UINT32, 0), "interval"
    yield "eps NaN", with_key("attention.layer_norm_rms_epsilon", T.FLOAT32, float("nan")), "nan"
    yield "base inf", with_key("rope.freq_base", T.FLOAT32, float("inf")), "inf"
    yield "longrope", with_key("rope.scaling.type", T.STRING, "longrope"), "longrope"
    sections = key("rope.dimension_sections")
    for values in ([0, 0, 0, 0], [2**31 - 1] * 4, [2, 1, 1], [-2, 3, 3, 0], [1, 1, 1, 1], []):
        pairs: dict[str, bytes | None] = {sections: kv_array(sections, T.INT32, values)}
        yield f"sections {values}", model_file(pairs=pairs).build(), "sections"
    yield "mtp count 4", with_key("nextn_predict_layers", T.UINT32, 4), "nextn"
    for name in ("blk.0.ssm_a", "blk.3.attn_v.weight", "output_norm.weight", "token_embd.weight"):
        yield f"without {name}", with_tensors(drop(name)), name
        yield f"{name} as IQ1_S", with_tensors(edit(name, ne=(256,), kind=Q.IQ1_S)), ""
        yield f"{name} with other shape", with_tensors(edit(name, ne=(8, 8))), ""
    yield "fused qkv", with_tensors(add(Tensor("blk.3.attn_qkv.weight", (32, 192)))), "one tensor"
    yield "bias", with_tensors(add(Tensor("blk.3.attn_k.bias", (32,)))), "biases"
    yield "scale", with_tensors(add(Tensor("blk.3.ffn_up_exps.scale", (8,)))), "scales"


def _vocab() -> Iterator[Case]:
    def vocab(name: str, pair: bytes | None) -> bytes:
        return model_file(pairs={TOK + name: pair}).build()

    def tokens(values: list[str | bytes]) -> bytes:
        return vocab("tokens", kv_array(TOK + "tokens", T.STRING, values))

    yield "no tokens", vocab("tokens", None), "tokens"
    yield "tokens as numbers", vocab("tokens", kv_array(TOK + "tokens", T.INT8, [1] * 40)), "tokens"
    yield "tokens as string", vocab("tokens", kv(TOK + "tokens", T.STRING, "abc")), "tokens"
    yield "zero tokens", tokens([]), "0 tokens"
    yield "too few tokens", tokens(["a"]), "elements"
    yield "equal tokens", tokens(["a", "a", *map(str, range(38))]), "more than once"
    yield "token not UTF-8", tokens([b"\xe4", *map(str, range(39))]), "UTF-8"
    yield "no merges", vocab("merges", None), "merges"
    yield "merges as floats", vocab("merges", kv_array(TOK + "merges", T.FLOAT32, [1.0])), "merges"
    yield "types short", vocab("token_type", kv_array(TOK + "token_type", T.INT32, [1])), "type"
    yield "eos 2^32-1", vocab("eos_token_id", kv(TOK + "eos_token_id", T.UINT32, 2**32 - 1)), "eos"
    yield "model spm", vocab("model", kv(TOK + "model", T.STRING, "llama")), "gpt2"
    yield "model number", vocab("model", kv(TOK + "model", T.UINT64, 1)), "expected a string"
    yield "40 tokens, 41 rows", with_tensors(edit("token_embd.weight", ne=(32, 41))), "41 rows"


def _large() -> Iterator[Case]:
    """Yield files that are themselves megabytes, so that their claims fit into them."""
    empty = array(T.STRING, 2_000_000, bytes(16_000_000))
    yield "2 million empty strings", empty, "general.architecture is missing"
    many = b"".join(kv(f"k{i}", T.UINT8, 0) for i in range(65_536))
    yield "65,536 keys", head(many, n_kv=65_536), "general.architecture is missing"
    zeros = array(T.INT64, 4_000_000, bytes(32_000_000))
    yield "32 MB of numbers", zeros, "general.architecture is missing"
    long = head(string("k") + u32(T.STRING) + u64(32_000_000) + bytes(32_000_000))
    yield "a string of 32 MB", long, "general.architecture is missing"
    names = [Tensor(f"blk.{i}.x", (8,)) for i in range(20_000)]
    arch = kv("general.architecture", T.STRING, "qwen35moe")
    yield "20,000 tensors", File([arch], names).build(), "token_embd.weight missing"
    wide = Shape(n_layer=64)
    yield (
        "64 layers, one tensor short",
        File(model_file(wide).pairs, model_tensors(wide)[:-1]).build(),
        "missing",
    )
