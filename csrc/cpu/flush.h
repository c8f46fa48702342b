// From the lanes of a row to the float64 sums of its channels. A lane's sums are moved from its own
// pivot to the channel's, then added in an order that the shape alone fixes.
#pragma once

#include "../statistics.h"
#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// What the lanes of a row hold when they are flushed.
template <typename acc_t, int64_t kLanes>
struct LaneSums {
  static constexpr int64_t room = kLanes + 2 * kVec<acc_t>;  // the last pack may begin at any lane
  alignas(64) acc_t pivot[room];
  alignas(64) acc_t first[room];
  alignas(64) acc_t first_lost[room];
  alignas(64) acc_t second[room];
  alignas(64) acc_t second_lost[room];
  bool settled;  // whether there are totals, and with them what they have lost
};

// A value for each lane, or with step 0 one for all.
struct PerLane {
  const double* value;
  int64_t step;

  SYNCBN_INLINE double operator[](int64_t lane) const { return value[lane * step]; }
};

// The sum of n neighbouring values, in an order that n alone fixes.
SYNCBN_INLINE double sum_run(const double* values, int64_t n) {
  Vec<double> vector{};
  int64_t l = 0;
  for (; l + kVec<double> <= n; l += kVec<double>) {
    vector += load_unaligned<Vec<double>>(values + l);
  }
  double sum = n < kVec<double> ? 0 : sum_lanes(vector);
  for (; l < n; ++l) {
    sum += values[l];
  }
  return sum;
}

// Adds the lanes to the sums of their channels.
SYNCBN_INLINE void gather(const Tile& tile, const double* lanes, double* sums /* [C] */) {
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

// The sums of `width` lanes, each of which has added `count` values, in float64; about the
// channels' pivots, if there are any.
template <bool kPivot, bool kSettled, typename Lanes>
SYNCBN_INLINE void widen_lanes(const Lanes& lanes, int64_t width, PerLane count, PerLane pivot,
                               double* first, double* second) {
#pragma GCC ivdep
  for (int64_t l = 0; l < width; ++l) {
    first[l] = lanes.first[l];
    second[l] = lanes.second[l];
    if constexpr (kSettled) {
      first[l] += lanes.first_lost[l];
      second[l] += lanes.second_lost[l];
    }
    if constexpr (kPivot) {
      const Sums moved = rebase(count[l], first[l], second[l], lanes.pivot[l] - pivot[l]);
      first[l] = moved.first;
      second[l] = moved.second;
    }
  }
}

template <bool kPivot, typename Lanes>
SYNCBN_INLINE void widen(const Lanes& lanes, int64_t width, PerLane count, PerLane pivot,
                         double* first, double* second) {
  if (lanes.settled) {
    widen_lanes<kPivot, true>(lanes, width, count, pivot, first, second);
  } else {
    widen_lanes<kPivot, false>(lanes, width, count, pivot, first, second);
  }
}

// Flushes a tile to `partial`: [3, C] with pivot, [2, C] without. The first flush sets the pivots.
template <bool kPivot, typename acc_t>
__attribute__((noinline)) void flush_tile(const Tile& tile,
                                          const LaneSums<acc_t, kTileLanes>& lanes, PerLane count,
                                          bool first, double* partial, int64_t C) {
  double* sums = partial + (kPivot ? C : 0);
  if (first) {
    for (int64_t c = 0; c < tile.channels; ++c) {
      if constexpr (kPivot) {
        partial[tile.channel + c] = lanes.pivot[c * tile.run];
      }
      sums[tile.channel + c] = sums[C + tile.channel + c] = 0;
    }
  }
  alignas(64) double sum[kTileLanes], second[kTileLanes], pivots[kTileLanes + kVec<acc_t>];
  const double* pivot = partial + tile.channel;
  if (kPivot && !tile.direct()) {
    spread(tile, static_cast<const double*>(partial), pivots);
    pivot = pivots;
  }
  widen<kPivot>(lanes, tile.width, count, {pivot, 1}, sum, second);
  gather(tile, sum, sums);
  gather(tile, second, sums + C);
}

// The same for a row whose lanes are all of channel c.
template <bool kPivot, typename acc_t, int64_t kLanes>
SYNCBN_INLINE void flush_plane(int64_t c, const LaneSums<acc_t, kLanes>& lanes, PerLane count,
                               bool first, double* partial, int64_t C) {
  double* sums = partial + (kPivot ? C : 0);
  if (first) {
    if constexpr (kPivot) {
      partial[c] = lanes.pivot[0];
    }
    sums[c] = sums[C + c] = 0;
  }
  alignas(64) double sum[kLanes], second[kLanes];
  widen<kPivot>(lanes, kLanes, count, {partial + c, 0}, sum, second);
  sums[c] += sum_run(sum, kLanes);
  sums[C + c] += sum_run(second, kLanes);
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
