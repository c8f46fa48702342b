// Which instruction set the kernels of this process use.
#pragma once

#include "kernels.h"

namespace syncbn::cpu {

// The kernels of a scalar type for the newest instruction set of this machine, or for an older one
// that the environment variable SYNCBN_CPU_CAPABILITY names (default, avx2, avx512) at first use.
const TypeKernels& kernels_for(torch::headeronly::ScalarType dtype);

}  // namespace syncbn::cpu
