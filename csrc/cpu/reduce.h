// The sums of a channel over a box of [N, C, S]:
//
//   stats             sum and sum of squares of x - pivot, the pivot taken from the box
//   backward_reduce   sum of dy and of dy * ((x - mean_high) - mean_low)
//
// Every lane of a tile (tile.h) accumulates in acc_t for at most kReduceRows rows; then its sums
// are added to the channel's in float64. A lane of stats subtracts a pivot of its own from its
// values of those rows, the median of three means of the first: near the data, so that a large mean
// cancels nothing (of one value alone, every 4 sigma off would cost a digit), and blind to a lone
// outlier, which would otherwise cost the whole lane its digits. The flush rebases to the channel's
// pivot (Chan, Golub & LeVeque 1983), about which float64 sums are exact enough. One pass over x,
// and dy.
#pragma once

#include "flush.h"
#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

constexpr int64_t kReduceRows = 256;
constexpr int64_t kPivotRows = 3;  // a third of the values that a pivot is made of, at the most

template <typename scalar_t, int kSets>
struct Stats {
  using acc_t = acc_of<scalar_t>;
  static constexpr int kCount = 0;
  static constexpr bool kPivot = true;

  const scalar_t* input;
  Vec<acc_t> pivot[kSets], sum[kSets], sumsq[kSets];

  SYNCBN_INLINE explicit Stats(const Operands& operands)
      : input(static_cast<const scalar_t*>(operands.input)) {}

  SYNCBN_INLINE void open(int j, int64_t offset, int64_t rows, int64_t row_stride) {
    const int64_t third = rows < 3 ? 1 : rows / 3 < kPivotRows ? rows / 3 : kPivotRows;
    Vec<acc_t> mean[3];
#pragma GCC unroll 1
    for (int64_t i = 0; i < 3; ++i) {
      mean[i] = Vec<acc_t>{};
#pragma GCC unroll 1
      for (int64_t r = 0; r < third; ++r) {
        mean[i] += load(input + offset);
        offset += i * third + r + 1 < rows ? row_stride : 0;
      }
    }
    pivot[j] = median(mean[0], mean[1], mean[2]) * splat(acc_t(1) / static_cast<acc_t>(third));
    sum[j] = sumsq[j] = Vec<acc_t>{};
    // Had the pivot more bits than the values, all differences would share them, and rounding the
    // sums would drop them to the same side each time.
    pivot[j] = round_to<scalar_t>(pivot[j]);
  }

  SYNCBN_INLINE void add(int j, int64_t offset) {
    const Vec<acc_t> value = load(input + offset) - pivot[j];
    sum[j] += value;
    sumsq[j] += value * value;
  }

  SYNCBN_INLINE void add(int j, int64_t offset, Vec<acc_t> weight) {
    const Vec<acc_t> value = keep(load(input + offset) - pivot[j], weight);
    sum[j] += value;
    sumsq[j] += value * value;
  }

  SYNCBN_INLINE void save(int j, int64_t lane, LaneSums<acc_t>& lanes) const {
    store(lanes.pivot + lane, pivot[j]);
    store(lanes.first + lane, sum[j]);
    store(lanes.second + lane, sumsq[j]);
  }
};

template <typename scalar_t, int kSets>
struct BackwardReduce {
  using acc_t = acc_of<scalar_t>;
  static constexpr int kCount = 2;
  static constexpr bool kPivot = false;

  const scalar_t *input, *grad_out;
  Vec<acc_t> mean_high[kSets], mean_low[kSets], sum_dy[kSets], sum_dy_xmu[kSets];

  SYNCBN_INLINE explicit BackwardReduce(const Operands& operands)
      : input(static_cast<const scalar_t*>(operands.input)),
        grad_out(static_cast<const scalar_t*>(operands.grad_out)) {}

  template <typename Source>
  SYNCBN_INLINE void set(int j, const Source& coefficients, int64_t lane) {
    mean_high[j] = coefficients(0, lane);
    mean_low[j] = coefficients(1, lane);
  }

  SYNCBN_INLINE void open(int j, int64_t, int64_t, int64_t) {
    sum_dy[j] = sum_dy_xmu[j] = Vec<acc_t>{};
  }

