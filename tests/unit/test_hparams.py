"""Hyper-parameters: what each key gives, and a refusal for each value that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ggufbytes import REAL_35B, Shape, T, key, kv, kv_array, model_pairs

from moegraph.arch.qwen35moe import Qwen35Moe
from moegraph.errors import ModelFileError, UnsupportedModel
from moegraph.gguf.metadata import Metadata
from moegraph.gguf.reader import Reader
from moegraph.gguf.scan import _read_metadata

N_VOCAB = 40
Read = Callable[..., Qwen35Moe]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads the hyper-parameters of a shape with some keys replaced."""

    def run(shape: Shape | None = None, **changes: bytes | None) -> Qwen35Moe:
        pairs: dict[str, bytes | None] = {**model_pairs(shape or Shape())}
        pairs |= {key(name.replace("__", ".")): value for name, value in changes.items()}
        kept = [p for p in pairs.values() if p is not None]
        return Qwen35Moe.read(_metadata(tmp_path / "a.gguf", kept), N_VOCAB)

    return run


def _metadata(path: Path, pairs: list[bytes]) -> Metadata:
    path.write_bytes(b"".join(pairs))
    with path.open("rb") as file:
        return _read_metadata(Reader(file.fileno(), path, path.stat().st_size), len(pairs))


def uint(suffix: str, v: int) -> bytes:
    return kv(key(suffix), T.UINT32, v)


def real(suffix: str, v: float) -> bytes:
    return kv(key(suffix), T.FLOAT32, v)


def text(suffix: str, v: str) -> bytes:
    return kv(key(suffix), T.STRING, v)


def test_the_35b_shape_gives_the_sizes_of_the_real_model(read: Read) -> None:
    hp = read(Shape(**REAL_35B))
    assert (hp.n_layer, hp.n_layer_nextn, sum(hp.recurrent)) == (40, 1, 30)
    assert [il for il in range(40) if hp.layer(il).kv] == list(range(3, 40, 4))
    assert (hp.head_dim, hp.n_k_heads, hp.n_v_heads) == (128, 16, 32)
    assert (hp.key_dim, hp.value_dim, hp.conv_dim) == (2048, 4096, 8192)
    assert (hp.n_embd_head_k, hp.n_rot, hp.n_head, hp.n_head_kv) == (256, 64, 16, 2)
    assert (hp.n_vocab, hp.n_ff_exp, hp.n_ff_shexp) == (N_VOCAB, 512, 512)


def test_optional_keys_fall_back_as_in_llama_cpp(read: Read) -> None:
    hp = read(
        attention__head_count_kv=None,
        attention__key_length=None,
        attention__value_length=None,
        rope__dimension_count=None,
        rope__freq_base=None,
        full_attention_interval=None,
        rope__dimension_sections=kv_array(key("rope.dimension_sections"), T.INT32, (2, 1, 1, 0)),
    )
    assert (hp.n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (4, 8, 8, 8)
    assert hp.rope_freq_base == 10_000.0
    assert hp.recurrent == (True, True, True, False)


def test_expert_sizes_fall_back_to_the_feed_forward_length(read: Read) -> None:
    hp = read(
        expert_feed_forward_length=None,
        expert_shared_feed_forward_length=None,
        feed_forward_length=uint("feed_forward_length", 128),
    )
    assert (hp.n_ff_exp, hp.n_ff_shexp) == (64, 128)


def test_recurrent_layers_may_be_listed_one_by_one(read: Read) -> None:
    name = key("attention.recurrent_layers")
    flags = [False, True, False, True, True]
    hp = read(Shape(n_nextn=1), attention__recurrent_layers=kv_array(name, T.BOOL, flags))
    assert hp.recurrent == (False, True, False, True)
    assert hp.layer(4).kv and not hp.layer(3).kv, "a prediction block has attention"


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_sections",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
]


@pytest.mark.parametrize("suffix", REQUIRED)
def test_a_missing_required_key_is_named(read: Read, suffix: str) -> None:
    with pytest.raises(ModelFileError, match="missing") as caught:
        read(**{suffix.replace(".", "__"): None})
    assert key(suffix) in str(caught.value)


