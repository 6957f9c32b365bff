# Written by scripts/gen_stubs.py from C declarations; do not edit.
"""The patched ggml, and the C parts of moegraph, as cffi presents them."""

from typing import Any, Final, TypeAlias

from .ops import Tensor

# Any address: memory, or a struct that Python fills. cffi itself refuses a wrong one.
Address: TypeAlias = Any

class ggml_context_ptr: ...
class ggml_cgraph_ptr: ...
class ggml_backend_buffer_ptr: ...
class ggml_backend_buffer_type_ptr: ...
class ggml_backend_event_ptr: ...
class ggml_backend_ptr: ...
class ggml_backend_device_ptr: ...
class ggml_backend_reg_ptr: ...
class ggml_gallocr_ptr: ...
class ggml_threadpool_ptr: ...
class mg_watch_ptr: ...
class mg_cpu_ffn_ptr: ...

class ggml_init_params_ptr:
    mem_size: int
    mem_buffer: Address
    no_alloc: bool

class ggml_type_traits_ptr:
    type_name: Address
    blck_size: int
    type_size: int
    is_quantized: bool
    to_float: Address

class ggml_backend_dev_caps_ptr:
    host_buffer: bool
    buffer_from_host_ptr: bool
    events: bool

class ggml_backend_dev_props_ptr:
    name: Address
    description: Address
    memory_free: int
    memory_total: int
    type: int
    device_id: Address
    caps: ggml_backend_dev_caps_ptr

class ggml_threadpool_params_ptr:
    poll: int

class moegraph_rpc_counts_ptr:
    n_sent: int
    n_received: int
    n_graphs_sent: int
    n_graphs_stored: int

class mg_readback_ptr:
    src: Tensor
    dst: Address
    size: int

class mg_piece_ptr:
    src: Tensor
    offset: int
    dst: Address
    size: int

class mg_move_ptr:
    src: Address
    dst: Address
    size: int

class mg_cpu_ffn_layer_ptr:
    gate: Address
    up: Address
    down: Address
    gate_stride: int
    up_stride: int
    down_stride: int
    gate_type: int
    up_type: int
    down_type: int
    n_expert: int

class mg_sampler_ptr:
    temperature: float
    top_p: float
    typical_p: float
    min_p_log: float
    top_k: int
    n_changed: int
    ids: Address
    places: Address
    bias: Address
    repeat: Address
    subtracted: Address
    allowed: Address

