// How a tensor of shape (N, C, *) lies in memory, free of torch so that kernels, launch plans and
// tests share it. Two layouts are walked without a copy: [N, C, S] with S the product of the
// spatial sizes (contiguous), and [M, C] with M = N * S (channels-last 2d and 3d, (N, L, C) viewed
// as (N, C, L), and (N, C), where both names fit and [M, C] is used).
#pragma once

#include <cstdint>

namespace syncbn {

struct Layout {
  int64_t N = 0, C = 0, S = 0;
  bool channels_last = false;

  int64_t rows() const { return N * S; }       // values a channel, M of [M, C]
  int64_t numel() const { return N * C * S; }  // values in all
};

namespace detail {

// Whether the sizes, taken in the given order of dimensions, are dense; a dimension of size 1 has
// no say, whatever its stride.
template <typename Order>
bool dense_in_order(const int64_t* sizes, const int64_t* strides, int64_t dim, Order order) {
  int64_t expected = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    const int64_t d = order(i);
    if (sizes[d] != 1 && strides[d] != expected) {
      return false;
    }
    expected *= sizes[d];
  }
  return true;
}

}  // namespace detail

// Fills `layout` and returns true where the tensor lies in one of the two layouts.
inline bool resolve_layout(const int64_t* sizes, const int64_t* strides, int64_t dim,
                           Layout& layout) {
  layout.N = sizes[0];
  layout.C = sizes[1];
  layout.S = 1;
  for (int64_t d = 2; d < dim; ++d) {
    layout.S *= sizes[d];
  }
  if (layout.numel() == 0) {
    return true;
  }
  if (detail::dense_in_order(sizes, strides, dim, [](int64_t i) { return i; })) {
    layout.channels_last = layout.S == 1;
    return true;
  }
  // 0, 2, 3, ..., dim - 1, 1: the channel moved to the end.
  layout.channels_last = detail::dense_in_order(sizes, strides, dim, [dim](int64_t i) {
    return i == 0 ? 0 : i == dim - 1 ? 1 : i + 1;
  });
  return layout.channels_last;
}

}  // namespace syncbn
