// What programs with the files ROWS of tests/helpers/emulated.py share: their kernels' shared memory.
#pragma once

#include "driver.h"

EMULATED_SHARED(int4, moegraph_router_smem);
EMULATED_SHARED(char4, moegraph_rows_smem);
EMULATED_SHARED(int4, moegraph_one_smem);
EMULATED_SHARED(char4, moegraph_wide_smem);
EMULATED_SHARED(float4, moegraph_f32_smem);
EMULATED_SHARED(int, counts);
