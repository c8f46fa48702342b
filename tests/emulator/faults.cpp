// Small kernels that are each wrong in one way, so that the tests see the emulator find it.
#include <pybind11/pybind11.h>

#include <limits>
#include <map>
#include <string>

#include "reduce.cuh"

namespace py = pybind11;
using namespace syncbn;

namespace {

// What a kernel works on; enough for every one of them.
struct Memory {
  alignas(16) double values[64];
  alignas(16) Sums partials[8];
  unsigned counter = 0;
  double result = 0;
};

void barrier_for_half(Memory*) {
  if (threadIdx.x < 16) {
    __syncthreads();
  }
}

void barriers_in_two_branches(Memory*) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void barrier_in_a_loop_of_unequal_length(Memory*) {
  for (unsigned i = 0; i <= threadIdx.x / 32; ++i) {
    __syncthreads();
  }
}

void shuffle_for_half(Memory*) {
  if (threadIdx.x < 16) {
    __shfl_xor_sync(0xffffffffu, 1.0, 1);
  }
}

void shuffle_outside_its_mask(Memory*) { __shfl_xor_sync(0x0000ffffu, 1.0, 16); }

void misaligned_load(Memory* memory) {
  __ldg(reinterpret_cast<const double2*>(memory->values + 1));
}

void misaligned_store(Memory* memory) {
  store_word(reinterpret_cast<uint4*>(memory->values + 1), uint4{});
}

void too_much_shared_memory(Memory*) { SYNCBN_SHARED(double, shared, 8192); }

void partials_stored_plainly(Memory* memory) {
  memory->partials[blockIdx.x] = {1, 0};
  load_partial(memory->partials + blockIdx.x);
}

void partials_loaded_as_constants(Memory* memory) {
  store_partial(memory->partials + blockIdx.x, {1, 0});
  __ldg(reinterpret_cast<double2*>(memory->partials + blockIdx.x));
}

// The last thread reads what the first has written to shared memory.
template <bool kBarrier>
void through_shared_memory(Memory* memory) {
  SYNCBN_SHARED(double, shared, 1);
  if (threadIdx.x == 0) {
    *shared = 1;
  }
  if (kBarrier) {
    __syncthreads();
  }
  if (threadIdx.x == blockDim.x - 1) {
    memory->result = *shared;
  }
}

// The last block to arrive adds up what all have written; cf. last_to_arrive.
template <bool kRelease, bool kAcquire>
void through_partials(Memory* memory) {
  if (threadIdx.x != 0) {
    return;
  }
  store_partial(memory->partials + blockIdx.x, {1, 0});
  if (kRelease) {
    __threadfence();
  }
  if (atomicInc(&memory->counter, gridDim.x - 1) == gridDim.x - 1) {
    if (kAcquire) {
      __threadfence();
    }
    double sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) {
      sum += load_partial(memory->partials + b).first;
    }
    memory->result = sum / gridDim.x;
  }
}

const std::map<std::string, void (*)(Memory*)> kernels = {
    {"barrier for half", barrier_for_half},
    {"barriers in two branches", barriers_in_two_branches},
    {"barrier in a loop of unequal length", barrier_in_a_loop_of_unequal_length},
    {"shuffle for half", shuffle_for_half},
    {"shuffle outside its mask", shuffle_outside_its_mask},
    {"misaligned load", misaligned_load},
    {"misaligned store", misaligned_store},
    {"too much shared memory", too_much_shared_memory},
    {"partials stored plainly", partials_stored_plainly},
    {"partials loaded as constants", partials_loaded_as_constants},
    {"shared memory", through_shared_memory<true>},
    {"shared memory, no barrier", through_shared_memory<false>},
    {"partials", through_partials<true, true>},
    {"partials, no fence before the counter", through_partials<false, true>},
    {"partials, no fence after the counter", through_partials<true, false>},
};

// 1 where the kernel's threads have seen what they should.
double run_kernel(const std::string& name, uint64_t seed, int threads) {
  Memory memory;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (Sums& partial : memory.partials) {
    partial = {nan, nan};
  }
  emulator::set_options({seed, 4});
  launch(kernels.at(name), Grid{8, threads}, nullptr, &memory);
  return memory.result;
}

}  // namespace

void bind_faults(py::module_& m) {
  m.def("run_kernel", &run_kernel, py::arg("name"), py::arg("seed") = 0, py::arg("threads") = 64);
}
