// Normalise and its backward, element by element:
//
//   elemt            y  = ((x - mean_high) - mean_low) * scale + shift
//   backward_elemt   dx = ((dy - mean_dy) - ((x - mean_high) - mean_low) * slope) * scale
//
// the operations of Affine and InputGrad in statistics.h, in their order (Ioffe & Szegedy 2015).
// x, dy, y and dx are [N, C, S]; the coefficients of a channel come from the caller. One pass over
// a box: planes in order of memory with one channel's coefficients in registers, or tiles (tile.h)
// with the coefficients lane by lane.
#pragma once

#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// Rows of a tile before the next tile: few enough that the pages of the rows stay in the TLB.
constexpr int64_t kApplyRows = 64;

// The coefficients of kSets vectors: of every column of a tile, or of one channel for all.
template <typename scalar_t, int kSets>
struct Elemt {
  using acc_t = acc_of<scalar_t>;
  using type = scalar_t;
  static constexpr int kCount = 4;

  const scalar_t* input;
  scalar_t* output;
  Vec<acc_t> mean_high[kSets], mean_low[kSets], scale[kSets], shift[kSets];

  SYNCBN_INLINE explicit Elemt(const Operands& operands)
      : input(static_cast<const scalar_t*>(operands.input)),
        output(static_cast<scalar_t*>(operands.output)) {}

  template <typename Source>
  SYNCBN_INLINE void set(int j, const Source& coefficients, int64_t lane) {
    mean_high[j] = coefficients(0, lane);
    mean_low[j] = coefficients(1, lane);
    scale[j] = coefficients(2, lane);
    shift[j] = coefficients(3, lane);
  }

  SYNCBN_INLINE void apply(int j, int64_t offset) const {
    const Vec<acc_t> centred = (load(input + offset) - mean_high[j]) - mean_low[j];
    store(output + offset, centred * scale[j] + shift[j]);
  }
};

template <typename scalar_t, int kSets>
struct BackwardElemt {
  using acc_t = acc_of<scalar_t>;
  using type = scalar_t;
  static constexpr int kCount = 5;

  const scalar_t *input, *grad_out;
  scalar_t* grad_input;
  Vec<acc_t> mean_high[kSets], mean_low[kSets], mean_dy[kSets], slope[kSets], scale[kSets];

  SYNCBN_INLINE explicit BackwardElemt(const Operands& operands)
      : input(static_cast<const scalar_t*>(operands.input)),
        grad_out(static_cast<const scalar_t*>(operands.grad_out)),
        grad_input(static_cast<scalar_t*>(operands.output)) {}

  template <typename Source>
  SYNCBN_INLINE void set(int j, const Source& coefficients, int64_t lane) {
    mean_high[j] = coefficients(0, lane);
    mean_low[j] = coefficients(1, lane);
    mean_dy[j] = coefficients(2, lane);
    slope[j] = coefficients(3, lane);
    scale[j] = coefficients(4, lane);
  }

  SYNCBN_INLINE void apply(int j, int64_t offset) const {
    const Vec<acc_t> centred = (load(input + offset) - mean_high[j]) - mean_low[j];
    const Vec<acc_t> grad = load(grad_out + offset) - mean_dy[j];
    store(grad_input + offset, (grad - centred * slope[j]) * scale[j]);
  }
};

// The coefficients of one channel in every lane.
template <typename acc_t>
struct ChannelCoefficients {
  const acc_t* source;
  int64_t stride;

  SYNCBN_INLINE Vec<acc_t> operator()(int i, int64_t c) const {
    return splat(source[i * stride + c]);
  }
};

