// The host side of the operators, the same for every device: check the arguments, allocate the
// outputs, hand plain pointers to the device's kernels. `Backend` has one static function a step,
// each taking the device index and the arguments of arguments.h:
//
//   stats            reads x                 writes the message [2C + 1]
//   elemt            reads x, the message    writes y and the running buffers
//   backward_reduce  reads dy, x             writes [2C], the gradients of weight and bias
//   backward_elemt   reads dy, x, [2C]       writes dx
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "arguments.h"
#include "checks.h"
#include "namespace.h"

namespace syncbn {

template <typename Backend>
Tensor batch_norm_stats(const Tensor& input) {
  const Checks checks("batch_norm_stats");
  const Layout layout = checks.activations(input, "input");
  Tensor stats = torch::stable::new_empty(input, {2 * layout.C + 1}, ScalarType::Double);
  Backend::stats(input.get_device_index(), {input.scalar_type(), layout, input.const_data_ptr(),
                                            stats.mutable_data_ptr<double>()});
  return stats;
}

namespace detail {

template <typename Backend>
Tensor elemt(const Checks& checks, const Tensor& input, const Tensor& stats,
             const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
             const Layout& layout, const Running& running) {
  checks.message(stats, "stats", 2 * layout.C + 1, input);
  const ChannelVector w = checks.channels(weight, "weight", layout.C, input);
  const ChannelVector b = checks.channels(bias, "bias", layout.C, input);
  Tensor output = torch::stable::empty_like(input);
  Backend::elemt(input.get_device_index(),
                 {input.scalar_type(), layout, input.const_data_ptr(), output.mutable_data_ptr(),
                  stats.const_data_ptr<double>(), eps, w, b, running});
  return output;
}

}  // namespace detail

template <typename Backend>
Tensor batch_norm_elemt(const Tensor& input, const Tensor& stats,
                        const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        double eps) {
  const Checks checks("batch_norm_elemt");
  const Layout layout = checks.activations(input, "input");
  return detail::elemt<Backend>(checks, input, stats, weight, bias, eps, layout, {});
}

template <typename Backend>
Tensor batch_norm_elemt_running(const Tensor& input, const Tensor& stats,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias, double eps,
                                const Tensor& running_mean, const Tensor& running_var,
                                const std::optional<Tensor>& num_batches_tracked,
                                std::optional<double> momentum) {
  const Checks checks("batch_norm_elemt_running");
  const Layout layout = checks.activations(input, "input");
  checks.expect(momentum.has_value() || num_batches_tracked.has_value(), "num_batches_tracked",
                "given where momentum is None", "None");
  const Running running{
      checks.buffer(running_mean, "running_mean", layout.C, input),
      checks.buffer(running_var, "running_var", layout.C, input),
      checks.counter(num_batches_tracked, "num_batches_tracked", input),
      momentum.value_or(0),
      !momentum.has_value(),
  };
  return detail::elemt<Backend>(checks, input, stats, weight, bias, eps, layout, running);
}

// The gradients come in the given types; an absent type gives an empty tensor.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(
    const Tensor& grad_out, const Tensor& input, const Tensor& stats, double eps,
    std::optional<ScalarType> weight_dtype, std::optional<ScalarType> bias_dtype) {
  const Checks checks("batch_norm_backward_reduce");
  const Layout layout = checks.activations(input, "input");
  checks.like_input(grad_out, "grad_out", input, layout);
  checks.message(stats, "stats", 2 * layout.C + 1, input);
  const auto gradient = [&](const char* argument, std::optional<ScalarType> dtype) {
    const ScalarType type = dtype.value_or(ScalarType::Float);
    checks.expect(type == ScalarType::Float || type == input.scalar_type(), argument,
                  "float32 or the input's dtype", torch::headeronly::toString(type));
    return torch::stable::new_empty(input, {dtype.has_value() ? layout.C : 0}, type);
  };
  const auto vector = [](const Tensor& tensor) {
    return ChannelVector{tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(),
                         tensor.scalar_type()};
  };
  Tensor grad_weight = gradient("weight_dtype", weight_dtype);
  Tensor grad_bias = gradient("bias_dtype", bias_dtype);
  Tensor sums = torch::stable::new_empty(input, {2 * layout.C}, ScalarType::Double);
  Backend::backward_reduce(
      input.get_device_index(),
      {input.scalar_type(), layout, grad_out.const_data_ptr(), input.const_data_ptr(),
       stats.const_data_ptr<double>(), eps, sums.mutable_data_ptr<double>(), vector(grad_weight),
       vector(grad_bias)});
  return {sums, grad_weight, grad_bias};
}

template <typename Backend>
Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& stats,
                                 const Tensor& sums, const std::optional<Tensor>& weight,
                                 double eps) {
  const Checks checks("batch_norm_backward_elemt");
  const Layout layout = checks.activations(input, "input");
  checks.like_input(grad_out, "grad_out", input, layout);
  checks.message(stats, "stats", 2 * layout.C + 1, input);
  checks.message(sums, "sums", 2 * layout.C, input);
  const ChannelVector w = checks.channels(weight, "weight", layout.C, input);
  Tensor grad_input = torch::stable::empty_like(input);
  Backend::backward_elemt(input.get_device_index(),
                          {input.scalar_type(), layout, grad_out.const_data_ptr(),
                           input.const_data_ptr(), grad_input.mutable_data_ptr(),
                           stats.const_data_ptr<double>(), sums.const_data_ptr<double>(), eps, w});
  return grad_input;
}

// Registers all steps of a backend; the body of its STABLE_TORCH_LIBRARY_IMPL.
template <typename Backend>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("batch_norm_stats", TORCH_BOX(&batch_norm_stats<Backend>));
  m.impl("batch_norm_elemt", TORCH_BOX(&batch_norm_elemt<Backend>));
  m.impl("batch_norm_elemt_running", TORCH_BOX(&batch_norm_elemt_running<Backend>));
  m.impl("batch_norm_backward_reduce", TORCH_BOX(&batch_norm_backward_reduce<Backend>));
  m.impl("batch_norm_backward_elemt", TORCH_BOX(&batch_norm_backward_elemt<Backend>));
}

}  // namespace syncbn
