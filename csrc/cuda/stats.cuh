// Statistics of a batch: float64 [2C + 1], the sum and the sum of squares of each channel and the
// count of values a channel. One pass over x, nothing else of size.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs. Each thread
//   1. sums x - p and (x - p)^2 in float32 (float64 for float64 input) over some hundred values,
//      the pivot p being the median of three of these values themselves, so that neither a large
//      mean nor a lone outlier cancels digits;
//   2. moves these sums to the channel's origin P, the median of its first, middle and last value
//      (load_origin has an exception), and adds them up in float64 (rebase).
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

// The origin P of kAcc channels side by side.
template <bool kChannelsLast, int kAcc, typename scalar_t>
__device__ __forceinline__ Pack<scalar_t, kAcc> load_origin(const scalar_t* input,
                                                            const WalkPlan& plan, int64_t channel) {
  using acc_t = acc_type<scalar_t>;
  Pack<scalar_t, kAcc> first, middle, last;
  const scalar_t* const begin = input + channel * plan.S;
  first.load(begin);
  // Registers are scarce where a thread has many channels. There the first value has to do: an
  // outlier is at most sqrt(n) standard deviations away, and float64 has room for that as long as
  // the input is narrower.
  if constexpr (!kChannelsLast || std::is_same_v<scalar_t, double>) {
    middle.load(begin + plan.rows / 2 * plan.row_stride + plan.S / 2);
    last.load(begin + (plan.rows - 1) * plan.row_stride + plan.S - 1);
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      const acc_t P =
          median(static_cast<acc_t>(first.values[a]), static_cast<acc_t>(middle.values[a]),
                 static_cast<acc_t>(last.values[a]));
      first.values[a] = static_cast<scalar_t>(P);  // exactly: it is one of the three
    }
  }
  return first;
}

// Sums up to kFlushValues values of each of the thread's channels, and adds that to `sums`.
template <typename scalar_t, bool kChannelsLast, int kVec, int kAcc>
__device__ __forceinline__ void add_chunk(const scalar_t* __restrict__ input, int64_t numel,
                                          const Pack<scalar_t, kAcc>& origin /* P */,
                                          Walk<kChannelsLast, kVec, Order::kForward>& walk,
                                          Sums (&sums)[kAcc] /* about P */) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kUnroll = 4, kPacks = kFlushValues / (kVec / kAcc);
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
      // Where the thread has fewer packs, or those are shared with neighbours.
      const scalar_t other = kChannelsLast ? x[0].values[a] : origin.values[a];
      pivot[a] = median(static_cast<acc_t>(x[0].sample(at[0], a, other)),
                        static_cast<acc_t>(x[1].sample(at[1], a, other)),
                        static_cast<acc_t>(x[2].sample(at[2], a, other)));
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
    const auto origin = load_origin<kChannelsLast, kAcc>(input, plan, walk.channel());
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
      const double origin =
          static_cast<acc_type<scalar_t>>(load_origin<kChannelsLast, 1>(input, plan, c).values[0]);
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