template <template <typename, int> class Op, typename scalar_t>
void apply_planes(const Operands& operands, const Box& box) {
  using acc_t = acc_of<scalar_t>;
  constexpr int64_t vec = kVec<acc_t>;
  const ChannelCoefficients<acc_t> coefficients{static_cast<const acc_t*>(operands.coefficients),
                                                operands.stride};
  Op<scalar_t, 1> op(operands);
  for (int64_t n = box.n0; n < box.n1; ++n) {
    for (int64_t c = box.c0; c < box.c1; ++c) {
      op.set(0, coefficients, c);
      const int64_t plane = (n * operands.C + c) * operands.S;
      const int64_t end = plane + box.s1;
      int64_t i = plane + box.s0;
      for (; i + kPlaneColumns * vec <= end; i += kPlaneColumns * vec) {
#pragma GCC unroll 8
        for (int j = 0; j < kPlaneColumns; ++j) {
          op.apply(0, i + j * vec);
        }
      }
      for (; i + vec <= end; i += vec) {
        op.apply(0, i);
      }
      if (i < end) {
        op.apply(0, end - vec);
      }
    }
  }
}

template <template <typename, int> class Op, typename scalar_t, int kSets>
void apply_tile(const Operands& operands, const Tile<acc_of<scalar_t>>& tile, int64_t offset,
                int64_t rows, int64_t row_stride, int64_t rest) {
  using acc_t = acc_of<scalar_t>;
  const LaneCoefficients<acc_t, Op<scalar_t, 1>::kCount> coefficients(operands, tile);
  Op<scalar_t, kSets> op(operands);
#pragma GCC unroll 8
  for (int j = 0; j < kSets; ++j) {
    op.set(j, coefficients, tile.lane(j));
  }
  for (int64_t r = 0; r < rows; ++r, offset += row_stride) {
#pragma GCC unroll 8
    for (int j = 0; j < kSets; ++j) {
      op.apply(j, offset + tile.lane(j));
    }
  }
  if (rest > 0) {  // fewer than `repeats` values of n: the last full row, moved up to the end
    offset -= row_stride - rest;
    for (int j = 0; j < kSets; ++j) {
      op.apply(j, offset + tile.lane(j));
    }
  }
}

// The kernel of the least number of vectors that holds `columns`.
template <template <typename, int> class Op, typename scalar_t>
auto select_apply_tile(int64_t columns) {
  return columns <= 1   ? &apply_tile<Op, scalar_t, 1>
         : columns <= 2 ? &apply_tile<Op, scalar_t, 2>
         : columns <= 3 ? &apply_tile<Op, scalar_t, 3>
         : columns <= 4 ? &apply_tile<Op, scalar_t, 4>
         : columns <= 6 ? &apply_tile<Op, scalar_t, 6>
                        : &apply_tile<Op, scalar_t, 8>;
}

template <template <typename, int> class Op, typename scalar_t>
void apply_tiles(const Operands& operands, const Box& box) {
  using acc_t = acc_of<scalar_t>;
  // Converting 16-bit types takes registers too, and more time than memory does.
  constexpr int64_t columns = sizeof(scalar_t) == 2 ? kColumns / 2 : kColumns;
  const Tiling<acc_t> tiling(operands, box, columns * kVec<acc_t>);
  const int64_t n_stride = operands.C * operands.S;
  const int64_t row_stride = tiling.repeats * n_stride;
  const int64_t rows = (box.n1 - box.n0) / tiling.repeats;
  const int64_t rest = (box.n1 - box.n0) % tiling.repeats * n_stride;
  const int64_t block = tiling.tiles == 1 ? rows : kApplyRows;
  for (int64_t r = 0; r < rows; r += block) {
    const bool last = rows - r <= block;
    const int64_t count = last ? rows - r : block;
    for (int64_t t = 0; t < tiling.tiles; ++t) {
      const Tile<acc_t> tile = tiling.tile(t);
      const int64_t offset = box.n0 * n_stride + r * row_stride + tile.channel * operands.S;
      const int64_t more = last ? rest : 0;
      const auto kernel = select_apply_tile<Op, scalar_t>(tile.columns());
      kernel(operands, tile, offset, count, row_stride, more);
    }
  }
}

template <template <typename, int> class Op, typename scalar_t>
void apply(const Operands& operands, const Box& box) {
  if (applies_by_plane(operands.S, kLanes<scalar_t>)) {
    apply_planes<Op, scalar_t>(operands, box);
  } else {
    apply_tiles<Op, scalar_t>(operands, box);
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
