// A pack: kVec values that are loaded and stored as one word of up to 16 bytes, and a span: where a
// pack lies and which of its values are of the thread's channel.
//
// Rows of a contiguous tensor begin anywhere, so their first and last pack are shared with the
// neighbouring channels:
//
//   16-byte words   |0 1 2 3|4 5 6 7|8 9 . .|      row of S = 7 that begins at 2:
//   values of c          2 3 4 5 6 7 8             spans [2, 4) [0, 4) [0, 1)
//
// A shared pack is still loaded as one word wherever it lies inside the tensor; what is not the
// channel's own is then replaced. Stores touch the channel's own values only.
#pragma once

#include <cstring>

#include "platform.h"

namespace syncbn {

// Offsets count values from the tensor's begin; that of a shared pack may lie before it.
template <bool kChannelsLast, int kVec>
struct Span {
  // The pack lies partly outside the tensor.
  static constexpr unsigned kOutside = 1u << 31;

  int64_t offset;
  unsigned own;  // a bit for each value: whether it counts. One register, as many spans are alive

  // Values begin to end.
  static __device__ __forceinline__ unsigned bits(int begin, int end) {
    return (1u << end) - (1u << begin);
  }
  __device__ __forceinline__ bool any() const { return own != 0; }
  __device__ __forceinline__ bool full() const {
    return kChannelsLast ? any() : own == bits(0, kVec);
  }
  __device__ __forceinline__ bool has(int e) const { return (own >> e & 1) != 0; }
  // How many values each accumulator gets: channels-last packs hold one a channel.
  __device__ __forceinline__ int count() const {
    return kChannelsLast ? any() : full() ? kVec : __popc(own & bits(0, kVec));
  }
};

namespace detail {

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

}  // namespace detail

template <typename scalar_t, int kVec>
struct Pack {
  using Word = typename detail::Word<sizeof(scalar_t) * kVec>::type;

  scalar_t values[kVec];

  // `source`: aligned to the pack.
  __device__ __forceinline__ void load(const scalar_t* source) {
    const Word word = __ldg(reinterpret_cast<const Word*>(source));
    std::memcpy(values, &word, sizeof(word));
  }

  // Values outside the span are left undefined, or are a neighbour's.
  template <bool kChannelsLast>
  __device__ __forceinline__ void load(const scalar_t* tensor,
                                       const Span<kChannelsLast, kVec>& at) {
    if (at.any() && at.own < at.kOutside) {
      load(tensor + at.offset);
    } else if constexpr (!kChannelsLast && kVec > 1) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (at.has(e)) {
          values[e] = tensor[at.offset + e];
        }
      }
    }
  }

  // A value of channel `e` of the thread (contiguous: of its only one), or `other` where neither
  // end of the pack is the channel's own.
  template <bool kChannelsLast, typename acc_t>
  __device__ __forceinline__ acc_t sample(const Span<kChannelsLast, kVec>& at, int e,
                                          acc_t other) const {
    if constexpr (kChannelsLast) {
      return at.full() ? static_cast<acc_t>(values[e]) : other;
    } else {
      return at.has(0)          ? static_cast<acc_t>(values[0])
             : at.has(kVec - 1) ? static_cast<acc_t>(values[kVec - 1])
                                : other;
    }
  }

  // Values outside the span become `fill`. Apart from load, as it waits for the word.
  template <bool kChannelsLast>
  __device__ __forceinline__ void mask(const Span<kChannelsLast, kVec>& at, scalar_t fill) {
    if (!kChannelsLast && !at.full()) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        values[e] = at.has(e) ? values[e] : fill;
      }
    }
  }

  // `streaming`: first in line to leave the L2.
  template <bool kChannelsLast>
  __device__ __forceinline__ void store(scalar_t* tensor, const Span<kChannelsLast, kVec>& at,
                                        bool streaming) const {
    if (at.full()) {
      Word word;
      std::memcpy(&word, values, sizeof(word));
      Word* const target = reinterpret_cast<Word*>(tensor + at.offset);
      streaming ? __stcs(target, word) : store_word(target, word);
    } else if constexpr (!kChannelsLast) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (at.has(e)) {
          tensor[at.offset + e] = values[e];
        }
      }
    }
  }
};

}  // namespace syncbn
