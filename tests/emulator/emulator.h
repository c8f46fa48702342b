// CUDA's vocabulary for the host compiler, so that the kernels of csrc/cuda run without a GPU: as
// many as csrc/cuda needs, no more. Included by platform.h where SYNCBN_EMULATOR is defined.
//
// Each CUDA thread is a fiber; which one runs next is drawn from a seeded generator wherever a
// fiber waits or could be overtaken. What a GPU would leave unnoticed is an error here: a barrier
// or shuffle that not all threads reach, at one place; a misaligned vector access; shared memory
// beyond 48 KB. Shared memory starts as NaN.
//
// Fibers take turns, so each sees what all others have stored. Only partial sums, which travel
// between blocks, are as loosely ordered as a GPU may have them: a store by __stcg stays invisible
// until its thread's next fence, and then appears in any order with that thread's others; a load by
// __ldcg sees memory as it was at the last fence that a thread of its block has passed and, through
// barriers, told it of. CUDA is a little less strict: one thread's fence also serves those that it
// has met at a barrier before. Stores to shared memory are at once visible and never torn, so what
// only a race between two of them would spoil goes unnoticed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <vector>

namespace emulator {

using Place = std::source_location;

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Thread {
  Dim3 thread, block, block_size, grid_size;
};

extern Thread* current;

struct Options {
  uint64_t seed = 0;
  int blocks_alive = 4;  // how many blocks take turns
};

// A kernel with its arguments, to be run once for each thread.
struct Launch {
  int64_t blocks;
  int threads;
  std::function<void()> body;
};

// Runs kernels at the same time, as on two streams; throws std::runtime_error on what a GPU would
// do wrong.
void run(const std::vector<Launch>& launches);

// Hands a kernel to a stream (runtime.cpp): it runs at once, or each time its graph is replayed.
void enqueue(const Launch& launch, void* stream);

void set_options(const Options& options);  // of the runs to come

void barrier(const Place& place);
void fence();
void pause();  // others may run here
void exchange(unsigned mask, int partner, void* value, size_t size, const Place& place);
void store_later(void* target, const void* value, size_t size);
void load_seen(const void* source, void* value, size_t size);
bool is_partial(const void* source);  // whether __stcg has stored to it
void* shared_memory(const void* key, size_t size);
void fail(const char* what, const Place& place);

template <typename T>
T* aligned(T* pointer, const Place& place) {
  if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T) != 0) {
    fail("misaligned access", place);
  }
  return pointer;
}

}  // namespace emulator

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::emulator::current->thread)
#define blockIdx (::emulator::current->block)
#define blockDim (::emulator::current->block_size)
#define gridDim (::emulator::current->grid_size)

// The address of the static tells one shared array from another.
#define SYNCBN_SHARED(type, name, length) \
  static const char name##_key = 0;       \
  type* const name =                      \
      static_cast<type*>(::emulator::shared_memory(&name##_key, sizeof(type) * (length)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) double2 {
  double x, y;
};

inline double2 make_double2(double x, double y) { return {x, y}; }

template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }

inline void __syncthreads(emulator::Place place = emulator::Place::current()) {
  emulator::barrier(place);
}

inline int __syncthreads_or(int predicate, emulator::Place place = emulator::Place::current()) {
  SYNCBN_SHARED(int, any, 1);
  if (threadIdx.x == 0) {
    *any = 0;
  }
  emulator::barrier(place);
  if (predicate) {
    *any = 1;
  }
  emulator::barrier(place);
  const int result = *any;
  emulator::barrier(place);  // or thread 0 could begin the next vote
  return result;
}

inline void __threadfence() { emulator::fence(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset,
                  emulator::Place place = emulator::Place::current()) {
  emulator::exchange(mask, static_cast<int>(threadIdx.x % 32) ^ offset, &value, sizeof(T), place);
  return value;
}

inline unsigned atomicInc(unsigned* counter, unsigned limit) {
  emulator::pause();
  const unsigned old = *counter;
  *counter = old >= limit ? 0 : old + 1;
  emulator::pause();
  return old;
}

template <typename T>
T __ldg(const T* source, emulator::Place place = emulator::Place::current()) {
  if (emulator::is_partial(source)) {
    emulator::fail("__ldg of what the kernel itself stores", place);
  }
  return *emulator::aligned(source, place);
}

template <typename T>
T __ldcg(const T* source, emulator::Place place = emulator::Place::current()) {
  if (!emulator::is_partial(source)) {
    emulator::fail("__ldcg of what no __stcg of this kernel has stored", place);
  }
  T value;
  emulator::load_seen(emulator::aligned(source, place), &value, sizeof(T));
  return value;
}

template <typename T>
void __stcs(T* target, T value, emulator::Place place = emulator::Place::current()) {
  *emulator::aligned(target, place) = value;
}

template <typename T>
void __stcg(T* target, T value, emulator::Place place = emulator::Place::current()) {
  emulator::store_later(emulator::aligned(target, place), &value, sizeof(T));
}

namespace syncbn {

using Stream = void*;

template <typename Word>
void store_word(Word* target, const Word& word,
                emulator::Place place = emulator::Place::current()) {
  *emulator::aligned(target, place) = word;
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), Grid grid, Stream stream, const Args&... args) {
  emulator::enqueue({grid.blocks, grid.threads, [=] { kernel(args...); }}, stream);
}

}  // namespace syncbn
