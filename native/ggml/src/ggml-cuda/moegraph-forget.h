#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Free what the backend keeps of the graph whose first node is `first`: its records of the nodes, and what CUDA captured.
// Nothing happens if the backend is not CUDA, or has not seen the graph. The device may still be running it: the driver
// frees an executable graph when it has ended (cuGraphExecDestroy). The thread that launches graphs calls this.
void moegraph_forget_graph(ggml_backend_t backend, const struct ggml_tensor * first);

#ifdef __cplusplus
}
#endif
