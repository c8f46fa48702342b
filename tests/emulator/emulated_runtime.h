// What csrc/cuda/runtime.h offers the host side of the operators, for tensors of the CPU: streams
// and a card of the test's choice, and graphs of kernels and memsets that can be captured and
// replayed, several at the same time. Everything that is asked of it is noted.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "plan.h"
#include "platform.h"

#define SYNCBN_DISPATCH_KEY CPU

namespace syncbn {

struct DeviceGuard {
  explicit DeviceGuard(int /* device_index */) {}
};

Stream current_stream(int device_index);
bool is_capturing(Stream stream);
void zero(void* data, int64_t bytes, Stream stream);
torch::stable::Tensor allocate(int64_t bytes, int device_index);
void* allocate_for_good(int64_t bytes);
Card card(int device_index);
void throw_launch_error();

}  // namespace syncbn
