// Second half of backward: dx = ((dy - sum_dy / count) - (x - mean) * slope) * invstd * weight from
// the reduced message of forward and the reduced sums of backward_reduce.cuh. One pass over x, dy
// and dx.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs, here in the reverse
// order of backward_reduce.cuh. Each block first derives the coefficients of its own channels.
//
// Ioffe & Szegedy 2015, section 3, solved for dx.
#pragma once

#include "../statistics.h"
#include "batch.cuh"

namespace syncbn {

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<scalar_t>)
    backward_elemt_kernel(const scalar_t* __restrict__ grad_out,  // [N, C, S] or [M, C]
                          const scalar_t* __restrict__ input,     // as grad_out
                          scalar_t* __restrict__ grad_input,      // as grad_out
                          const double* __restrict__ stats,       // [4C + 1]
                          const double* __restrict__ sums,        // [2C]
                          ChannelVector weight, double eps, WalkPlan plan, bool streaming) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kAcc = kChannelsLast ? kVec : 1;
  SYNCBN_SHARED(InputGrad<acc_t>, shared, kChannelsLast ? kMaxTile : 1);

  Walk<kChannelsLast, kVec, Order::kReverse> walk(plan, blockIdx.x);
  Batch<Step::kWrite, scalar_t, kChannelsLast, kVec, 2> batch;
  batch.load(walk, {grad_out, input});
  InputGrad<acc_t> gradient[kAcc];
  const auto make = [&](int64_t c) {
    return input_grad<acc_t>(stats, sums, plan.C, c, eps, weight);
  };
  derive(plan, walk.tile(), make, shared, gradient);

  while (true) {
    auto& [dy, x] = batch.packs;
#pragma unroll
    for (int i = 0; i < batch.kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const acc_t dx = gradient[kChannelsLast ? e : 0](static_cast<acc_t>(dy[i].values[e]),
                                                         static_cast<acc_t>(x[i].values[e]));
        dy[i].values[e] = static_cast<scalar_t>(dx);
      }
      dy[i].store(grad_input, batch.at[i], streaming);
    }
    if (!walk.more()) {
      return;
    }
    batch.load(walk, {grad_out, input});
  }
}

}  // namespace syncbn
