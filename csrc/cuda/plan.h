// The launch plan: how many blocks and threads a kernel gets and which values each thread visits.
// Plain C++ on plain numbers, shared by the launchers and the tests' emulator.
//
// All four kernels walk the tensor by one scheme. A tile is what a block owns of the channels: one
// channel (contiguous) or `lanes` packs of channels side by side (channels-last). The packs of a
// tile lie in rows; they are dealt out to the threads of `splits` blocks in turn, so that all
// blocks move through memory together:
//
//   contiguous, [N, C, S]: row n of channel c      channels-last, [M, C]: row m of a tile
//     | pack 0 | pack 1 | ... | pack P - 1 |         | lane 0 | lane 1 | ... |    one pack a lane
//       t = 0    t = 1    ...   one thread a pack      thread t: lane t % lanes, row t / lanes
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "../layout.h"

namespace syncbn {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 256;    // a block
inline constexpr int kMaxTile = 128;       // channels of a block, channels-last
inline constexpr int kBlocksPerSM = 8;     // what the grid aims at
inline constexpr int kMinPacks = 8;        // of a thread, before a channel is split further
inline constexpr int kFlushValues = 512;   // what a float32 sum takes before it is emptied
inline constexpr int64_t kPackBytes = 16;  // the widest load and store

// Blocks of kMaxThreads that must fit an SM, so that the compiler knows what registers it has:
// kAcc is the number of channels of a thread.
template <int kAcc>
inline constexpr int kMinBlocks = kAcc == 8 ? 2 : 3;

struct Card {
  int64_t sms = 1;
  int64_t l2_bytes = 0;
};

// What a thread needs to find its packs; a kernel parameter (walk.cuh).
struct WalkPlan {
  int64_t C = 0, S = 0;     // S: values of a row that belong to one channel; 1 in channels-last
  int64_t count = 0;        // values of a channel
  int64_t numel = 0;        // values in all
  int64_t rows = 0;         // rows of a tile: N or M
  int64_t row_stride = 0;   // values from one row to the next
  int64_t step_rows = 0;    // the way from one pack of a thread to its next: rows, in values,
  int step_packs = 0;       // and packs along the row
  int packs = 0;            // packs of a row (an upper bound where rows are not aligned)
  int each = 0, extra = 0;  // packs of a thread; the first `extra` have one more
  int shift = 0;            // values between the pointers and the 16-byte boundary below them
  int lanes = 1;            // threads side by side over the channels of a tile
  int tiles = 0;            // blocks side by side over all channels
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
  int tile = 1;            // channels of a tile
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

// Contiguous rows may begin anywhere, so they are peeled; all that counts is that the pointers are
// misaligned alike. Channels-last packs never straddle rows, so the width must divide C.
inline int vector_width(const Layout& layout, int64_t size,
                        std::initializer_list<const void*> pointers) {
  const auto misalignment = [](const void* pointer, int64_t bytes) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) % bytes);
  };
  int width = static_cast<int>(kPackBytes / size);
  for (const void* pointer : pointers) {
    if (!layout.channels_last) {
      width = misalignment(pointer, kPackBytes) == misalignment(*pointers.begin(), kPackBytes)
                  ? width
                  : 1;
    }
    while (layout.channels_last && (layout.C % width != 0 || misalignment(pointer, width * size))) {
      width /= 2;
    }
  }
  return width;
}

// The widest tile wastes the fewest instructions, unless a narrower one leaves fewer lanes idle
// past C or, where there are few rows to split, is needed to fill the card. Rows of a tile keep at
// least 64 bytes: two sectors.
inline int choose_lanes(const Layout& layout, int64_t size, int vec, const Card& card) {
  const auto tiles = [&](int lanes) { return ceil_div(layout.C, lanes * vec); };
  int best = static_cast<int>(std::min<int64_t>(
      kWarpSize, ceil_pow2(ceil_div(std::min<int64_t>(layout.C, kMaxTile), vec))));
  for (int lanes = best / 2; lanes > 0 && lanes * vec * size >= 64; lanes /= 2) {
    const bool fills = layout.rows() <= 1024 && tiles(best) < card.sms;
    if (fills || tiles(lanes) * lanes < tiles(best) * best) {
      best = lanes;
    }
  }
  return best;
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
inline Plan make_plan(const Layout& layout, int64_t size,
                      std::initializer_list<const void*> pointers, const Card& card) {
  using detail::ceil_div;
  Plan plan;
  plan.channels_last = layout.channels_last;
  plan.vec = detail::vector_width(layout, size, pointers);
  plan.streaming = layout.numel() * size > card.l2_bytes / 2;

  WalkPlan& walk = plan.walk;
  walk.C = layout.C;
  walk.count = layout.rows();
  walk.numel = layout.numel();
  if (walk.count == 0) {
    return plan;
  }
  if (layout.channels_last) {
    walk.S = 1;
    walk.rows = layout.rows();
    walk.row_stride = layout.C;
    walk.packs = 1;
    walk.lanes = detail::choose_lanes(layout, size, plan.vec, card);
    plan.tile = walk.lanes * plan.vec;
  } else {
    walk.S = layout.S;
    walk.rows = layout.N;
    walk.row_stride = layout.C * layout.S;
    const auto address = reinterpret_cast<uintptr_t>(*pointers.begin());
    walk.shift = static_cast<int>(address % (plan.vec * size) / size);
    const bool aligned = walk.shift == 0 && layout.S % plan.vec == 0;
    const int64_t packs = aligned ? layout.S / plan.vec : (layout.S - 2) / plan.vec + 2;
    if (packs > INT32_MAX / 2) {
      throw std::invalid_argument("syncbn_cuda: a channel of one sample is too long");
    }
    walk.packs = static_cast<int>(packs);
  }
  walk.tiles = static_cast<int>(ceil_div(layout.C, plan.tile));

  const int64_t packs = walk.rows * walk.packs;  // of a lane of a tile
  const int64_t wanted = detail::ceil_pow2(ceil_div(packs * walk.lanes, kMinPacks / 2));
  plan.threads = static_cast<int>(std::clamp<int64_t>(wanted, kWarpSize, kMaxThreads));
  const int64_t abreast = plan.threads / walk.lanes;  // packs a block takes at once, a lane
  const int64_t filling = ceil_div(kBlocksPerSM * card.sms, walk.tiles);
  walk.splits = static_cast<int>(
      std::clamp<int64_t>(packs / (abreast * kMinPacks), 1, std::max<int64_t>(filling, 1)));

  const int64_t step = abreast * walk.splits;
  walk.step_rows = step / walk.packs * walk.row_stride;
  walk.step_packs = static_cast<int>(step % walk.packs);
  walk.each = static_cast<int>(packs / step);
  walk.extra = static_cast<int>(packs % step);
  plan.tree = detail::plan_tree(walk.splits, plan.tile);
  return plan;
}

}  // namespace syncbn
