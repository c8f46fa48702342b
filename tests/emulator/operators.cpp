// The CUDA operators as they are, host side included, for tensors of the CPU and in a namespace of
// their own.
#define SYNCBN_NAMESPACE syncbn_emulated

#include "../../csrc/ops.cpp"
#include "batch_norm.cu"
