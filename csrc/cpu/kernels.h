// The border between the operators (batch_norm.cpp) and the kernels, which are compiled once per
// instruction set (kernels_*.cpp): plain structs and a table of function pointers.
//
// Every tensor is seen as [N, C, S] in this order of memory; channels-last [M, C] is [M, C, 1].
// A kernel works on one box of it. The boxes follow from the shape alone and their partial sums are
// added in fixed order, so the number of threads does not change a bit of the result.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <utility>

#include "../arguments.h"

namespace syncbn::cpu {

struct Plan;  // plan.h

struct Box {
  int64_t n0, n1, c0, c1, s0, s1;  // s0 and s1 cut [0, S) only where a plane is long
  double* partial;                 // [3, C] or [2, C], see Operands; only c0 to c1 are written
};

// What all boxes of one call share; what a step has no use for is null.
struct Operands {
  int64_t N, C, S;
  const void* input;     // x [N, C, S]
  const void* grad_out;  // dy [N, C, S]
  void* output;          // y or dx [N, C, S]

  // acc_t [k, stride], with k values a channel (statistics.h): mean_high, mean_low, and then
  //   elemt            scale, shift
  //   backward_reduce  invstd
  //   backward_elemt   mean_dy, slope, scale
  // padded so that a whole pack (pack.h) can be read at any channel.
  const void* coefficients;
  int64_t stride;
};

// What the coefficients of a call are derived from, and where they go.
struct Channels {
  int64_t C;
  const double* stats;  // [4C + 1], reduced
  const double* sums;   // [2C], reduced
  double eps;
  const void *weight, *bias;  // acc_t [C]
  void* out;                  // acc_t [k, stride]
  int64_t stride;
};

// How a kernel walks a box (tile.h): whole planes of S values, or rows of some channels.
enum class Walk { planes, short_planes, tiles };

// For sums; `lanes` values make a row of a plane. What the lanes of a row hold is added up at the
// end of a plane's values, at a price: short planes are given a row of fewer lanes, and where many
// n follow, which share the price of a tile, tiles.
constexpr Walk reduce_walk(int64_t N, int64_t S, int64_t lanes) {
  return S > 2 * lanes               ? Walk::planes
         : S >= lanes / 2 && N <= 16 ? Walk::short_planes
                                     : Walk::tiles;
}

// Whether an elementwise pass walks whole planes, too: from one pack (pack.h) on, going in order of
// memory outweighs reading a channel's coefficients for each plane.
constexpr bool applies_by_plane(int64_t S, int64_t pack) { return S >= pack; }

using Kernel = void (*)(const Operands&, const Box&);
using ChannelKernel = void (*)(const Channels&, int64_t begin, int64_t end);
using FinishStats = void (*)(const Plan&, const double* partials, const StatsArgs&, int64_t begin,
                             int64_t end);
using UpdateRunning = void (*)(const ElemtArgs&, double factor, int64_t begin, int64_t end);
using FinishBackward = void (*)(const Plan&, const double* partials, const void* invstd,
                                const BackwardReduceArgs&, int64_t begin, int64_t end);

// The kernels of one scalar type.
struct TypeKernels {
  int64_t pack, lanes;     // values of a pack, and of a row of a plane
  Kernel stats;            // partial: pivot, sum and sum of squares of (x - pivot)
  Kernel elemt;            // y
  Kernel backward_reduce;  // partial: sum of dy, sum of dy * (x - mean)
  Kernel backward_elemt;   // dx
  ChannelKernel elemt_coefficients, backward_reduce_coefficients, backward_elemt_coefficients;
  FinishStats finish_stats;
  UpdateRunning update_running;
  FinishBackward finish_backward;
};

struct Kernels {
  TypeKernels float64, float32, float16, bfloat16;
};

extern const Kernels kernels_default;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SYNCBN_CPU_DISPATCH 1
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace syncbn::cpu
