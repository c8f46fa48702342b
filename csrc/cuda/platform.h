// What differs between nvcc and the tests' emulator, which compiles this folder with the host
// compiler (tests/emulator): shared memory, the stream and the launch. Nothing else in the kernels
// and launchers may depend on which of the two is at work.
#pragma once

#include <cstdint>

namespace syncbn {

struct Grid {
  int64_t blocks;
  int threads;  // a block
};

}  // namespace syncbn

#ifdef SYNCBN_EMULATOR

#include "emulator.h"

#else

#include <cuda_runtime.h>

// Raw bytes, since shared variables cannot have constructors.
#define SYNCBN_SHARED(type, name, length)                                       \
  __shared__ __align__(16) unsigned char name##_bytes[sizeof(type) * (length)]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)

namespace syncbn {

using Stream = cudaStream_t;

// One store each: an assignment may be split up, and __stwb has an ordering of its own.
__device__ __forceinline__ void store_word(uint4* target, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(target), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

__device__ __forceinline__ void store_word(uint2* target, uint2 word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(target), "r"(word.x), "r"(word.y)
               : "memory");
}

template <typename Word>
__device__ __forceinline__ void store_word(Word* target, Word word) {
  *target = word;
}

void check_launch();  // throws what the launch before it reported (batch_norm.cu)

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), Grid grid, Stream stream, const Args&... args) {
  const unsigned blocks = static_cast<unsigned>(grid.blocks);
  // clang-format off
  kernel<<<blocks, grid.threads, 0, stream>>>(args...);
  // clang-format on
  check_launch();
}

}  // namespace syncbn

#endif
