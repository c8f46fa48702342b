// A stack of its own and the switch to it and back. Machine code on x86-64, as swapcontext makes
// two system calls a switch; swapcontext elsewhere. AddressSanitizer is told of each switch.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

#if defined(__x86_64__)

extern "C" void emulator_switch(void** from, void* to);

struct Context {
  void* stack_pointer = nullptr;

  void start(char* stack, size_t size, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stack + size);  // 16-byte aligned
    *--top = nullptr;                                    // where a return address would be
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) {
      *--top = nullptr;
    }
    stack_pointer = top;
  }

  static void exchange(Context& from, Context& to) {
    emulator_switch(&from.stack_pointer, to.stack_pointer);
  }
};

#else

struct Context {
  ucontext_t context;

  void start(char* stack, size_t size, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = size;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }

  static void exchange(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
};

#endif

class Fiber {
 public:
  Fiber() {
    void* memory =
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    stack_ = static_cast<char*>(memory);
  }
  ~Fiber() { munmap(stack_, kStack); }
  Fiber(const Fiber&) = delete;

  void start(void (*entry)()) { context_.start(stack_, kStack, entry); }

  // From the scheduler into the fiber, until it leaves.
  void enter() {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_, kStack);
    Context::exchange(scheduler_, context_);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    Context::exchange(scheduler_, context_);
#endif
  }

  // From the fiber back; `last`: not to be entered again before another start.
  void leave(bool last) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_, outer_, outer_size_);
    Context::exchange(context_, scheduler_);
    arrive();
#else
    static_cast<void>(last);
    Context::exchange(context_, scheduler_);
#endif
  }

  // The first thing on a fiber.
  void arrive() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_, &outer_, &outer_size_);
    fake_ = nullptr;
#endif
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kStack = 256 * 1024;
  void* fake_ = nullptr;
  static inline const void* outer_ = nullptr;
  static inline size_t outer_size_ = 0;
#else
  static constexpr size_t kStack = 64 * 1024;
#endif
  static inline Context scheduler_;
  Context context_;
  char* stack_;
};

}  // namespace emulator
