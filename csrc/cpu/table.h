// The table of one instruction set. kernels_*.cpp sets SYNCBN_CAPABILITY (the namespace) and
// SYNCBN_VECTOR_BYTES, includes every header from outside first, then this one between its target
// options.
#pragma once

#include "coefficients.h"
#include "elementwise.h"
#include "finish.h"
#include "reduce.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

template <typename scalar_t>
constexpr TypeKernels type_kernels() {
  using acc_t = acc_of<scalar_t>;
  return {kPack<scalar_t>,
          4 * kVec<acc_t>,
          &reduce<Stats<scalar_t>, scalar_t>,
          &apply<Elemt<scalar_t>, scalar_t>,
          &reduce<BackwardReduce<scalar_t>, scalar_t>,
          &apply<BackwardElemt<scalar_t>, scalar_t>,
          &elemt_coefficients<acc_t>,
          &centre_coefficients<acc_t>,
          &backward_elemt_coefficients<acc_t>,
          &finish_stats,
          &update_running,
          &finish_backward<acc_t>};
}

constexpr Kernels table() {
  return {type_kernels<double>(), type_kernels<float>(), type_kernels<c10::Half>(),
          type_kernels<c10::BFloat16>()};
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
