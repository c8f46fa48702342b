"""Faults in what the four kernels share on the device: packs, the walk, the reduction."""

from __future__ import annotations

from .mutant import Mutant

PACK = [
    Mutant(
        "cuda/pack.cuh",
        "return (1u << end) - (1u << begin);",
        "return (2u << end) - (1u << begin);",
        "a span has one value more at its end",
        quick=True,
    ),
    Mutant(
        "cuda/pack.cuh",
        "return (1u << end) - (1u << begin);",
        "return (1u << end) - (2u << begin);",
        "a span has one value less at its begin",
    ),
    Mutant(
        "cuda/pack.cuh",
        "any() : own == bits(0, kVec);",
        "any() : has(kVec - 1);",
        "a pack that begins with a neighbour's values passes for full",
    ),
    Mutant(
        "cuda/pack.cuh",
        "full() ? kVec : __popc(own & bits(0, kVec));",
        "any() * kVec;",
        "a neighbour's values count",
    ),
    Mutant(
        "cuda/pack.cuh",
        "kChannelsLast ? any() : full()",
        "full()",
        "all channels of a pack count for each",
    ),
    Mutant(
        "cuda/pack.cuh",
        "using type = uint2;",
        "using type = unsigned;",
        "words of 8 bytes are only 4 wide",
    ),
    Mutant(
        "cuda/pack.cuh",
        "if (!kChannelsLast && !at.full()) {",
        "if (!kChannelsLast && !at.has(0)) {",
        "values past the end of a row are not masked",
    ),
    Mutant(
        "cuda/pack.cuh",
        "return at.full() ? static_cast<acc_t>(values[e]) : other;",
        "return static_cast<acc_t>(values[e]);",
        "a pivot from a pack that was never loaded",
    ),
    Mutant(
        "cuda/pack.cuh",
        "int64_t offset;",
        "int offset;",
        "offsets of 32 bits",
    ),
]

WALK = [
    Mutant(
        "cuda/walk.cuh",
        " + (first < plan.extra)",
        "",
        "the packs that do not deal out evenly are left",
    ),
    Mutant(
        "cuda/walk.cuh",
        "(first < plan.extra)",
        "(first <= plan.extra)",
        "one pack is visited twice",
    ),
    Mutant(
        "cuda/walk.cuh",
        "column_ < plan.columns ?",
        "column_ <= plan.columns ?",
        "a lane past the last channel is at work",
    ),
    Mutant(
        "cuda/walk.cuh",
        "if (pack_ >= plan_.packs)",
        "if (pack_ > plan_.packs)",
        "no carry at the very end of a row",
        quick=True,
    ),
    Mutant(
        "cuda/walk.cuh",
        "        step += plan_.row_stride;\n",
        "",
        "the carry does not reach the next row",
    ),
    Mutant(
        "cuda/walk.cuh",
        "start_ + first, left_ > 0 ? at.bits(0, kVec) : 0};",
        "start_ + first, at.bits(0, kVec)};",
        "goes on after the last pack",
    ),
    Mutant(
        "cuda/walk.cuh",
        "static_cast<int>(start_) + plan_.shift)",
        "static_cast<int>(start_))",
        "rows are aligned as in an aligned tensor",
    ),
    Mutant(
        "cuda/walk.cuh",
        "rest < 0 ? 0 : min(rest, kVec)",
        "rest <= 0 ? 0 : kVec",
        "the last pack of a row is full",
    ),
    Mutant(
        "cuda/walk.cuh",
        "{start_, left_ > 0 ? at.bits(0, kVec) : 0};",
        "{start_, at.bits(0, kVec)};",
        "goes on after the last row",
    ),
    Mutant(
        "cuda/walk.cuh",
        "!plan_.aligned && ",
        "false && ",
        "all rows pass for aligned",
    ),
    Mutant(
        "cuda/walk.cuh",
        "split_ * abreast",
        "split_ + abreast",
        "blocks begin one pack apart",
    ),
    Mutant(
        "cuda/walk.cuh",
        "kReverse ? plan.rows - 1 - row : row",
        "kReverse ? plan.rows - row : row",
        "the reverse order begins a row too late",
    ),
    Mutant(
        "cuda/walk.cuh",
        "kReverse ? plan_.packs - 1 - pack_ : pack_",
        "kReverse ? plan_.packs - pack_ : pack_",
        "the reverse order begins a pack too late",
    ),
    Mutant(
        "cuda/walk.cuh",
        "start_ += kReverse ? -step : step;",
        "start_ += step;",
        "the reverse order goes forward through the rows",
    ),
    Mutant(
        "cuda/walk.cuh",
        "int64_t column_, start_;",
        "int64_t column_; int start_;",
        "begins of rows in 32 bits",
    ),
    Mutant(
        "cuda/walk.cuh",
        "int64_t step = plan_.step_rows;",
        "int step = plan_.step_rows;",
        "steps of 32 bits",
    ),
]

REDUCE = [
    Mutant(
        "cuda/reduce.cuh",
        "column += plan.C) {",
        "column += 2 * plan.C) {",
        "columns of folded rows are left out",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "    if (c < plan.C) {",
        "    if (c < plan.C - 1) {",
        "the last channel is not written",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "__ldcg(",
        "__ldg(",
        "partial sums are loaded as constants",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "__stcg(reinterpret_cast<double2*>(target), make_double2(sums.first, sums.second))",
        "*target = sums",
        "partial sums are stored plainly",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "sums[a].second, offset)",
        "sums[a].second, offset / 2)",
        "a shuffle with the wrong partner",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "0xffffffffu, sums[a].first",
        "0x0000ffffu, sums[a].first",
        "a shuffle of half a warp",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "offset >= lanes",
        "offset > lanes",
        "the last shuffle is left out",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "shared[warp * tile + lane * kAcc + a]",
        "shared[warp * tile + a * lanes + lane]",
        "strides of lane and channel swapped",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "w < warps;",
        "w < warps - 1;",
        "the last warp is not added",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "return {word.x, word.y};",
        "return {word.y, word.x};",
        "the two sums change places between blocks",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "size - 1) == size - 1",
        "size) == size - 1",
        "the counter does not wrap back to 0",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "size - 1) == size - 1",
        "size - 1) == 0",
        "the first block to arrive adds up",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "tree.partials * channels;",
        "tree.partials;",
        "tiles lie over one another's partial sums",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "workspace.counters + static_cast<int64_t>(tile) * tree.counters",
        "workspace.counters",
        "all tiles share the counters of the first",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "min(begin + tree.fan, nodes)",
        "begin + tree.fan",
        "the last node waits for more blocks than there are",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "      sums[a] = {};\n",
        "",
        "a block's own sums are added twice",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "n < end;",
        "n < end - 1;",
        "the last block of a node is not added",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "n += abreast",
        "n += 1",
        "threads add one another's blocks",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "    level += static_cast<int64_t>(nodes) * channels;\n",
        "",
        "the second level writes over the first",
    ),
    Mutant(
        "cuda/reduce.cuh",
        "    counters += nodes;\n",
        "",
        "the second level counts in the first's place",
    ),
]

FAULTS = [*PACK, *WALK, *REDUCE]
