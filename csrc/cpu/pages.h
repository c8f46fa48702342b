// Huge pages behind a large output. The C library returns large blocks to the system, so that the
// memory of such an output is new at each call, and taking it 4 KiB at a time costs several times
// what the kernel takes that fills it. A hint: where it is not heeded nothing changes.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace syncbn::cpu {

constexpr int64_t kManyBytes = 8 << 20;  // smaller blocks are mostly kept by the C library

inline void prefer_huge_pages(void* data /* [bytes] */, int64_t bytes) {
#ifdef __linux__
  if (bytes >= kManyBytes) {
    constexpr uintptr_t page = 65536;  // a multiple of every usual page size
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (begin + page - 1) / page * page;
    madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace syncbn::cpu
