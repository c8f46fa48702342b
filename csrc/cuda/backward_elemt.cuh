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
#include "walk.cuh"

namespace syncbn {

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kChannelsLast ? kVec : 1>)
    backward_elemt_kernel(const scalar_t* __restrict__ grad_out,  // [N, C, S] or [M, C]
                          const scalar_t* __restrict__ input,     // as grad_out
                          scalar_t* __restrict__ grad_input,      // as grad_out
                          const double* __restrict__ stats,       // [2C + 1]
                          const double* __restrict__ sums,        // [2C]
                          ChannelVector weight, double eps, WalkPlan plan, bool streaming) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kUnroll = 2, kAcc = kChannelsLast ? kVec : 1;
  SYNCBN_SHARED(InputGrad<acc_t>, shared, kChannelsLast ? kMaxTile : 1);

  Walk<kChannelsLast, kVec, Order::kReverse> walk(plan, blockIdx.x);
  const int tile = plan.lanes * kAcc;
  for (int t = threadIdx.x; t < tile; t += blockDim.x) {
    const int64_t c = static_cast<int64_t>(walk.tile()) * tile + t;
    if (c < plan.C) {
      shared[t] = input_grad<acc_t>(stats, sums, plan.C, c, eps, weight);
    }
  }
  __syncthreads();
  InputGrad<acc_t> gradient[kAcc];
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    gradient[a] = shared[threadIdx.x % plan.lanes * kAcc + a];
  }

  while (walk.more()) {
    Span<kChannelsLast, kVec> at[kUnroll];
    Pack<scalar_t, kVec> dy[kUnroll], x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      at[u] = walk.next();
      dy[u].load(grad_out, at[u], plan.numel);
      x[u].load(input, at[u], plan.numel);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const acc_t dx = gradient[kChannelsLast ? e : 0](static_cast<acc_t>(dy[u].values[e]),
                                                         static_cast<acc_t>(x[u].values[e]));
        dy[u].values[e] = static_cast<scalar_t>(dx);
      }
      dy[u].store(grad_input, at[u], streaming);
    }
  }
}

}  // namespace syncbn
