// Expert FFN on the CPU (documented in ../cpu_ffn.h).

struct mg_cpu_ffn_layer {
    const void * gate;
    const void * up;
    const void * down;
    size_t gate_stride;
    size_t up_stride;
    size_t down_stride;
    enum ggml_type gate_type;
    enum ggml_type up_type;
    enum ggml_type down_type;
    int n_expert;
};

struct mg_cpu_ffn;

struct mg_cpu_ffn * mg_cpu_ffn_new(int n_threads, int n_embd, int n_ff, int n_expert_used, int max_rows);
void mg_cpu_ffn_free(struct mg_cpu_ffn * ffn);
void mg_cpu_ffn_compute(struct mg_cpu_ffn * ffn, const struct mg_cpu_ffn_layer * layer, const float * x,
        const int32_t * ids, const float * weights, int n_rows, float * y);