@pytest.mark.parametrize("suffix", [s for s in REQUIRED if "sections" not in s])
@pytest.mark.parametrize("kind", ["string", "bool", "strings", "number"])
def test_a_key_of_the_wrong_type_is_named(read: Read, suffix: str, kind: str) -> None:
    is_real = suffix.endswith("epsilon")
    wrong = {
        "string": text(suffix, "4"),
        "bool": kv(key(suffix), T.BOOL, True),
        "strings": kv_array(key(suffix), T.STRING, ["4"]),
        "number": uint(suffix, 1) if is_real else real(suffix, 1.0),
    }[kind]
    with pytest.raises(ModelFileError, match="expected") as caught:
        read(**{suffix.replace(".", "__"): wrong})
    assert key(suffix) in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "v", "words"),
    [
        ("block_count", 0, "allowed are 1 to 512"),
        ("block_count", 513, "allowed are 1 to 512"),
        ("context_length", 0, "allowed"),
        ("embedding_length", 0, "allowed"),
        ("embedding_length", 2**32 - 1, "allowed"),
        ("expert_count", 0, "1 to 1024"),
        ("expert_count", 1025, "1 to 1024"),
        ("expert_used_count", 0, "1 to 8"),
        ("expert_used_count", 9, "1 to 8"),
        ("expert_feed_forward_length", 0, "cannot replace"),
        ("attention.head_count", 0, "allowed"),
        ("attention.head_count_kv", 0, "allowed"),
        ("attention.head_count_kv", 3, "does not divide n_head 4"),
        ("attention.head_count_kv", 8, "does not divide"),
        ("attention.key_length", 0, "allowed"),
        ("attention.value_length", 32, "needs them equal"),
        ("rope.dimension_count", 0, "allowed"),
        ("rope.dimension_count", 7, "must be even"),
        ("rope.dimension_count", 18, "rotate 18 of 16"),
        ("ssm.conv_kernel", 1, "2 to 64"),
        ("ssm.conv_kernel", 65, "2 to 64"),
        ("ssm.inner_size", 33, "4 value heads"),
        ("ssm.inner_size", 0, "allowed"),
        ("ssm.state_size", 16, "4 value heads"),
        ("ssm.time_step_rank", 3, "3 value heads"),
        ("ssm.group_count", 3, "do not divide"),
        ("ssm.group_count", 0, "allowed"),
        ("full_attention_interval", 0, "allowed"),
        ("nextn_predict_layers", 4, "allowed are 0 to 3"),
    ],
)
def test_a_value_that_cannot_run_is_refused(read: Read, suffix: str, v: int, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(**{suffix.replace(".", "__"): uint(suffix, v)})
    assert words in str(caught.value) and key(suffix) in str(caught.value)


def test_layers_that_differ_are_unsupported(read: Read) -> None:
    heads = kv_array(key("attention.head_count"), T.UINT32, [4, 4, 8, 4])
    with pytest.raises(UnsupportedModel, match=r"differs between layers \(\[4, 8\]\)"):
        read(attention__head_count=heads)


def test_grouped_expert_selection_is_unsupported(read: Read) -> None:
    read(expert_group_count=uint("expert_group_count", 1))
    with pytest.raises(UnsupportedModel, match="grouped expert selection"):
        read(expert_group_count=uint("expert_group_count", 2))


def sections(*values: int) -> bytes:
    return kv_array(key("rope.dimension_sections"), T.INT32, values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 0, 0, 4), "cannot all be 0"),
        ((2, 1, 1), "has 3 elements"),
        ((9, 9, 9, 0), "exceed the head size 16"),
        ((-1, 2, 2, 0), "contains -1"),
        ((1, 1, 1, 1), "leaves rotary pair 3 of 4 without a text position"),
    ],
)
def test_malformed_rope_sections_are_refused(
    read: Read, values: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ModelFileError, match="dimension_sections") as caught:
        read(rope__dimension_sections=sections(*values))
    assert words in str(caught.value)


def scaling(kind: str | None, **values: float) -> dict[str, bytes]:
    pairs = {} if kind is None else {"rope__scaling__type": text("rope.scaling.type", kind)}
    return pairs | {f"rope__scaling__{k}": real(f"rope.scaling.{k}", v) for k, v in values.items()}


@pytest.mark.parametrize(
    ("kind", "legacy", "factor", "scale"),
    [(None, 0.0, 0.0, 1.0), (None, 0.0, 4.0, 0.25), (None, 2.0, None, 0.5),
     ("linear", 2.0, 4.0, 0.25), ("none", 2.0, 4.0, 1.0), ("yarn", 0.0, 4.0, 0.25)],
)  # fmt: skip
def test_positions_are_scaled_by_the_factor_of_a_file(
    read: Read, kind: str | None, legacy: float, factor: float | None, scale: float
) -> None:
    given = scaling(kind, **({} if factor is None else {"factor": factor}))
    hp = read(**given, rope__scale_linear=real("rope.scale_linear", legacy))
    assert (hp.rope_freq_scale, hp.rope_ext_factor) == (scale, float(kind == "yarn"))
    assert hp.rope_attn_factor == pytest.approx(1.0) and hp.n_ctx_orig == hp.n_ctx_train


@pytest.mark.parametrize(("n", "n_orig"), [(0, None), (64, 64)])
def test_the_context_before_scaling(read: Read, n: int, n_orig: int | None) -> None:
    name = "rope.scaling.original_context_length"
    hp = read(rope__scaling__original_context_length=uint(name, n))
    assert hp.n_ctx_orig == (n_orig or hp.n_ctx_train)


def test_a_factor_near_0_is_refused(read: Read) -> None:
    with pytest.raises(ModelFileError, match="is 0.0001; allowed are 0.001 to"):
        read(**scaling("linear", factor=1e-4))


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "", "YARN"])
def test_other_rope_scalings_are_unsupported(read: Read, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="none, linear and yarn"):
        read(**scaling(kind))


def test_messages_name_file_key_and_byte(read: Read, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(expert_count=uint("expert_count", 5000))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'a.gguf'}: key qwen35moe.expert_count is 5000")
    assert "(at byte " in message
