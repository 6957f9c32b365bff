// moegraph's own C shim (documented in ../shim.h).

const char * mg_patchset_built(void);
const char * mg_patchset_loaded(void);
const char * mg_llama_commit(void);

#define MG_NO_ID ...

struct mg_readback {
    const struct ggml_tensor * src;
    void * dst;
    size_t size;
};

void mg_install_callbacks(int verbose);
size_t mg_last_error(char * out, size_t size);
void mg_cancel_bind(ggml_backend_t backend_cpu, volatile int32_t * flag);

bool mg_graph_alloc(ggml_gallocr_t galloc, ggml_backend_t backend, struct ggml_context * ctx, struct ggml_cgraph * graph);

enum ggml_status mg_launch(ggml_backend_t backend, struct ggml_cgraph * graph, const struct mg_readback * reads, int n_reads);
bool mg_wait_ids(ggml_backend_t backend, const int32_t * ids, int n);
void mg_copy_bytes(ggml_backend_t backend, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size);
enum ggml_status mg_upload_launch(ggml_backend_t compute, ggml_backend_t upload,
        struct ggml_tensor * slots, const void * numbers, size_t size,
        ggml_backend_event_t ev_free, ggml_backend_event_t ev_uploaded, struct ggml_cgraph * graph);
