// The namespace that the operators are registered in. The tests' emulator offers them in one of its
// own, beside the shipped ones.
#pragma once

#ifndef SYNCBN_NAMESPACE
#define SYNCBN_NAMESPACE syncbn_cuda
#endif
