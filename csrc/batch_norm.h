// The host side of the operators, the same for every device: check the arguments, allocate the
// outputs, hand plain pointers to the device's kernels. `Backend` has one static function a step,
// each taking the device index and the arguments of arguments.h:
//
//   stats            reads x                 writes the message [4C + 1]
//   elemt            reads x, the message    writes y and the running buffers
//   backward_reduce  reads dy, x             writes [2C], the gradients of weight and bias
//   backward_elemt   reads dy, x, [2C]       writes dx
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "arguments.h"
#include "checks.h"
#include "namespace.h"
#include "tensors.h"

namespace syncbn {

// The first step also checks what those after the collective will be given: a mistake has to come
// out before any rank waits for another.
template <typename Backend>
Tensor batch_norm_stats(const Tensor& input, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& running_mean,
                        const std::optional<Tensor>& running_var,
                        const std::optional<Tensor>& num_batches_tracked) {
  const Checks checks("batch_norm_stats", input);
  const Layout layout = checks.input();
  checks.channels(weight, "weight", layout.C);
  checks.channels(bias, "bias", layout.C);
  checks.channels(running_mean, "running_mean", layout.C);
  checks.channels(running_var, "running_var", layout.C);
  checks.counter(num_batches_tracked, "num_batches_tracked");
  Tensor stats = allocate_vector(message_size(layout.C), ScalarType::Double, input);
  Backend::stats(input.get_device_index(), {checks.dtype(), layout, input.const_data_ptr(),
                                            static_cast<double*>(stats.mutable_data_ptr())});
  return stats;
}

namespace detail {

template <typename Backend>
Tensor elemt(const Checks& checks, const Tensor& input, const Tensor& stats,
             const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
             const Layout& layout, const Running& running) {
  const double* message = checks.message(stats, "stats", message_size(layout.C));
  const ChannelVector w = checks.channels(weight, "weight", layout.C);
  const ChannelVector b = checks.channels(bias, "bias", layout.C);
  Tensor output = allocate_like(input);
  Backend::elemt(input.get_device_index(),
                 {checks.dtype(), layout, input.const_data_ptr(), output.mutable_data_ptr(),
                  message, eps, w, b, running});
  return output;
}

}  // namespace detail

template <typename Backend>
Tensor batch_norm_elemt(const Tensor& input, const Tensor& stats,
                        const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        double eps) {
  const Checks checks("batch_norm_elemt", input);
  const Layout layout = checks.input();
  return detail::elemt<Backend>(checks, input, stats, weight, bias, eps, layout, {});
}

template <typename Backend>
Tensor batch_norm_elemt_running(const Tensor& input, const Tensor& stats,
                                const std::optional<Tensor>& weight,
                                const std::optional<Tensor>& bias, double eps,
                                const Tensor& running_mean, const Tensor& running_var,
                                const std::optional<Tensor>& num_batches_tracked,
                                std::optional<double> momentum, bool skip_nonfinite) {
  const Checks checks("batch_norm_elemt_running", input);
  const Layout layout = checks.input();
  checks.expect(momentum.has_value() || num_batches_tracked.has_value(), "num_batches_tracked",
                "given where momentum is None", "None");
  const Running running{
      checks.buffer(running_mean, "running_mean", layout.C),
      checks.buffer(running_var, "running_var", layout.C),
      checks.counter(num_batches_tracked, "num_batches_tracked"),
      momentum.value_or(0),
      !momentum.has_value(),
      skip_nonfinite,
  };
  return detail::elemt<Backend>(checks, input, stats, weight, bias, eps, layout, running);
}

// The gradients of weight and bias are float32, or each of the input's type where it is asked for:
// a parameter has one of the two. Two flags, as an optional dtype takes longer than the checks.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad_out,
                                                              const Tensor& input,
                                                              const Tensor& stats, double eps,
                                                              bool weight_like_input,
                                                              bool bias_like_input) {
  const Checks checks("batch_norm_backward_reduce", input);
  const Layout layout = checks.input();
  checks.like_input(grad_out, "grad_out", layout);
  const double* message = checks.message(stats, "stats", message_size(layout.C));
  const ScalarType dtype = checks.dtype();
  const ScalarType weight_dtype = weight_like_input ? dtype : ScalarType::Float;
  const ScalarType bias_dtype = bias_like_input ? dtype : ScalarType::Float;
  Tensor grad_weight = allocate_vector(layout.C, weight_dtype, input);
  Tensor grad_bias = allocate_vector(layout.C, bias_dtype, input);
  Tensor sums = allocate_vector(2 * layout.C, ScalarType::Double, input);
  Backend::backward_reduce(input.get_device_index(),
                           {dtype, layout, grad_out.const_data_ptr(), input.const_data_ptr(),
                            message, eps, static_cast<double*>(sums.mutable_data_ptr()),
                            ChannelVector{grad_weight.mutable_data_ptr(), weight_dtype},
                            ChannelVector{grad_bias.mutable_data_ptr(), bias_dtype}});
  return {sums, grad_weight, grad_bias};
}

template <typename Backend>
Tensor batch_norm_backward_elemt(const Tensor& grad_out, const Tensor& input, const Tensor& stats,
                                 const Tensor& sums, const std::optional<Tensor>& weight,
                                 double eps) {
  const Checks checks("batch_norm_backward_elemt", input);
  const Layout layout = checks.input();
  checks.like_input(grad_out, "grad_out", layout);
  const double* message = checks.message(stats, "stats", message_size(layout.C));
  const double* reduced = checks.message(sums, "sums", 2 * layout.C);
  const ChannelVector w = checks.channels(weight, "weight", layout.C);
  Tensor grad_input = allocate_like(input);
  Backend::backward_elemt(
      input.get_device_index(),
      {checks.dtype(), layout, grad_out.const_data_ptr(), input.const_data_ptr(),
       grad_input.mutable_data_ptr(), message, reduced, eps, w});
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
