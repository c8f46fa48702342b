// The scheduler: blocks, threads, barriers and shuffles.
#include "platform.h"

#include <sstream>
#include <stdexcept>
#include <utility>

#include "machine.h"

namespace emulator {

Thread* current = nullptr;

Machine machine;

FiberThread& self() { return *static_cast<FiberThread*>(current); }

namespace {

bool below(const FiberThread* a, const FiberThread* b) { return a->rank < b->rank; }

// Half of the runs draw the next thread afresh each time. The others keep the ranks that threads
// start with, one in sixteen behind all the rest: a thread that is late for as long as the barriers
// allow shows what an even draw almost never does.
void draw_rank(FiberThread& thread) {
  const uint64_t rank = machine.random() >> 2;
  thread.rank = machine.random() % 16 == 0 ? rank : rank | uint64_t{1} << 63;
}

void make_ready(FiberThread& thread) {
  thread.state = State::kReady;
  if (!machine.steady) {
    draw_rank(thread);
  }
  machine.ready.push_back(&thread);
  std::push_heap(machine.ready.begin(), machine.ready.end(), below);
}

std::string describe(const Place& place) {
  std::ostringstream text;
  text << place.file_name() << ":" << place.line();
  return text.str();
}

void leave(State state) {
  FiberThread& thread = self();
  thread.state = state;
  thread.fiber.leave(state == State::kDone);
}

// Waits until `size` threads of the gathering are here.
void gather(Gathering& gathering, size_t size, const Place& place, const char* what) {
  if (gathering.waiting.empty()) {
    gathering.place = place;
  } else if (gathering.place.line() != place.line() ||
             std::strcmp(gathering.place.file_name(), place.file_name()) != 0) {
    fail((std::string("divergent ") + what + ", others wait at " + describe(gathering.place))
             .c_str(),
         place);
  }
  gathering.waiting.push_back(&self());
  if (gathering.waiting.size() < size) {
    leave(State::kWaiting);
    return;
  }
  gathering.waiting.pop_back();
  for (FiberThread* thread : gathering.waiting) {
    make_ready(*thread);
  }
  gathering.waiting.clear();
  pause();
}

void entry() {
  self().fiber.arrive();
  try {
    self().home->launch->body();
  } catch (const std::exception& error) {
    machine.error = error.what();
  }
  leave(State::kDone);
}

void start_block(Block& block, const Launch& launch, unsigned index) {
  const int threads = launch.threads;
  block.launch = &launch;
  block.size = threads;
  block.done = 0;
  block.arriving = machine.begun;
  block.barrier = {};
  block.warps.assign(threads / kWarp, {});
  block.shared.clear();
  block.shared_size = 0;
  while (block.threads.size() < static_cast<size_t>(threads)) {
    block.threads.push_back(std::make_unique<FiberThread>());
  }
  for (int t = 0; t < threads; ++t) {
    FiberThread& thread = *block.threads[t];
    static_cast<Thread&>(thread) = {{static_cast<unsigned>(t), 0, 0},
                                    {index, 0, 0},
                                    {static_cast<unsigned>(threads)},
                                    {static_cast<unsigned>(launch.blocks)}};
    thread.home = &block;
    thread.warp = &block.warps[t / kWarp];
    thread.stores.clear();
    thread.seen = block.arriving;
    thread.fiber.start(entry);
    draw_rank(thread);
    make_ready(thread);
  }
}

// Lets the next thread run on. True if its block has ended with it.
bool step() {
  std::pop_heap(machine.ready.begin(), machine.ready.end(), below);
  FiberThread& thread = *machine.ready.back();
  machine.ready.pop_back();
  current = &thread;
  thread.fiber.enter();
  if (thread.state == State::kReady) {
    make_ready(thread);
  }
  if (thread.state != State::kDone) {
    return false;
  }
  machine.stores.insert(machine.stores.end(), thread.stores.begin(), thread.stores.end());
  return ++thread.home->done == thread.home->size;
}

std::string stuck(const std::vector<Block*>& alive) {
  std::ostringstream text;
  text << "deadlock:";
  for (const Block* block : alive) {
    const auto add = [&](const Gathering& gathering, const char* what) {
      if (!gathering.waiting.empty()) {
        const FiberThread& thread = *gathering.waiting.front();
        text << " block " << thread.block.x << ": " << gathering.waiting.size() << " threads at a "
             << what << ", " << describe(gathering.place) << ";";
      }
    };
    add(block->barrier, "barrier");
    for (const Warp& warp : block->warps) {
      add(warp.gathering, "shuffle");
    }
    text << " " << block->done << " of " << block->size << " threads have ended;";
  }
  return text.str();
}

}  // namespace

void set_options(const Options& options) {
  machine.options = options;
  machine.random.seed(options.seed);
}

void run(const std::vector<Launch>& launches) {
  std::vector<std::pair<const Launch*, unsigned>> pending;
  for (const Launch& launch : launches) {
    if (launch.blocks < 1 || launch.blocks > INT32_MAX || launch.threads < kWarp ||
        launch.threads > 1024 || launch.threads % kWarp != 0) {
      throw std::runtime_error("emulator: bad launch: " + std::to_string(launch.blocks) +
                               " blocks of " + std::to_string(launch.threads) + " threads");
    }
    for (int64_t b = 0; b < launch.blocks; ++b) {
      pending.emplace_back(&launch, static_cast<unsigned>(b));
    }
  }
  machine.ready.clear();
  machine.stores.clear();
  machine.history.clear();
  machine.begun = machine.now;
  machine.error.clear();
  machine.steady = machine.random() % 2 == 0;
  std::shuffle(pending.begin(), pending.end(), machine.random);
  std::vector<Block*> alive, idle;
  for (int b = 0; b < machine.options.blocks_alive; ++b) {
    if (machine.pool.size() <= static_cast<size_t>(b)) {
      machine.pool.push_back(std::make_unique<Block>());
    }
    idle.push_back(machine.pool[b].get());
  }
  while (!pending.empty() || !alive.empty()) {
    while (!pending.empty() && !idle.empty()) {
      start_block(*idle.back(), *pending.back().first, pending.back().second);
      alive.push_back(idle.back());
      idle.pop_back();
      pending.pop_back();
    }
    if (machine.ready.empty()) {
      machine.error = stuck(alive);
    } else if (step()) {
      Block* const block = self().home;
      alive.erase(std::find(alive.begin(), alive.end(), block));
      idle.push_back(block);
    }
    if (!machine.error.empty()) {
      throw std::runtime_error("emulator: " + machine.error);
    }
  }
  commit(machine.stores);
}

void fail(const char* what, const Place& place) {
  std::ostringstream text;
  text << what << " at " << describe(place) << " (" << place.function_name() << "), block "
       << current->block.x << ", thread " << current->thread.x;
  throw std::runtime_error(text.str());
}

void pause() { leave(State::kReady); }

void barrier(const Place& place) {
  Block& block = *self().home;
  block.arriving = std::max(block.arriving, self().seen);
  if (block.barrier.waiting.size() + 1 == static_cast<size_t>(block.size)) {
    block.seen = block.arriving;
  }
  gather(block.barrier, block.size, place, "barrier");
  self().seen = block.seen;
}

void exchange(unsigned mask, int partner, void* value, size_t size, const Place& place) {
  Warp& warp = *self().warp;
  const int lane = static_cast<int>(current->thread.x % kWarp);
  if (partner >= kWarp || !(mask >> lane & 1) || !(mask >> partner & 1)) {
    fail("a shuffle from or to a lane outside its mask", place);
  }
  if (!warp.gathering.waiting.empty() && warp.mask != mask) {
    fail("a shuffle with unequal masks", place);
  }
  warp.mask = mask;
  const int turn = warp.turn;
  std::memcpy(warp.values[turn][lane], value, size);
  const size_t lanes = __builtin_popcount(mask);
  if (warp.gathering.waiting.size() + 1 == lanes) {
    warp.turn = 1 - turn;
  }
  gather(warp.gathering, lanes, place, "shuffle");
  std::memcpy(value, warp.values[turn][partner], size);
}

}  // namespace emulator
