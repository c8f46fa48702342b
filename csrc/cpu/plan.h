// How a tensor [N, C, S] is cut into boxes, the tasks of one kernel call.
//
// A plan depends on the shape alone, never on the number of threads, so partial sums are added in
// the same order everywhere. Boxes are numbered in order of memory: parallel_for gives each thread
// neighbours.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace syncbn::cpu {

constexpr int64_t kBoxValues = 16384;     // values a box: some microseconds of work
constexpr int64_t kMaxBoxes = 512;        // enough to keep any machine's threads busy evenly
constexpr int64_t kThreadValues = 32768;  // values that are worth a thread, as in ATen

struct Plan {
  int64_t N, C, S, lanes;
  int64_t n_parts, c_parts, s_parts;

  int64_t boxes() const { return n_parts * c_parts * s_parts; }

  // Boxes that share their channels, and so add to the same sums.
  int64_t parts() const { return n_parts * s_parts; }

  int64_t part(int64_t box) const { return box / (c_parts * s_parts) * s_parts + box % s_parts; }

  // The least number of boxes for a thread of its own.
  int64_t grain() const {
    const int64_t values = std::max<int64_t>(N * C * S / boxes(), 1);
    return (kThreadValues + values - 1) / values;
  }

  Box box(int64_t i) const {
    const int64_t s = i % s_parts, c = i / s_parts % c_parts, n = i / s_parts / c_parts;
    // A plane is cut between rows of `lanes` values; the last part has the rest.
    const int64_t rows = S / lanes;
    const auto cut = [&](int64_t p) { return p == s_parts ? S : p * rows / s_parts * lanes; };
    return {n * N / n_parts, (n + 1) * N / n_parts,
            c * C / c_parts, (c + 1) * C / c_parts,
            cut(s),          cut(s + 1),
            nullptr};
  }

  // The values of a channel in the boxes of one part.
  int64_t count(int64_t part) const {
    const Box b = box(part / s_parts * c_parts * s_parts + part % s_parts);
    return (b.n1 - b.n0) * (b.s1 - b.s0);
  }
};

namespace detail {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// By fours, so that few boxes too are shared out evenly.
inline int64_t boxes_wanted(int64_t values) {
  const int64_t boxes = std::clamp<int64_t>(values / kBoxValues, 1, kMaxBoxes);
  return boxes <= 2 ? boxes : divide_up(boxes, 4) * 4;
}

// A plane is cut only in pieces of some length.
inline int64_t plane_parts(int64_t S, int64_t lanes) {
  return std::max<int64_t>(S / (128 * lanes), 1);
}

// Boxes of tiles hold so many channels that their rows are long, and no row is shorter than a pack.
inline int64_t tile_parts(int64_t C, int64_t S, int64_t lanes) {
  return divide_up(C, 2 * lanes / S);
}

}  // namespace detail

// For sums: rather few channels a box than few rows, as each box adds its rows to [C] sums at a
// price.
inline Plan reduce_plan(const Operands& operands, const TypeKernels& kernels) {
  const int64_t N = operands.N, C = operands.C, S = operands.S, lanes = kernels.lanes;
  const int64_t wanted = detail::boxes_wanted(N * C * S);
  Plan plan{N, C, S, lanes, 1, 1, 1};
  if (reduce_walk(N, S, lanes) != Walk::tiles) {
    plan.c_parts = std::min(C, wanted);
    plan.n_parts = std::min(N, detail::divide_up(wanted, plan.c_parts));
    plan.s_parts = std::min(detail::plane_parts(S, lanes),
                            detail::divide_up(wanted, plan.c_parts * plan.n_parts));
  } else {
    plan.n_parts = std::clamp<int64_t>(N / 256, 1, wanted);
    plan.c_parts =
        std::min(detail::tile_parts(C, S, lanes), detail::divide_up(wanted, plan.n_parts));
  }
  return plan;
}

// For a pass that writes: in order of memory.
inline Plan elementwise_plan(const Operands& operands, const TypeKernels& kernels) {
  const int64_t N = operands.N, C = operands.C, S = operands.S, lanes = kernels.lanes;
  const int64_t wanted = detail::boxes_wanted(N * C * S);
  Plan plan{N, C, S, lanes, 1, 1, 1};
  if (applies_by_plane(S, kernels.pack)) {
    plan.n_parts = std::min(N, wanted);
    plan.c_parts = std::min(C, detail::divide_up(wanted, plan.n_parts));
    plan.s_parts = std::min(detail::plane_parts(S, lanes),
                            detail::divide_up(wanted, plan.c_parts * plan.n_parts));
  } else {
    plan.n_parts = std::clamp<int64_t>(N / 8, 1, wanted);
    plan.c_parts =
        std::min(detail::tile_parts(C, S, lanes), detail::divide_up(wanted, plan.n_parts));
  }
  return plan;
}

}  // namespace syncbn::cpu
