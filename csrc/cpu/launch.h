// From a call's arguments to its kernels: operands, coefficients, and the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "../layout.h"
#include "../statistics.h"
#include "kernels.h"
#include "pages.h"
#include "plan.h"

namespace syncbn::cpu {

constexpr int64_t kChannelGrain = 2048;  // channels that are worth a thread
constexpr int64_t kPad = 64;             // values, at least the widest pack

// Runs f(begin, end) over ranges of channels.
template <typename F>
void for_channels(int64_t C, const F& f) {
  if (C <= kChannelGrain) {
    f(0, C);
  } else {
    torch::stable::parallel_for(0, C, kChannelGrain, f);
  }
}

// The tensors of a call. One smaller than a pack is copied to where there is room for a whole
// one.
class Tensors {
 public:
  Tensors(const Layout& layout, ScalarType dtype, const void* input, const void* grad_out,
          void* output)
      : operands{layout.N, layout.C, layout.S, input, grad_out, output, nullptr, 0} {
    if (layout.channels_last) {
      operands.N *= operands.S;
      operands.S = 1;
    }
    const int64_t bytes = layout.numel() * (dtype == ScalarType::Double  ? 8
                                            : dtype == ScalarType::Float ? 4
                                                                         : 2);
    if (output != nullptr) {
      prefer_huge_pages(output, bytes);
    }
    if (layout.numel() < kPad) {
      bytes_ = bytes;
      buffers_.reset(new Buffers());
      operands.input = std::memcpy(buffers_->input, input, bytes_);
      if (grad_out != nullptr) {
        operands.grad_out = std::memcpy(buffers_->grad_out, grad_out, bytes_);
      }
      if (output != nullptr) {
        output_ = output;
        operands.output = buffers_->output;
      }
    }
  }

  ~Tensors() {
    if (output_ != nullptr) {
      std::memcpy(output_, buffers_->output, bytes_);
    }
  }

  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  Operands operands;

 private:
  struct Buffers {
    double input[2 * kPad], grad_out[2 * kPad], output[2 * kPad];
  };
  std::unique_ptr<Buffers> buffers_;
  void* output_ = nullptr;
  size_t bytes_ = 0;
};

// The coefficients of a call, computed once for all boxes.
template <typename acc_t>
class Coefficients {
 public:
  Coefficients(Operands& operands, ChannelKernel kernel, int64_t count, const double* stats,
               const double* sums, double eps, const ChannelVector& weight,
               const ChannelVector& bias)
      : stride_(operands.C + kPad), values_(new acc_t[(count + 2) * stride_]) {
    const int64_t C = operands.C;
    const Channels channels{C,
                            stats,
                            sums,
                            eps,
                            in_acc_t(weight, C, 1, row(count)),
                            in_acc_t(bias, C, 0, row(count + 1)),
                            values_.get(),
                            stride_};
    for_channels(C, [&](int64_t begin, int64_t end) { kernel(channels, begin, end); });
    for (int64_t i = 0; i < count; ++i) {
      std::fill_n(row(i) + C, kPad, acc_t(0));
    }
    operands.coefficients = values_.get();
    operands.stride = stride_;
  }

  acc_t* row(int64_t i) const { return values_.get() + i * stride_; }

 private:
  static const void* in_acc_t(const ChannelVector& vector, int64_t C, acc_t absent, acc_t* buffer) {
    const ScalarType dtype = sizeof(acc_t) == 8 ? ScalarType::Double : ScalarType::Float;
    if (vector.data != nullptr && vector.dtype == dtype) {
      return vector.data;
    }
    for (int64_t c = 0; c < C; ++c) {
      buffer[c] = static_cast<acc_t>(vector.load(c, absent));
    }
    return buffer;
  }

  int64_t stride_;
  std::unique_ptr<acc_t[]> values_;
};

// Calls `f` with a value of the type that `dtype` accumulates in.
template <typename F>
void dispatch_acc(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Double) {
    f(double{});
  } else {
    f(float{});
  }
}

// Runs `kernel` over all boxes of `plan`; `partials` is [parts, rows, C], or null and rows 0.
inline void run(Kernel kernel, const Plan& plan, const Operands& operands, double* partials,
                int64_t rows) {
  const auto run_boxes = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Box box = plan.box(i);
      box.partial = partials + plan.part(i) * rows * plan.C;
      kernel(operands, box);
    }
  };
  if (plan.boxes() <= plan.grain()) {
    run_boxes(0, plan.boxes());
  } else {
    torch::stable::parallel_for(0, plan.boxes(), plan.grain(), run_boxes);
  }
}

}  // namespace syncbn::cpu
