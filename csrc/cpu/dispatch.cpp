#include "dispatch.h"

#include <cstdlib>
#include <string_view>

namespace syncbn::cpu {
namespace {

const Kernels& choose_kernels() {
#ifdef SYNCBN_CPU_DISPATCH
  const char* variable = std::getenv("SYNCBN_CPU_CAPABILITY");
  const std::string_view limit = variable == nullptr ? "" : variable;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && limit != "avx2" && limit != "default") {
    return kernels_avx512;
  }
  if (avx2 && limit != "default") {
    return kernels_avx2;
  }
#endif
  return kernels_default;
}

}  // namespace

const TypeKernels& kernels_for(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  static const Kernels& kernels = choose_kernels();
  switch (dtype) {
    case ScalarType::Double:
      return kernels.float64;
    case ScalarType::Half:
      return kernels.float16;
    case ScalarType::BFloat16:
      return kernels.bfloat16;
    default:
      return kernels.float32;
  }
}

}  // namespace syncbn::cpu
