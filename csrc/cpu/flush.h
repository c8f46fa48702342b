// From the lanes of a tile to the float64 sums of its channels. A lane's sums are moved from its
// own pivot to the channel's, then added in an order that the shape alone fixes. Out of line and on
// plain arrays, as it runs once in some hundred rows.
#pragma once

#include "../statistics.h"
#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// What the lanes of a tile hold when they are flushed.
template <typename acc_t>
struct LaneSums {
  alignas(64) acc_t pivot[kLanes<acc_t>];
  alignas(64) acc_t first[kLanes<acc_t>];
  alignas(64) acc_t second[kLanes<acc_t>];
};

// 1 for each lane that takes part in a tail, 0 for the others.
template <typename acc_t>
struct Tail {
  alignas(64) acc_t weight[kLanes<acc_t>] = {};

  SYNCBN_INLINE void add(int64_t begin, int64_t end) {
    for (int64_t l = begin; l < end; ++l) {
      weight[l] = 1;
    }
  }
};

// The sum of n neighbouring values, in an order that n alone fixes.
SYNCBN_INLINE double sum_run(const double* values, int64_t n) {
  Vec<double> vector{};
  int64_t l = 0;
  for (; l + kVec<double> <= n; l += kVec<double>) {
    vector += load(values + l);
  }
  double sum = 0;
  for (; l < n; ++l) {
    sum += values[l];
  }
  if (n >= kVec<double>) {
    for (int i = 0; i < kVec<double>; ++i) {
      sum += vector[i];
    }
  }
  return sum;
}

// Adds the lanes to the sums of their channels.
template <typename acc_t>
SYNCBN_INLINE void gather(const Tile<acc_t>& tile, const double* lanes, double* sums /* [C] */) {
  sums += tile.channel;
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    if (tile.run == 1) {
      for (int64_t c = 0; c < tile.channels; ++c) {
        sums[c] += lanes[c];
      }
      lanes += tile.channels;
      continue;
    }
    for (int64_t c = 0; c < tile.channels; ++c, lanes += tile.run) {
      sums[c] += sum_run(lanes, tile.run);
    }
  }
}

// Flushes the lanes, each of which has added `rows` values and, where it is in the tail, `tails`
// more, to `partial`: [3, C] with pivot, [2, C] without. The first flush sets the pivots.
template <typename acc_t, bool kPivot>
__attribute__((noinline)) void flush(const Tile<acc_t>& tile, const LaneSums<acc_t>& lanes,
                                     double rows, double tails, const Tail<acc_t>& tail, bool first,
                                     double* partial, int64_t C) {
  double* sums = partial + (kPivot ? C : 0);
  if (first) {
    for (int64_t c = tile.channel; c < tile.channel + tile.channels; ++c) {
      if (kPivot) {
        partial[c] = lanes.pivot[(c - tile.channel) * tile.run];
      }
      sums[c] = sums[C + c] = 0;
    }
  }
  alignas(64) double sum[kLanes<acc_t>], second[kLanes<acc_t>];
  if (kPivot) {
    alignas(64) double buffer[kLanes<acc_t> + kVec<acc_t>];
    const double* pivot = partial + tile.channel;
    if (!tile.direct()) {
      spread(tile, static_cast<const double*>(partial), buffer);
      pivot = buffer;
    }
    for (int64_t l = 0; l < tile.width; ++l) {
      const Sums moved = rebase(rows + tails * tail.weight[l], lanes.first[l], lanes.second[l],
                                lanes.pivot[l] - pivot[l]);
      sum[l] = moved.first;
      second[l] = moved.second;
    }
  } else {
    for (int64_t l = 0; l < tile.width; ++l) {
      sum[l] = lanes.first[l];
      second[l] = lanes.second[l];
    }
  }
  gather(tile, sum, sums);
  gather(tile, second, sums + C);
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
