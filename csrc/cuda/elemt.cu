#include "elemt.cuh"

#include "batch_norm.h"
#include "dispatch.h"

namespace syncbn {

void launch_elemt(const ElemtArgs& args, const Plan& plan, Stream stream) {
  const int threads = plan.blocks() == 0 ? kMaxThreads : plan.threads;
  const auto owners = static_cast<unsigned>(running_blocks(args.running, args.layout.C, threads));
  const int64_t blocks = plan.blocks() + owners;
  if (blocks == 0) {
    return;
  }
  dispatch(args.dtype, plan, [&]<typename scalar_t, bool kChannelsLast, int kVec>() {
    launch(elemt_kernel<scalar_t, kChannelsLast, kVec>, {blocks, threads}, stream,
           static_cast<const scalar_t*>(args.input), static_cast<scalar_t*>(args.output),
           args.stats, args.weight, args.bias, args.eps, args.running, owners, plan.walk,
           plan.streaming);
  });
}

}  // namespace syncbn
