// First half of backward: float64 [2C], the sums of dy and of dy * (x - mean), and this rank's
// gradients of weight and bias from the same sums. One pass over x and dy.
//
// Layouts: [N, C, S] and [M, C]; plan.h shows which thread visits which packs. Each thread adds up
// at most some hundred values a channel in float32 (float64 for float64 input), all else is in
// float64. x is centred by the mean as a float32 pair (statistics.h), so a large mean cancels
// nothing. The last block of a channel writes the results.
//
// Ioffe & Szegedy 2015, section 3: grad bias = sum dy, grad weight = sum dy * (x - mean) * invstd.
#pragma once

#include "batch.cuh"
#include "reduce.cuh"

namespace syncbn {

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<scalar_t>)
    backward_reduce_kernel(const scalar_t* __restrict__ grad_out,  // [N, C, S] or [M, C]
                           const scalar_t* __restrict__ input,     // as grad_out
                           const double* __restrict__ stats,       // [4C + 1]
                           double eps,
                           double* __restrict__ sums,  // [2C]
                           ChannelVector grad_weight, ChannelVector grad_bias, WalkPlan plan,
                           TreePlan tree, Workspace workspace) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kAcc = kChannelsLast ? kVec : 1, kTile = kChannelsLast ? kMaxTile : 1;
  SYNCBN_SHARED(Sums, shared, kMaxThreads / kWarpSize * kTile);
  SYNCBN_SHARED(ChannelStats<acc_t>, shared_stats, kTile);

  Walk<kChannelsLast, kVec, Order::kForward> walk(plan, blockIdx.x);
  Batch<Step::kReduce, scalar_t, kChannelsLast, kVec, 2> batch;
  batch.load(walk, {grad_out, input});
  ChannelStats<acc_t> channel[kAcc];
  const auto make = [&](int64_t c) { return channel_stats<acc_t>(stats, plan.C, c, eps); };
  derive(plan, walk.tile(), make, shared_stats, channel);

  const scalar_t zero = static_cast<scalar_t>(acc_t{0});
  Total<scalar_t> total_dy[kAcc], total_dy_xmu[kAcc];
  while (true) {
    auto& [dy, x] = batch.packs;
    acc_t sum_dy[kAcc] = {}, sum_dy_xmu[kAcc] = {};
#pragma unroll
    for (int i = 0; i < batch.kPacks; ++i) {
      if (kChannelsLast && !batch.at[i].any()) {
        continue;
      }
      dy[i].mask(batch.at[i], zero);
      x[i].mask(batch.at[i], zero);  // a neighbour's infinity times 0 would be NaN
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const int a = kAcc == 1 ? 0 : e;
        const acc_t grad = static_cast<acc_t>(dy[i].values[e]);
        sum_dy[a] += grad;
        sum_dy_xmu[a] += grad * channel[a].centre(static_cast<acc_t>(x[i].values[e]));
      }
    }
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      total_dy[a] += sum_dy[a];
      total_dy_xmu[a] += sum_dy_xmu[a];
    }
    if (!walk.more()) {
      break;
    }
    batch.load(walk, {grad_out, input});
  }

  Sums total[kAcc];
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    total[a] = {total_dy[a].value(), total_dy_xmu[a].value()};
  }
  if (!reduce_blocks(total, plan, tree, workspace, walk.tile(), walk.split(), shared)) {
    return;
  }
  fold_columns(plan, walk.tile(), plan.lanes * kAcc, shared, [&](int64_t c, int t, Sums sum) {
    sums[c] = sum.first;
    sums[plan.C + c] = sum.second;
    grad_weight.store(c, sum.second * shared_stats[t].invstd);
    grad_bias.store(c, sum.first);
  });
}

}  // namespace syncbn
