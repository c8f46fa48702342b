// The launch plan: how many blocks and threads a kernel gets and which values each thread visits.
// Plain C++ on plain numbers, shared by the launchers and the tests' emulator.
//
// All four kernels walk the tensor by one scheme. A tile is what a block owns of the channels: one
// channel (contiguous) or `lanes` packs of columns side by side (channels-last). The packs of a
// tile lie in rows; they are dealt out to the threads of `splits` blocks in turn, so that all
// blocks move through memory together:
//
//   contiguous, [N, C, S]: row n of channel c      channels-last, [M, C]: row m of a tile
//     | pack 0 | pack 1 | ... | pack P - 1 |         | lane 0 | lane 1 | ... |    one pack a lane
//       t = 0    t = 1    ...   one thread a pack      thread t: lane t % lanes, row t / lanes
//
// A column of a channels-last row is one channel, with two exceptions that keep packs wide: where
// C is small and odd, some rows are taken for one, [M / r, r * C]; and kernels that only write take
// a contiguous tensor of short rows for [N, C * S]. Column v is of channel (v / span) % C.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "../layout.h"

namespace syncbn {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 256;      // a block
inline constexpr int kMaxTile = 128;         // channels of a block
inline constexpr int kMaxValues = 512;       // of a channel that a thread adds up in float32
inline constexpr int kBlocksPerSM = 16;      // no more are launched where it can be helped,
inline constexpr int kPartialsPerSM = 1024;  // nor do they leave more sums to be combined
inline constexpr int64_t kPackBytes = 16;    // the widest load and store
inline constexpr int kBatchBytes = 64;       // that a thread has in flight, in packs
inline constexpr int kMinBatch = 4;          // packs
inline constexpr int kMaxBatch = 16;
inline constexpr int64_t kShortRow = 512;  // bytes of a contiguous row that is not worth a block

// Blocks of kMaxThreads that must fit an SM, so that the compiler knows what registers it has:
// three times 64 bytes a thread are 48 KB in flight, twice what the memory of an H200 needs. A
// float64 takes two registers.
template <typename scalar_t>
inline constexpr int kMinBlocks = sizeof(scalar_t) == 8 ? 2 : 3;

// Whether a kernel adds up or writes; what adds up must have all columns of a channel in one tile.
enum class Step { kReduce, kWrite };

// How many packs a thread loads before it waits for the first. What writes needs half as many bytes
// in flight, and registers to remember where each pack belongs.
constexpr int batch_packs(int64_t pack_bytes, Step step) {
  const int bytes = step == Step::kWrite ? kBatchBytes / 2 : kBatchBytes;
  const int most = step == Step::kWrite ? kMaxBatch / 2 : kMaxBatch;
  return std::clamp(static_cast<int>(bytes / pack_bytes), kMinBatch, most);
}

struct Card {
  int64_t sms = 1;
  int64_t l2_bytes = 0;
};

// What a thread needs to find its packs; a kernel parameter (walk.cuh).
struct WalkPlan {
  int64_t C = 0, S = 0;     // S: values of a row that belong to one channel; 1 in channels-last
  int64_t columns = 0;      // what is walked as channels: as many, or more (choose_view)
  int span = 1;             // columns side by side that are one channel
  int64_t count = 0;        // values of a channel
  int64_t numel = 0;        // values in all
  int64_t rows = 0;         // rows of a tile: N or M, or fewer where they are folded
  int64_t row_stride = 0;   // values from one row to the next
  int64_t step_rows = 0;    // the way from one pack of a thread to its next: rows, in values,
  int step_packs = 0;       // and packs along the row
  int packs = 0;            // packs of a row (an upper bound where rows are not aligned)
  int each = 0, extra = 0;  // packs of a thread; the first `extra` have one more
  int shift = 0;            // values between the pointers and the 16-byte boundary below them
  bool aligned = false;     // all rows begin and end at such a boundary
  int lanes = 1;            // threads side by side over the columns of a tile
  int tiles = 0;            // blocks side by side over all columns
  int splits = 1;           // blocks a tile
};

// The tree by which the blocks of a tile combine their sums: `fan` blocks a node, all levels of
// nodes one behind the other (reduce.cuh).
struct TreePlan {
  int fan = 1;
  int partials = 0;  // rows of partial sums a tile
  int counters = 0;  // nodes a tile
};

struct Plan {
  bool channels_last = false;
  int vec = 1;             // values of a pack
  int threads = 0;         // a block
  int tile = 1;            // columns of a tile
  bool streaming = false;  // the output is too large for the L2 to keep
  WalkPlan walk;
  TreePlan tree;

