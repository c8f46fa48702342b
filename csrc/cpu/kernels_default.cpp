// The kernels for any machine: vectors of 16 bytes, which SSE2 and NEON have.
#include "../statistics.h"
#include "plan.h"

#define SYNCBN_CAPABILITY simd_default
#define SYNCBN_VECTOR_BYTES 16
#include "table.h"

namespace syncbn::cpu {
const Kernels kernels_default = simd_default::table();
}
