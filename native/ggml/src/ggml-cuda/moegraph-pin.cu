#include "moegraph-pin.h"

#include "common.cuh"
#include "ggml-backend-impl.h"

#include <cstdlib>

bool moegraph_pin(ggml_backend_t backend, void * data, size_t size) {
    if (!ggml_backend_is_cuda(backend) || getenv("GGML_CUDA_NO_PINNED") != nullptr) {
        return false;
    }
    // a new thread would use device 0, and with it a context that takes memory there
    ggml_cuda_set_device(((ggml_backend_cuda_context *) backend->context)->device);
    if (cudaHostRegister(data, size, cudaHostRegisterPortable) == cudaSuccess) {
        void * on_device = nullptr;
        if (cudaHostGetDevicePointer(&on_device, data, 0) == cudaSuccess && on_device == data) {
            return true;
        }
        moegraph_unpin(data);
    }
    (void) cudaGetLastError();
    return false;
}

void moegraph_unpin(void * data) {
    if (cudaHostUnregister(data) != cudaSuccess) {
        (void) cudaGetLastError();
    }
}
