// How a kernel walks a box of [N, C, S]: the same for all four steps.
//
//   planes   long runs of one channel (one n, one c). What belongs to the channel (its
//            coefficients, its accumulators) stays in registers.
//   tiles    short runs: a row is n; it holds S values each of some channels c, c + 1, ... Where
//            all C * S values are few, `repeats` values of n make one row. What belongs to a lane
//            of the row lies in arrays in the first-level cache and is read once for kTileRows
//            rows, so that memory is walked in long pieces however many channels there are.
//
//   lane l of a tile belongs to   channel + (l / run) % channels
//
// Where the width is no multiple of a pack (pack.h) the last pack overlaps the one before it: it
// ends at the last value. Overlapping lanes compute the same twice, so no load or store needs a
// mask, on any instruction set. (The host pads a tensor that is smaller than one pack.)
#pragma once

#include "pack.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

constexpr int64_t kTileLanes = 1024;  // arrays of some kilobytes
constexpr int64_t kTileRows = 4;      // streams from memory at a time

// Vectors of a row that is put together from several n.
constexpr int64_t kRepeatedVectors = 8;

struct Tile {
  int64_t channel, channels;  // first channel, number of channels
  int64_t run;                // neighbouring lanes of one channel
  int64_t repeats;            // how often the channels recur
  int64_t width;              // lanes in use: channels * run * repeats

  // Whether lane l is just channel + l.
  SYNCBN_INLINE bool direct() const { return run == 1 && repeats == 1; }
};

// How the rows n of a box are cut into tiles.
struct Tiling {
  int64_t S, c0, channels;
  int64_t n_stride, repeats, row_stride;
  int64_t rows, rest;  // `rest` values follow the last full row, those of fewer than `repeats` n
  int64_t tiles;

  SYNCBN_INLINE Tiling(const Operands& operands, const Box& box, int64_t pack, int64_t vec)
      : S(operands.S), c0(box.c0), channels(box.c1 - box.c0), n_stride(operands.C * operands.S) {
    const int64_t n = box.n1 - box.n0;
    // A row of a few vectors is enough, of more where only that makes it whole packs, or nearly.
    int64_t even = 1;  // so many n are whole packs
    while (even * n_stride % pack != 0) {
      even *= 2;
    }
    int64_t fit = kRepeatedVectors / 2 * vec / n_stride;
    fit = fit < even ? kRepeatedVectors * vec / n_stride : fit;
    fit -= fit < even ? 0 : fit % even;
    repeats = channels < operands.C || fit < 1 ? 1 : fit < n ? fit : n;
    row_stride = repeats * n_stride;
    rows = n / repeats;
    rest = n % repeats * n_stride;
    const int64_t most = kTileLanes / S;
    tiles = (channels + most - 1) / most;
  }

  // Of even sizes, so that none is narrower than a pack.
  SYNCBN_INLINE Tile tile(int64_t t) const {
    const int64_t begin = t * channels / tiles, end = (t + 1) * channels / tiles;
    return {c0 + begin, end - begin, S, repeats, (end - begin) * S * repeats};
  }
};

// The tensors of a call, with their type.
template <typename scalar_t>
struct Values {
  const scalar_t *input, *grad_out;
  scalar_t* output;

  SYNCBN_INLINE explicit Values(const Operands& operands)
      : input(static_cast<const scalar_t*>(operands.input)),
        grad_out(static_cast<const scalar_t*>(operands.grad_out)),
        output(static_cast<scalar_t*>(operands.output)) {}

  // Of what is read; beyond the end it does nothing.
  SYNCBN_INLINE void prefetch(int64_t offset) const {
    __builtin_prefetch(input + offset);
    if (grad_out != nullptr) {
      __builtin_prefetch(grad_out + offset);
    }
  }
};

// A number that a function is compiled for.
template <int64_t kValue>
struct Count {
  static constexpr int64_t value = kValue;
};

// Calls f(j, lane) for each pack of a row of `width` lanes: its number, and its first lane.
template <int64_t pack, typename F>
SYNCBN_INLINE void for_packs(int64_t width, const F& f) {
  int64_t j = 0;
  for (; (j + 1) * pack <= width; ++j) {
    f(j, j * pack);
  }
  if (j * pack < width) {
    f(j, width > pack ? width - pack : 0);
  }
}

// Writes source[channel of lane l] to target[l], a whole vector at a time: up to kVec values too
// many, which the next channel overwrites.
template <typename T>
SYNCBN_INLINE void spread(const Tile& tile, const T* source /* [C] */,
                          T* target /* [kTileLanes + kVec] */) {
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

// A step's operation for each pack of a tile: coefficients and accumulators, in the order in which
// the packs are met.
template <typename Op, typename scalar_t>
struct TileOps {
  using acc_t = acc_of<scalar_t>;
  static constexpr int64_t pack = kPack<scalar_t>;

  Op ops[kTileLanes / pack + 1];

  SYNCBN_INLINE TileOps(const Operands& operands, const Tile& tile) {
    if constexpr (Op::kCount > 0) {
      alignas(64) acc_t buffer[Op::kCount][kTileLanes + kVec<acc_t>];
      const acc_t* source = static_cast<const acc_t*>(operands.coefficients);
      const acc_t* lanes[Op::kCount];
      for (int i = 0; i < Op::kCount; ++i, source += operands.stride) {
        if (tile.direct()) {
          lanes[i] = source + tile.channel;
        } else {
          spread(tile, source, buffer[i]);
          lanes[i] = buffer[i];
        }
      }
      for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
        ops[j].set([&](int i) __attribute__((always_inline)) {
          return load_lanes<scalar_t>(lanes[i] + lane);
        });
      });
    }
  }
};

// The same for a channel.
template <typename scalar_t, typename Op>
SYNCBN_INLINE void set_channel(Op& op, const Operands& operands, int64_t c) {
  const auto* source = static_cast<const acc_of<scalar_t>*>(operands.coefficients) + c;
  op.set([&](int i) __attribute__((always_inline)) {
    return splat_pack<scalar_t>(source[i * operands.stride]);
  });
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
