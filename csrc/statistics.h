// From the reduced message to the statistics of a channel: mean, variance, invstd, running stats.
//
// One source for CPU, CUDA and the tests' emulator: every rank of a mixed group must derive the
// same bits from the same message. Hence one rounding per operation everywhere (mul_rn, add_rn on
// the device; the host files are compiled with -ffp-contract=off), true divisions, and a correctly
// rounded square root rather than rsqrt.
//
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "message.h"

namespace syncbn {

using torch::headeronly::ScalarType;

// Statistics and gradients of float64 input are float64, of everything narrower float32.
template <typename scalar_t>
using acc_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

SYNCBN_HOST_DEVICE float inverse_sqrt(float v) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(1.0f, __fsqrt_rn(v));
#else
  return 1.0f / std::sqrt(v);
#endif
}

SYNCBN_HOST_DEVICE double inverse_sqrt(double v) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(1.0, __dsqrt_rn(v));
#else
  return 1.0 / std::sqrt(v);
#endif
}

// A vector of C parameters, buffers or gradients whose type is known at run time only; absent
// where data is null.
struct ChannelVector {
  void* data = nullptr;  // [C]
  ScalarType dtype = ScalarType::Float;

  SYNCBN_HOST_DEVICE double load(int64_t c, double absent) const {
    if (data == nullptr) {
      return absent;
    }
    switch (dtype) {
      case ScalarType::Double:
        return static_cast<const double*>(data)[c];
      case ScalarType::Half:
        return static_cast<float>(static_cast<const c10::Half*>(data)[c]);
      case ScalarType::BFloat16:
        return static_cast<float>(static_cast<const c10::BFloat16*>(data)[c]);
      default:
        return static_cast<const float*>(data)[c];
    }
  }

  SYNCBN_HOST_DEVICE void store(int64_t c, double value) const {
    if (data == nullptr) {
      return;
    }
    switch (dtype) {
      case ScalarType::Double:
        static_cast<double*>(data)[c] = value;
        break;
      case ScalarType::Half:
        static_cast<c10::Half*>(data)[c] = static_cast<float>(value);
        break;
      case ScalarType::BFloat16:
        static_cast<c10::BFloat16*>(data)[c] = static_cast<float>(value);
        break;
      default:
        static_cast<float*>(data)[c] = static_cast<float>(value);
    }
  }

  // Whether the value is finite in this type.
  SYNCBN_HOST_DEVICE bool holds(double value) const {
    const double largest = dtype == ScalarType::Double     ? DBL_MAX
                           : dtype == ScalarType::Half     ? 65504.0
                           : dtype == ScalarType::BFloat16 ? 0x1.FEp127
                                                           : FLT_MAX;
    return value <= largest && value >= -largest;  // NaN is neither
  }
};

// What the kernels normalise with. The mean is a pair: a single number would be off by 2^-24 mean,
// or 2^-53 mean for float64 input, which counts once mean / std is large.
template <typename acc_t>
struct ChannelStats {
  acc_t mean_high, mean_low, invstd;

  SYNCBN_HOST_DEVICE acc_t centre(acc_t x) const { return (x - mean_high) - mean_low; }
};

template <typename acc_t>
SYNCBN_HOST_DEVICE ChannelStats<acc_t> channel_stats(const Moments& m, double eps) {
  const acc_t high = static_cast<acc_t>(m.mean);
  const double low = add_rn(add_rn(m.mean, -static_cast<double>(high)), m.mean_low);
  // An infinite mean would give low = Inf - Inf = NaN where BatchNorm's output is NaN as well.
  return {high, static_cast<acc_t>(low), inverse_sqrt(static_cast<acc_t>(add_rn(m.var, eps)))};
}

template <typename acc_t>
SYNCBN_HOST_DEVICE ChannelStats<acc_t> channel_stats(const double* stats /* [4C + 1] */, int64_t C,
                                                     int64_t c, double eps) {
  return channel_stats<acc_t>(moments(stats, C, c), eps);
}

// y = centre(x) * scale + shift
template <typename acc_t>
struct Affine {
  ChannelStats<acc_t> stats;
  acc_t scale, shift;

  SYNCBN_HOST_DEVICE acc_t operator()(acc_t x) const { return stats.centre(x) * scale + shift; }
};

template <typename acc_t>
SYNCBN_HOST_DEVICE Affine<acc_t> affine(const double* stats, int64_t C, int64_t c, double eps,
                                        const ChannelVector& weight, const ChannelVector& bias) {
  const ChannelStats<acc_t> s = channel_stats<acc_t>(stats, C, c, eps);
  return {s, s.invstd * static_cast<acc_t>(weight.load(c, 1)), static_cast<acc_t>(bias.load(c, 0))};
}

// dx = ((dy - mean_dy) - centre(x) * slope) * scale, with mean_dy = sum(dy) / count and
// slope = sum(dy * (x - mean)) / count * invstd^2, summed over all ranks.
template <typename acc_t>
struct InputGrad {
  ChannelStats<acc_t> stats;
  acc_t mean_dy, slope, scale;

  SYNCBN_HOST_DEVICE acc_t operator()(acc_t dy, acc_t x) const {
    return ((dy - mean_dy) - stats.centre(x) * slope) * scale;
  }
};

template <typename acc_t>
SYNCBN_HOST_DEVICE InputGrad<acc_t> input_grad(const double* stats, const double* sums /* [2C] */,
                                               int64_t C, int64_t c, double eps,
                                               const ChannelVector& weight) {
  const Moments m = moments(stats, C, c);
  const ChannelStats<acc_t> s = channel_stats<acc_t>(m, eps);
  const double invstd = s.invstd;
  return {s, static_cast<acc_t>(mul_rn(sums[c], m.share)),
          static_cast<acc_t>(mul_rn(mul_rn(sums[C + c], m.share), mul_rn(invstd, invstd))),
          s.invstd * static_cast<acc_t>(weight.load(c, 1))};
}

// The running buffers of a layer and how they move.
struct Running {
  ChannelVector mean, var;
  int64_t* num_batches_tracked = nullptr;  // [], may be absent
  double momentum = 0;
  bool cumulative = false;  // momentum=None: the plain average over all batches so far
  // A message that they cannot hold moves none of the three. All ranks have the same message, so
  // they decide alike.
  bool skip_nonfinite = false;

  SYNCBN_HOST_DEVICE bool present() const { return mean.data != nullptr; }

  // The weight of the new batch. Read it once, before the counter is advanced.
  SYNCBN_HOST_DEVICE double factor() const {
    return cumulative ? 1.0 / static_cast<double>(*num_batches_tracked + 1) : momentum;
  }

  // Whether the buffers can hold the statistics of a channel.
  SYNCBN_HOST_DEVICE bool holds(const double* stats, int64_t C, int64_t c) const {
    const Moments m = moments(stats, C, c);
    return mean.holds(m.mean) && var.holds(unbiased(m));
  }

  SYNCBN_HOST_DEVICE void update(const double* stats, int64_t C, int64_t c, double factor) const {
    const Moments m = moments(stats, C, c);
    const double keep = add_rn(1, -factor);
    mean.store(c, add_rn(mul_rn(keep, mean.load(c, 0)), mul_rn(factor, m.mean)));
    var.store(c, add_rn(mul_rn(keep, var.load(c, 0)), mul_rn(factor, unbiased(m))));
  }
};

}  // namespace syncbn
