#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Page-lock memory of this process, so that the device of `backend` can read it, at the same address. False if the
// driver refuses or would map it elsewhere, if the backend is not CUDA, or if GGML_CUDA_NO_PINNED is set. Any thread may
// call these functions.
bool moegraph_pin(ggml_backend_t backend, void * data, size_t size);
void moegraph_unpin(void * data);

#ifdef __cplusplus
}
#endif
