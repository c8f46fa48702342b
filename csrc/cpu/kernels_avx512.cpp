// The kernels for AVX-512 (F, BW, DQ, VL). All other headers are included before the target options
// are set, so that no code shared with other files is compiled under them.
#include "plan.h"

#ifdef SYNCBN_CPU_DISPATCH
#include <immintrin.h>

#include "../statistics.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#define SYNCBN_CAPABILITY simd_avx512
#define SYNCBN_VECTOR_BYTES 64
#include "table.h"
#pragma GCC pop_options

namespace syncbn::cpu {
const Kernels kernels_avx512 = simd_avx512::table();
}
#endif