  SYNCBN_INLINE void add(int j, int64_t offset) {
    const Vec<acc_t> grad = load(grad_out + offset);
    sum_dy[j] += grad;
    sum_dy_xmu[j] += grad * ((load(input + offset) - mean_high[j]) - mean_low[j]);
  }

  SYNCBN_INLINE void add(int j, int64_t offset, Vec<acc_t> weight) {
    const Vec<acc_t> grad = load(grad_out + offset);
    sum_dy[j] += keep(grad, weight);
    sum_dy_xmu[j] += keep(grad * ((load(input + offset) - mean_high[j]) - mean_low[j]), weight);
  }

  SYNCBN_INLINE void save(int j, int64_t lane, LaneSums<acc_t>& lanes) const {
    store(lanes.first + lane, sum_dy[j]);
    store(lanes.second + lane, sum_dy_xmu[j]);
  }
};

// Gives the lanes their channels' coefficients.
template <template <typename, int> class Op, typename scalar_t, int kSets>
SYNCBN_INLINE void set_tile(Op<scalar_t, kSets>& op, const Operands& operands,
                            const Tile<acc_of<scalar_t>>& tile) {
  constexpr int count = Op<scalar_t, kSets>::kCount;
  if constexpr (count > 0) {
    const LaneCoefficients<acc_of<scalar_t>, count> coefficients(operands, tile);
#pragma GCC unroll 8
    for (int j = 0; j < kSets; ++j) {
      op.set(j, coefficients, tile.lane(j));
    }
  }
}

// Starts the accumulators anew for rows from `offset`.
template <template <typename, int> class Op, typename scalar_t, int kSets>
SYNCBN_INLINE void open_tile(Op<scalar_t, kSets>& op, const Tile<acc_of<scalar_t>>& tile,
                             int64_t offset, int64_t rows, int64_t row_stride) {
#pragma GCC unroll 8
  for (int j = 0; j < kSets; ++j) {
    op.open(j, offset + tile.lane(j), rows, row_stride);
  }
}

// Stores the accumulators where flush finds them: apart, so that they themselves stay in registers.
template <template <typename, int> class Op, typename scalar_t, int kSets>
SYNCBN_INLINE void flush_tile(const Op<scalar_t, kSets>& op, const Tile<acc_of<scalar_t>>& tile,
                              int64_t rows, int64_t tails, const Tail<acc_of<scalar_t>>& tail,
                              bool first, double* partial, int64_t C) {
  LaneSums<acc_of<scalar_t>> lanes;
#pragma GCC unroll 8
  for (int j = 0; j < kSets; ++j) {
    op.save(j, tile.lane(j), lanes);
  }
  flush<acc_of<scalar_t>, Op<scalar_t, 1>::kPivot>(tile, lanes, rows, tails, tail, first, partial,
                                                   C);
}

template <template <typename, int> class Op, typename scalar_t>
void reduce_planes(const Operands& operands, const Box& box) {
  using acc_t = acc_of<scalar_t>;
  constexpr int64_t vec = kVec<acc_t>, lanes = kPlaneColumns * vec;
  const int64_t full = (box.s1 - box.s0) / lanes * lanes;
  const int64_t tail_vectors = (box.s1 - box.s0 - full) / vec;
  const int64_t tail_values = (box.s1 - box.s0 - full) % vec;
  // The last values of a plane are the last lanes of a vector that reaches back to ones already
  // added.
  Tail<acc_t> tail;
  tail.add(0, tail_vectors * vec);
  tail.add((tail_vectors + 1) * vec - tail_values, (tail_vectors + (tail_values > 0)) * vec);

  for (int64_t c = box.c0; c < box.c1; ++c) {
    const Tile<acc_t> tile = plane_tile<acc_t>(c);
    Op<scalar_t, kPlaneColumns> op(operands);
    set_tile(op, operands, tile);
    open_tile(op, tile, (box.n0 * operands.C + c) * operands.S + box.s0, full / lanes, lanes);
    int64_t rows = 0, tails = 0;
    bool first = true;
    for (int64_t n = box.n0; n < box.n1; ++n) {
      int64_t offset = (n * operands.C + c) * operands.S + box.s0;
      const int64_t end = offset + full;
      while (offset < end) {
        if (rows == kReduceRows) {
          flush_tile(op, tile, rows, tails, tail, first, box.partial, operands.C);
          first = false;
          rows = tails = 0;
          open_tile(op, tile, offset, (end - offset) / lanes, lanes);
        }
        const int64_t left = (end - offset) / lanes;
        const int64_t count = left < kReduceRows - rows ? left : kReduceRows - rows;
        rows += count;
        for (int64_t r = 0; r < count; ++r, offset += lanes) {
#pragma GCC unroll 8
          for (int j = 0; j < kPlaneColumns; ++j) {
            op.add(j, offset + j * vec);
          }
        }
      }
      if (tail_vectors + tail_values > 0) {
        ++tails;
#pragma GCC unroll 8
        for (int j = 0; j < kPlaneColumns; ++j) {
          if (j < tail_vectors) {
            op.add(j, end + j * vec);
          } else if (j == tail_vectors && tail_values > 0) {
            op.add(j, end + j * vec + tail_values - vec, load(tail.weight + j * vec));
          }
        }
      }
    }
    flush_tile(op, tile, rows, tails, tail, first, box.partial, operands.C);
  }
}

