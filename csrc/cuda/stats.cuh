// Statistics of a batch: the message of message.h, of each channel the sum and the sum of squares
// and the count of values. One pass over x, nothing else of size.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs. Each thread
//   1. sums x - p and (x - p)^2 in float32 (float64 for float64 input) over at most some hundred
//      values, the pivot p being the median of three of these values themselves, so that neither a
//      large mean nor a lone outlier cancels digits;
//   2. moves these sums in float64 to the column's origin P, the median of its first, middle and
//      last value (Origin has an exception).
// All threads of a column share P, so their sums only need adding (reduce.cuh). The last block of
// a channel writes the totals into the message.
//
// Ioffe & Szegedy 2015, algorithm 1; shifted sums as in Chan, Golub & LeVeque 1983, section 3.
#pragma once

#include "batch.cuh"
#include "reduce.cuh"

namespace syncbn {

// What differences are taken from: 0 rather than an infinity, which would leave NaN of infinity.
template <typename acc_t>
__device__ __forceinline__ acc_t finite(acc_t value) {
  return value - value == 0 ? value : acc_t{0};
}

template <typename acc_t>
__device__ __forceinline__ acc_t median(acc_t a, acc_t b, acc_t c) {
  const acc_t low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c < high ? c : high;
}

// The origin P of kAcc columns side by side. It is loaded before the values and computed after, so
// that both wait for memory but once.
template <typename scalar_t, bool kChannelsLast, int kAcc>
struct Origin {
  using acc_t = acc_type<scalar_t>;
  // Registers are scarce where a thread has many channels. There the first value has to do: an
  // outlier is at most sqrt(n) standard deviations away, and float64 has room for that as long as
  // the input is narrower.
  static constexpr bool kMedian = !kChannelsLast || std::is_same_v<scalar_t, double>;

  Pack<scalar_t, kAcc> first, middle, last;

  __device__ __forceinline__ Origin(const scalar_t* input, const WalkPlan& plan, int64_t column) {
    const scalar_t* const begin = input + column * plan.S;
    first.load(begin);
    if constexpr (kMedian) {
      middle.load(begin + plan.rows / 2 * plan.row_stride + plan.S / 2);
      last.load(begin + (plan.rows - 1) * plan.row_stride + plan.S - 1);
    }
  }

  __device__ __forceinline__ acc_t operator()(int a) const {
    const acc_t value = first.values[a];
    if constexpr (kMedian) {
      return finite(
          median(value, static_cast<acc_t>(middle.values[a]), static_cast<acc_t>(last.values[a])));
    }
    return finite(value);
  }
};

// The sums of all of the thread's values about the origins P of their columns.
template <typename scalar_t, bool kChannelsLast, int kVec, int kAcc>
__device__ __forceinline__ void add_up(const scalar_t* __restrict__ input, const WalkPlan& plan,
                                       Walk<kChannelsLast, kVec, Order::kForward>& walk,
                                       Sums (&sums)[kAcc] /* about P */) {
  using acc_t = acc_type<scalar_t>;
  Batch<Step::kReduce, scalar_t, kChannelsLast, kVec, 1> batch;
  auto& x = batch.packs[0];
  batch.load(walk, {input});
  const Origin<scalar_t, kChannelsLast, kAcc> origin(input, plan, walk.column());
  acc_t pivot[kAcc];
  Total<scalar_t> total[kAcc], total_sq[kAcc];
  int count = 0;
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    // Where the thread has fewer packs, or those are shared with neighbours.
    const acc_t other = kChannelsLast ? static_cast<acc_t>(x[0].values[a]) : origin(a);
    const auto sample = [&](int i) { return x[i].sample(batch.at[i], a, other); };
    pivot[a] = finite(median(sample(0), sample(1), sample(2)));
  }
  while (true) {
    acc_t sum[kAcc] = {}, sumsq[kAcc] = {};
#pragma unroll
    for (int i = 0; i < batch.kPacks; ++i) {
      if (kChannelsLast && !batch.at[i].any()) {
        continue;
      }
      count += batch.at[i].count();
      // What is not the channel's own becomes the pivot.
      x[i].mask(batch.at[i], static_cast<scalar_t>(pivot[0]));
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int a = kAcc == 1 ? 0 : e;
        const acc_t delta = static_cast<acc_t>(x[i].values[e]) - pivot[a];
        sum[a] += delta;
        sumsq[a] += delta * delta;
      }
    }
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      total[a] += sum[a];
      total_sq[a] += sumsq[a];
    }
    if (!walk.more()) {
      break;
    }
    batch.load(walk, {input});
  }
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    const double delta = static_cast<double>(pivot[a]) - origin(a);
    sums[a] = rebase(count, total[a].value(), total_sq[a].value(), delta);
  }
}

// Blackwell adds two float32 at once, which takes more registers where a thread has many sums.
template <typename scalar_t, int kAcc>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kMinStatsBlocks = kAcc == 8 ? 2 : kMinBlocks<scalar_t>;
#else
inline constexpr int kMinStatsBlocks = kMinBlocks<scalar_t>;
#endif

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinStatsBlocks<scalar_t, kChannelsLast ? kVec : 1>)
    stats_kernel(const scalar_t* __restrict__ input,  // [N, C, S] or [M, C]
                 double* __restrict__ stats,          // [4C + 1]
                 WalkPlan plan, TreePlan tree, Workspace workspace) {
  constexpr int kAcc = kChannelsLast ? kVec : 1;
  SYNCBN_SHARED(Sums, shared, kMaxThreads / kWarpSize * (kChannelsLast ? kMaxTile : 1));

  Walk<kChannelsLast, kVec, Order::kForward> walk(plan, blockIdx.x);
  Sums sums[kAcc] = {};
  if (walk.more()) {
    add_up(input, plan, walk, sums);
  }
  if (!reduce_blocks(sums, plan, tree, workspace, walk.tile(), walk.split(), shared)) {
    return;
  }
  const int tile = plan.lanes * kAcc;
  const int64_t begin = static_cast<int64_t>(walk.tile()) * tile;
  const int64_t folds = plan.columns / plan.C;
  const auto origin = [&](int64_t column) -> double {
    return Origin<scalar_t, kChannelsLast, 1>(input, plan, column)(0);
  };
  // Columns of one channel have origins of their own: all move to that of the first.
  for (int t = threadIdx.x; folds > 1 && t < tile && begin + t < plan.columns; t += blockDim.x) {
    const double delta = origin(begin + t) - origin((begin + t) % plan.C);
    shared[t] = rebase(plan.count / folds, shared[t].first, shared[t].second, delta);
  }
  fold_columns(plan, walk.tile(), tile, shared, [&](int64_t c, int, const Sums& total) {
    write_sums(stats, plan.C, c, plan.count, origin(c), total);
  });
  if (walk.tile() == 0 && threadIdx.x == 0) {
    stats[message_size(plan.C) - 1] = plan.count;
  }
}

}  // namespace syncbn
