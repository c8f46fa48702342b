// Kernels with the faults that the tests of the compiled kernels look for, and two without.
#include "pack.cuh"

namespace syncbn {

template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void sound_elemt_kernel(const scalar_t* __restrict__ input,
                                   scalar_t* __restrict__ output, int64_t packs, bool streaming) {
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    const Span<kChannelsLast, kVec> at = {i * kVec, at.bits(0, kVec)};
    Pack<scalar_t, kVec> x;
    x.load(input + at.offset);
    for (int e = 0; e < kVec; ++e) {
      x.values[e] += 1;
    }
    x.store(output, at, streaming);
  }
}

// Loads and stores value by value.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void narrow_elemt_kernel(const scalar_t* __restrict__ input,
                                    scalar_t* __restrict__ output, int64_t packs, bool streaming) {
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs * kVec; i += blockDim.x) {
    Pack<scalar_t, 1> x;
    x.load(input + i);
    x.values[0] += 1;
    x.store(output, Span<kChannelsLast, 1>{i, 1}, streaming);
  }
}

// Loads packs but stores value by value.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void split_elemt_kernel(const scalar_t* __restrict__ input,
                                   scalar_t* __restrict__ output, int64_t packs, bool streaming) {
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
    for (int e = 0; e < kVec; ++e) {
      const Pack<scalar_t, 1> value = {x.values[e] + 1};
      value.store(output, Span<kChannelsLast, 1>{i * kVec + e, 1}, streaming);
    }
  }
}

// Loads a pack as such and another one value by value, more than a pack has on its own.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void mixed_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                             int64_t packs, bool) {
  scalar_t sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
    for (int e = 0; e < kVec + 2; ++e) {
      Pack<scalar_t, 1> y;
      y.load(input + (i + e * packs) * kVec + 1);
      sum += x.values[e % kVec] * y.values[0];
    }
  }
  output[threadIdx.x] = sum;
}

// Sums in float64.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void float64_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                               int64_t packs, bool) {
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input, Span<kChannelsLast, kVec>{i * kVec, (1u << kVec) - 1});
    for (int e = 0; e < kVec; ++e) {
      sum += x.values[e];
    }
  }
  output[threadIdx.x] = static_cast<scalar_t>(sum);
}

// Loads a pack only once the one before is dealt with.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void waiting_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                               int64_t packs, bool) {
  scalar_t sum = 0;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
    for (int e = 0; e < kVec; ++e) {
      sum += x.values[e];
    }
  }
  output[threadIdx.x] = sum;
}

// Divides each value.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void dividing_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                                int64_t packs, bool) {
  scalar_t sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
    for (int e = 0; e < kVec; ++e) {
      sum += 1 / x.values[e];
    }
  }
  output[threadIdx.x] = sum;
}

// Has more sums than registers.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void __launch_bounds__(1024)
    spilling_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                    int64_t packs, bool) {
  constexpr int kSums = 96;
  scalar_t sum[kSums] = {};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sum[s] += x.values[s % kVec] * sum[(s + 1) % kSums] + s;
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    output[s * blockDim.x + threadIdx.x] = sum[s];
  }
}

// Looks up in an array of its own by an index that is known at run time only.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void indexing_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                                int64_t packs, bool) {
  scalar_t sum[16] = {};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
    Pack<scalar_t, kVec> x;
    x.load(input + i * kVec);
    for (int e = 0; e < kVec; ++e) {
      sum[static_cast<int>(x.values[e]) & 15] += 1;
    }
  }
  output[threadIdx.x] = sum[packs & 15];
}

// Has no loop.
template <typename scalar_t, bool kChannelsLast, int kVec>
__global__ void loopless_kernel(const scalar_t* __restrict__ input, scalar_t* __restrict__ output,
                                int64_t, bool) {
  Pack<scalar_t, kVec> x;
  x.load(input + threadIdx.x * kVec);
  output[threadIdx.x] = x.values[0];
}

template <typename scalar_t>
using Planted = void (*)(const scalar_t*, scalar_t*, int64_t, bool);

// So that there are instances.
Planted<float> of_float[] = {
    sound_elemt_kernel<float, true, 4>,  narrow_elemt_kernel<float, true, 4>,
    split_elemt_kernel<float, false, 4>, mixed_kernel<float, false, 4>,
    float64_kernel<float, true, 4>,      spilling_kernel<float, true, 4>,
    indexing_kernel<float, true, 4>,     loopless_kernel<float, true, 4>,
    waiting_kernel<float, true, 4>,      dividing_kernel<float, true, 4>,
};
Planted<double> of_double[] = {sound_elemt_kernel<double, true, 2>};

}  // namespace syncbn
