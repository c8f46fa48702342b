// Sums over the threads of a block and over the blocks of a tile, in a fixed order and without
// floating-point atomics, so that two runs give the same bits.
//
// Every thread brings kAcc sums, one for each of its channels, in float64 and about a pivot that
// all threads of a channel share. Then combining is plain addition: exact as the (count, mean, M2)
// of Chan, Golub & LeVeque 1983, and without their divisions. Three stages:
//
//   warp     shuffles over the lanes that stand over the same channels
//   block    one row of sums a warp through shared memory, added in the order of the warps
//   blocks   a tree: of `fan` blocks the last to arrive adds up the partial sums of all
#pragma once

#include "../statistics.h"
#include "plan.h"
#include "platform.h"

namespace syncbn {

// What a thread adds up: the sum of a batch at a time, and what the additions' roundings lose, so
// that some hundred values are as good as added in float64. (A plain sum of squares loses more than
// random roundings would, all to the same side, where the values lie on a grid as those far from 0
// do.) Of 16-bit values a plain sum is exact enough, and registers are scarce.
template <typename scalar_t>
class Total {
  using acc_t = acc_type<scalar_t>;

 public:
  __device__ __forceinline__ void operator+=(acc_t part) {
    const acc_t next = sum_ + part;
    if constexpr (kExact) {
      lost_ += part - (next - sum_);
    }
    sum_ = next;
  }

  __device__ __forceinline__ double value() const {
    // What an infinite sum has lost is no part of it.
    return kExact && lost_ - lost_ == 0 ? static_cast<double>(sum_) + lost_ : sum_;
  }

 private:
  static constexpr bool kExact = sizeof(scalar_t) > 2;
  acc_t sum_ = 0, lost_ = 0;
};

struct Workspace {
  Sums* partials = nullptr;      // [tiles, TreePlan::partials, tile]; unset
  unsigned* counters = nullptr;  // [tiles, TreePlan::counters]; zero, and zero again afterwards
};

// Partial sums cross from block to block, so they bypass the L1. These two are the only way.
__device__ __forceinline__ void store_partial(Sums* target, const Sums& sums) {
  __stcg(reinterpret_cast<double2*>(target), make_double2(sums.first, sums.second));
}

__device__ __forceinline__ Sums load_partial(const Sums* source) {
  const double2 word = __ldcg(reinterpret_cast<const double2*>(source));
  return {word.x, word.y};
}

__device__ __forceinline__ void add(Sums& to, const Sums& sums) {
  to.first += sums.first;
  to.second += sums.second;
}

// Sums of one tile over a block. `lanes` threads stand side by side, kAcc channels each. The total
// of channel c is left in shared[c] for thread c % blockDim.x, which made it: no barrier follows.
template <int kAcc>
__device__ __forceinline__ void reduce_block(Sums (&sums)[kAcc], int lanes,
                                             Sums* shared /* [warps, lanes * kAcc] */) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int tile = lanes * kAcc;
  for (int offset = kWarpSize / 2; offset >= lanes; offset /= 2) {
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      add(sums[a], {__shfl_xor_sync(0xffffffffu, sums[a].first, offset),
                    __shfl_xor_sync(0xffffffffu, sums[a].second, offset)});
    }
  }
  if (lane < lanes) {
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      shared[warp * tile + lane * kAcc + a] = sums[a];
    }
  }
  __syncthreads();
  const int warps = blockDim.x / kWarpSize;
  for (int c = threadIdx.x; c < tile; c += blockDim.x) {
    for (int w = 1; w < warps; ++w) {
      add(shared[c], shared[w * tile + c]);
    }
  }
}

// Whether this block is the last of the `size` blocks of a node to arrive, all of whose partial
// sums it may then read. The counter wraps back to 0.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned size) {
  SYNCBN_SHARED(bool, last, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *last = atomicInc(counter, size - 1) == size - 1;
    __threadfence();
  }
  __syncthreads();
  return *last;
}

// Sums of one tile over all its blocks. True in the one block that has the totals, left as above.
template <int kAcc>
__device__ __forceinline__ bool reduce_blocks(Sums (&sums)[kAcc], const WalkPlan& walk,
                                              const TreePlan& tree, const Workspace& workspace,
                                              int tile, int split,
                                              Sums* shared /* [warps, lanes * kAcc] */) {
  const int channels = walk.lanes * kAcc;
  Sums* level = workspace.partials + static_cast<int64_t>(tile) * tree.partials * channels;
  unsigned* counters = workspace.counters + static_cast<int64_t>(tile) * tree.counters;
  reduce_block(sums, walk.lanes, shared);
  for (int nodes = walk.splits, node = split; nodes > 1;) {
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
      store_partial(level + node * channels + c, shared[c]);
    }
    const int parent = node / tree.fan;
    const int begin = parent * tree.fan, end = min(begin + tree.fan, nodes);
    if (!last_to_arrive(counters + parent, end - begin)) {
      return false;
    }
#pragma unroll
    for (int a = 0; a < kAcc; ++a) {
      sums[a] = {};
    }
    const int lane = threadIdx.x % walk.lanes, abreast = blockDim.x / walk.lanes;
    for (int n = begin + threadIdx.x / walk.lanes; n < end; n += abreast) {
#pragma unroll
      for (int a = 0; a < kAcc; ++a) {
        add(sums[a], load_partial(level + n * channels + lane * kAcc + a));
      }
    }
    reduce_block(sums, walk.lanes, shared);
    level += static_cast<int64_t>(nodes) * channels;
    nodes = (nodes + tree.fan - 1) / tree.fan;
    counters += nodes;
    node = parent;
  }
  return true;
}

// Calls write(channel, place in the tile, sums) for each channel of a tile, with the totals that
// the tile's columns have in shared: where rows are folded (plan.h) there are several of each
// channel.
template <typename Write>
__device__ __forceinline__ void fold_columns(const WalkPlan& plan, int tile, int columns,
                                             const Sums* shared /* [columns] */,
                                             const Write& write) {
  __syncthreads();
  for (int t = threadIdx.x; t < columns; t += blockDim.x) {
    const int64_t c = static_cast<int64_t>(tile) * columns + t;
    if (c < plan.C) {
      Sums total = shared[t];
      for (int64_t column = c + plan.C; column < plan.columns; column += plan.C) {
        add(total, shared[column]);
      }
      write(c, t, total);
    }
  }
}

}  // namespace syncbn
