// The coefficients of the channels, from the reduced message: one call of statistics.h a channel,
// in loops that the compiler vectorises (with -fno-math-errno; with C in the hundreds and few
// values a channel they are most of a step; ivdep: what is written overlaps nothing). Written as
// [k, stride], see Operands.
#pragma once

#include "../statistics.h"
#include "vector.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// The host has filled in what is absent.
template <typename acc_t>
SYNCBN_INLINE ChannelVector channel_vector(const void* data) {
  return {const_cast<void*>(data), sizeof(acc_t) == 8 ? ScalarType::Double : ScalarType::Float};
}

template <typename acc_t>
void centre_coefficients(const Channels& channels, int64_t begin, int64_t end) {
  acc_t* out = static_cast<acc_t*>(channels.out);
  const double* stats = channels.stats;
  const int64_t C = channels.C, stride = channels.stride;
  const double eps = channels.eps;
#pragma GCC ivdep
  for (int64_t c = begin; c < end; ++c) {
    const auto s = channel_stats<acc_t>(stats, C, c, eps);
    out[c] = s.mean_high;
    out[stride + c] = s.mean_low;
    out[2 * stride + c] = s.invstd;
  }
}

template <typename acc_t>
void elemt_coefficients(const Channels& channels, int64_t begin, int64_t end) {
  acc_t* out = static_cast<acc_t*>(channels.out);
  const double* stats = channels.stats;
  const int64_t C = channels.C, stride = channels.stride;
  const double eps = channels.eps;
  const ChannelVector weight = channel_vector<acc_t>(channels.weight);
  const ChannelVector bias = channel_vector<acc_t>(channels.bias);
#pragma GCC ivdep
  for (int64_t c = begin; c < end; ++c) {
    const auto a = affine<acc_t>(stats, C, c, eps, weight, bias);
    out[c] = a.stats.mean_high;
    out[stride + c] = a.stats.mean_low;
    out[2 * stride + c] = a.scale;
    out[3 * stride + c] = a.shift;
  }
}

template <typename acc_t>
void backward_elemt_coefficients(const Channels& channels, int64_t begin, int64_t end) {
  acc_t* out = static_cast<acc_t*>(channels.out);
  const double* stats = channels.stats;
  const double* sums = channels.sums;
  const int64_t C = channels.C, stride = channels.stride;
  const double eps = channels.eps;
  const ChannelVector weight = channel_vector<acc_t>(channels.weight);
#pragma GCC ivdep
  for (int64_t c = begin; c < end; ++c) {
    const auto g = input_grad<acc_t>(stats, sums, C, c, eps, weight);
    out[c] = g.stats.mean_high;
    out[stride + c] = g.stats.mean_low;
    out[2 * stride + c] = g.mean_dy;
    out[3 * stride + c] = g.slope;
    out[4 * stride + c] = g.scale;
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
