#include "backward_elemt.cuh"

#include "batch_norm.h"
#include "dispatch.h"

namespace syncbn {

void launch_backward_elemt(const BackwardElemtArgs& args, const Plan& plan, Stream stream) {
  if (plan.blocks() == 0) {
    return;
  }
  dispatch(args.dtype, plan, [&]<typename scalar_t, bool kChannelsLast, int kVec>() {
    launch(backward_elemt_kernel<scalar_t, kChannelsLast, kVec>, {plan.blocks(), plan.threads},
           stream, static_cast<const scalar_t*>(args.grad_out),
           static_cast<const scalar_t*>(args.input), static_cast<scalar_t*>(args.grad_input),
           args.stats, args.sums, args.weight, args.eps, plan.walk, plan.streaming);
  });
}

}  // namespace syncbn