template <template <typename, int> class Op, typename scalar_t, int kSets>
void reduce_tile(const Operands& operands, const Tile<acc_of<scalar_t>>& tile, int64_t offset,
                 int64_t rows, int64_t row_stride, int64_t rest, bool first, double* partial) {
  using acc_t = acc_of<scalar_t>;
  Op<scalar_t, kSets> op(operands);
  set_tile(op, operands, tile);
  open_tile(op, tile, offset, rows, row_stride);
  for (int64_t r = 0; r < rows; ++r, offset += row_stride) {
#pragma GCC unroll 8
    for (int j = 0; j < kSets; ++j) {
      op.add(j, offset + tile.lane(j));
    }
  }
  Tail<acc_t> tail;
  if (rest > 0) {  // fewer than `repeats` values of n: the last full row, moved up to the end
    offset -= row_stride - rest;
    tail.add(tile.width - rest, tile.width);
#pragma GCC unroll 8
    for (int j = 0; j < kSets; ++j) {
      const int64_t lane = tile.lane(j);
      op.add(j, offset + lane, load(tail.weight + lane));
    }
  }
  flush_tile(op, tile, rows, rest > 0, tail, first, partial, operands.C);
}

// The kernel of the least number of vectors that holds `columns`.
template <template <typename, int> class Op, typename scalar_t>
auto select_reduce_tile(int64_t columns) {
  return columns <= 1   ? &reduce_tile<Op, scalar_t, 1>
         : columns <= 2 ? &reduce_tile<Op, scalar_t, 2>
         : columns <= 3 ? &reduce_tile<Op, scalar_t, 3>
         : columns <= 4 ? &reduce_tile<Op, scalar_t, 4>
         : columns <= 6 ? &reduce_tile<Op, scalar_t, 6>
                        : &reduce_tile<Op, scalar_t, 8>;
}

template <template <typename, int> class Op, typename scalar_t>
void reduce_tiles(const Operands& operands, const Box& box) {
  using acc_t = acc_of<scalar_t>;
  const Tiling<acc_t> tiling(operands, box, kLanes<scalar_t>);
  const int64_t n_stride = operands.C * operands.S;
  const int64_t row_stride = tiling.repeats * n_stride;
  const int64_t rows = (box.n1 - box.n0) / tiling.repeats;
  const int64_t rest = (box.n1 - box.n0) % tiling.repeats * n_stride;
  for (int64_t r = 0; r < rows; r += kReduceRows) {
    const bool last = rows - r <= kReduceRows;
    const int64_t count = last ? rows - r : kReduceRows;
    for (int64_t t = 0; t < tiling.tiles; ++t) {
      const Tile<acc_t> tile = tiling.tile(t);
      const int64_t offset = box.n0 * n_stride + r * row_stride + tile.channel * operands.S;
      const int64_t more = last ? rest : 0;
      const bool first = r == 0;
      const auto kernel = select_reduce_tile<Op, scalar_t>(tile.columns());
      kernel(operands, tile, offset, count, row_stride, more, first, box.partial);
    }
  }
}

template <template <typename, int> class Op, typename scalar_t>
void reduce(const Operands& operands, const Box& box) {
  if (operands.S > kLanes<scalar_t>) {
    reduce_planes<Op, scalar_t>(operands, box);
  } else {
    reduce_tiles<Op, scalar_t>(operands, box);
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
