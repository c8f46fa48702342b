// First half of backward: float64 [2C], the sums of dy and of dy * (x - mean), and this rank's
// gradients of weight and bias from the same sums. One pass over x and dy.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs. Each thread adds up
// some hundred values in float32 (float64 for float64 input), then empties that into float64. x is
// centred by the mean as a float32 pair (statistics.h), so a large mean cancels nothing. The last
// block of a channel writes the results.
//
// Ioffe & Szegedy 2015, section 3: grad bias = sum dy, grad weight = sum dy * (x - mean) * invstd.
#pragma once

#include "reduce.cuh"
#include "walk.cuh"

namespace syncbn {

// Sums up to kFlushValues values of each of the thread's channels, and adds that to `total`.
template <typename scalar_t, bool kChannelsLast, int kVec, int kAcc>
__device__ __forceinline__ void add_chunk(const scalar_t* __restrict__ grad_out,
                                          const scalar_t* __restrict__ input, int64_t numel,
                                          const ChannelStats<acc_type<scalar_t>> (&channel)[kAcc],
                                          Walk<kChannelsLast, kVec, Order::kForward>& walk,
                                          Sums (&total)[kAcc]) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kUnroll = 2, kPacks = kFlushValues / (kVec / kAcc);
  const scalar_t zero = static_cast<scalar_t>(acc_t{0});
  acc_t sum_dy[kAcc] = {}, sum_dy_xmu[kAcc] = {};
  for (int i = 0; i < kPacks && walk.more(); i += kUnroll) {
    Span<kChannelsLast, kVec> at[kUnroll];
    Pack<scalar_t, kVec> dy[kUnroll], x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      at[u] = walk.next();
      dy[u].load(grad_out, at[u], numel);
      x[u].load(input, at[u], numel);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at[u].end == 0) {
        continue;
      }
      dy[u].mask(at[u], zero);
      x[u].mask(at[u], zero);  // a neighbour's infinity times 0 would be NaN
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int a = kAcc == 1 ? 0 : e;
        const acc_t grad = static_cast<acc_t>(dy[u].values[e]);
        sum_dy[a] += grad;
        sum_dy_xmu[a] += grad * channel[a].centre(static_cast<acc_t>(x[u].values[e]));
      }
    }
  }
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    add(total[a], {sum_dy[a], sum_dy_xmu[a]});
  }
}

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kChannelsLast ? kVec : 1>)
    backward_reduce_kernel(const scalar_t* __restrict__ grad_out,  // [N, C, S] or [M, C]
                           const scalar_t* __restrict__ input,     // as grad_out
                           const double* __restrict__ stats,       // [2C + 1]
                           double eps,
                           double* __restrict__ sums,  // [2C]
                           ChannelVector grad_weight, ChannelVector grad_bias, WalkPlan plan,
                           TreePlan tree, Workspace workspace) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kAcc = kChannelsLast ? kVec : 1, kTile = kChannelsLast ? kMaxTile : 1;
  SYNCBN_SHARED(Sums, shared, kMaxThreads / kWarpSize * kTile);
  SYNCBN_SHARED(ChannelStats<acc_t>, shared_stats, kTile);

  Walk<kChannelsLast, kVec, Order::kForward> walk(plan, blockIdx.x);
  const int tile = plan.lanes * kAcc;
  const int64_t first_channel = static_cast<int64_t>(walk.tile()) * tile;
  for (int t = threadIdx.x; t < tile; t += blockDim.x) {
    if (first_channel + t < plan.C) {
      shared_stats[t] = channel_stats<acc_t>(stats, plan.C, first_channel + t, eps);
    }
  }
  __syncthreads();
  ChannelStats<acc_t> channel[kAcc];
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    channel[a] = shared_stats[threadIdx.x % plan.lanes * kAcc + a];
  }

  Sums total[kAcc] = {};
  while (walk.more()) {
    add_chunk(grad_out, input, plan.numel, channel, walk, total);
  }
  if (!reduce_blocks(total, plan, tree, workspace, walk.tile(), walk.split(), shared)) {
    return;
  }
  for (int t = threadIdx.x; t < tile; t += blockDim.x) {
    const int64_t c = first_channel + t;
    if (c < plan.C) {
      sums[c] = shared[t].first;
      sums[plan.C + c] = shared[t].second;
      grad_weight.store(c, shared[t].second * shared_stats[t].invstd);
      grad_bias.store(c, shared[t].first);
    }
  }
}

}  // namespace syncbn
