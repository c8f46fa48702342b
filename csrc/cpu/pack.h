// What a kernel reads, computes on and writes at a time: one vector of acc_t, for bfloat16 two.
//
// Two, because 32 bits hold an even and an odd bfloat16, and a shift or a mask makes either a
// float32 in place: as many values a load as its bytes hold, and no value changes its lane. So the
// two vectors of a pack hold the even and the odd values; load_lanes and store_lanes are the way
// from and to arrays of acc_t in the order of memory.
#pragma once

#include "vector.h"

namespace syncbn::cpu::SYNCBN_CAPABILITY {

template <typename scalar_t>
constexpr int kParts = 1;
template <>
inline constexpr int kParts<BFloat16> = 2;

template <typename scalar_t>
constexpr int64_t kPack = kParts<scalar_t> * kVec<acc_of<scalar_t>>;

template <typename scalar_t>
struct Pack {
  static constexpr int parts = kParts<scalar_t>;
  Vec<acc_of<scalar_t>> part[parts];

  SYNCBN_INLINE Pack& operator+=(const Pack& other) {
#pragma GCC unroll 2
    for (int i = 0; i < parts; ++i) {
      part[i] += other.part[i];
    }
    return *this;
  }

  SYNCBN_INLINE Pack& operator-=(const Pack& other) {
#pragma GCC unroll 2
    for (int i = 0; i < parts; ++i) {
      part[i] -= other.part[i];
    }
    return *this;
  }

  SYNCBN_INLINE Pack& operator*=(const Pack& other) {
#pragma GCC unroll 2
    for (int i = 0; i < parts; ++i) {
      part[i] *= other.part[i];
    }
    return *this;
  }

  SYNCBN_INLINE friend Pack operator+(Pack a, const Pack& b) { return a += b; }
  SYNCBN_INLINE friend Pack operator-(Pack a, const Pack& b) { return a -= b; }
  SYNCBN_INLINE friend Pack operator*(Pack a, const Pack& b) { return a *= b; }
};

template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> splat_pack(acc_of<scalar_t> value) {
  Pack<scalar_t> pack;
#pragma GCC unroll 2
  for (int i = 0; i < pack.parts; ++i) {
    pack.part[i] = splat(value);
  }
  return pack;
}

template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> load(const scalar_t* p) {
  return {{load_unaligned<Vec<scalar_t>>(p)}};
}
template <>
SYNCBN_INLINE Pack<Half> load(const Half* p) {
  return {{widen_float16(load_unaligned<Bits16>(p))}};
}
template <>
SYNCBN_INLINE Pack<BFloat16> load(const BFloat16* p) {
  const Bits32 bits = load_unaligned<Bits32>(p);
  return {{widen_even(bits), widen_odd(bits)}};
}

template <typename scalar_t>
SYNCBN_INLINE void store(scalar_t* p, const Pack<scalar_t>& pack) {
  store_unaligned(p, pack.part[0]);
}
template <>
SYNCBN_INLINE void store(Half* p, const Pack<Half>& pack) {
  store_unaligned(p, narrow_float16(pack.part[0]));
}
template <>
SYNCBN_INLINE void store(BFloat16* p, const Pack<BFloat16>& pack) {
  store_unaligned(p, narrow_bfloat16(pack.part[0], pack.part[1]));
}

// Every second value of two vectors from lane `first` on, and two vectors' values in turn from
// there on: as lists of lanes, in which every compiler sees a shuffle. (An index sequence leaves no
// code.)
template <int first, int... lane>
SYNCBN_INLINE Vec<float> every_second(Vec<float> a, Vec<float> b,
                                      std::integer_sequence<int, lane...>) {
  constexpr int n = sizeof...(lane);
  return Vec<float>{(lane < n / 2 ? a : b)[(2 * lane + first) % n]...};
}
template <int first, int... lane>
SYNCBN_INLINE Vec<float> in_turn(Vec<float> a, Vec<float> b, std::integer_sequence<int, lane...>) {
  return Vec<float>{(lane % 2 == 0 ? a : b)[first + lane / 2]...};
}
using Lanes = std::make_integer_sequence<int, static_cast<int>(kVec<float>)>;

template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> load_lanes(const acc_of<scalar_t>* p) {
  return {{load_unaligned<Vec<acc_of<scalar_t>>>(p)}};
}
template <>
SYNCBN_INLINE Pack<BFloat16> load_lanes<BFloat16>(const float* p) {
  const auto low = load_unaligned<Vec<float>>(p),
             high = load_unaligned<Vec<float>>(p + kVec<float>);
  return {{every_second<0>(low, high, Lanes{}), every_second<1>(low, high, Lanes{})}};
}

template <typename scalar_t>
SYNCBN_INLINE void store_lanes(acc_of<scalar_t>* p, const Pack<scalar_t>& pack) {
  store_unaligned(p, pack.part[0]);
}
template <>
SYNCBN_INLINE void store_lanes(float* p, const Pack<BFloat16>& pack) {
  constexpr int half = static_cast<int>(kVec<float> / 2);
  store_unaligned(p, in_turn<0>(pack.part[0], pack.part[1], Lanes{}));
  store_unaligned(p + kVec<float>, in_turn<half>(pack.part[0], pack.part[1], Lanes{}));
}

template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> greater(Pack<scalar_t> a, const Pack<scalar_t>& b) {
#pragma GCC unroll 2
  for (int i = 0; i < a.parts; ++i) {
    a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  }
  return a;
}

// `pack`, with the other sign where `sign` is negative.
template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> signed_as(const Pack<scalar_t>& sign, Pack<scalar_t> pack) {
#pragma GCC unroll 2
  for (int i = 0; i < pack.parts; ++i) {
    pack.part[i] = sign.part[i] < 0 ? -pack.part[i] : pack.part[i];
  }
  return pack;
}

template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> magnitude(const Pack<scalar_t>& pack) {
  return signed_as(pack, pack);
}

// The middle of three values, lane by lane.
template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> median(const Pack<scalar_t>& a, const Pack<scalar_t>& b,
                                    const Pack<scalar_t>& c) {
  Pack<scalar_t> middle;
#pragma GCC unroll 2
  for (int i = 0; i < middle.parts; ++i) {
    const auto u = a.part[i], v = b.part[i], w = c.part[i];
    const auto low = u < v ? u : v, high = u < v ? v : u;
    middle.part[i] = w < low ? low : w < high ? w : high;
  }
  return middle;
}

// `pack` where `weight` is not 0, else 0, whatever `pack` is.
template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> keep(Pack<scalar_t> pack, const Pack<scalar_t>& weight) {
#pragma GCC unroll 2
  for (int i = 0; i < pack.parts; ++i) {
    pack.part[i] = weight.part[i] != 0 ? pack.part[i] : Vec<acc_of<scalar_t>>{};
  }
  return pack;
}

// `pack` where it is finite, else `other`.
template <typename scalar_t>
SYNCBN_INLINE Pack<scalar_t> finite_or(const Pack<scalar_t>& other, Pack<scalar_t> pack) {
#pragma GCC unroll 2
  for (int i = 0; i < pack.parts; ++i) {
    const auto zero = pack.part[i] - pack.part[i];
    pack.part[i] = zero == zero ? pack.part[i] : other.part[i];
  }
  return pack;
}

}  // namespace syncbn::cpu::SYNCBN_CAPABILITY
