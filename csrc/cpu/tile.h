// How a kernel walks a box of [N, C, S]: the same for all four steps.
//
// A tile is a row of at most kLanes = kColumns * kVec values that is repeated down the tensor, so
// that what belongs to a lane (a channel's coefficients, an accumulator) stays in registers:
//
//   S > kLanes   planes: a row is a piece of one plane (one n, one c); the rest of the plane is its
//                tail. All lanes are one channel.
//   otherwise    tiles: a row is n; it holds S values each of some channels c, c + 1, ... Where
//                all C * S values are few, `repeats` values of n make one row.
//
//   lane l of a tile belongs to   channel + (l / run) % channels
//
// Where the width is no multiple of kVec the last vector overlaps the one before it: it ends at the
// last value. Overlapping lanes compute the same twice, so no load or store needs a mask, on any
// instruction set. (The host pads a tensor that is smaller than one vector.)
#pragma once

#include "vector.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

template <typename acc_t>
struct Tile {
  int64_t channel, channels;  // first channel, number of channels
  int64_t run;                // neighbouring lanes of one channel
  int64_t repeats;            // how often the channels recur
  int64_t width;              // lanes in use: channels * run * repeats

  // The first lane of vector `j`, of as many or more as it takes.
  SYNCBN_INLINE int64_t lane(int64_t j) const {
    const int64_t last = width > kVec<acc_t> ? width - kVec<acc_t> : 0;
    return j * kVec<acc_t> < last ? j * kVec<acc_t> : last;
  }

  SYNCBN_INLINE int64_t columns() const { return (width + kVec<acc_t> - 1) / kVec<acc_t>; }

  // Whether lane l is just channel + l.
  SYNCBN_INLINE bool direct() const { return run == 1 && repeats == 1; }
};

// One plane's row: every lane is channel c. Of fewer vectors, as planes are read in order anyway.
constexpr int64_t kPlaneColumns = 4;

template <typename acc_t>
SYNCBN_INLINE Tile<acc_t> plane_tile(int64_t c) {
  constexpr int64_t lanes = kPlaneColumns * kVec<acc_t>;
  return {c, 1, lanes, 1, lanes};
}

// How the rows n of a box are cut into tiles.
template <typename acc_t>
struct Tiling {
  int64_t C, S, c0, channels;
  int64_t repeats, tiles;

  // A tile has at most `lanes` lanes, S or more. Rows of all channels follow one another in memory,
  // so that putting them together beyond kPlaneColumns vectors gains nothing.
  SYNCBN_INLINE Tiling(const Operands& operands, const Box& box, int64_t lanes)
      : C(operands.C), S(operands.S), c0(box.c0), channels(box.c1 - box.c0) {
    const int64_t rows = box.n1 - box.n0;
    const int64_t fit = channels == C ? kPlaneColumns * kVec<acc_t> / (C * S) : 0;
    repeats = fit < 1 ? 1 : fit < rows ? fit : rows;
    const int64_t most = lanes / S;
    tiles = (channels + most - 1) / most;
  }

  // Of even sizes, so that none is narrower than a vector.
  SYNCBN_INLINE Tile<acc_t> tile(int64_t t) const {
    const int64_t begin = t * channels / tiles, end = (t + 1) * channels / tiles;
    return {c0 + begin, end - begin, S, repeats, (end - begin) * S * repeats};
  }
};

// Writes source[channel of lane l] to target[l], a whole vector at a time: up to kVec values too
// many, which the next channel overwrites.
template <typename T, typename acc_t>
SYNCBN_INLINE void spread(const Tile<acc_t>& tile, const T* source /* [C] */,
                          T* target /* [kLanes + kVec] */) {
  source += tile.channel;
  for (int64_t repeat = 0; repeat < tile.repeats; ++repeat) {
    if (tile.run == 1) {
      for (int64_t c = 0; c < tile.channels; ++c) {
        target[c] = source[c];
      }
      target += tile.channels;
      continue;
    }
    for (int64_t c = 0; c < tile.channels; ++c, target += tile.run) {
      const Vec<T> value = splat(source[c]);
      for (int64_t l = 0; l < tile.run; l += kVec<T>) {
        store_unaligned(target + l, value);
      }
    }
  }
}

// The coefficients of a tile, lane by lane.
template <typename acc_t, int kCount>
struct LaneCoefficients {
  alignas(64) acc_t buffer[kCount][kLanes<acc_t> + kVec<acc_t>];
  const acc_t* lanes[kCount];

  SYNCBN_INLINE LaneCoefficients(const Operands& operands, const Tile<acc_t>& tile) {
    const acc_t* source = static_cast<const acc_t*>(operands.coefficients);
    for (int i = 0; i < kCount; ++i, source += operands.stride) {
      if (tile.direct()) {
        lanes[i] = source + tile.channel;
      } else {
        spread(tile, source, buffer[i]);
        lanes[i] = buffer[i];
      }
    }
  }

  SYNCBN_INLINE Vec<acc_t> operator()(int i, int64_t lane) const { return load(lanes[i] + lane); }
};

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
