"""Faults in the four kernels, and in what they share around their arithmetic."""

from __future__ import annotations

from .mutant import Mutant

BATCH = [
    Mutant(
        "cuda/batch.cuh",
        "begin + threadIdx.x % plan.lanes * kAcc;",
        "begin + threadIdx.x % plan.lanes;",
        "constants of another lane's channels",
        quick=True,
    ),
    Mutant(
        "cuda/batch.cuh",
        "begin = tile * columns;",
        "begin = 0;",
        "constants of the first tile for all",
    ),
    Mutant(
        "cuda/batch.cuh",
        "(end - 1) / span - first + 1;",
        "(end - 1) / span - first;",
        "no constants for a tile's last channel",
    ),
    Mutant(
        "cuda/batch.cuh",
        "(first + t) % static_cast<unsigned>(plan.C)",
        "(first + t)",
        "folded rows have channels of their own",
    ),
    Mutant(
        "cuda/batch.cuh",
        "left = span - column % span;",
        "left = span;",
        "every pack begins a channel",
    ),
    Mutant(
        "cuda/batch.cuh",
        "left == 0 ? span : left;",
        "left;",
        "a pack has two channels at most",
    ),
    Mutant(
        "cuda/batch.cuh",
        "at[i] = walk.next();",
        "at[i] = i == 0 ? walk.next() : at[0];",
        "a batch is one pack over and over",
    ),
]

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
        "      x[i].mask(batch.at[i], static_cast<scalar_t>(pivot[0]));",
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
        "count += batch.at[i].count();",
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
        "static_cast<double>(pivot[a]) - origin(a)",
        "origin(a) - static_cast<double>(pivot[a])",
        "moved from the pivot the wrong way",
    ),
    Mutant(
        "cuda/stats.cuh",
        "origin(begin + t) - ",
        "origin(begin) - ",
        "a column's totals are moved by the P of another",
    ),
    Mutant(
        "cuda/stats.cuh",
        "middle.load(begin + plan.rows / 2 * plan.row_stride + plan.S / 2);",
        "middle.load(begin);",
        "P is the first value, an outlier too",
    ),
    Mutant(
        "cuda/stats.cuh",
        "plan.count, origin(c), total",
        "plan.count, 0, total",
        "the totals stay about P",
    ),
    Mutant(
        "cuda/stats.cuh",
        "stats[message_size(plan.C) - 1] = plan.count;",
        "stats[message_size(plan.C) - 1] = plan.rows;",
        "the count is that of rows",
    ),
    Mutant(
        "cuda/stats.cuh",
        "plan.count / folds",
        "plan.count",
        "a column counts as a channel where rows are folded",
    ),
    Mutant(
        "cuda/stats.cuh",
        "return value - value == 0 ? value : acc_t{0};",
        "return value;",
        "an infinite pivot",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "lost_ += part - (next - sum_);",
        "lost_ += 0;",
        "a thread's totals forget what roundings lose",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "kExact && lost_ - lost_ == 0 ?",
        "kExact ?",
        "an infinite total becomes NaN",
    ),
]

ELEMT = [
    Mutant(
        "cuda/elemt.cuh",
        """  if (blockIdx.x < owners) {
    update_running(running, stats, plan.C, owners);
    return;
  }""",
        """  if (running.present()) {
    update_running(running, stats, plan.C, owners);
    if (blockIdx.x < owners) return;
  }""",
        "every block updates the buffers",
        quick=True,
    ),
    Mutant(
        "cuda/elemt.cuh",
        "blockIdx.x - owners",
        "blockIdx.x",
        "the block of the buffers is not made up for",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "first == 0 && running",
        "running",
        "every thread counts the batch",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "if (!(message_count(stats, C) > 0))",
        "if (false)",
        "an empty global batch moves the buffers",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "if (running.skip_nonfinite) {",
        "if (false) {",
        "what is not finite is not skipped",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "int64_t c = threadIdx.x; c < C; c += blockDim.x",
        "int64_t c = blockIdx.x * blockDim.x + threadIdx.x, once = 0; c < C && !once++;",
        "each block looks at its own channels alone",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "c += owners * blockDim.x",
        "c += kWarpSize",
        "threads update one another's channels",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "running.cumulative ? 1 : ",
        "",
        "blocks read the counter that another advances",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "eps, weight, bias);",
        "eps, bias, weight);",
        "weight and bias swapped",
    ),
    Mutant(
        "cuda/elemt.cuh",
        "normalise[kChannelsLast ? e : 0]",
        "normalise[0]",
        "one channel's coefficients for a whole pack",
    ),
]

BACKWARD_REDUCE = [
    Mutant(
        "cuda/backward_reduce.cuh",
        "total[a] = {total_dy[a].value(), total_dy_xmu[a].value()};",
        "total[a] = {total_dy_xmu[a].value(), total_dy[a].value()};",
        "the two sums change places",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "      dy[i].mask(batch.at[i], zero);",
        "",
        "gradients of the neighbours are added",
        quick=True,
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "      x[i].mask(batch.at[i], zero);",
        "",
        "a neighbour's infinity makes NaN",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "sums[plan.C + c] = ",
        "sums[2 * c + 1] = ",
        "the two sums of a channel side by side",
    ),
    Mutant(
        "cuda/backward_reduce.cuh",
        "sum.second * shared_stats[t].invstd",
        "sum.second",
        "the gradient of weight without invstd",
    ),
]

BACKWARD_ELEMT = [
    Mutant(
        "cuda/backward_elemt.cuh",
        "    if (!walk.more()) {\n      return;",
        "    if (true) {\n      return;",
        "only the first batch is written",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "  batch.load(walk, {grad_out, input});\n  InputGrad",
        "  batch.load(walk, {grad_out, grad_out});\n  InputGrad",
        "the gradient in the place of the input",
        quick=True,
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "gradient[kChannelsLast ? e : 0]",
        "gradient[0]",
        "one channel's coefficients for a whole pack",
    ),
    Mutant(
        "cuda/backward_elemt.cuh",
        "store(grad_input, batch.at[i], streaming)",
        "store(grad_input, batch.at[0], streaming)",
        "both packs are written to one place",
    ),
]

FAULTS = [*BATCH, *STATS, *ELEMT, *BACKWARD_REDUCE, *BACKWARD_ELEMT]
