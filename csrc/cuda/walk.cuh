// The way of one thread through its packs (plan.h has the map). Forward for the kernels that
// reduce; the kernels that write walk the same packs in the reverse order, blocks included, so that
// they first meet what the pass before has left in the L2.
//
// No division per pack: the step from one pack to the next is a fixed number of rows and packs,
// with a carry at the end of a row.
#pragma once

#include "pack.cuh"
#include "plan.h"

namespace syncbn {

enum class Order { kForward, kReverse };

template <bool kChannelsLast, int kVec, Order kOrder>
class Walk {
 public:
  // `block`: of tiles * splits.
  __device__ __forceinline__ Walk(const WalkPlan& plan, unsigned block) : plan_(plan) {
    if constexpr (kReverse) {
      block = static_cast<unsigned>(plan.tiles) * plan.splits - 1 - block;
    }
    split_ = static_cast<int>(block / static_cast<unsigned>(plan.tiles));
    tile_ = static_cast<int>(block % static_cast<unsigned>(plan.tiles));
    const unsigned lanes = plan.lanes, abreast = blockDim.x / lanes;
    column_ = (static_cast<int64_t>(tile_) * plan.lanes + threadIdx.x % lanes) *
              (kChannelsLast ? kVec : 1);
    const int first = static_cast<int>(split_ * abreast + threadIdx.x / lanes);
    left_ = column_ < plan.columns ? plan.each + (first < plan.extra) : 0;
    const int row = kChannelsLast ? first : first / plan.packs;
    pack_ = kChannelsLast ? 0 : first % plan.packs;
    start_ = column_ * plan.S + (kReverse ? plan.rows - 1 - row : row) * plan.row_stride;
  }

  __device__ __forceinline__ int split() const { return split_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int64_t column() const { return column_; }  // the thread's first
  __device__ __forceinline__ bool more() const { return left_ > 0; }

  // Where the thread stands; then it moves on. An empty span once nothing is left.
  __device__ __forceinline__ Span<kChannelsLast, kVec> next() {
    Span<kChannelsLast, kVec> at;
    int64_t step = plan_.step_rows;
    if constexpr (kChannelsLast) {
      at = {start_, left_ > 0 ? at.bits(0, kVec) : 0};
    } else {
      const int64_t first = static_cast<int64_t>(pack()) * kVec;
      at = {start_ + first, left_ > 0 ? at.bits(0, kVec) : 0};
      if (kVec > 1 && !plan_.aligned && left_ > 0) {
        at.offset -= head();
        // Values of the row from the pack's begin on, or some number above kVec.
        const int whole = min(static_cast<int>(plan_.S / kVec) - pack(), 2);
        const int rest = whole * kVec + static_cast<int>(plan_.S % kVec) + head();
        at.own = at.bits(pack() == 0 ? head() : 0, rest < 0 ? 0 : min(rest, kVec));
        if (at.offset < 0 || at.offset + kVec > plan_.numel) {
          at.own |= at.kOutside;
        }
      }
      pack_ += plan_.step_packs;
      if (pack_ >= plan_.packs) {
        pack_ -= plan_.packs;
        step += plan_.row_stride;
      }
    }
    start_ += kReverse ? -step : step;
    --left_;
    return at;
  }

 private:
  static constexpr bool kReverse = kOrder == Order::kReverse;

  // Values between the begin of the row and the 16-byte boundary below it.
  __device__ __forceinline__ int head() const {
    return (static_cast<int>(start_) + plan_.shift) & (kVec - 1);
  }
  __device__ __forceinline__ int pack() const { return kReverse ? plan_.packs - 1 - pack_ : pack_; }

  const WalkPlan& plan_;
  int split_, tile_;
  int left_, pack_;         // packs left to visit; where the thread stands in the row
  int64_t column_, start_;  // where the row begins in the tensor
};

}  // namespace syncbn
