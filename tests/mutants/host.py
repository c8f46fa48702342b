"""Faults in what runs on the host, or on both: the plan, the operators, the statistics."""

from __future__ import annotations

from .mutant import Mutant

PLAN = [
    Mutant(
        "cuda/plan.h",
        "columns % width != 0 || ",
        "",
        "packs straddle channels-last rows",
    ),
    Mutant(
        "cuda/plan.h",
        " || misalignment(pointer, width * size) != 0",
        "",
        "channels-last pointers pass for aligned",
    ),
    Mutant(
        "cuda/plan.h",
        "misalignment(pointer, kPackBytes) == first;",
        "true;",
        "pointers pass for misaligned alike",
        quick=True,
    ),
    Mutant(
        "cuda/plan.h",
        "(layout.S - 2) / plan.vec + 2",
        "(layout.S - 2) / plan.vec + 1",
        "no pack for the end of a row that begins anywhere",
    ),
    Mutant(
        "cuda/plan.h",
        "walk.shift == 0 && layout.S",
        "layout.S",
        "rows pass for aligned where the pointers are not",
    ),
    Mutant(
        "cuda/plan.h",
        "plan.vec * size) / size);",
        "plan.vec * size));",
        "the shift in bytes",
    ),
    Mutant(
        "cuda/plan.h",
        "walk.count = layout.rows();",
        "walk.count = layout.N;",
        "the count is that of samples",
    ),
    Mutant(
        "cuda/plan.h",
        "walk.row_stride = layout.C * layout.S;",
        "walk.row_stride = layout.S;",
        "the next row is the next channel's",
    ),
    Mutant(
        "cuda/plan.h",
        "plan.threads / walk.lanes;",
        "plan.threads;",
        "steps over what the other lanes would take",
    ),
    Mutant(
        "cuda/plan.h",
        "stride / walk.packs * walk.row_stride",
        "stride / walk.packs",
        "the step in rows, not in values",
    ),
    Mutant(
        "cuda/plan.h",
        "static_cast<int>(stride % walk.packs)",
        "0",
        "no step along the row",
    ),
    Mutant(
        "cuda/plan.h",
        "static_cast<int>(packs % stride)",
        "0",
        "packs that do not deal out evenly are left",
    ),
    Mutant(
        "cuda/plan.h",
        "int64_t row_stride = 0;",
        "int row_stride = 0;",
        "a stride of 32 bits",
    ),
    Mutant(
        "cuda/plan.h",
        "step == Step::kReduce && !fits",
        "false",
        "columns that are one channel's lie in several tiles",
    ),
    Mutant(
        "cuda/plan.h",
        "while (view.rows % 2 == 0) {",
        "while (true) {",
        "an odd number of rows is folded",
    ),
    Mutant(
        "cuda/plan.h",
        "!view.folded && (fills",
        "(fills",
        "columns that are one channel's are spread over the card",
    ),
]

MESSAGE = [
    Mutant(
        "message.h",
        "add_rn(add_rn(sum, sum), shift)",
        "add_rn(sum, shift)",
        "sums of squares lose half of the mixed term",
    ),
    Mutant(
        "message.h",
        "var < 0 ? 0 : var",
        "var",
        "a variance that rounding left negative stays",
    ),
    Mutant(
        "message.h",
        "m.count / (m.count > 2 ? m.count - 1 : 1)",
        "1",
        "the running variance is biased",
    ),
    Mutant(
        "message.h",
        "add_rn(add_rn(sum.high, -high), sum.low)",
        "add_rn(sum.high, -high)",
        "the low part without what the sum itself has rounded off",
    ),
    Mutant(
        "message.h",
        "mul_rn(sum.high / count, 0x1p32)",
        "0",
        "high parts of all bits, which no longer add up exactly",
    ),
    Mutant(
        "message.h",
        "Pair{sum.high, 0}",
        "Pair{sum.high, sum.low}",
        "an infinite sum with NaN beside it",
    ),
    Mutant(
        "message.h",
        "return lost - lost == 0 ? lost : 0;",
        "return lost;",
        "an infinite mean becomes NaN",
    ),
    Mutant(
        "message.h",
        "add_rn(lows, -product.low)",
        "lows",
        "a variance with the rounding of mean * sum in it",
        quick=True,
    ),
    Mutant(
        "message.h",
        "const double mean = add_rn(about, step);",
        "const double mean = about;",
        "the mean of the high part alone",
    ),
]

STATISTICS = [
    Mutant(
        "statistics.h",
        "{high, static_cast<acc_t>(low), ",
        "{high, 0, ",
        "the mean without its low part",
        quick=True,
    ),
    Mutant(
        "statistics.h",
        "add_rn(m.var, eps)",
        "m.var",
        "no eps",
    ),
    Mutant(
        "statistics.h",
        " && value >= -largest",
        "",
        "minus infinity is taken for a number",
    ),
    Mutant(
        "statistics.h",
        "add_rn(1, -factor)",
        "1",
        "the buffers keep all of the old value",
    ),
    Mutant(
        "statistics.h",
        "static_cast<double>(*num_batches_tracked + 1)",
        "static_cast<double>(*num_batches_tracked)",
        "the plain average over one batch too few",
    ),
    Mutant(
        "statistics.h",
        "mul_rn(invstd, invstd)",
        "invstd",
        "the slope of dx with invstd, not its square",
    ),
    Mutant(
        "statistics.h",
        "static_cast<acc_t>(mul_rn(sums[c], m.share))",
        "static_cast<acc_t>(sums[c])",
        "the sum of dy in the place of its mean",
    ),
    Mutant(
        "statistics.h",
        "bias.load(c, 0)",
        "bias.load(c, 1)",
        "an absent bias is 1",
    ),
]

OPERATORS = [
    Mutant(
        "cuda/batch_norm.cu",
        "      zero(workspace.counters, counters, stream);\n",
        "",
        "counters of a graph start as they are",
    ),
    Mutant(
        "cuda/batch_norm.cu",
        "  zero(counters, kBytes, stream);\n",
        "",
        "counters of a stream start as they are",
    ),
    Mutant(
        "cuda/batch_norm.cu",
        "is_capturing(stream) ? nullptr : cached_counters(",
        "cached_counters(",
        "graphs share the counters of their stream",
    ),
    Mutant(
        "cuda/batch_norm.cu",
        "rows.find({device_index, stream})",
        "rows.begin()",
        "streams share their counters",
    ),
    Mutant(
        "cuda/batch_norm.cu",
        "reinterpret_cast<unsigned*>(data + partials)",
        "reinterpret_cast<unsigned*>(data)",
        "counters lie over the partial sums",
    ),
    Mutant(
        "cuda/batch_norm.cu",
        "zero(args.stats, message_size(C) * sizeof(double), stream);",
        "",
        "the message of an empty rank is never written",
    ),
]

FAULTS = [*PLAN, *MESSAGE, *STATISTICS, *OPERATORS]
