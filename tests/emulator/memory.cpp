// Memory as threads see it: partial sums between blocks, and shared memory.
#include "platform.h"

#include "machine.h"

namespace emulator {

void commit(std::vector<Store>& stores) {
  std::shuffle(stores.begin(), stores.end(), machine.random);
  for (const Store& store : stores) {
    Replaced replaced{++machine.now, {}};
    std::memcpy(replaced.value, store.target, store.size);
    machine.history[store.target].push_back(replaced);
    std::memcpy(store.target, store.value, store.size);
  }
  stores.clear();
}

void fence() {
  commit(self().stores);
  self().seen = machine.now;
  pause();
}

void store_later(void* target, const void* value, size_t size) {
  machine.history.try_emplace(target);
  Store store{target, size, {}};
  std::memcpy(store.value, value, size);
  self().stores.push_back(store);
}

bool is_partial(const void* source) { return machine.history.count(source) != 0; }

void load_seen(const void* source, void* value, size_t size) {
  const void* found = source;
  for (const Replaced& replaced : machine.history[source]) {
    if (replaced.time > self().seen) {
      found = replaced.value;
      break;
    }
  }
  for (const Store& store : self().stores) {
    found = store.target == source ? store.value : found;
  }
  std::memcpy(value, found, size);
}

void* shared_memory(const void* key, size_t size) {
  Block& block = *self().home;
  const auto [entry, is_new] = block.shared.try_emplace(key);
  if (is_new) {
    block.shared_size += size;
    if (block.shared_size > kSharedLimit) {
      fail("more than 48 KB of shared memory", Place::current());
    }
    entry->second.assign(size, static_cast<char>(0xff));
  }
  return entry->second.data();
}

}  // namespace emulator
