// The message of forward, float64 [4C + 1], and how a rank's sums become one:
//
//   high parts of the sums [C], of the sums of squares [C]; their low parts [C], [C]; the count of
//   values a channel
//
// It is summed over the ranks as it is. The variance is E[x^2] - E[x]^2, of which sums in single
// doubles lose 2^-52 mean^2. A high part is a multiple of 2^-20 of what a value contributes, so
// the sum of all high parts is exact up to 2^33 values a channel, on however unequal ranks; and the
// low parts hold the rest, so small that its rounding is at most 2^-73 mean^2. Only where a rank's
// mean is far nearer to 0 than those of many more values do high parts round after all: by 2^-52
// mean^2, and the variance between the ranks is larger than mean^2 over the count.
//
// Dekker 1971 and Knuth, TAOCP 2, section 4.2.2, for sums and products with their rounding errors.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define SYNCBN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SYNCBN_HOST_DEVICE inline
#endif

namespace syncbn {

// One rounding an operation, whatever the compiler would like to contract.
SYNCBN_HOST_DEVICE double mul_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

SYNCBN_HOST_DEVICE double add_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

SYNCBN_HOST_DEVICE double fma_rn(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// The value high + low, where low is (about) what rounding to high has lost.
struct Pair {
  double high, low;
};

SYNCBN_HOST_DEVICE Pair two_sum(double a, double b) {
  const double sum = add_rn(a, b);
  const double of_b = add_rn(sum, -a);
  return {sum, add_rn(add_rn(a, -add_rn(sum, -of_b)), add_rn(b, -of_b))};
}

SYNCBN_HOST_DEVICE Pair two_product(double a, double b) {
  const double product = mul_rn(a, b);
  return {product, fma_rn(a, b, -product)};
}

// The sum and the sum of squares of some values about a pivot, seen from another pivot that lies
// `delta` below. About one of the data's own values a large mean cancels nothing.
struct Sums {
  double first = 0;   // sum of x - pivot; in backward, of dy
  double second = 0;  // sum of (x - pivot)^2; in backward, of dy * (x - mean)
};

SYNCBN_HOST_DEVICE Sums rebase(double count, double sum, double sumsq, double delta) {
  const double shift = mul_rn(count, delta);
  return {add_rn(sum, shift), add_rn(sumsq, mul_rn(delta, add_rn(add_rn(sum, sum), shift)))};
}

SYNCBN_HOST_DEVICE int64_t message_size(int64_t C) { return 4 * C + 1; }

SYNCBN_HOST_DEVICE double message_count(const double* message /* [4C + 1] */, int64_t C) {
  return message[4 * C];
}

// A sum over `count` values as a high part that adds up exactly, and the rest.
SYNCBN_HOST_DEVICE Pair split(const Pair& sum, double count) {
  // Of the sum's sign, so that it rounds -x as x. Its ulp is 2^-20 of a value.
  const double grid = mul_rn(sum.high / count, 0x1p32);
  const double high = add_rn(add_rn(sum.high, grid), -grid);
  // NaN where the sum is not finite, or as good as that.
  return high == high ? Pair{high, add_rn(add_rn(sum.high, -high), sum.low)} : Pair{sum.high, 0};
}

// Writes a channel's part of the message, from `count` values' sums about a pivot.
SYNCBN_HOST_DEVICE void write_sums(double* message /* [4C + 1] */, int64_t C, int64_t c,
                                   double count, double pivot, const Sums& sums) {
  const Pair shift = two_product(count, pivot);
  const Pair sum = two_sum(shift.high, sums.first);
  // count * pivot^2 + 2 pivot * first + second
  const Pair square = two_product(shift.high, pivot);
  const Pair cross = two_product(add_rn(pivot, pivot), sums.first);
  const Pair shifted = two_sum(square.high, cross.high);
  const Pair sumsq = two_sum(shifted.high, sums.second);
  const double shift_low = mul_rn(shift.low, pivot);
  const double lows = add_rn(add_rn(square.low, shift_low), add_rn(cross.low, shifted.low));

  const Pair first = split({sum.high, add_rn(sum.low, shift.low)}, count);
  const Pair second = split({sumsq.high, add_rn(sumsq.low, lows)}, count);
  message[c] = first.high;
  message[C + c] = second.high;
  message[2 * C + c] = first.low;
  message[3 * C + c] = second.low;
}

// What rounding an infinite sum has lost is no part of it.
SYNCBN_HOST_DEVICE double finite_or_0(double lost) { return lost - lost == 0 ? lost : 0; }

struct Moments {
  double mean, mean_low;  // their sum is the mean; the first alone is correctly rounded, or nearly
  double var;             // biased
  double count, share;    // 1 / count
};

SYNCBN_HOST_DEVICE Moments moments(const double* message /* [4C + 1] */, int64_t C, int64_t c) {
  const double count = message_count(message, C);
  const double divisor = count > 0 ? count : 1;  // no value in the whole group: all sums are 0
  const double share = 1 / divisor;
  Pair sum = two_sum(message[c], message[2 * C + c]);
  Pair sumsq = two_sum(message[C + c], message[3 * C + c]);
  sum.low = finite_or_0(sum.low);
  sumsq.low = finite_or_0(sumsq.low);
  const double about = mul_rn(sum.high, share);  // the mean but for roundings
  // sum of x - about
  const double rest = finite_or_0(add_rn(fma_rn(-about, divisor, sum.high), sum.low));
  // sum of (x - about)^2 = sumsq - about * sum - about * rest
  const Pair product = two_product(about, sum.high);
  const double lows = add_rn(sumsq.low, -mul_rn(about, add_rn(sum.low, rest)));
  const double centred = add_rn(add_rn(sumsq.high, -product.high), add_rn(lows, -product.low));
  const double var = mul_rn(centred, share);
  const double step = mul_rn(rest, share);
  const double mean = add_rn(about, step);
  // Rounding can leave a variance of 0 slightly negative. NaN is no less than 0 and stays.
  return {mean, add_rn(add_rn(about, -mean), step), var < 0 ? 0 : var, count, share};
}

SYNCBN_HOST_DEVICE double unbiased(const Moments& m) {
  return mul_rn(m.var, m.count / (m.count > 2 ? m.count - 1 : 1));
}

}  // namespace syncbn
