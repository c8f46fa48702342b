#include "backward_reduce.cuh"

#include "batch_norm.h"
#include "dispatch.h"

namespace syncbn {

void launch_backward_reduce(const BackwardReduceArgs& args, const Plan& plan,
                            const Workspace& workspace, Stream stream) {
  if (plan.blocks() == 0) {
    return;
  }
  dispatch(args.dtype, plan, [&]<typename scalar_t, bool kChannelsLast, int kVec>() {
    launch(backward_reduce_kernel<scalar_t, kChannelsLast, kVec>, {plan.blocks(), plan.threads},
           stream, static_cast<const scalar_t*>(args.grad_out),
           static_cast<const scalar_t*>(args.input), args.stats, args.eps, args.sums,
           args.grad_weight, args.grad_bias, plan.walk, plan.tree, workspace);
  });
}

}  // namespace syncbn
