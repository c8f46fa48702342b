// The four launchers: the contract between the host side (batch_norm.cu) and the kernels.
//
// Each takes raw pointers into device memory (arguments.h), the plan that make_plan gave for the
// same layout and the same pointers, and a stream of the current device; it enqueues at most one
// kernel and returns at once. `workspace` has plan.partials() sums and plan.counters() counters,
// these zero at the start and zero again at the end; no two kernels in flight may share it.
//
// An empty tensor (plan.blocks() == 0): launch_elemt updates the buffers, the others do nothing, so
// the caller sets what launch_stats and launch_backward_reduce leave unwritten to zero.
#pragma once

#include "../arguments.h"
#include "plan.h"
#include "reduce.cuh"

namespace syncbn {

// Reads x; writes stats.
void launch_stats(const StatsArgs& args, const Plan& plan, const Workspace& workspace,
                  Stream stream);

// Reads x and stats; writes y, and reads and writes the running buffers where present.
void launch_elemt(const ElemtArgs& args, const Plan& plan, Stream stream);

// Reads dy, x and stats; writes sums and, where present, the gradients of weight and bias.
void launch_backward_reduce(const BackwardReduceArgs& args, const Plan& plan,
                            const Workspace& workspace, Stream stream);

// Reads dy, x, stats and sums; writes dx.
void launch_backward_elemt(const BackwardElemtArgs& args, const Plan& plan, Stream stream);

}  // namespace syncbn
