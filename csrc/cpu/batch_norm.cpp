// The four steps on the CPU. Each call derives its channels' coefficients once (coefficients.h),
// runs a kernel (kernels.h) over the boxes of a plan (plan.h) on torch's threads, and adds up
// partial sums in fixed order. What the steps compute: ../statistics.h; their arguments:
// ../arguments.h.
#include "../batch_norm.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>

#include "dispatch.h"
#include "launch.h"

namespace syncbn {

static bool moves_running(const ElemtArgs& args) {
  const int64_t C = args.layout.C;
  for (int64_t c = 0; args.running.skip_nonfinite && c < C; ++c) {
    if (!args.running.holds(args.stats, C, c)) {
      return false;
    }
  }
  return args.running.present() && message_count(args.stats, C) > 0;
}

struct Cpu {
  static void stats(int /* device_index */, const StatsArgs& args) {
    const int64_t C = args.layout.C;
    if (args.layout.numel() == 0) {
      std::fill_n(args.stats, message_size(C), 0.0);
      return;
    }
    args.stats[message_size(C) - 1] = static_cast<double>(args.layout.rows());
    const cpu::TypeKernels& kernels = cpu::kernels_for(args.dtype);
    const cpu::Tensors tensors(args.layout, args.dtype, args.input, nullptr, nullptr);
    const cpu::Plan plan = cpu::reduce_plan(tensors.operands, kernels);
    const std::unique_ptr<double[]> partials(new double[plan.parts() * 3 * C]);
    cpu::run(kernels.stats, plan, tensors.operands, partials.get(), 3);
    cpu::for_channels(C, [&](int64_t begin, int64_t end) {
      kernels.finish_stats(plan, partials.get(), args, begin, end);
    });
  }

  static void elemt(int /* device_index */, const ElemtArgs& args) {
    const int64_t C = args.layout.C;
    const cpu::TypeKernels& kernels = cpu::kernels_for(args.dtype);
    if (args.layout.numel() > 0) {
      cpu::Tensors tensors(args.layout, args.dtype, args.input, nullptr, args.output);
      cpu::dispatch_acc(args.dtype, [&](auto zero) {
        const cpu::Coefficients<decltype(zero)> coefficients(
            tensors.operands, kernels.elemt_coefficients, 4, args.stats, nullptr, args.eps,
            args.weight, args.bias);
        cpu::run(kernels.elemt, cpu::elementwise_plan(tensors.operands, kernels), tensors.operands,
                 nullptr, 0);
      });
    }
    if (moves_running(args)) {
      const double factor = args.running.factor();
      cpu::for_channels(
          C, [&](int64_t begin, int64_t end) { kernels.update_running(args, factor, begin, end); });
      if (args.running.num_batches_tracked != nullptr) {
        ++*args.running.num_batches_tracked;
      }
    }
  }

  static void backward_reduce(int /* device_index */, const BackwardReduceArgs& args) {
    const int64_t C = args.layout.C;
    if (args.layout.numel() == 0) {  // zero and not zero * invstd, as that is NaN at a count of 0
      std::fill_n(args.sums, 2 * C, 0.0);
      for (int64_t c = 0; c < C; ++c) {
        args.grad_weight.store(c, 0);
        args.grad_bias.store(c, 0);
      }
      return;
    }
    const cpu::TypeKernels& kernels = cpu::kernels_for(args.dtype);
    cpu::Tensors tensors(args.layout, args.dtype, args.input, args.grad_out, nullptr);
    const cpu::Plan plan = cpu::reduce_plan(tensors.operands, kernels);
    const std::unique_ptr<double[]> partials(new double[plan.parts() * 2 * C]);
    cpu::dispatch_acc(args.dtype, [&](auto zero) {
      const cpu::Coefficients<decltype(zero)> coefficients(tensors.operands,
                                                           kernels.backward_reduce_coefficients, 3,
                                                           args.stats, nullptr, args.eps, {}, {});
      cpu::run(kernels.backward_reduce, plan, tensors.operands, partials.get(), 2);
      cpu::for_channels(C, [&](int64_t begin, int64_t end) {
        kernels.finish_backward(plan, partials.get(), coefficients.row(2), args, begin, end);
      });
    });
  }

  static void backward_elemt(int /* device_index */, const BackwardElemtArgs& args) {
    if (args.layout.numel() == 0) {
      return;
    }
    const cpu::TypeKernels& kernels = cpu::kernels_for(args.dtype);
    cpu::Tensors tensors(args.layout, args.dtype, args.input, args.grad_out, args.grad_input);
    cpu::dispatch_acc(args.dtype, [&](auto zero) {
      const cpu::Coefficients<decltype(zero)> coefficients(
          tensors.operands, kernels.backward_elemt_coefficients, 5, args.stats, args.sums, args.eps,
          args.weight, {});
      cpu::run(kernels.backward_elemt, cpu::elementwise_plan(tensors.operands, kernels),
               tensors.operands, nullptr, 0);
    });
  }
};

}  // namespace syncbn

STABLE_TORCH_LIBRARY_IMPL(SYNCBN_NAMESPACE, CPU, m) { syncbn::register_operators<syncbn::Cpu>(m); }
