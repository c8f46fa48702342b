// Argument checks of the operators: each names the operator, the argument, what was expected and
// what came. std::invalid_argument reaches Python as ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "layout.h"
#include "statistics.h"

namespace syncbn {

using torch::stable::Tensor;

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto left = a.sizes(), right = b.sizes();
  return std::equal(left.begin(), left.end(), right.begin(), right.end());
}

// Prints as [2, 3, 4]; formatted only when a check has failed.
struct Shape {
  const Tensor& tensor;

  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << "[";
    const auto sizes = shape.tensor.sizes();
    for (size_t d = 0; d < sizes.size(); ++d) {
      out << (d == 0 ? "" : ", ") << sizes[d];
    }
    return out << "]";
  }
};

struct Length {
  int64_t value;

  friend std::ostream& operator<<(std::ostream& out, const Length& length) {
    return out << "of shape [" << length.value << "]";
  }
};

// The checks of one call of the operator `op`.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  template <typename Expected, typename Got>
  void expect(bool holds, const char* argument, const Expected& expected, const Got& got) const {
    if (!holds) [[unlikely]] {
      std::ostringstream message;
      message << "syncbn_cuda::" << op_ << ": expected " << argument << " to be " << expected
              << ", got " << got;
      throw std::invalid_argument(message.str());
    }
  }

  // The layout of the activations `tensor`, of shape (N, C, *) and a supported type.
  Layout activations(const Tensor& tensor, const char* argument) const {
    expect(tensor.dim() >= 2, argument, "of at least 2 dimensions", Shape{tensor});
    const ScalarType dtype = tensor.scalar_type();
    expect(dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Half ||
               dtype == ScalarType::BFloat16,
           argument, "float32, float64, float16 or bfloat16", torch::headeronly::toString(dtype));
    Layout layout;
    const bool dense =
        resolve_layout(tensor.sizes().data(), tensor.strides().data(), tensor.dim(), layout);
    expect(dense, argument, "contiguous or channels-last", "other strides");
    expect(layout.C > 0, argument, "of at least one channel", Shape{tensor});
    return layout;
  }

  // `tensor` has the shape, type, device and memory layout of `input`.
  void like_input(const Tensor& tensor, const char* argument, const Tensor& input,
                  const Layout& layout) const {
    const Layout own = activations(tensor, argument);
    expect(same_sizes(tensor, input), argument, "of the input's shape", Shape{tensor});
    expect(tensor.scalar_type() == input.scalar_type(), argument, "of the input's dtype",
           torch::headeronly::toString(tensor.scalar_type()));
    expect(own.channels_last == layout.channels_last || layout.numel() == 0, argument,
           "in the input's memory format", own.channels_last ? "channels-last" : "contiguous");
    on_device_of(tensor, argument, input);
  }

  // `tensor` is contiguous float64 of `length` values beside `input`: a message.
  void message(const Tensor& tensor, const char* argument, int64_t length,
               const Tensor& input) const {
    expect(tensor.scalar_type() == ScalarType::Double, argument, "float64",
           torch::headeronly::toString(tensor.scalar_type()));
    vector(tensor, argument, length, input);
  }

  // `tensor` is a contiguous vector of C parameters or buffers, of a supported type.
  ChannelVector channels(const std::optional<Tensor>& tensor, const char* argument, int64_t C,
                         const Tensor& input) const {
    if (!tensor.has_value()) {
      return {};
    }
    vector(*tensor, argument, C, input);
    const ScalarType dtype = tensor->scalar_type();
    expect(dtype == ScalarType::Float || dtype == input.scalar_type(), argument,
           "float32 or of the input's dtype", torch::headeronly::toString(dtype));
    // Not mutable_data_ptr: that would copy a parameter that shares its memory until written.
    return {const_cast<void*>(tensor->const_data_ptr()), dtype};
  }

  // The same for a buffer that the operator writes.
  ChannelVector buffer(const Tensor& tensor, const char* argument, int64_t C,
                       const Tensor& input) const {
    ChannelVector vector = channels(tensor, argument, C, input);
    vector.data = tensor.mutable_data_ptr();
    return vector;
  }

  int64_t* counter(const std::optional<Tensor>& tensor, const char* argument,
                   const Tensor& input) const {
    if (!tensor.has_value()) {
      return nullptr;
    }
    expect(tensor->scalar_type() == ScalarType::Long, argument, "int64",
           torch::headeronly::toString(tensor->scalar_type()));
    expect(tensor->numel() == 1, argument, "one value", Shape{*tensor});
    on_device_of(*tensor, argument, input);
    return tensor->mutable_data_ptr<int64_t>();
  }

 private:
  void vector(const Tensor& tensor, const char* argument, int64_t length,
              const Tensor& input) const {
    expect(tensor.dim() == 1 && tensor.numel() == length, argument, Length{length}, Shape{tensor});
    expect(tensor.is_contiguous(), argument, "contiguous", "other strides");
    on_device_of(tensor, argument, input);
  }

  void on_device_of(const Tensor& tensor, const char* argument, const Tensor& input) const {
    expect(tensor.is_cuda() == input.is_cuda() &&
               tensor.get_device_index() == input.get_device_index(),
           argument, "on the input's device", tensor.is_cuda() ? "a CUDA device" : "another");
  }

  const char* op_;
};

}  // namespace syncbn
