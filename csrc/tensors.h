// What the operators ask of tensors, by the shortest way: a call on a small tensor is mostly this.
// torch::stable::empty_like and new_empty look their operator up by name and box six arguments,
// each time; Tensor::scalar_type asks torch for the code of one type after the other.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>

namespace syncbn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace detail {

// The types that the kernels know, and what torch's C interface calls them.
struct KnownType {
  ScalarType dtype;
  int32_t code;
};

inline const KnownType (&known_types())[5] {
  static const KnownType types[] = {
      {ScalarType::Float, aoti_torch_dtype_float32()},
      {ScalarType::Double, aoti_torch_dtype_float64()},
      {ScalarType::BFloat16, aoti_torch_dtype_bfloat16()},
      {ScalarType::Half, aoti_torch_dtype_float16()},
      {ScalarType::Long, aoti_torch_dtype_int64()},
  };
  return types;
}

// Types by the codes of torch's C interface.
inline Tensor empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype, int32_t device_type, int32_t device_index) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, device_index, &handle));
  Tensor tensor(handle);
#ifdef SYNCBN_POISON  // in the tests' builds for the CPU: what no kernel writes is NaN
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
  if (bytes > 0) {
    std::memset(tensor.mutable_data_ptr(), 0xff, bytes);
  }
#endif
  return tensor;
}

}  // namespace detail

inline ScalarType dtype_of(const Tensor& tensor) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  for (const auto& known : detail::known_types()) {
    if (known.code == code) {
      return known.dtype;
    }
  }
  return tensor.scalar_type();
}

inline int32_t device_type_of(const Tensor& tensor) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
  return device_type;
}

// Of the shape, strides, type and device of `input`, which is dense.
inline Tensor allocate_like(const Tensor& input) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(input.get(), &dtype));
  return detail::empty_strided(input.dim(), input.sizes().data(), input.strides().data(), dtype,
                               device_type_of(input), input.get_device_index());
}

// `dtype`: one of the known types.
inline Tensor allocate_vector(int64_t length, ScalarType dtype, const Tensor& beside) {
  const int64_t stride = 1;
  const detail::KnownType* known = detail::known_types();
  while (known->dtype != dtype) {
    ++known;
  }
  return detail::empty_strided(1, &length, &stride, known->code, device_type_of(beside),
                               beside.get_device_index());
}

}  // namespace syncbn
