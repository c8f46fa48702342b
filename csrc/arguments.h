// What a kernel of each step gets: plain structs of raw pointers, the same on every device.
// x, y, dy, dx are [N, C, S] or [M, C] (layout.h), all of one type and one layout.
#pragma once

#include "layout.h"
#include "statistics.h"

namespace syncbn {

struct StatsArgs {
  ScalarType dtype;
  Layout layout;
  const void* input;  // x
  double* stats;      // [4C + 1], written: message.h
};

struct ElemtArgs {
  ScalarType dtype;
  Layout layout;
  const void* input;    // x
  void* output;         // y, written
  const double* stats;  // [4C + 1], reduced
  double eps;
  ChannelVector weight, bias;
  Running running;  // updated where present
};

struct BackwardReduceArgs {
  ScalarType dtype;
  Layout layout;
  const void* grad_out;  // dy
  const void* input;     // x
  const double* stats;   // [4C + 1], reduced
  double eps;
  double* sums;                          // [2C], written: sum dy, sum dy * (x - mean)
  ChannelVector grad_weight, grad_bias;  // written where present, from this rank's values
};

struct BackwardElemtArgs {
  ScalarType dtype;
  Layout layout;
  const void* grad_out;  // dy
  const void* input;     // x
  void* grad_input;      // dx, written
  const double* stats;   // [4C + 1], reduced
  const double* sums;    // [2C], reduced
  double eps;
  ChannelVector weight;
};

}  // namespace syncbn
