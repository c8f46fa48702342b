// What a lane of a row (tile.h) accumulates, in acc_t:
//
//   stats             sum and sum of squares of x - pivot
//   backward_reduce   sum of dy and of dy * ((x - mean_high) - mean_low)
//
// Some rows are added up at a time, then their sum goes to a total that remembers what its rounding
// loses: as good as a sum in float64. (A plain sum of hundreds of squares loses more than random
// roundings would, all to the same side, where the values lie on a grid as those far from 0 do.)
//
// A lane of stats subtracts a pivot of its own from its values, the median of three of them: near
// the data, so that a large mean cancels nothing, and blind to a lone outlier, which would
// otherwise cost the whole lane its digits.
#pragma once

#include "tile.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// The pivots of the lanes of a pack, from three rows or nine. Apart, as it runs once in many rows.
//
// A pivot with lower bits than the values would leave these bits in all differences, and rounding
// would drop them to the same side each time. So it is one of the values, without bits below the
// last ones of four times the largest of the three, which few values exceed.
template <typename scalar_t>
__attribute__((noinline)) void find_pivot(const scalar_t* input, int64_t rows, int64_t row_stride,
                                          Pack<scalar_t>& pivot) {
  const auto row = [&](int64_t r)
                       __attribute__((always_inline)) { return load(input + r * row_stride); };
  Pack<scalar_t> a = row(0), b = row(rows / 2), c = row(rows - 1);
  if (rows >= 9) {  // each the median of three rows: nearer to the middle of all
    a = median(a, row(1), row(2));
    b = median(b, row(rows / 2 - 1), row(rows / 2 + 1));
    c = median(c, row(rows - 2), row(rows - 3));
  }
  const Pack<scalar_t> middle = median(a, b, c);
  const Pack<scalar_t> largest = greater(magnitude(a), greater(magnitude(b), magnitude(c)));
  const Pack<scalar_t> grid =
      signed_as(middle, largest * splat_pack<scalar_t>(4));  // so -x is rounded as x
  pivot = finite_or(finite_or({}, middle), (middle + grid) - grid);
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

// A sum, and what its roundings have lost.
template <typename scalar_t>
struct Total {
  Pack<scalar_t> sum, lost;

  SYNCBN_INLINE void begin(const Pack<scalar_t>& part) {
    sum = part;
    lost = {};
  }

  SYNCBN_INLINE void add(const Pack<scalar_t>& part) {
    const Pack<scalar_t> next = sum + part;
    lost += part - (next - sum);
    sum = next;
  }
};

template <typename scalar_t>
struct Totals {
  Total<scalar_t> first, second;
};

// The two sums of the rows at hand. With more than a few rows they are settled, again and again,
// by moving them to totals: `settled` says whether that has happened before.
template <typename scalar_t>
struct TwoSums {
  Pack<scalar_t> first, second;

  SYNCBN_INLINE void clear() { first = second = {}; }

  SYNCBN_INLINE void settle(bool settled, Totals<scalar_t>& totals) {
    if (settled) {
      totals.first.add(first);
      totals.second.add(second);
    } else {
      totals.first.begin(first);
      totals.second.begin(second);
    }
    clear();
  }

  template <typename Lanes>
  SYNCBN_INLINE void save(int64_t lane, Totals<scalar_t>& totals, Lanes& lanes) {
    if (!lanes.settled) {
      store_lanes(lanes.first + lane, first);
      store_lanes(lanes.second + lane, second);
      return;
    }
    settle(true, totals);
    // What an infinite sum has lost is no part of it.
    store_lanes(lanes.first + lane, totals.first.sum);
    store_lanes(lanes.first_lost + lane, finite_or({}, totals.first.lost));
    store_lanes(lanes.second + lane, totals.second.sum);
    store_lanes(lanes.second_lost + lane, finite_or({}, totals.second.lost));
  }
};

template <typename scalar_t>
struct Stats {
  static constexpr int kCount = 0;
  static constexpr bool kPivot = true;

  Pack<scalar_t> pivot;
  TwoSums<scalar_t> sums;

  template <typename Source>
  SYNCBN_INLINE void set(const Source&) {}

  SYNCBN_INLINE void open(const Values<scalar_t>& values, int64_t offset, int64_t rows,
                          int64_t row_stride) {
    find_pivot(values.input + offset, rows, row_stride, pivot);
    sums.clear();
  }

  template <typename Counting = All>
  SYNCBN_INLINE void add(const Values<scalar_t>& values, int64_t offset,
                         const Counting& counting = {}) {
    const Pack<scalar_t> value = counting(load(values.input + offset) - pivot);
    sums.first += value;
    sums.second += value * value;
  }

  template <typename Lanes>
  SYNCBN_INLINE void save_pivot(int64_t lane, Lanes& lanes) const {
    store_lanes(lanes.pivot + lane, pivot);
  }
};

template <typename scalar_t>
struct BackwardReduce {
  static constexpr int kCount = 2;
  static constexpr bool kPivot = false;

  Pack<scalar_t> mean_high, mean_low;
  TwoSums<scalar_t> sums;

  template <typename Source>
  SYNCBN_INLINE void set(const Source& coefficient) {
    mean_high = coefficient(0);
    mean_low = coefficient(1);
  }

  SYNCBN_INLINE void open(const Values<scalar_t>&, int64_t, int64_t, int64_t) { sums.clear(); }

  template <typename Counting = All>
  SYNCBN_INLINE void add(const Values<scalar_t>& values, int64_t offset,
                         const Counting& counting = {}) {
    const Pack<scalar_t> grad = load(values.grad_out + offset);
    sums.first += counting(grad);
    sums.second += counting(grad * ((load(values.input + offset) - mean_high) - mean_low));
  }

  template <typename Lanes>
  SYNCBN_INLINE void save_pivot(int64_t, Lanes&) const {}
};

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
