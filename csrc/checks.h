// Argument checks of the operators: each names the operator, the argument, what was expected and
// what came. std::invalid_argument reaches Python as ValueError.
#pragma once

#include <algorithm>
#include <optional>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "layout.h"
#include "statistics.h"
#include "tensors.h"

namespace syncbn {

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

// The checks of one call of the operator `op` on `input`.
class Checks {
 public:
  Checks(const char* op, const Tensor& input)
      : op_(op),
        input_(input),
        dtype_(dtype_of(input)),
        is_cuda_(input.is_cuda()),
        device_index_(input.get_device_index()) {}

  ScalarType dtype() const { return dtype_; }

  template <typename Expected, typename Got>
  void expect(bool holds, const char* argument, const Expected& expected, const Got& got) const {
    if (!holds) [[unlikely]] {
      std::ostringstream message;
      message << "syncbn_cuda::" << op_ << ": expected " << argument << " to be " << expected
              << ", got " << got;
      throw std::invalid_argument(message.str());
    }
  }

  // The layout of `input`, of shape (N, C, *) and a supported type.
  Layout input() const {
    expect(dtype_ == ScalarType::Float || dtype_ == ScalarType::Double ||
               dtype_ == ScalarType::Half || dtype_ == ScalarType::BFloat16,
           "input", "float32, float64, float16 or bfloat16", torch::headeronly::toString(dtype_));
    const Layout layout = activations(input_, "input");
    expect(layout.C > 0, "input", "of at least one channel", Shape{input_});
    return layout;
  }

  // `tensor` has the shape, type, device and memory layout of the input.
  void like_input(const Tensor& tensor, const char* argument, const Layout& layout) const {
    const Layout own = activations(tensor, argument);
    const ScalarType dtype = dtype_of(tensor);
    expect(same_sizes(tensor, input_), argument, "of the input's shape", Shape{tensor});
    expect(dtype == dtype_, argument, "of the input's dtype", torch::headeronly::toString(dtype));
    expect(own.channels_last == layout.channels_last || layout.numel() == 0, argument,
           "in the input's memory format", own.channels_last ? "channels-last" : "contiguous");
    on_device_of_input(tensor, argument);
  }

  // `tensor` is contiguous float64 of `length` values beside the input: a message.
  const double* message(const Tensor& tensor, const char* argument, int64_t length) const {
    const ScalarType dtype = dtype_of(tensor);
    expect(dtype == ScalarType::Double, argument, "float64", torch::headeronly::toString(dtype));
    vector(tensor, argument, length);
    return static_cast<const double*>(tensor.const_data_ptr());
  }

  // `tensor` is a contiguous vector of C parameters or buffers, of a supported type.
  ChannelVector channels(const std::optional<Tensor>& tensor, const char* argument,
                         int64_t C) const {
    return tensor.has_value() ? channels(*tensor, argument, C) : ChannelVector{};
  }

  ChannelVector channels(const Tensor& tensor, const char* argument, int64_t C) const {
    vector(tensor, argument, C);
    const ScalarType dtype = dtype_of(tensor);
    expect(dtype == ScalarType::Float || dtype == dtype_, argument,
           "float32 or of the input's dtype", torch::headeronly::toString(dtype));
    // Not mutable_data_ptr: that would copy a parameter that shares its memory until written.
    return {const_cast<void*>(tensor.const_data_ptr()), dtype};
  }

  // The same for a buffer that the operator writes.
  ChannelVector buffer(const Tensor& tensor, const char* argument, int64_t C) const {
    ChannelVector vector = channels(tensor, argument, C);
    vector.data = tensor.mutable_data_ptr();
    return vector;
  }

  int64_t* counter(const std::optional<Tensor>& tensor, const char* argument) const {
    if (!tensor.has_value()) {
      return nullptr;
    }
    const ScalarType dtype = dtype_of(*tensor);
    expect(dtype == ScalarType::Long, argument, "int64", torch::headeronly::toString(dtype));
    expect(tensor->numel() == 1, argument, "one value", Shape{*tensor});
    on_device_of_input(*tensor, argument);
    return static_cast<int64_t*>(tensor->mutable_data_ptr());
  }

 private:
  Layout activations(const Tensor& tensor, const char* argument) const {
    const auto sizes = tensor.sizes();
    const int64_t dim = static_cast<int64_t>(sizes.size());
    expect(dim >= 2, argument, "of at least 2 dimensions", Shape{tensor});
    Layout layout;
    const bool dense = resolve_layout(sizes.data(), tensor.strides().data(), dim, layout);
    expect(dense, argument, "contiguous or channels-last", "other strides");
    return layout;
  }

  void vector(const Tensor& tensor, const char* argument, int64_t length) const {
    expect(tensor.dim() == 1 && tensor.numel() == length, argument, Length{length}, Shape{tensor});
    expect(tensor.is_contiguous(), argument, "contiguous", "other strides");
    on_device_of_input(tensor, argument);
  }

  void on_device_of_input(const Tensor& tensor, const char* argument) const {
    const bool is_cuda = tensor.is_cuda();
    expect(is_cuda == is_cuda_ && tensor.get_device_index() == device_index_, argument,
           "on the input's device", is_cuda ? "a CUDA device" : "another");
  }

  const char* op_;
  const Tensor& input_;
  ScalarType dtype_;
  bool is_cuda_;
  int32_t device_index_;
};

}  // namespace syncbn
