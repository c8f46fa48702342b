// Vectors of acc_t as wide as the instruction set, and their way from and to memory.
//
// GCC's vector extension, so that one source serves every instruction set. float16 and bfloat16 are
// widened and narrowed in registers, to the bits that torch's own conversions give; pack.h says how
// many vectors are read at a time. Included by
// kernels_*.cpp (through table.h) in a namespace and under target options of its own; hence nothing
// here may instantiate a template of the standard library, whose code could then be picked by the
// linker for callers on any machine.
#pragma once

#include "kernels.h"

#define SYNCBN_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is passed to a function that is not inlined

namespace syncbn::cpu::SYNCBN_CAPABILITY {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

template <typename T, int64_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T>
using Vec = typename VectorOf<T, SYNCBN_VECTOR_BYTES>::type;
using Bits32 = Vec<uint32_t>;
using Bits16 = typename VectorOf<uint16_t, SYNCBN_VECTOR_BYTES / 2>::type;

template <typename T>
constexpr int64_t kVec = SYNCBN_VECTOR_BYTES / sizeof(T);

// Narrower types compute in float32.
template <typename scalar_t>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename scalar_t>
using acc_of = typename Accumulate<scalar_t>::type;

template <typename V, typename T>
SYNCBN_INLINE V load_unaligned(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <typename V, typename T>
SYNCBN_INLINE void store_unaligned(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <typename T>
SYNCBN_INLINE Vec<T> splat(T value) {
  return value - Vec<T>{};  // keeps the sign of a zero, as value + 0 does not
}

// Two bfloat16 of 32 bits: the even one lies in the lower half, the odd one in the upper half,
// where float32 has its leading bits.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

SYNCBN_INLINE Vec<float> widen_even(Bits32 v) { return (Vec<float>)(v << 16); }
SYNCBN_INLINE Vec<float> widen_odd(Bits32 v) { return (Vec<float>)(v & 0xffff0000u); }

// To nearest, ties to even, in the upper half; the carry out of the mantissa rounds the exponent
// up, to Inf too.
SYNCBN_INLINE Bits32 round_to_bfloat16(Vec<float> v) {
  const Bits32 bits = (Bits32)v;
  const Bits32 rounded = bits + ((bits >> 16) & 1) + 0x7fff;
  const Bits32 nan = Bits32{} + 0x7fc00000u;
  return v == v ? rounded : nan;
}

SYNCBN_INLINE Bits32 narrow_bfloat16(Vec<float> even, Vec<float> odd) {
  return (round_to_bfloat16(even) >> 16) | (round_to_bfloat16(odd) & 0xffff0000u);
}

#if SYNCBN_VECTOR_BYTES == 64
// The forms with a mask, of all lanes: the plain ones warn in GCC 12 (bug 105593).
SYNCBN_INLINE Vec<float> widen_float16(Bits16 v) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)v);
}

SYNCBN_INLINE Bits16 narrow_float16(Vec<float> v) {
  return (Bits16)_mm512_maskz_cvtps_ph(0xffff, (__m512)v,
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif SYNCBN_VECTOR_BYTES == 32
SYNCBN_INLINE Vec<float> widen_float16(Bits16 v) { return (Vec<float>)_mm256_cvtph_ps((__m128i)v); }

SYNCBN_INLINE Bits16 narrow_float16(Vec<float> v) {
  return (Bits16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// The floating-point unit does the work (Maratyszcza's FP16 library, as in c10::Half): a normal
// number is shifted into place and scaled by a power of two, a subnormal one is read as the
// mantissa of a number in [0.5, 1), from which 0.5 is taken.
SYNCBN_INLINE Vec<float> widen_float16(Bits16 v) {
  const Bits32 w = __builtin_convertvector(v, Bits32) << 16;
  const Bits32 twice = w + w;  // without the sign
  const Vec<float> normal = (Vec<float>)((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
  const Vec<float> subnormal = (Vec<float>)((twice >> 17) | 0x3f000000u) - 0.5f;
  const Bits32 magnitude = twice < (1u << 27) ? (Bits32)subnormal : (Bits32)normal;
  return (Vec<float>)((w & 0x80000000u) | magnitude);
}

// Adding a power of two that depends on the exponent makes the hardware round at the right bit;
// scaling up and down before turns what float16 cannot hold into Inf.
SYNCBN_INLINE Bits16 narrow_float16(Vec<float> v) {
  const Bits32 w = (Bits32)v;
  const Bits32 twice = w + w;
  const Vec<float> base = (Vec<float>)(w & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f;
  const Bits32 exponent = twice & 0xff000000u;
  const Bits32 smallest = Bits32{} + 0x71000000u;
  const Bits32 bias = exponent < smallest ? smallest : exponent;
  const Bits32 bits = (Bits32)((Vec<float>)((bias >> 1) + 0x07800000u) + base);
  const Bits32 number = ((bits >> 13) & 0x7c00u) + (bits & 0xfffu);
  const Bits32 nan = Bits32{} + 0x7e00u;
  const Bits32 magnitude = twice > 0xff000000u ? nan : number;
  return __builtin_convertvector(((w >> 16) & 0x8000u) | magnitude, Bits16);
}
#endif

// The sum of all lanes, halved over and over: an order that the width alone fixes.
template <int64_t kBytes = SYNCBN_VECTOR_BYTES>
SYNCBN_INLINE double sum_lanes(typename VectorOf<double, kBytes>::type v) {
  if constexpr (kBytes == 16) {
    return v[0] + v[1];
  } else {
    typename VectorOf<double, kBytes / 2>::type half[2];
    __builtin_memcpy(half, &v, kBytes);
    return sum_lanes<kBytes / 2>(half[0] + half[1]);
  }
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
