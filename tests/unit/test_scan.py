"""The bounded header scan: what it reads, and one clear line for each thing that is wrong."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
from helpers.ggufbytes import File, Q, T, Tensor, kv, kv_array, string, u32, u64

from moegraph.errors import ModelFileError
from moegraph.gguf import reader as reader_module
from moegraph.gguf.reader import StringArray
from moegraph.gguf.scan import Part, scan_part


def scan(tmp_path: Path, raw: bytes) -> Part:
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    fd = os.open(path, os.O_RDONLY)
    try:
        return scan_part(fd, path, len(raw))
    finally:
        os.close(fd)


def refused(tmp_path: Path, raw: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        scan(tmp_path, raw)
    message = str(caught.value)
    assert message.isprintable() and message.startswith(str(tmp_path / "a.gguf") + ": ")
    return message


@pytest.mark.parametrize(
    ("kind", "v"),
    [
        (T.UINT8, 255),
        (T.INT8, -128),
        (T.UINT16, 65_535),
        (T.INT16, -32_768),
        (T.UINT32, 2**32 - 1),
        (T.INT32, -(2**31)),
        (T.UINT64, 2**64 - 1),
        (T.INT64, -(2**63)),
        (T.FLOAT64, 0.1),
        (T.FLOAT32, 0.5),
        (T.BOOL, True),
        (T.BOOL, False),
        (T.STRING, "a\u00fc"),
    ],
)
def test_every_scalar_kind_is_read_with_its_python_type(tmp_path: Path, kind: T, v: object) -> None:
    got = scan(tmp_path, File(pairs=[kv("k", kind, v)]).build()).metadata.values["k"]
    assert got == v and type(got) is type(v)


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        (T.INT8, [-1, 2], "int8"),
        (T.UINT16, [1, 65_535], "uint16"),
        (T.INT32, [-5, 6], "int32"),
        (T.UINT64, [2**63], "uint64"),
        (T.FLOAT32, [0.5, -1.5], "float32"),
        (T.FLOAT64, [0.1], "float64"),
        (T.BOOL, [True, False, True], "bool"),
        (T.UINT8, [], "uint8"),
    ],
)
def test_number_arrays_become_numpy_arrays(
    tmp_path: Path, kind: T, values: list[object], dtype: str
) -> None:
    got = scan(tmp_path, File(pairs=[kv_array("k", kind, values)]).build()).metadata.values["k"]
    assert got.dtype.name == dtype and got.tolist() == values


def test_string_arrays_behave_as_lists_and_keep_their_bytes(tmp_path: Path) -> None:
    strings = ["", "a", "\u4e2d\u6587", "", "long" * 50]
    part = scan(tmp_path, File(pairs=[kv_array("k", T.STRING, strings)]).build())
    got = part.metadata.values["k"]
    assert isinstance(got, StringArray) and list(got) == strings and len(got) == 5
    assert got[-1] == strings[-1] and strings[2] in got
    assert list(got.raw_strings()) == [s.encode() for s in strings] and got.n_longest == 200
    with pytest.raises(IndexError):
        got[5]


def test_strings_that_are_not_utf8_are_readable_but_marked(tmp_path: Path) -> None:
    raw = File(pairs=[kv("k", T.STRING, b"a\xff"), kv_array("l", T.STRING, [b"\xfe"])]).build()
    values = scan(tmp_path, raw).metadata.values
    assert values["k"] == "a\ufffd" and values["l"][0] == "\ufffd"
    assert values["l"].raw(0) == b"\xfe"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_tensors_are_placed_after_the_padded_header(
    tmp_path: Path, version: int, alignment: int
) -> None:
    tensors = [Tensor("a", (3,)), Tensor("b", (32, 2), Q.Q4_0), Tensor("c", (256, 3, 2), Q.Q6_K)]
    pairs = [kv("general.alignment", T.UINT32, alignment)]
    raw = File(pairs, tensors, alignment=alignment, version=version).build()
    part = scan(tmp_path, raw)
    assert (part.version, part.trailing_bytes) == (version, 0)
    assert [t.ne for t in part.tensors.values()] == [(3, 1, 1, 1), (32, 2, 1, 1), (256, 3, 2, 1)]
    assert [t.nbytes for t in part.tensors.values()] == [12, 36, 1260]
    for info, t in zip(part.tensors.values(), tensors, strict=True):
        assert info.offset % alignment == 0
        assert raw[info.offset : info.offset + info.nbytes] == t.payload()


def test_headers_longer_than_one_read_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_FIRST_READ", 7)
    pairs = [
        kv_array("s", T.STRING, [str(i) * (i % 40) for i in range(500)]),
        kv_array("n", T.INT32, range(1000)),
        kv("k", T.STRING, "x" * 3000),
    ]
    part = scan(tmp_path, File(pairs, [Tensor("a", (4,))]).build())
    assert part.metadata.values["s"][499] == "499" * 19
    assert part.metadata.values["n"].tolist() == list(range(1000))
    assert "a" in part.tensors


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "the file is empty"),
        (b"GG", "it begins with b'GG'"),
        (u64(200) + b'{"__metadata__":{}}', "safetensors"),
        (b"PK\x03\x04" + bytes(30), "PyTorch"),
        (b"\x80\x02}q\x00", "pickle"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"<html>404</html>", "web page"),
        (b'{"error": "gone"}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"FUGG" + bytes(40), "byte-swapped"),
        (b"tjgg" + bytes(40), "old GGJT"),
        (bytes(4096), "zero bytes"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian GGUF"),
        (b"GGUF" + u32(0x30000) + bytes(16), "big-endian GGUF"),
        (b"GGUF" + u32(1) + bytes(16), "version 1 is not supported"),
        (b"GGUF" + u32(4) + bytes(16), "version 4 is not supported"),
        (b"GGUF" + u32(0) + bytes(16), "version 0 is not supported"),
        (b"GGUF", "version needs 4 bytes but the file ends"),
        (b"GGUF" + u32(3) + u64(0), "number of key-value pairs needs 8 bytes"),
    ],
)
def test_a_file_that_is_not_gguf_is_described(tmp_path: Path, head: bytes, words: str) -> None:
    assert words in refused(tmp_path, head)


def header(pairs: bytes, n_kv: int = 1, n_tensors: int = 0) -> bytes:
    return b"GGUF" + u32(3) + u64(n_tensors) + u64(n_kv) + pairs


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (header(b"", n_kv=2**64 - 1), "claims 18446744073709551615 key-value pairs"),
        (header(b"", n_kv=0, n_tensors=2**63), "tensors; allowed are 65536"),
        (header(bytes(100), n_kv=65_536), "a header with"),
        (header(bytes(100), n_kv=0, n_tensors=1000), "a header with"),
        (header(u64(2**63) + bytes(40)), "key 0 has 9223372036854775808 bytes"),
        (header(u64(0) + bytes(40)), "key 0 has 0 bytes"),
        (header(u64(65_536) + bytes(70_000)), "allowed are 1 to 65535"),
        (header(u64(3000) + bytes(40)), "truncated or damaged"),
        (header(string(b"\xff\xfe") + bytes(40)), "not UTF-8"),
        (header(string("a\0b") + bytes(40)), "NUL"),
        (header(kv("k", T.UINT32, 1) * 2, n_kv=2), "key k appears twice"),
        (header(string("k") + u32(13) + bytes(40)), "unknown value type 13"),
        (header(string("k") + u32(2**32 - 1) + bytes(40)), "unknown value type"),
        (header(string("k") + u32(T.BOOL) + b"\x02"), "boolean with the value 2"),
        (header(kv_array("k", T.BOOL, [])[:-8] + u64(2) + b"\x00\x09"), "above 1"),
        (header(string("k") + u32(T.STRING) + u64(2**64 - 1) + bytes(20)), "value of key k needs"),
        (header(string("k") + u32(T.UINT64) + b"1234"), "value of key k needs 8 bytes"),
        (header(string("k") + u32(T.ARRAY) + u32(T.UINT8) + u64(2**63)), "array of 9223372036"),
        (
            header(string("k") + u32(T.ARRAY) + u32(T.STRING) + u64(2**61)),
            "an array of 2305843009213693952 e",
        ),
        (header(string("k") + u32(T.ARRAY) + u32(T.ARRAY) + u64(1)), "array of arrays"),
        (header(string("k") + u32(T.ARRAY) + u32(77) + u64(1)), "elements of key k has"),
        (header(string("k") + u32(T.ARRAY) + u32(T.FLOAT64) + u64(2) + bytes(15)), "array of 2"),
        (
            header(string("k") + u32(T.ARRAY) + u32(T.STRING) + u64(2) + string("ab") + bytes(6)),
            "length of string 1",
        ),
        (
            header(string("k") + u32(T.ARRAY) + u32(T.STRING) + u64(1) + u64(9) + b"12345678"),
            "string 0 of key k",
        ),
        (
            header(
                string("k") + u32(T.ARRAY) + u32(T.STRING) + u64(1) + u64(2**64 - 8) + b"12345678"
            ),
            "string 0 of key k needs",
        ),
    ],
)
def test_malformed_key_value_pairs_are_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    message = refused(tmp_path, raw)
    assert words in message and "at byte" in message


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (kv("general.alignment", T.UINT32, 0), "is 0; allowed are 8 to 4096"),
        (kv("general.alignment", T.UINT32, 4), "is 4; allowed"),
        (kv("general.alignment", T.UINT32, 48), "not a power of two"),
        (kv("general.alignment", T.UINT32, 2**31), "allowed are 8 to 4096"),
        (kv("general.alignment", T.UINT64, 2**64 - 1), "allowed are 8 to 4096"),
        (kv("general.alignment", T.STRING, "32"), "is a string; expected an integer"),
        (kv("general.alignment", T.BOOL, True), "is a boolean"),
        (kv_array("general.alignment", T.UINT32, [32]), "an array of uint32"),
    ],
)
def test_a_wrong_alignment_is_refused(tmp_path: Path, pair: bytes, words: str) -> None:
    assert words in refused(tmp_path, File([pair], [Tensor("a", (4,))]).build())


A, B = Tensor("a", (32, 4)), Tensor("b", (32,))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([Tensor("", (4,))], "a tensor name has 0 bytes"),
        ([Tensor("n" * 64, (4,))], "a tensor name has 64 bytes; allowed are 1 to 63"),
        ([Tensor(b"\xc3(", (4,))], "a tensor name is not UTF-8"),
        ([Tensor("a\0", (4,))], "NUL"),
        ([Tensor("a", (4,), n_dims=0)], "0 dimensions"),
        ([Tensor("a", (1, 1, 1, 1, 4))], "5 dimensions"),
        ([Tensor("a", (4,), n_dims=2**32 - 1)], "4294967295 dimensions"),
        ([Tensor("a", (4, 0), data=b"")], "zero dimension"),
        ([Tensor("a", (2**63,), data=b"1234")], "larger than any memory"),
        ([Tensor("a", (2**32, 2**32), data=b"1234")], "larger than any memory"),
        ([Tensor("a", (2**62, 4, 4, 4), data=b"1234")], "larger than any memory"),
        ([Tensor("a", (33,), Q.Q4_0, data=bytes(40))], "not a multiple of the block size 32"),
        ([Tensor("a", (128,), Q.Q4_K, data=bytes(40))], "not a multiple of the block size 256"),
        ([Tensor("a", (4,), type_number=999)], "unknown type 999"),
        ([Tensor("a", (4,), type_number=4)], "unknown type 4"),
        ([A, A], "tensor a appears twice"),
        ([A, Tensor("b", (32,), offset=516)], "not a multiple of the alignment"),
        ([A, Tensor("b", (32,), offset=0)], "overlaps tensor a"),
        ([A, Tensor("b", (32,), offset=480)], "overlaps tensor a"),
        ([A, Tensor("b", (32,), offset=544)], "leaves a gap after tensor a"),
        ([Tensor("a", (32,), offset=32)], "leaves a gap after the start"),
        ([Tensor("a", (32,), offset=2**64 - 32)], "leaves a gap"),
        ([A, Tensor("b", (2**20,), data=bytes(64))], "is truncated"),
    ],
)
def test_malformed_tensor_records_are_refused(
    tmp_path: Path, tensors: list[Tensor], words: str
) -> None:
    assert words in refused(tmp_path, File(tensors=tensors).build())


def test_every_truncation_of_a_file_is_an_error(tmp_path: Path) -> None:
    pairs = [
        kv("k", T.STRING, "v"),
        kv_array("s", T.STRING, ["a", "b"]),
        kv_array("n", T.INT16, [1, 2, 3]),
        kv("f", T.FLOAT32, math.pi),
    ]
    file = File(pairs, [A, B])
    raw = file.build()
    scan(tmp_path, raw)
    for n in range(len(raw)):
        refused(tmp_path, raw[:n])


def test_a_header_beyond_its_budget_is_refused_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "HEADER_LIMIT", 1000)
    raw = header(string("k") + u32(T.STRING) + string("x" * 2000))
    assert "the header is larger than" in refused(tmp_path, raw)
    raw = header(string("k") + u32(T.ARRAY) + u32(T.INT32) + u64(500) + bytes(2000))
    assert "the header is larger than" in refused(tmp_path, raw)


def test_the_number_of_strings_in_a_header_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "STRINGS_LIMIT", 5)
    pairs = [kv_array("a", T.STRING, [""] * 3), kv_array("b", T.STRING, [""] * 3)]
    assert "key b has 3 strings" in refused(tmp_path, File(pairs).build())


def test_a_file_that_shrinks_during_the_scan_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(File([kv("k", T.STRING, "v" * 100)]).build()[:60])
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ModelFileError, match="shrank"):
            scan_part(fd, path, 200)
    finally:
        os.close(fd)
