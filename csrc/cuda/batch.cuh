// What the four kernels have in common around their arithmetic: packs are loaded by batches, so
// that many loads are in flight, and a block first derives the constants of its channels.
//
// The first batch is loaded before the constants, whose divisions then pass while memory answers.
#pragma once

#include "walk.cuh"

namespace syncbn {

// The next packs of a thread: the same ones of each of kTensors tensors.
template <Step kStep, typename scalar_t, bool kChannelsLast, int kVec, int kTensors>
struct Batch {
  static constexpr int kPacks = batch_packs(sizeof(scalar_t) * kVec, kStep) / kTensors;

  Span<kChannelsLast, kVec> at[kPacks];
  Pack<scalar_t, kVec> packs[kTensors][kPacks];

  template <Order kOrder>
  __device__ __forceinline__ void load(Walk<kChannelsLast, kVec, kOrder>& walk,
                                       const scalar_t* const (&tensors)[kTensors]) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      at[i] = walk.next();
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        packs[t][i].load(tensors[t], at[i]);
      }
    }
  }
};

// Calls make(channel) once for each channel of a tile and hands each thread those of its columns.
// Channel c's lies in shared[c - first channel] from then on.
template <int kAcc, typename T, typename Make>
__device__ __forceinline__ void derive(const WalkPlan& plan, int tile, const Make& make,
                                       T* shared /* [kMaxTile] */, T (&mine)[kAcc]) {
  const unsigned span = plan.span, columns = plan.lanes * kAcc, begin = tile * columns;
  const unsigned end = min(begin + columns, static_cast<unsigned>(plan.columns));
  const unsigned first = begin / span, channels = (end - 1) / span - first + 1;
  for (unsigned t = threadIdx.x; t < channels; t += blockDim.x) {
    shared[t] = make((first + t) % static_cast<unsigned>(plan.C));
  }
  __syncthreads();
  const unsigned column = begin + threadIdx.x % plan.lanes * kAcc;
  unsigned at = column / span - first, left = span - column % span;
#pragma unroll
  for (int a = 0; a < kAcc; ++a) {
    mine[a] = shared[min(at, channels - 1)];  // some lanes stand past the last column
    at += --left == 0;
    left = left == 0 ? span : left;
  }
}

}  // namespace syncbn
