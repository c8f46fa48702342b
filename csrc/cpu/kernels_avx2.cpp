// The kernels for AVX2 and F16C. All other headers are included before the target options
// are set, so that no code shared with other files is compiled under them.
#include "plan.h"

#ifdef SYNCBN_CPU_DISPATCH
#include <immintrin.h>

#include "../statistics.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define SYNCBN_CAPABILITY simd_avx2
#define SYNCBN_VECTOR_BYTES 32
#include "table.h"
#pragma GCC pop_options

namespace syncbn::cpu {
const Kernels kernels_avx2 = simd_avx2::table();
}
#endif
