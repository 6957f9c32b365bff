// Takes the place of upstream's mmvq.cuh.
#pragma once

#include "common.cuh"

#define MMVQ_MAX_BATCH_SIZE 8
