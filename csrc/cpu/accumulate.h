// What a lane of a row (tile.h) accumulates, in acc_t:
//
//   stats             sum and sum of squares of x - pivot
//   backward_reduce   sum of dy and of dy * ((x - mean_high) - mean_low)
//
// A lane of stats subtracts a pivot of its own from its values, the median of three means of the
// first: near the data, so that a large mean cancels nothing (of one value alone, every 4 sigma off
// would cost a digit), and blind to a lone outlier, which would otherwise cost the whole lane its
// digits.
#pragma once

#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

constexpr int64_t kPivotRows = 3;  // a third of the values that a pivot is made of, at the most

// The pivots of the lanes of a pack, from its first rows. Apart, as it runs once in many rows.
template <typename scalar_t>
__attribute__((noinline)) void find_pivot(const scalar_t* input, int64_t rows, int64_t row_stride,
                                          Pack<scalar_t>& pivot) {
  using acc_t = acc_of<scalar_t>;
  const int64_t third = rows < 3 ? 1 : rows / 3 < kPivotRows ? rows / 3 : kPivotRows;
  const auto row = [&](int64_t r) __attribute__((always_inline)) {
    return load(input + (r < rows ? r : rows - 1) * row_stride);
  };
  Pack<scalar_t> a = row(0), b = row(third), c = row(2 * third);
  for (int64_t r = 1; r < third; ++r) {
    a += row(r);
    b += row(third + r);
    c += row(2 * third + r);
  }
  pivot = median(a, b, c) * splat_pack<scalar_t>(acc_t(1) / static_cast<acc_t>(third));
  // Had the pivot more bits than the values, all differences would share them, and rounding the
  // sums would drop them to the same side each time.
  scalar_t memory[kPack<scalar_t>];
  store(memory, pivot);
  pivot = load(memory);
}

// Which of the values read count: all, or those of lanes whose weight is not 0.
struct All {
  template <typename T>
  SYNCBN_INLINE T operator()(const T& value) const {
    return value;
  }
};

template <typename scalar_t>
struct Weighted {
  Pack<scalar_t> weight;

  SYNCBN_INLINE Pack<scalar_t> operator()(const Pack<scalar_t>& value) const {
    return keep(value, weight);
  }
};

template <typename scalar_t>
struct Stats {
  static constexpr int kCount = 0;
  static constexpr bool kPivot = true;

  Pack<scalar_t> pivot, sum, sumsq;

  template <typename Source>
  SYNCBN_INLINE void set(const Source&) {}

  SYNCBN_INLINE void open(const Values<scalar_t>& values, int64_t offset, int64_t rows,
                          int64_t row_stride) {
    find_pivot(values.input + offset, rows, row_stride, pivot);
    sum = sumsq = {};
  }

  template <typename Counting = All>
  SYNCBN_INLINE void add(const Values<scalar_t>& values, int64_t offset,
                         const Counting& counting = {}) {
    const Pack<scalar_t> value = counting(load(values.input + offset) - pivot);
    sum += value;
    sumsq += value * value;
  }

  SYNCBN_INLINE void take_sums(const Stats& other) {
    sum = other.sum;
    sumsq = other.sumsq;
  }

  template <typename Lanes>
  SYNCBN_INLINE void save(int64_t lane, Lanes& lanes) const {
    store_lanes(lanes.pivot + lane, pivot);
    store_lanes(lanes.first + lane, sum);
    store_lanes(lanes.second + lane, sumsq);
  }
};

template <typename scalar_t>
struct BackwardReduce {
  static constexpr int kCount = 2;
  static constexpr bool kPivot = false;

  Pack<scalar_t> mean_high, mean_low, sum_dy, sum_dy_xmu;

  template <typename Source>
  SYNCBN_INLINE void set(const Source& coefficient) {
    mean_high = coefficient(0);
    mean_low = coefficient(1);
  }

  SYNCBN_INLINE void open(const Values<scalar_t>&, int64_t, int64_t, int64_t) {
    sum_dy = sum_dy_xmu = {};
  }

  template <typename Counting = All>
  SYNCBN_INLINE void add(const Values<scalar_t>& values, int64_t offset,
                         const Counting& counting = {}) {
    const Pack<scalar_t> grad = load(values.grad_out + offset);
    sum_dy += counting(grad);
    sum_dy_xmu += counting(grad * ((load(values.input + offset) - mean_high) - mean_low));
  }

  SYNCBN_INLINE void take_sums(const BackwardReduce& other) {
    sum_dy = other.sum_dy;
    sum_dy_xmu = other.sum_dy_xmu;
  }

  template <typename Lanes>
  SYNCBN_INLINE void save(int64_t lane, Lanes& lanes) const {
    store_lanes(lanes.first + lane, sum_dy);
    store_lanes(lanes.second + lane, sum_dy_xmu);
  }
};

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
