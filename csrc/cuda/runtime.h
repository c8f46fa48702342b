// What the host side asks of the CUDA runtime and of torch's devices and streams; batch_norm.cu
// calls nothing else of either. The tests' emulator has the same functions for CPU tensors.
#pragma once

#ifdef SYNCBN_EMULATOR

#include "emulated_runtime.h"

#else

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include <map>
#include <mutex>

#include "../tensors.h"
#include "plan.h"
#include "platform.h"

#define SYNCBN_DISPATCH_KEY CUDA

namespace syncbn {

using torch::stable::accelerator::DeviceGuard;

inline void throw_launch_error() { STD_CUDA_KERNEL_LAUNCH_CHECK(); }

inline Stream current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<Stream>(stream);
}

inline bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

inline void zero(void* data, int64_t bytes, Stream stream) {
  STD_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream));
}

inline torch::stable::Tensor allocate(int64_t bytes, int device_index) {
  const int64_t stride = 1;
  return detail::empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(),
                               aoti_torch_device_type_cuda(), device_index);
}

// Of the current device and kept to the end of the process. Elsewhere another thread may be
// capturing a graph, which forbids cudaMalloc to all threads that have not opted out.
inline void* allocate_for_good(int64_t bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  STD_CUDA_CHECK(error);
  return data;
}

inline Card card(int device_index) {
  static std::mutex mutex;
  static std::map<int, Card> cards;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = cards.try_emplace(device_index);
  if (is_new) {
    int sms = 0, l2_bytes = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_index));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device_index));
    entry->second = {sms, l2_bytes};
  }
  return entry->second;
}

}  // namespace syncbn

#endif
