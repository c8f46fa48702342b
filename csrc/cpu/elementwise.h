// Normalise and its backward, element by element:
//
//   elemt            y  = ((x - mean_high) - mean_low) * scale + shift
//   backward_elemt   dx = ((dy - mean_dy) - ((x - mean_high) - mean_low) * slope) * scale
//
// the operations of Affine and InputGrad in statistics.h, in their order (Ioffe & Szegedy 2015).
// x, dy, y and dx are [N, C, S]; the coefficients of a channel come from the caller. One pass over
// a box in order of memory, by planes or by tiles (tile.h).
#pragma once

#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

constexpr int kPlanePacks = 4;     // so often is the loop over a plane unrolled
constexpr int64_t kTurnRows = 64;  // rows of a tile before its neighbour's turn

template <typename scalar_t>
struct Elemt {
  static constexpr int kCount = 4;

  Pack<scalar_t> mean_high, mean_low, scale, shift;

  template <typename Source>
  SYNCBN_INLINE void set(const Source& coefficient) {
    mean_high = coefficient(0);
    mean_low = coefficient(1);
    scale = coefficient(2);
    shift = coefficient(3);
  }

  SYNCBN_INLINE void apply(const Values<scalar_t>& values, int64_t offset) const {
    const Pack<scalar_t> centred = (load(values.input + offset) - mean_high) - mean_low;
    store(values.output + offset, centred * scale + shift);
  }
};

template <typename scalar_t>
struct BackwardElemt {
  static constexpr int kCount = 5;

  Pack<scalar_t> mean_high, mean_low, mean_dy, slope, scale;

  template <typename Source>
  SYNCBN_INLINE void set(const Source& coefficient) {
    mean_high = coefficient(0);
    mean_low = coefficient(1);
    mean_dy = coefficient(2);
    slope = coefficient(3);
    scale = coefficient(4);
  }

  SYNCBN_INLINE void apply(const Values<scalar_t>& values, int64_t offset) const {
    const Pack<scalar_t> centred = (load(values.input + offset) - mean_high) - mean_low;
    const Pack<scalar_t> grad = load(values.grad_out + offset) - mean_dy;
    store(values.output + offset, (grad - centred * slope) * scale);
  }
};

template <typename Op, typename scalar_t>
void apply_planes(const Operands& operands, const Box& box) {
  constexpr int64_t pack = kPack<scalar_t>;
  const Values<scalar_t> values(operands);
  Op op;
  for (int64_t n = box.n0; n < box.n1; ++n) {
    for (int64_t c = box.c0; c < box.c1; ++c) {
      set_channel<scalar_t>(op, operands, c);
      const int64_t plane = (n * operands.C + c) * operands.S;
      const int64_t end = plane + box.s1;
      int64_t i = plane + box.s0;
      for (; i + kPlanePacks * pack <= end; i += kPlanePacks * pack) {
#pragma GCC unroll 8
        for (int j = 0; j < kPlanePacks; ++j) {
          op.apply(values, i + j * pack);
        }
      }
      for (; i + pack <= end; i += pack) {
        op.apply(values, i);
      }
      if (i < end) {
        op.apply(values, end - pack);
      }
    }
  }
}

template <typename Op, typename scalar_t>
void apply_tile(const Operands& operands, const Tile& tile, int64_t offset, int64_t rows,
                int64_t row_stride, int64_t rest) {
  constexpr int64_t pack = kPack<scalar_t>;
  const Values<scalar_t> values(operands);
  const TileOps<Op, scalar_t> tile_ops(operands, tile);
  const auto apply_row = [&](int64_t row) __attribute__((always_inline)) {
    for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
      tile_ops.ops[j].apply(values, row + lane);
    });
  };
  // All rows of a narrow tile, of so many packs, with the coefficients in registers.
  const auto apply_narrow = [&](auto packs) __attribute__((always_inline)) {
    Op ops[packs.value];
    int64_t lanes[packs.value];
    for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
      ops[j] = tile_ops.ops[j];
      lanes[j] = lane;
    });
    for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int64_t j = 0; j < packs.value; ++j) {
        ops[j].apply(values, offset + r * row_stride + lanes[j]);
      }
    }
  };
  const int64_t vectors = (tile.width + pack - 1) / pack * kParts<scalar_t>;
  if (vectors == 3 && kParts<scalar_t> == 1) {
    apply_narrow(Count<3>{});
  } else if (vectors == 4) {
    apply_narrow(Count<4 / kParts<scalar_t>>{});
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      apply_row(offset + r * row_stride);
    }
  }
  if (rest > 0) {  // the last full row, moved up to the end
    apply_row(offset + (rows - 1) * row_stride + rest);
  }
}

template <typename Op, typename scalar_t>
void apply_tiles(const Operands& operands, const Box& box) {
  const Tiling tiling(operands, box, kPack<scalar_t>, kVec<acc_of<scalar_t>>);
  const int64_t turn = tiling.tiles == 1 ? tiling.rows : kTurnRows;
  for (int64_t r = 0; r < tiling.rows; r += turn) {
    const bool last = tiling.rows - r <= turn;
    const int64_t rows = last ? tiling.rows - r : turn;
    for (int64_t t = 0; t < tiling.tiles; ++t) {
      const Tile tile = tiling.tile(t);
      const int64_t offset =
          box.n0 * tiling.n_stride + r * tiling.row_stride + tile.channel * operands.S;
      apply_tile<Op, scalar_t>(operands, tile, offset, rows, tiling.row_stride,
                               last ? tiling.rest : 0);
    }
  }
}

template <typename Op, typename scalar_t>
void apply(const Operands& operands, const Box& box) {
  if (applies_by_plane(operands.S, kPack<scalar_t>)) {
    apply_planes<Op, scalar_t>(operands, box);
  } else {
    apply_tiles<Op, scalar_t>(operands, box);
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
