// Statistics of a batch: float64 [2C + 1], the sum and the sum of squares of each channel and the
// count of values a channel. One pass over x, nothing else of size.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs. Each thread
//   1. sums x - p and (x - p)^2 in float32 (float64 for float64 input) over some hundred values,
//      the pivot p being the median of three of these values themselves, so that neither a large
//      mean nor a lone outlier cancels digits;
//   2. moves these sums to the channel's first value P and adds them up in float64 (rebase). An
//      outlier P is at most sqrt(n) standard deviations away, which float64 has room for.
// All threads of a channel share P, so their sums only need adding (reduce.cuh). The last block of
// a channel moves the totals to pivot 0 and writes the message.
//
// Ioffe & Szegedy 2015, algorithm 1; shifted sums as in Chan, Golub & LeVeque 1983, section 3.
#pragma once

#include "reduce.cuh"
#include "walk.cuh"

namespace syncbn {

template <typename acc_t>
__device__ __forceinline__ acc_t median(acc_t a, acc_t b, acc_t c) {
  const acc_t low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c < high ? c : high;
}

// Sums up to kFlushValues values of each of the thread's channels, and adds that to `sums`.
template <typename scalar_t, bool kChannelsLast, int kVec, int kAcc>
__device__ __forceinline__ void add_chunk(const scalar_t* __restrict__ input, int64_t numel,
                                          const Pack<scalar_t, kAcc>& origin /* P */,
                                          Walk<kChannelsLast, kVec, Order::kForward>& walk,
                                          Sums (&sums)[kAcc] /* about P */) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kUnroll = 4, kPacks = kFlushValues / (kVec / kAcc);
  Pack<scalar_t, kAcc> own;
  own.load(input + walk.here());
  acc_t pivot[kAcc], sum[kAcc] = {}, sumsq[kAcc] = {};
  int count = 0;
  for (int i = 0; i < kPacks && walk.more(); i += kUnroll) {
    Span<kChannelsLast, kVec> at[kUnroll];
    Pack<scalar_t, kVec> x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      at[u] = walk.next();
      x[u].load(input, at[u], numel);
    }
#pragma unroll
    for (int a = 0; a < kAcc && i == 0; ++a) {
      // Of three packs, or else of the only one.
      const scalar_t first = own.values[a];
      const bool alone = !kChannelsLast && at[0].full();
      const scalar_t middle = alone ? x[0].values[kVec / 2] : first;
      const scalar_t last = alone ? x[0].values[kVec - 1] : first;
      pivot[a] =
          median(static_cast<acc_t>(first), static_cast<acc_t>(x[1].sample(at[1], a, middle)),
                 static_cast<acc_t>(x[2].sample(at[2], a, last)));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at[u].end == 0) {
        continue;
      }
      x[u].mask(at[u], static_cast<scalar_t>(pivot[0]));  // neighbour's values count as pivots
      count += at[u].count();
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int a = kAcc == 1 ? 0 : e;
        const acc_t delta = static_cast<acc_t>(x[u].values[e]) - pivot[a];
        sum[a] += delta;
        sumsq[a] += delta * delta;
      }
    }
  }
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    const double delta = static_cast<double>(pivot[a]) - static_cast<acc_t>(origin.values[a]);
    add(sums[a], rebase(count, sum[a], sumsq[a], delta));
  }
}

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<kChannelsLast ? kVec : 1>)
    stats_kernel(const scalar_t* __restrict__ input,  // [N, C, S] or [M, C]
                 double* __restrict__ stats,          // [2C + 1]
                 WalkPlan plan, TreePlan tree, Workspace workspace) {
  constexpr int kAcc = kChannelsLast ? kVec : 1;
  SYNCBN_SHARED(Sums, shared, kMaxThreads / kWarpSize * (kChannelsLast ? kMaxTile : 1));

  Walk<kChannelsLast, kVec, Order::kForward> walk(plan, blockIdx.x);
  Sums sums[kAcc] = {};
  if (walk.more()) {
    Pack<scalar_t, kAcc> origin;
    origin.load(input + walk.channel() * plan.S);
    do {
      add_chunk(input, plan.numel, origin, walk, sums);
    } while (walk.more());
  }
  if (!reduce_blocks(sums, plan, tree, workspace, walk.tile(), walk.split(), shared)) {
    return;
  }
  const int tile = plan.lanes * kAcc;
  for (int t = threadIdx.x; t < tile; t += blockDim.x) {
    const int64_t c = static_cast<int64_t>(walk.tile()) * tile + t;
    if (c < plan.C) {
      const double origin = static_cast<acc_type<scalar_t>>(input[c * plan.S]);
      const Sums raw = rebase(plan.count, shared[t].first, shared[t].second, origin);
      stats[c] = raw.first;
      stats[plan.C + c] = raw.second;
    }
  }
  if (walk.tile() == 0 && threadIdx.x == 0) {
    stats[2 * plan.C] = plan.count;
  }
}

}  // namespace syncbn