  int64_t blocks() const { return static_cast<int64_t>(walk.tiles) * walk.splits; }
  int64_t partials() const { return static_cast<int64_t>(walk.tiles) * tree.partials * tile; }
  int64_t counters() const { return static_cast<int64_t>(walk.tiles) * tree.counters; }
};

namespace detail {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t ceil_pow2(int64_t value) {
  int64_t power = 1;
  while (power < value) {
    power *= 2;
  }
  return power;
}

inline int64_t floor_pow2(int64_t value) { return ceil_pow2(value / 2 + 1); }

inline int64_t misalignment(const void* pointer, int64_t bytes) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) % bytes);
}

using Pointers = std::initializer_list<const void*>;

// Contiguous rows may begin anywhere, so they are peeled; all that counts is that the pointers are
// misaligned alike.
inline int row_width(int64_t size, Pointers pointers) {
  const int64_t first = misalignment(*pointers.begin(), kPackBytes);
  const bool alike = std::all_of(pointers.begin(), pointers.end(), [&](const void* pointer) {
    return misalignment(pointer, kPackBytes) == first;
  });
  return alike ? static_cast<int>(kPackBytes / size) : 1;
}

// Packs of columns never straddle rows, so the width must divide their number.
inline int column_width(int64_t columns, int64_t size, Pointers pointers) {
  int width = static_cast<int>(kPackBytes / size);
  for (const void* pointer : pointers) {
    while (columns % width != 0 || misalignment(pointer, width * size) != 0) {
      width /= 2;
    }
  }
  return width;
}

// A tensor that is walked as [rows, columns].
struct View {
  int64_t rows = 0, columns = 0;
  int64_t span = 1;
  int vec = 1;
  bool folded = false;  // several rows are taken for one
};

// Rows are folded as long as that makes packs wider. What adds up needs all columns of a channel in
// one tile.
inline View fold(const Layout& layout, int64_t size, Pointers pointers, Step step) {
  View view{layout.rows(), layout.C, 1, column_width(layout.C, size, pointers)};
  while (view.rows % 2 == 0) {
    const int64_t columns = 2 * view.columns;
    const int vec = column_width(columns, size, pointers);
    const bool fits = columns <= std::min(kMaxTile, kWarpSize * vec);
    if (vec == view.vec || (step == Step::kReduce && !fits)) {
      break;
    }
    view = {view.rows / 2, columns, 1, vec, true};
  }
  return view;
}

// The view of [rows, columns], or none where the tensor is walked row by row. Rows of some hundred
// bytes have too many of their packs in common with their neighbours to be written that way.
inline View choose_view(const Layout& layout, int64_t size, Pointers pointers, Step step) {
  if (layout.channels_last) {
    return fold(layout, size, pointers, step);
  }
  const int64_t columns = layout.C * layout.S;
  const View view{layout.N, columns, layout.S, column_width(columns, size, pointers)};
  const bool is_short = layout.S * size <= kShortRow && view.vec * size >= kPackBytes / 2;
  return step == Step::kWrite && is_short && columns <= INT32_MAX ? view : View{};
}

// The widest tile wastes the fewest instructions, unless a narrower one leaves fewer lanes idle
// past the last column or, where there are few rows to split, is needed to fill the card. Rows of a
// tile keep at least 64 bytes: two sectors. A tile has at most kMaxTile channels, which need not
// begin where it does.
inline int choose_lanes(const View& view, int64_t size, const Card& card) {
  const auto tiles = [&](int64_t lanes) { return ceil_div(view.columns, lanes * view.vec); };
  const int64_t most = view.span == 1 ? std::min<int64_t>(kWarpSize, kMaxTile / view.vec)
                                      : (kMaxTile - 2) * view.span / view.vec;
  int64_t best =
      std::min({floor_pow2(std::max<int64_t>(most, 1)), ceil_pow2(ceil_div(view.columns, view.vec)),
                static_cast<int64_t>(kMaxThreads)});
  for (int64_t lanes = best / 2; lanes > 0 && lanes * view.vec * size >= 64; lanes /= 2) {
    const bool fills = view.rows <= 1024 && tiles(best) < card.sms;
    if (!view.folded && (fills || tiles(lanes) * lanes < tiles(best) * best)) {
      best = lanes;
    }
  }
  return static_cast<int>(best);
}