class Lib:
    PROT_READ: Final[int]
    PROT_WRITE: Final[int]
    MAP_PRIVATE: Final[int]
    MAP_ANONYMOUS: Final[int]
    MADV_HUGEPAGE: Final[int]
    MADV_DONTFORK: Final[int]
    GGML_MAX_SRC: Final[int]
    GGML_MAX_NAME: Final[int]
    GGML_ROPE_TYPE_NEOX: Final[int]
    GGML_ROPE_TYPE_IMROPE: Final[int]
    MOEGRAPH_TREE_ROWS: Final[int]
    MOEGRAPH_CONV_WIDTH: Final[int]
    MOEGRAPH_FETCH_IDS: Final[int]
    MOEGRAPH_ATTN_ROWS: Final[int]
    MOEGRAPH_ATTN_PATH: Final[int]
    MOEGRAPH_ATTN_WORDS: Final[int]
    MOEGRAPH_ATTN_HEAD: Final[int]
    MOEGRAPH_ATTN_CAPACITY: Final[int]
    MOEGRAPH_DRAW_ROWS: Final[int]
    MOEGRAPH_DRAW_IDS: Final[int]
    MOEGRAPH_DRAW_WORDS: Final[int]
    MOEGRAPH_LIKELY: Final[int]
    MOEGRAPH_CANDIDATES: Final[int]
    MOEGRAPH_EARLY: Final[int]
    MG_NO_ID: Final[int]
    MG_CHOOSE_UNKNOWN: Final[int]
    MG_CHOOSE_NONE: Final[int]
    GGML_STATUS_ALLOC_FAILED: Final[int]
    GGML_STATUS_FAILED: Final[int]
    GGML_STATUS_SUCCESS: Final[int]
    GGML_STATUS_ABORTED: Final[int]
    GGML_TYPE_F32: Final[int]
    GGML_TYPE_F16: Final[int]
    GGML_TYPE_Q4_0: Final[int]
    GGML_TYPE_Q8_0: Final[int]
    GGML_TYPE_I32: Final[int]
    GGML_TYPE_I64: Final[int]
    GGML_TYPE_BF16: Final[int]
    GGML_PREC_DEFAULT: Final[int]
    GGML_PREC_F32: Final[int]
    GGML_HINT_NONE: Final[int]
    GGML_HINT_SRC0_IS_HADAMARD: Final[int]
    GGML_SORT_ORDER_ASC: Final[int]
    GGML_SORT_ORDER_DESC: Final[int]
    GGML_BACKEND_BUFFER_USAGE_ANY: Final[int]
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS: Final[int]
    GGML_BACKEND_BUFFER_USAGE_COMPUTE: Final[int]
    GGML_BACKEND_DEVICE_TYPE_CPU: Final[int]
    GGML_BACKEND_DEVICE_TYPE_GPU: Final[int]
    GGML_BACKEND_DEVICE_TYPE_IGPU: Final[int]
    GGML_BACKEND_DEVICE_TYPE_ACCEL: Final[int]
    def mmap(self, a0: Address, a1: int, a2: int, a3: int, a4: int, a5: int, /) -> Address: ...
    def munmap(self, a0: Address, a1: int, /) -> int: ...
    def madvise(self, a0: Address, a1: int, a2: int, /) -> int: ...
    def ggml_init(self, a0: ggml_init_params_ptr, /) -> ggml_context_ptr: ...
    def ggml_free(self, a0: ggml_context_ptr, /) -> None: ...
    def ggml_used_mem(self, a0: ggml_context_ptr, /) -> int: ...
    def ggml_tensor_overhead(self) -> int: ...
    def ggml_graph_overhead_custom(self, a0: int, a1: bool, /) -> int: ...
    def ggml_version(self) -> Address: ...
    def ggml_nbytes(self, a0: Tensor, /) -> int: ...
    def ggml_nelements(self, a0: Tensor, /) -> int: ...
    def ggml_row_size(self, a0: int, a1: int, /) -> int: ...
    def ggml_type_size(self, a0: int, /) -> int: ...
    def ggml_is_contiguous(self, a0: Tensor, /) -> bool: ...
    def ggml_type_name(self, a0: int, /) -> Address: ...
    def ggml_op_desc(self, a0: Tensor, /) -> Address: ...
    def ggml_get_type_traits(self, a0: int, /) -> ggml_type_traits_ptr: ...
    def ggml_new_tensor(self, a0: ggml_context_ptr, a1: int, a2: int, a3: Address, /) -> Tensor: ...
    def ggml_new_tensor_1d(self, a0: ggml_context_ptr, a1: int, a2: int, /) -> Tensor: ...
    def ggml_new_tensor_2d(self, a0: ggml_context_ptr, a1: int, a2: int, a3: int, /) -> Tensor: ...
    def ggml_new_tensor_3d(
        self,
        a0: ggml_context_ptr,
        a1: int,
        a2: int,
        a3: int,
        a4: int,
        /,
    ) -> Tensor: ...
    def ggml_set_name(self, a0: Tensor, a1: Address, /) -> Tensor: ...
    def ggml_set_input(self, a0: Tensor, /) -> None: ...
    def ggml_set_output(self, a0: Tensor, /) -> None: ...
    def ggml_add(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_add_id(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        /,
    ) -> Tensor: ...
    def ggml_mul(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_div(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_scale(self, a0: ggml_context_ptr, a1: Tensor, a2: float, /) -> Tensor: ...
    def ggml_fill(self, a0: ggml_context_ptr, a1: Tensor, a2: float, /) -> Tensor: ...
    def ggml_clamp(self, a0: ggml_context_ptr, a1: Tensor, a2: float, a3: float, /) -> Tensor: ...
    def ggml_sum_rows(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_argmax(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_argsort_top_k(self, a0: ggml_context_ptr, a1: Tensor, a2: int, /) -> Tensor: ...
    def ggml_concat(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, a3: int, /) -> Tensor: ...
    def ggml_sigmoid(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_silu(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_softplus(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_tanh(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_swiglu_split(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_geglu_split(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_swiglu_oai(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: float,
        a4: float,
        /,
    ) -> Tensor: ...
    def ggml_rms_norm(self, a0: ggml_context_ptr, a1: Tensor, a2: float, /) -> Tensor: ...
    def ggml_mul_mat(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_mul_mat_set_hint(self, a0: Tensor, a1: int, /) -> None: ...
    def ggml_prec_set_acc(self, a0: Tensor, a1: int, /) -> bool: ...
    def ggml_mul_mat_id(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        /,
    ) -> Tensor: ...
    def ggml_cpy(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_cont(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_cont_2d(self, a0: ggml_context_ptr, a1: Tensor, a2: int, a3: int, /) -> Tensor: ...
    def ggml_reshape_1d(self, a0: ggml_context_ptr, a1: Tensor, a2: int, /) -> Tensor: ...
    def ggml_reshape_2d(self, a0: ggml_context_ptr, a1: Tensor, a2: int, a3: int, /) -> Tensor: ...
    def ggml_reshape_3d(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        /,
    ) -> Tensor: ...
    def ggml_reshape_4d(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        a5: int,
        /,
    ) -> Tensor: ...
    def ggml_view_1d(self, a0: ggml_context_ptr, a1: Tensor, a2: int, a3: int, /) -> Tensor: ...
    def ggml_view_2d(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        a5: int,
        /,
    ) -> Tensor: ...
    def ggml_view_3d(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        a5: int,
        a6: int,
        a7: int,
        /,
    ) -> Tensor: ...
    def ggml_view_4d(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        a5: int,
        a6: int,
        a7: int,
        a8: int,
        a9: int,
        /,
    ) -> Tensor: ...
    def ggml_permute(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: int,
        a3: int,
        a4: int,
        a5: int,
        /,
    ) -> Tensor: ...
    def ggml_get_rows(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_set_rows(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        /,
    ) -> Tensor: ...
    def ggml_soft_max(self, a0: ggml_context_ptr, a1: Tensor, /) -> Tensor: ...
    def ggml_rope_ext(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: int,
        a5: int,
        a6: int,
        a7: float,
        a8: float,
        a9: float,
        a10: float,
        a11: float,
        a12: float,
        /,
    ) -> Tensor: ...
    def ggml_rope_multi(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: int,
        a5: Address,
        a6: int,
        a7: int,
        a8: float,
        a9: float,
        a10: float,
        a11: float,
        a12: float,
        a13: float,
        /,
    ) -> Tensor: ...
    def ggml_flash_attn_ext(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: float,
        a6: float,
        a7: float,
        /,
    ) -> Tensor: ...
    def ggml_flash_attn_ext_add_sinks(self, a0: Tensor, a1: Tensor, /) -> None: ...
    def ggml_ssm_conv(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_gated_delta_net(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: Tensor,
        a6: Tensor,
        a7: int,
        /,
    ) -> Tensor: ...
    def ggml_new_graph_custom(
        self,
        a0: ggml_context_ptr,
        a1: int,
        a2: bool,
        /,
    ) -> ggml_cgraph_ptr: ...
    def ggml_build_forward_expand(self, a0: ggml_cgraph_ptr, a1: Tensor, /) -> None: ...
    def ggml_graph_n_nodes(self, a0: ggml_cgraph_ptr, /) -> int: ...
    def ggml_graph_node(self, a0: ggml_cgraph_ptr, a1: int, /) -> Tensor: ...
    def ggml_can_repeat(self, a0: Tensor, a1: Tensor, /) -> bool: ...
    def moegraph_patchset(self) -> Address: ...
    def moegraph_conv(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: Tensor,
        a6: Tensor,
        /,
    ) -> Tensor: ...
    def moegraph_delta_net(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: Tensor,
        a6: Tensor,
        a7: Tensor,
        a8: Tensor,
        a9: Tensor,
        /,
    ) -> Tensor: ...
    def moegraph_fetch_rows(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: Tensor,
        /,
    ) -> Tensor: ...
    def moegraph_publish(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def moegraph_is_publish(self, a0: Tensor, /) -> bool: ...
    def moegraph_keep_rows_apart(self, a0: ggml_cgraph_ptr, /) -> None: ...
    def moegraph_rows_are_apart(self, a0: Tensor, /) -> bool: ...
    def moegraph_attn(
        self,
        a0: ggml_context_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Tensor,
        a4: Tensor,
        a5: Tensor,
        a6: int,
        a7: float,
        /,
    ) -> Tensor: ...
    def moegraph_attn_add(self, a0: Tensor, a1: Tensor, a2: int, /) -> None: ...
    def moegraph_candidates(self, a0: ggml_context_ptr, a1: Tensor, a2: Tensor, /) -> Tensor: ...
    def ggml_backend_buft_name(self, a0: ggml_backend_buffer_type_ptr, /) -> Address: ...
    def ggml_backend_buft_alloc_buffer(
        self,
        a0: ggml_backend_buffer_type_ptr,
        a1: int,
        /,
    ) -> ggml_backend_buffer_ptr: ...
    def ggml_backend_buft_get_alignment(self, a0: ggml_backend_buffer_type_ptr, /) -> int: ...
    def ggml_backend_buft_get_alloc_size(
        self,
        a0: ggml_backend_buffer_type_ptr,
        a1: Tensor,
        /,
    ) -> int: ...
    def ggml_backend_buffer_free(self, a0: ggml_backend_buffer_ptr, /) -> None: ...
    def ggml_backend_buffer_get_base(self, a0: ggml_backend_buffer_ptr, /) -> Address: ...
    def ggml_backend_buffer_get_size(self, a0: ggml_backend_buffer_ptr, /) -> int: ...
    def ggml_backend_buffer_clear(self, a0: ggml_backend_buffer_ptr, a1: int, /) -> None: ...
    def ggml_backend_buffer_set_usage(self, a0: ggml_backend_buffer_ptr, a1: int, /) -> None: ...
    def ggml_backend_buffer_get_type(
        self,
        a0: ggml_backend_buffer_ptr,
        /,
    ) -> ggml_backend_buffer_type_ptr: ...
    def ggml_backend_cpu_buffer_from_ptr(
        self,
        a0: Address,
        a1: int,
        /,
    ) -> ggml_backend_buffer_ptr: ...
    def ggml_backend_tensor_alloc(
        self,
        a0: ggml_backend_buffer_ptr,
        a1: Tensor,
        a2: Address,
        /,
    ) -> int: ...
    def ggml_backend_tensor_set(self, a0: Tensor, a1: Address, a2: int, a3: int, /) -> None: ...
    def ggml_backend_tensor_get(self, a0: Tensor, a1: Address, a2: int, a3: int, /) -> None: ...
    def ggml_backend_tensor_memset(self, a0: Tensor, a1: int, a2: int, a3: int, /) -> None: ...
    def ggml_backend_tensor_set_async(
        self,
        a0: ggml_backend_ptr,
        a1: Tensor,
        a2: Address,
        a3: int,
        a4: int,
        /,
    ) -> None: ...
    def ggml_backend_tensor_get_async(
        self,
        a0: ggml_backend_ptr,
        a1: Tensor,
        a2: Address,
        a3: int,
        a4: int,
        /,
    ) -> None: ...
    def ggml_backend_dev_init(
        self,
        a0: ggml_backend_device_ptr,
        a1: Address,
        /,
    ) -> ggml_backend_ptr: ...
    def ggml_backend_free(self, a0: ggml_backend_ptr, /) -> None: ...
    def ggml_backend_synchronize(self, a0: ggml_backend_ptr, /) -> None: ...
    def ggml_backend_supports_op(self, a0: ggml_backend_ptr, a1: Tensor, /) -> bool: ...
    def ggml_backend_event_new(self, a0: ggml_backend_device_ptr, /) -> ggml_backend_event_ptr: ...
    def ggml_backend_event_free(self, a0: ggml_backend_event_ptr, /) -> None: ...
    def ggml_backend_event_record(
        self,
        a0: ggml_backend_event_ptr,
        a1: ggml_backend_ptr,
        /,
    ) -> None: ...
    def ggml_backend_event_synchronize(self, a0: ggml_backend_event_ptr, /) -> None: ...
    def ggml_backend_event_wait(
        self,
        a0: ggml_backend_ptr,
        a1: ggml_backend_event_ptr,
        /,
    ) -> None: ...
    def ggml_backend_dev_count(self) -> int: ...
    def ggml_backend_dev_get(self, a0: int, /) -> ggml_backend_device_ptr: ...
    def ggml_backend_reg_dev_count(self, a0: ggml_backend_reg_ptr, /) -> int: ...
    def ggml_backend_reg_dev_get(
        self,
        a0: ggml_backend_reg_ptr,
        a1: int,
        /,
    ) -> ggml_backend_device_ptr: ...
    def ggml_backend_dev_name(self, a0: ggml_backend_device_ptr, /) -> Address: ...
    def ggml_backend_dev_type(self, a0: ggml_backend_device_ptr, /) -> int: ...
    def ggml_backend_dev_memory(
        self,
        a0: ggml_backend_device_ptr,
        a1: Address,
        a2: Address,
        /,
    ) -> None: ...
    def ggml_backend_dev_get_props(self, a0: ggml_backend_device_ptr, a1: Address, /) -> None: ...
    def ggml_backend_dev_buffer_type(
        self,
        a0: ggml_backend_device_ptr,
        /,
    ) -> ggml_backend_buffer_type_ptr: ...
    def ggml_backend_dev_host_buffer_type(
        self,
        a0: ggml_backend_device_ptr,
        /,
    ) -> ggml_backend_buffer_type_ptr: ...
    def ggml_backend_cpu_buffer_type(self) -> ggml_backend_buffer_type_ptr: ...
    def ggml_backend_alloc_ctx_tensors_from_buft(
        self,
        a0: ggml_context_ptr,
        a1: ggml_backend_buffer_type_ptr,
        /,
    ) -> ggml_backend_buffer_ptr: ...
    def ggml_gallocr_new(self, a0: ggml_backend_buffer_type_ptr, /) -> ggml_gallocr_ptr: ...
    def ggml_gallocr_free(self, a0: ggml_gallocr_ptr, /) -> None: ...
    def ggml_gallocr_get_buffer_size(self, a0: ggml_gallocr_ptr, a1: int, /) -> int: ...
    def ggml_backend_cpu_set_n_threads(self, a0: ggml_backend_ptr, a1: int, /) -> None: ...
    def ggml_backend_cpu_set_use_ref(self, a0: ggml_backend_ptr, a1: bool, /) -> None: ...
    def ggml_threadpool_params_default(self, a0: int, /) -> ggml_threadpool_params_ptr: ...
    def ggml_threadpool_new(self, a0: Address, /) -> ggml_threadpool_ptr: ...
    def ggml_threadpool_free(self, a0: ggml_threadpool_ptr, /) -> None: ...
    def ggml_backend_cpu_set_threadpool(
        self,
        a0: ggml_backend_ptr,
        a1: ggml_threadpool_ptr,
        /,
    ) -> None: ...
    def moegraph_rpc_adopt(self, a0: Address, a1: int, /) -> ggml_backend_reg_ptr: ...
    def moegraph_rpc_close(self, a0: Address, /) -> None: ...
    def moegraph_rpc_failure(self, a0: Address, /) -> int: ...
    def moegraph_rpc_count(self, a0: Address, a1: Address, /) -> None: ...
    def moegraph_rpc_serve(self, a0: int, a1: Address, a2: int, a3: Address, /) -> None: ...
    def mg_patchset_built(self) -> Address: ...
    def mg_llama_commit(self) -> Address: ...
    def mg_install_callbacks(self, a0: int, /) -> None: ...
    def mg_last_error(self, a0: Address, a1: int, /) -> int: ...
    def mg_ids_where(self, a0: Address, a1: Address, a2: int, a3: Address, /) -> int: ...
    def mg_cancel_bind(self, a0: ggml_backend_ptr, a1: Address, /) -> None: ...
    def mg_graph_alloc(
        self,
        a0: ggml_gallocr_ptr,
        a1: ggml_backend_ptr,
        a2: ggml_context_ptr,
        a3: ggml_cgraph_ptr,
        /,
    ) -> bool: ...
    def mg_graph_unsupported(self, a0: ggml_backend_ptr, a1: ggml_cgraph_ptr, /) -> Tensor: ...
    def mg_graph_forget(self, a0: ggml_backend_ptr, a1: ggml_cgraph_ptr, /) -> None: ...
    def mg_pin(self, a0: ggml_backend_ptr, a1: Address, a2: int, /) -> bool: ...
    def mg_unpin(self, a0: Address, /) -> None: ...
    def mg_get_pieces(self, a0: ggml_backend_ptr, a1: Address, a2: int, /) -> None: ...
    def mg_move_bytes(self, a0: Address, a1: int, /) -> None: ...
    def mg_launch(
        self,
        a0: ggml_backend_ptr,
        a1: ggml_cgraph_ptr,
        a2: Address,
        a3: int,
        /,
    ) -> int: ...
    def mg_wait_ids(self, a0: ggml_backend_ptr, a1: Address, a2: int, /) -> bool: ...
    def mg_copy_bytes(
        self,
        a0: ggml_backend_ptr,
        a1: Tensor,
        a2: int,
        a3: Tensor,
        a4: int,
        a5: int,
        /,
    ) -> None: ...
    def mg_copy_experts(
        self,
        a0: ggml_backend_ptr,
        a1: Tensor,
        a2: Tensor,
        a3: Address,
        a4: int,
        a5: int,
        a6: int,
        /,
    ) -> None: ...
    def mg_copy_across(
        self,
        a0: ggml_backend_ptr,
        a1: ggml_backend_ptr,
        a2: Tensor,
        a3: int,
        a4: Tensor,
        a5: int,
        a6: int,
        /,
    ) -> None: ...
    def mg_upload_launch(
        self,
        a0: ggml_backend_ptr,
        a1: ggml_backend_ptr,
        a2: Tensor,
        a3: Address,
        a4: int,
        a5: ggml_backend_event_ptr,
        a6: ggml_backend_event_ptr,
        a7: ggml_cgraph_ptr,
        /,
    ) -> int: ...
    def mg_rows_to_float(
        self,
        a0: Address,
        a1: Address,
        a2: int,
        a3: Address,
        a4: int,
        a5: int,
        a6: Address,
        /,
    ) -> None: ...
    def mg_upload_experts(
        self,
        a0: ggml_backend_ptr,
        a1: Tensor,
        a2: Address,
        a3: int,
        a4: Address,
        a5: int,
        a6: int,
        a7: int,
        a8: int,
        /,
    ) -> None: ...
    def mg_watch(self, a0: Address, a1: int, /) -> mg_watch_ptr: ...
    def mg_unwatch(self, a0: mg_watch_ptr, /) -> None: ...
    def mg_watch_faults(self) -> int: ...
    def mg_watch_fault(self, a0: mg_watch_ptr, /) -> int: ...
    def mg_cpu_ffn_new(self, a0: int, a1: int, a2: int, a3: int, a4: int, /) -> mg_cpu_ffn_ptr: ...
    def mg_cpu_ffn_free(self, a0: mg_cpu_ffn_ptr, /) -> None: ...
    def mg_cpu_ffn_begin(
        self,
        a0: mg_cpu_ffn_ptr,
        a1: Address,
        a2: Address,
        a3: Address,
        a4: Address,
        a5: int,
        a6: Address,
        /,
    ) -> None: ...
    def mg_cpu_ffn_end(self, a0: mg_cpu_ffn_ptr, /) -> None: ...
    def mg_choose(self, a0: Address, a1: Address, a2: int, /) -> int: ...
    def mg_find_missing(
        self,
        a0: Address,
        a1: int,
        a2: Address,
        a3: int,
        a4: Address,
        a5: Address,
        a6: Address,
        /,
    ) -> int: ...
    def mg_sort_places(
        self,
        a0: Address,
        a1: Address,
        a2: int,
        a3: int,
        a4: Address,
        a5: Address,
        /,
    ) -> int: ...
    def mg_merge_places(
        self,
        a0: Address,
        a1: Address,
        a2: Address,
        a3: int,
        a4: int,
        a5: int,
        a6: Address,
        a7: Address,
        /,
    ) -> int: ...
    def mg_unit(
        self,
        a0: Address,
        a1: int,
        a2: Address,
        a3: Address,
        a4: int,
        a5: int,
        a6: int,
        a7: int,
        a8: int,
        a9: Address,
        /,
    ) -> int: ...

class FFI:
    """The part of cffi's compiled FFI object that moegraph uses."""

    NULL: Final[Any]
    def new(self, cdecl: str, init: object = ..., /) -> Any: ...
    def cast(self, cdecl: str, value: object, /) -> Any: ...
    def string(self, cdata: Address, maxlen: int = ..., /) -> bytes: ...
    def buffer(self, cdata: Address, size: int = ..., /) -> Any: ...
    def from_buffer(self, cdecl: object, buffer: object = ..., /) -> Any: ...

ffi: FFI
lib: Lib
