// From run-time type, layout and vector width to template parameters: the one place that decides
// which instances of a kernel exist. A contiguous tensor is read by full packs or, where the
// pointers are not misaligned alike, by single values; channels-last widths go down by halves.
#pragma once

#include <stdexcept>

#include "../statistics.h"
#include "plan.h"

namespace syncbn {

namespace detail {

template <typename scalar_t, int kVec, typename Launch>
void dispatch_channels_last(const Plan& plan, const Launch& launch) {
  if (plan.vec == kVec) {
    launch.template operator()<scalar_t, true, kVec>();
  } else if constexpr (kVec > 1) {
    dispatch_channels_last<scalar_t, kVec / 2>(plan, launch);
  }
}

template <typename scalar_t, typename Launch>
void dispatch_layout(const Plan& plan, const Launch& launch) {
  constexpr int kFull = static_cast<int>(kPackBytes / sizeof(scalar_t));
  if (plan.channels_last) {
    dispatch_channels_last<scalar_t, kFull>(plan, launch);
  } else if (plan.vec == kFull) {
    launch.template operator()<scalar_t, false, kFull>();
  } else {
    launch.template operator()<scalar_t, false, 1>();
  }
}

}  // namespace detail

// Calls launch.operator()<scalar_t, kChannelsLast, kVec>().
template <typename Launch>
void dispatch(ScalarType dtype, const Plan& plan, const Launch& launch) {
  switch (dtype) {
    case ScalarType::Float:
      return detail::dispatch_layout<float>(plan, launch);
    case ScalarType::Double:
      return detail::dispatch_layout<double>(plan, launch);
    case ScalarType::Half:
      return detail::dispatch_layout<c10::Half>(plan, launch);
    case ScalarType::BFloat16:
      return detail::dispatch_layout<c10::BFloat16>(plan, launch);
    default:
      throw std::invalid_argument("syncbn_cuda: no kernel for this dtype");
  }
}

}  // namespace syncbn
