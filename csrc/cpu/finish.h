// What a step does once a channel behind its pass over memory: add up the boxes' partial sums, in
// the order of the boxes, and write what users see. In loops that the compiler vectorises, as with
// C in the hundreds and few values a channel they take as long as the pass.
#pragma once

#include "../arguments.h"
#include "../statistics.h"
#include "plan.h"
#include "vector.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

// Calls f(a, b), with types known to the compiler where they are the usual float32.
template <typename F>
SYNCBN_INLINE void with_known_type(const ChannelVector& a, const ChannelVector& b, const F& f) {
  const auto is_float = [](const ChannelVector& vector) {
    return vector.data != nullptr && vector.dtype == ScalarType::Float;
  };
  if (is_float(a) && is_float(b)) {
    f(ChannelVector{a.data, ScalarType::Float}, ChannelVector{b.data, ScalarType::Float});
  } else {
    f(a, b);
  }
}

// The message's channels begin to end, from partial sums about a pivot of each part.
inline void finish_stats(const Plan& plan, const double* partials /* [parts, 3, C] */,
                         const StatsArgs& args, int64_t begin, int64_t end) {
  const int64_t C = plan.C;
  double* sum = args.stats;
  double* sumsq = args.stats + C;
  for (int64_t c = begin; c < end; ++c) {
    sum[c] = sumsq[c] = 0;
  }
  const double* pivot = partials;  // of the first part; the others' sums are rebased to it
  for (int64_t p = 0; p < plan.parts(); ++p, partials += 3 * C) {
    const double count = static_cast<double>(plan.count(p));
#pragma GCC ivdep
    for (int64_t c = begin; c < end; ++c) {
      const Sums sums = rebase(count, partials[C + c], partials[2 * C + c], partials[c] - pivot[c]);
      sum[c] += sums.first;
      sumsq[c] += sums.second;
    }
  }
  const double count = static_cast<double>(plan.N * plan.S);
#pragma GCC ivdep
  for (int64_t c = begin; c < end; ++c) {
    write_sums(args.stats, C, c, count, pivot[c], {sum[c], sumsq[c]});
  }
}

inline void update_running(const ElemtArgs& args, double factor, int64_t begin, int64_t end) {
  with_known_type(args.running.mean, args.running.var, [&](const auto& mean, const auto& var) {
    const Running running{mean, var};
    const double* stats = args.stats;
    const int64_t C = args.layout.C;
#pragma GCC ivdep
    for (int64_t c = begin; c < end; ++c) {
      running.update(stats, C, c, factor);
    }
  });
}

template <typename acc_t>
void finish_backward(const Plan& plan, const double* partials /* [parts, 2, C] */,
                     const void* invstd /* acc_t [C] */, const BackwardReduceArgs& args,
                     int64_t begin, int64_t end) {
  const int64_t C = plan.C;
  double* sum_dy = args.sums;
  double* sum_dy_xmu = args.sums + C;
  for (int64_t c = begin; c < end; ++c) {
    sum_dy[c] = partials[c];
    sum_dy_xmu[c] = partials[C + c];
  }
  for (int64_t p = 1; p < plan.parts(); ++p) {
    partials += 2 * C;
#pragma GCC ivdep
    for (int64_t c = begin; c < end; ++c) {
      sum_dy[c] += partials[c];
      sum_dy_xmu[c] += partials[C + c];
    }
  }
  const acc_t* scale = static_cast<const acc_t*>(invstd);
  with_known_type(args.grad_weight, args.grad_bias, [&](const auto& weight, const auto& bias) {
#pragma GCC ivdep
    for (int64_t c = begin; c < end; ++c) {
      weight.store(c, sum_dy_xmu[c] * scale[c]);
      bias.store(c, sum_dy[c]);
    }
  });
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
