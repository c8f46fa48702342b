// What the scheduler keeps of a launch: threads, warps, blocks, and stores that are held back.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator.h"
#include "fiber.h"

namespace emulator {

constexpr int kWarp = 32;
constexpr size_t kSharedLimit = 48 * 1024;

struct Block;
struct Warp;

struct Store {
  void* target;
  size_t size;
  char value[16];
};

enum class State { kReady, kWaiting, kDone };

struct FiberThread : Thread {
  Fiber fiber;
  State state = State::kDone;
  uint64_t rank = 0;  // the ready thread of the highest rank is next
  Block* home = nullptr;
  Warp* warp = nullptr;
  std::vector<Store> stores;  // not yet visible to others
  uint64_t seen = 0;          // loads of partial sums see memory as of this time
};

// Threads that wait for each other at one place.
struct Gathering {
  std::vector<FiberThread*> waiting;
  Place place;
};

struct Warp {
  Gathering gathering;
  unsigned mask = 0;
  int turn = 0;  // values of one exchange are read while the next one's arrive
  char values[2][kWarp][16];
};

struct Block {
  const Launch* launch = nullptr;
  std::vector<std::unique_ptr<FiberThread>> threads;
  std::vector<Warp> warps;
  Gathering barrier;
  int size = 0, done = 0;
  std::map<const void*, std::vector<char>> shared;  // of just the size asked for
  size_t shared_size = 0;
  uint64_t arriving = 0, seen = 0;  // the latest time that a thread has seen: till now, at the
                                    // last barrier
};

// What lay at an address until a store replaced it.
struct Replaced {
  uint64_t time;
  char value[16];
};

struct Machine {
  Options options;
  std::mt19937_64 random;
  bool steady = false;              // threads keep their ranks
  std::vector<FiberThread*> ready;  // a heap
  std::vector<Store> stores;        // of threads that ended without a fence
  std::unordered_map<const void*, std::vector<Replaced>> history;  // of what __stcg has stored to
  uint64_t begun = 0, now = 0;  // stores that have become visible: before this run, till now
  std::vector<std::unique_ptr<Block>> pool;
  std::string error;
};

extern Machine machine;

FiberThread& self();  // the thread that is running

void commit(std::vector<Store>& stores);  // makes them visible, in any order

}  // namespace emulator
