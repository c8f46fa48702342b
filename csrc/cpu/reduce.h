// The sums of a channel over a box of [N, C, S]: every lane of a row accumulates (accumulate.h) for
// at most kReduceRows rows; then its sums are added to the channel's in float64 (flush.h). The
// flush rebases to the channel's pivot (Chan, Golub & LeVeque 1983), taken from the box, about
// which float64 sums are exact enough. One pass over x, and dy.
#pragma once

#include "accumulate.h"
#include "flush.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

constexpr int64_t kReduceRows = 256;
constexpr int64_t kBlockRows = 8;   // between two additions to the totals
constexpr int64_t kShortRow = 256;  // several of them side by side elude the hardware's prefetch

// How often each lane of a row has added a value: `rows` times, and where its weight is not 0 once
// more for each tail.
template <typename acc_t, int64_t kLanes>
struct Counts {
  alignas(64) acc_t weight[kLanes + kVec<acc_t>] = {};
  alignas(64) double count[kLanes];

  SYNCBN_INLINE void weigh(int64_t begin, int64_t end) {
    for (int64_t l = begin; l < end; ++l) {
      weight[l] = 1;
    }
  }

  SYNCBN_INLINE PerLane per_lane(int64_t rows, int64_t tails) {
    if (tails == 0) {
      count[0] = static_cast<double>(rows);
      return {count, 0};
    }
    for (int64_t l = 0; l < kLanes; ++l) {
      count[l] = static_cast<double>(rows) + static_cast<double>(tails) * weight[l];
    }
    return {count, 1};
  }
};

// A row is kPacks packs of one plane. The last values of a plane are the last lanes of a pack that
// reaches back to ones already added.
template <typename Op, typename scalar_t, int kPacks>
void reduce_planes(const Operands& operands, const Box& box) {
  using acc_t = acc_of<scalar_t>;
  constexpr int64_t pack = kPack<scalar_t>, lanes = kPacks * pack;
  const Values<scalar_t> values(operands);
  const int64_t full = (box.s1 - box.s0) / lanes * lanes;
  const int64_t tail_packs = (box.s1 - box.s0 - full) / pack;
  const int64_t tail_values = (box.s1 - box.s0 - full) % pack;
  const bool has_tail = tail_packs + tail_values > 0;
  Counts<acc_t, lanes> counts;
  counts.weigh(0, tail_packs * pack);
  counts.weigh((tail_packs + 1) * pack - tail_values, (tail_packs + (tail_values > 0)) * pack);

  for (int64_t c = box.c0; c < box.c1; ++c) {
    Op ops[kPacks];
    Totals<scalar_t> totals[kPacks];
    int64_t pending = 0;  // rows whose sums are not yet in the totals
    bool settled = false;
    const auto settle = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < kPacks; ++j) {
        ops[j].sums.settle(settled, totals[j]);
      }
      pending = 0;
      settled = true;
    };
    const auto open = [&](int64_t offset, int64_t rows, int64_t n) __attribute__((always_inline)) {
      // Three rows of a plane if it has them, else those at the same place of several planes.
      const bool across = rows < 3 && rows < box.n1 - n;
      const int64_t count = across ? box.n1 - n : rows;
      const int64_t stride = across ? operands.C * operands.S : lanes;
#pragma GCC unroll 4
      for (int j = 0; j < kPacks; ++j) {
        ops[j].open(values, offset + j * pack, count, stride);
      }
      pending = 0;
      settled = false;
    };
    const auto flush = [&](int64_t rows, int64_t tails, bool first) __attribute__((always_inline)) {
      LaneSums<acc_t, lanes> sums;
      sums.settled = settled;
#pragma GCC unroll 4
      for (int j = 0; j < kPacks; ++j) {
        ops[j].save_pivot(j * pack, sums);
        ops[j].sums.save(j * pack, totals[j], sums);
      }
      flush_plane<Op::kPivot>(c, sums, counts.per_lane(rows, tails), first, box.partial,
                              operands.C);
    };
#pragma GCC unroll 4
    for (int j = 0; j < kPacks; ++j) {
      set_channel<scalar_t>(ops[j], operands, c);
    }
    open((box.n0 * operands.C + c) * operands.S + box.s0, full / lanes, box.n0);
    int64_t rows = 0, tails = 0;
    bool first = true;
    for (int64_t n = box.n0; n < box.n1; ++n) {
      int64_t offset = (n * operands.C + c) * operands.S + box.s0;
      const int64_t end = offset + full;
      while (offset < end) {
        const int64_t left = (end - offset) / lanes;
        if (rows == kReduceRows) {
          flush(rows, tails, first);
          first = false;
          rows = tails = 0;
          open(offset, left, n);
        }
        if (pending >= kBlockRows) {
          settle();
        }
        int64_t count = left < kReduceRows - rows ? left : kReduceRows - rows;
        count = count < kBlockRows ? count : kBlockRows;
        rows += count;
        pending += count;
        for (int64_t r = 0; r < count; ++r, offset += lanes) {
#pragma GCC unroll 4
          for (int j = 0; j < kPacks; ++j) {
            ops[j].add(values, offset + j * pack);
          }
        }
      }
      if (has_tail) {
        ++tails;
        ++pending;
#pragma GCC unroll 4
        for (int j = 0; j < kPacks; ++j) {
          if (j < tail_packs) {
            ops[j].add(values, end + j * pack);
          } else if (j == tail_packs && tail_values > 0) {
            ops[j].add(values, end + j * pack + tail_values - pack,
                       Weighted<scalar_t>{load_lanes<scalar_t>(counts.weight + j * pack)});
          }
        }
      }
    }
    flush(rows, tails, first);
  }
}