// Blocks a tile: about as many blocks an SM as packs a thread, so that neither the last block to
// end nor what each block does once weighs much.
inline int choose_splits(const Plan& plan, int64_t packs, int64_t abreast, int batch,
                         const Card& card) {
  const WalkPlan& walk = plan.walk;
  const int64_t steps = packs / abreast;
  const int an_sm = std::min(kBlocksPerSM, kPartialsPerSM / std::min(plan.tile, kMaxTile));
  const int64_t most = card.sms * an_sm / walk.tiles;
  const auto even = static_cast<int64_t>(
      std::sqrt(static_cast<double>(steps) * static_cast<double>(card.sms) / walk.tiles));
  const int64_t values = plan.channels_last ? 1 : plan.vec;  // of a channel in a pack
  const int64_t least = std::max<int64_t>(ceil_div(packs * values, abreast * kMaxValues), 1);
  return static_cast<int>(std::max(std::min({even, most, steps / batch}), least));
}

inline TreePlan plan_tree(int splits, int tile) {
  TreePlan tree;
  // One level as long as the last block has little to read, else two of about equal size.
  if (splits * tile <= 2048) {
    tree.fan = splits;
  }
  while (tree.fan * tree.fan < splits) {
    ++tree.fan;
  }
  for (int nodes = splits; nodes > 1;) {
    tree.partials += nodes;
    nodes = (nodes + tree.fan - 1) / tree.fan;
    tree.counters += nodes;
  }
  return tree;
}

}  // namespace detail

// `size`: bytes of a value; `pointers`: all tensors of this layout that the kernel touches.
inline Plan make_plan(const Layout& layout, int64_t size, detail::Pointers pointers,
                      const Card& card, Step step) {
  using detail::ceil_div;
  Plan plan;
  plan.streaming = layout.numel() * size > card.l2_bytes / 2;
  WalkPlan& walk = plan.walk;
  walk.C = layout.C;
  walk.count = layout.rows();
  walk.numel = layout.numel();
  if (walk.count == 0) {
    return plan;
  }
  const detail::View view = detail::choose_view(layout, size, pointers, step);
  plan.channels_last = view.columns > 0;
  if (plan.channels_last) {
    plan.vec = view.vec;
    walk.S = 1;
    walk.rows = view.rows;
    walk.row_stride = walk.columns = view.columns;
    walk.span = static_cast<int>(view.span);
    walk.packs = 1;
    walk.lanes = detail::choose_lanes(view, size, card);
    plan.tile = walk.lanes * plan.vec;
  } else {
    plan.vec = detail::row_width(size, pointers);
    walk.S = layout.S;
    walk.rows = layout.N;
    walk.row_stride = layout.C * layout.S;
    walk.columns = layout.C;
    walk.shift = static_cast<int>(detail::misalignment(*pointers.begin(), plan.vec * size) / size);
    walk.aligned = walk.shift == 0 && layout.S % plan.vec == 0;
    const int64_t packs = walk.aligned ? layout.S / plan.vec : (layout.S - 2) / plan.vec + 2;
    if (packs > INT32_MAX / 2) {
      throw std::invalid_argument("syncbn_cuda: a channel of one sample is too long");
    }
    walk.packs = static_cast<int>(packs);
  }
  if (walk.columns > INT32_MAX) {
    throw std::invalid_argument("syncbn_cuda: too many channels");
  }
  walk.tiles = static_cast<int>(ceil_div(walk.columns, plan.tile));

  const int64_t packs = walk.rows * walk.packs;  // of a lane of a tile
  const int batch = batch_packs(plan.vec * size, step);
  const int64_t wanted = detail::ceil_pow2(ceil_div(packs * walk.lanes, batch));
  plan.threads =
      static_cast<int>(std::clamp<int64_t>(wanted, std::max(kWarpSize, walk.lanes), kMaxThreads));
  const int64_t abreast = plan.threads / walk.lanes;  // packs a block takes at once, a lane
  walk.splits = detail::choose_splits(plan, packs, abreast, batch, card);

  const int64_t stride = abreast * walk.splits;
  walk.step_rows = stride / walk.packs * walk.row_stride;
  walk.step_packs = static_cast<int>(stride % walk.packs);
  walk.each = static_cast<int>(packs / stride);
  walk.extra = static_cast<int>(packs % stride);
  plan.tree = detail::plan_tree(walk.splits, plan.tile);
  return plan;
}

}  // namespace syncbn
