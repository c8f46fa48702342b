// The host side of the CUDA operators: device, stream, plan, workspace, launch. The arguments are
// checked and the outputs allocated by ../batch_norm.h; every step is one kernel launch.
#include "../batch_norm.h"

#include <torch/csrc/stable/library.h>

#include <map>
#include <mutex>
#include <utility>

#include "batch_norm.h"
#include "runtime.h"

namespace syncbn {

void check_launch() { throw_launch_error(); }

namespace {

int64_t value_size(ScalarType dtype) {
  return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2;
}

// Counters that are zero between kernels, one row for each stream, as kernels in flight on two
// streams must not share them: the launch that finds them zero leaves them zero. Null once there
// are more streams than rows, or where one row is too short.
unsigned* cached_counters(int device_index, Stream stream, int64_t length) {
  constexpr int64_t kLength = 4096;
  constexpr size_t kRows = 256;
  static std::mutex mutex;
  static std::map<std::pair<int, Stream>, unsigned*> rows;
  if (length > kLength) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto row = rows.find({device_index, stream});
  if (row != rows.end()) {
    return row->second;
  }
  if (rows.size() >= kRows) {
    return nullptr;
  }
  constexpr int64_t kBytes = kLength * sizeof(unsigned);
  auto* counters = static_cast<unsigned*>(allocate_for_good(kBytes));
  zero(counters, kBytes, stream);
  rows[{device_index, stream}] = counters;
  return counters;
}

// The memory behind a Workspace, for one launch; freed in stream order.
struct WorkspaceMemory {
  std::optional<Tensor> memory;
  Workspace workspace;

  WorkspaceMemory(const Plan& plan, int device_index, Stream stream) {
    if (plan.partials() == 0) {
      return;
    }
    // A captured launch bakes in the address of its counters, and two graphs captured on one
    // stream may be replayed at once: each gets counters of its own and sets them to zero.
    workspace.counters =
        is_capturing(stream) ? nullptr : cached_counters(device_index, stream, plan.counters());
    const int64_t partials = plan.partials() * sizeof(Sums);
    const int64_t counters = workspace.counters == nullptr ? plan.counters() * sizeof(unsigned) : 0;
    memory = allocate(partials + counters, device_index);
    auto* data = static_cast<char*>(memory->mutable_data_ptr());
    workspace.partials = reinterpret_cast<Sums*>(data);
    if (counters > 0) {
      workspace.counters = reinterpret_cast<unsigned*>(data + partials);
      zero(workspace.counters, counters, stream);
    }
  }
};

void zero_vector(const ChannelVector& vector, int64_t C, Stream stream) {
  if (vector.data != nullptr) {
    zero(vector.data, C * value_size(vector.dtype), stream);
  }
}

struct Cuda {
  static void stats(int device_index, const StatsArgs& args) {
    const DeviceGuard guard(device_index);
    const Stream stream = current_stream(device_index);
    const int64_t C = args.layout.C;
    if (args.layout.numel() == 0) {
      zero(args.stats, message_size(C) * sizeof(double), stream);
      return;
    }
    const Plan plan = make_plan(args.layout, value_size(args.dtype), {args.input},
                                card(device_index), Step::kReduce);
    const WorkspaceMemory memory(plan, device_index, stream);
    launch_stats(args, plan, memory.workspace, stream);
  }

  static void elemt(int device_index, const ElemtArgs& args) {
    const DeviceGuard guard(device_index);
    const Plan plan = make_plan(args.layout, value_size(args.dtype), {args.input, args.output},
                                card(device_index), Step::kWrite);
    launch_elemt(args, plan, current_stream(device_index));
  }

  static void backward_reduce(int device_index, const BackwardReduceArgs& args) {
    const DeviceGuard guard(device_index);
    const Stream stream = current_stream(device_index);
    const int64_t C = args.layout.C;
    if (args.layout.numel() == 0) {
      zero(args.sums, 2 * C * sizeof(double), stream);
      zero_vector(args.grad_weight, C, stream);
      zero_vector(args.grad_bias, C, stream);
      return;
    }
    const Plan plan = make_plan(args.layout, value_size(args.dtype), {args.grad_out, args.input},
                                card(device_index), Step::kReduce);
    const WorkspaceMemory memory(plan, device_index, stream);
    launch_backward_reduce(args, plan, memory.workspace, stream);
  }

  static void backward_elemt(int device_index, const BackwardElemtArgs& args) {
    const DeviceGuard guard(device_index);
    const Plan plan =
        make_plan(args.layout, value_size(args.dtype), {args.grad_out, args.input, args.grad_input},
                  card(device_index), Step::kWrite);
    launch_backward_elemt(args, plan, current_stream(device_index));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SYNCBN_NAMESPACE, SYNCBN_DISPATCH_KEY, m) { register_operators<Cuda>(m); }

}  // namespace syncbn
