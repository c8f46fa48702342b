"""Faults in the four kernels."""

from __future__ import annotations

from .mutant import Mutant

STATS = [
    Mutant(
        "cuda/stats.cuh",
        "return c < low ? low : c < high ? c : high;",
        "return acc_t{0};",
        "no pivot",
        quick=True,
    ),
    Mutant(
        "cuda/stats.cuh",
        "return c < low ? low : c < high ? c : high;",
        "return a;",
        "the first value is the pivot, an outlier too",
    ),
    Mutant(
        "cuda/stats.cuh",
        "      x[u].mask(at[u], static_cast<scalar_t>(pivot[0]));",
        "",
        "values of the neighbours are added",
    ),
    Mutant(
        "cuda/stats.cuh",
        "static_cast<scalar_t>(pivot[0])",
        "static_cast<scalar_t>(acc_t{0})",
        "values of the neighbours count as 0, not as the pivot",
    ),
    Mutant(
        "cuda/stats.cuh",
        "count += at[u].count();",
        "count += kVec / kAcc;",
        "every pack counts as full",
    ),
    Mutant(
        "cuda/stats.cuh",
        "sumsq[a] += delta * delta;",
        "sumsq[a] += delta;",
        "no squares",
    ),
    Mutant(
        "cuda/stats.cuh",
        "add(sums[a], rebase(count, sum[a], sumsq[a], delta));",
        "sums[a] = rebase(count, sum[a], sumsq[a], delta);",
        "emptying a sum forgets what was emptied before",
    ),
    Mutant(
        "cuda/stats.cuh",
        "static_cast<double>(pivot[a]) - static_cast<acc_t>(origin.values[a])",
        "static_cast<acc_t>(origin.values[a]) - static_cast<double>(pivot[a])",
        "moved from the pivot the wrong way",
    ),
    Mutant(
        "cuda/stats.cuh",
        "load_origin<kChannelsLast, 1>(input, plan, c)",
        "load_origin<kChannelsLast, 1>(input, plan, 0)",
        "the totals are moved by the P of another channel",
    ),
    Mutant(
        "cuda/stats.cuh",
        "middle.load(begin + plan.rows / 2 * plan.row_stride + plan.S / 2);",
        "middle.load(begin);",
        "P is the first value, an outlier too",
    ),
    Mutant(
        "cuda/stats.cuh",
        "shared[t].second, origin)",
        "shared[t].second, 0)",
        "the totals stay about P",
    ),
    Mutant(
        "cuda/stats.cuh",
        "stats[2 * plan.C] = plan.count;",
        "stats[2 * plan.C] = plan.rows;",
        "the count is that of rows",
    ),
    Mutant(
        "cuda/stats.cuh",
        "if (c < plan.C)",
        "if (c <= plan.C)",
        "one channel too many is written",
    ),
]

ELEMT = [
    Mutant(
        "cuda/elemt.cuh",
        """  if (running.present() && blockIdx.x == 0) {
    update_running(running, stats, plan.C);
    return;
  }""",
        """  if (running.present()) {
    update_running(running, stats, plan.C);
    if (blockIdx.x == 0) return;
  }""",
        "every block updates the buffers",
        quick=True,
    ),
    Mutant(
        "cuda/elemt.cuh",
        "blockIdx.x - running.present()",
        "blockIdx.x",
        "the block of the buffers is not made up for",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "threadIdx.x == 0 && running",
        "running",
        "every thread counts the batch",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "if (!(stats[2 * C] > 0))",
        "if (false)",
        "an empty global batch moves the buffers",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "c < C; c += blockDim.x",
        "c < C; c += kWarpSize",
        "warps update one another's channels",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "eps, weight, bias);",
        "eps, bias, weight);",
        "weight and bias swapped",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "% plan.lanes * kAcc + a]",
        "% plan.lanes + a]",
        "coefficients of another lane's channels",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "normalise[kChannelsLast ? e : 0]",
        "normalise[0]",
        "one channel's coefficients for a whole pack",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "static_cast<int64_t>(walk.tile()) * tile + t",
        "t",
        "coefficients of the first tile for all",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "if (c < plan.C)",
        "if (c < plan.C - 1)",
        "no coefficients for the last channel",
    ),
]

BACKWARD_REDUCE = [
    Mutant(
        "cuda/backward_reduce.cuh",
        "      dy[u].mask(at[u], zero);",
        "",
        "gradients of the neighbours are added",
        quick=True,
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "      x[u].mask(at[u], zero);",
        "",
        "a neighbour's infinity makes NaN",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "add(total[a], {sum_dy[a], sum_dy_xmu[a]});",
        "total[a] = {sum_dy[a], sum_dy_xmu[a]};",
        "emptying a sum forgets what was emptied before",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "channel_stats<acc_t>(stats, plan.C, first_channel + t, eps)",
        "channel_stats<acc_t>(stats, plan.C, t, eps)",
        "statistics of the first tile for all",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "if (first_channel + t < plan.C)",
        "if (first_channel + t < plan.C - 1)",
        "no statistics for the last channel",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "% plan.lanes * kAcc + a]",
        "% plan.lanes + a]",
        "statistics of another lane's channels",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "sums[plan.C + c] = ",
        "sums[2 * c + 1] = ",
        "the two sums of a channel side by side",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "shared[t].second * shared_stats[t].invstd",
        "shared[t].second",
        "the gradient of weight without invstd",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "    if (c < plan.C) {",
        "    if (c < plan.C - 1) {",
        "the last channel is not written",
    ),
]

BACKWARD_ELEMT = [
    Mutant(
        "cuda/backward_elemt.cuh",
        "if (c < plan.C)",
        "if (c < plan.C - 1)",
        "no coefficients for the last channel",
        quick=True,
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "x[u].load(input,",
        "x[u].load(grad_out,",
        "the gradient in the place of the input",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "gradient[kChannelsLast ? e : 0]",
        "gradient[0]",
        "one channel's coefficients for a whole pack",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "% plan.lanes * kAcc + a]",
        "% plan.lanes + a]",
        "coefficients of another lane's channels",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "static_cast<int64_t>(walk.tile()) * tile + t",
        "t",
        "coefficients of the first tile for all",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "store(grad_input, at[u], streaming)",
        "store(grad_input, at[0], streaming)",
        "both packs are written to one place",
    ),
]

FAULTS = [*STATS, *ELEMT, *BACKWARD_REDUCE, *BACKWARD_ELEMT]
