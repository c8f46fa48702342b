// Normalise: y = (x - mean) * invstd * weight + bias from the reduced message, and the running
// buffers in the same launch. One pass over x, one over y.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs, here in the reverse
// order of stats.cuh. Each block first derives the coefficients of its own channels from the
// message. The running buffers have blocks of their own, a thread a channel, as one block would be
// at work on many channels long after the others have ended. The counter has one owner, block 0;
// where its value counts, that block owns all, so no block reads what another advances.
//
// Ioffe & Szegedy 2015, algorithm 1.
#pragma once

#include "../statistics.h"
#include "batch.cuh"

namespace syncbn {

// How many blocks own the running buffers: the first ones of the launch.
inline int64_t running_blocks(const Running& running, int64_t C, int threads) {
  return !running.present() ? 0 : running.cumulative ? 1 : detail::ceil_div(C, threads);
}

// Global count 0: nothing happens. Nor with skip_nonfinite, if any channel cannot be held: each
// block looks at all of them.
__device__ __forceinline__ void update_running(const Running& running,
                                               const double* stats /* [4C + 1] */, int64_t C,
                                               unsigned owners) {
  if (!(message_count(stats, C) > 0)) {
    return;
  }
  if (running.skip_nonfinite) {
    bool held = true;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
      held = held && running.holds(stats, C, c);
    }
    if (__syncthreads_or(!held)) {
      return;
    }
  }
  const double factor = running.factor();
  const unsigned first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t c = first; c < C; c += owners * blockDim.x) {
    running.update(stats, C, c, factor);
  }
  __syncthreads();  // all have read the counter
  if (first == 0 && running.num_batches_tracked != nullptr) {
    *running.num_batches_tracked += 1;
  }
}

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<scalar_t>)
    elemt_kernel(const scalar_t* __restrict__ input,  // [N, C, S] or [M, C]
                 scalar_t* __restrict__ output,       // as input
                 const double* __restrict__ stats,    // [4C + 1]
                 ChannelVector weight, ChannelVector bias, double eps, Running running,
                 unsigned owners /* of running */, WalkPlan plan, bool streaming) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kAcc = kChannelsLast ? kVec : 1;
  SYNCBN_SHARED(Affine<acc_t>, shared, kChannelsLast ? kMaxTile : 1);

  if (blockIdx.x < owners) {
    update_running(running, stats, plan.C, owners);
    return;
  }
  Walk<kChannelsLast, kVec, Order::kReverse> walk(plan, blockIdx.x - owners);
  Batch<Step::kWrite, scalar_t, kChannelsLast, kVec, 1> batch;
  batch.load(walk, {input});
  Affine<acc_t> normalise[kAcc];
  const auto make = [&](int64_t c) { return affine<acc_t>(stats, plan.C, c, eps, weight, bias); };
  derive(plan, walk.tile(), make, shared, normalise);

  while (true) {
    auto& x = batch.packs[0];
#pragma unroll
    for (int i = 0; i < batch.kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const acc_t y = normalise[kChannelsLast ? e : 0](static_cast<acc_t>(x[i].values[e]));
        x[i].values[e] = static_cast<scalar_t>(y);
      }
      x[i].store(output, batch.at[i], streaming);
    }
    if (!walk.more()) {
      return;
    }
    batch.load(walk, {input});
  }
}

}  // namespace syncbn
