#include "stats.cuh"

#include "batch_norm.h"
#include "dispatch.h"

namespace syncbn {

void launch_stats(const StatsArgs& args, const Plan& plan, const Workspace& workspace,
                  Stream stream) {
  if (plan.blocks() == 0) {
    return;
  }
  dispatch(args.dtype, plan, [&]<typename scalar_t, bool kChannelsLast, int kVec>() {
    launch(stats_kernel<scalar_t, kChannelsLast, kVec>, {plan.blocks(), plan.threads}, stream,
           static_cast<const scalar_t*>(args.input), args.stats, plan.walk, plan.tree, workspace);
  });
}

}  // namespace syncbn
