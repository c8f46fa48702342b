// The schemas of all operators; the kernels register themselves per device (cpu/, cuda/). What each
// step reads and writes: batch_norm.h. The functions that call them: syncbn_cuda/functional.py.
#include "namespace.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(SYNCBN_NAMESPACE, m) {
  // The vectors are only checked: before anything has happened.
  m.def(
      "batch_norm_stats(Tensor input, Tensor? weight=None, Tensor? bias=None,"
      " Tensor? running_mean=None, Tensor? running_var=None, Tensor? num_batches_tracked=None)"
      " -> Tensor");
  m.def(
      "batch_norm_elemt(Tensor input, Tensor stats, Tensor? weight, Tensor? bias, float eps)"
      " -> Tensor");
  // Of its own: Inductor fails on an operator whose mutable arguments are all None.
  m.def(
      "batch_norm_elemt_running(Tensor input, Tensor stats, Tensor? weight, Tensor? bias,"
      " float eps, Tensor(a!) running_mean, Tensor(b!) running_var,"
      " Tensor(c!)? num_batches_tracked, float? momentum, bool skip_nonfinite=False)"
      " -> Tensor");
  m.def(
      "batch_norm_backward_reduce(Tensor grad_out, Tensor input, Tensor stats, float eps,"
      " bool weight_like_input, bool bias_like_input) -> (Tensor, Tensor, Tensor)");
  m.def(
      "batch_norm_backward_elemt(Tensor grad_out, Tensor input, Tensor stats, Tensor sums,"
      " Tensor? weight, float eps) -> Tensor");
}