template <typename Op, typename scalar_t>
void reduce_tile(const Operands& operands, const Tile& tile, int64_t offset, int64_t rows,
                 int64_t row_stride, int64_t rest, bool first, double* partial) {
  using acc_t = acc_of<scalar_t>;
  constexpr int64_t pack = kPack<scalar_t>;
  const Values<scalar_t> values(operands);
  TileOps<Op, scalar_t> tile_ops(operands, tile);
  Totals<scalar_t> totals[kTileLanes / pack + 1];
  for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
    tile_ops.ops[j].open(values, offset + lane, rows, row_stride);
  });
  const auto add_rows = [&](auto count, auto ahead, int64_t from) __attribute__((always_inline)) {
    for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
      Op op = tile_ops.ops[j];
#pragma GCC unroll 8
      for (int64_t r = 0; r < count.value; ++r) {
        const int64_t offset = from + lane + r * row_stride;
        if constexpr (ahead.value > 0) {
          values.prefetch(offset + ahead.value * row_stride);
        }
        op.add(values, offset);
      }
      tile_ops.ops[j].sums.first = op.sums.first;
      tile_ops.ops[j].sums.second = op.sums.second;
    });
  };
  bool settled = false;
  const auto add_blocks = [&](auto ahead) __attribute__((always_inline)) {
    int64_t r = 0;
    for (; r + kTileRows <= rows; r += kTileRows) {
      if (r > 0 && r % kBlockRows == 0) {
        for_packs<pack>(tile.width, [&](int64_t j, int64_t) __attribute__((always_inline)) {
          tile_ops.ops[j].sums.settle(settled, totals[j]);
        });
        settled = true;
      }
      add_rows(Count<kTileRows>{}, ahead, offset + r * row_stride);
    }
    for (; r < rows; ++r) {
      add_rows(Count<1>{}, ahead, offset + r * row_stride);
    }
  };
  if (row_stride <= kShortRow) {
    add_blocks(Count<2 * kTileRows>{});
  } else {
    add_blocks(Count<0>{});
  }
  Counts<acc_t, kRepeatedVectors * kVec<acc_t>> counts;
  if (rest > 0) {  // fewer than `repeats` values of n: the last full row, moved up to the end
    counts.weigh(tile.width - rest, tile.width);
    const int64_t last = offset + (rows - 1) * row_stride + rest;
    for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
      tile_ops.ops[j].add(values, last + lane,
                          Weighted<scalar_t>{load_lanes<scalar_t>(counts.weight + lane)});
    });
  }
  LaneSums<acc_t, kTileLanes> sums;
  sums.settled = settled;
  for_packs<pack>(tile.width, [&](int64_t j, int64_t lane) __attribute__((always_inline)) {
    tile_ops.ops[j].save_pivot(lane, sums);
    tile_ops.ops[j].sums.save(lane, totals[j], sums);
  });
  flush_tile<Op::kPivot>(tile, sums, counts.per_lane(rows, rest > 0), first, partial, operands.C);
}

template <typename Op, typename scalar_t>
void reduce_tiles(const Operands& operands, const Box& box) {
  const Tiling tiling(operands, box, kPack<scalar_t>, kVec<acc_of<scalar_t>>);
  for (int64_t r = 0; r < tiling.rows; r += kReduceRows) {
    const bool last = tiling.rows - r <= kReduceRows;
    const int64_t rows = last ? tiling.rows - r : kReduceRows;
    for (int64_t t = 0; t < tiling.tiles; ++t) {
      const Tile tile = tiling.tile(t);
      const int64_t offset =
          box.n0 * tiling.n_stride + r * tiling.row_stride + tile.channel * operands.S;
      reduce_tile<Op, scalar_t>(operands, tile, offset, rows, tiling.row_stride,
                                last ? tiling.rest : 0, r == 0, box.partial);
    }
  }
}

template <typename Op, typename scalar_t>
void reduce(const Operands& operands, const Box& box) {
  constexpr int packs = 4 / kParts<scalar_t>;
  switch (reduce_walk(operands.N, operands.S, packs * kPack<scalar_t>)) {
    case Walk::planes:
      return reduce_planes<Op, scalar_t, packs>(operands, box);
    case Walk::short_planes:
      return reduce_planes<Op, scalar_t, 1>(operands, box);
    case Walk::tiles:
      return reduce_tiles<Op, scalar_t>(operands, box);
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
