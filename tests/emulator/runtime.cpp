#include "runtime.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "emulator.h"

namespace py = pybind11;

namespace {

using emulator::Launch;
using syncbn::Stream;
using torch::stable::Tensor;

struct Memset {
  void* data;
  int64_t bytes;
};

struct Graph {
  std::vector<std::variant<Launch, Memset>> steps;
  std::vector<Tensor> memory;  // of its own, as a captured launch bakes in addresses
};

struct Runtime {
  syncbn::Card card{4, 1 << 20};
  Stream stream = nullptr;  // the current one
  std::vector<Graph> graphs;
  bool capturing = false;           // into the last graph
  std::vector<std::string> events;  // since they were last asked for
  std::vector<std::vector<char>> for_good;
};

Runtime runtime;

void execute(const Memset& memset) { std::memset(memset.data, 0, memset.bytes); }
void execute(const Launch& launch) { emulator::run({launch}); }

template <typename Step>
void do_or_capture(const Step& step) {
  if (runtime.capturing) {
    runtime.graphs.back().steps.push_back(step);
  } else {
    execute(step);
  }
}

// Step by step, the kernels of one step at the same time.
void replay(const std::vector<size_t>& graphs) {
  for (size_t i = 0; i < runtime.graphs.at(graphs.at(0)).steps.size(); ++i) {
    std::vector<Launch> launches;
    for (const size_t graph : graphs) {
      const auto& step = runtime.graphs.at(graph).steps.at(i);
      if (const auto* memset = std::get_if<Memset>(&step)) {
        execute(*memset);
      } else {
        launches.push_back(std::get<Launch>(step));
      }
    }
    if (!launches.empty()) {
      emulator::run(launches);
    }
  }
}

}  // namespace

void emulator::enqueue(const Launch& launch, void* stream) {
  if (stream != runtime.stream) {
    throw std::runtime_error("emulator: a launch on another stream than the current one");
  }
  runtime.events.push_back("launch");
  do_or_capture(launch);
}

namespace syncbn {

Stream current_stream(int /* device_index */) { return runtime.stream; }

bool is_capturing(Stream /* stream */) { return runtime.capturing; }

void zero(void* data, int64_t bytes, Stream /* stream */) {
  runtime.events.push_back("zero");
  do_or_capture(Memset{data, bytes});
}

Tensor allocate(int64_t bytes, int /* device_index */) {
  Tensor memory = torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                       torch::headeronly::DeviceType::CPU);
  std::memset(memory.mutable_data_ptr(), 0xff, bytes);
  if (runtime.capturing) {
    runtime.graphs.back().memory.push_back(memory);
  }
  return memory;
}

void* allocate_for_good(int64_t bytes) {
  runtime.events.push_back("allocate for good");
  return runtime.for_good.emplace_back(bytes, static_cast<char>(0xff)).data();
}

Card card(int /* device_index */) { return runtime.card; }

void throw_launch_error() {}

}  // namespace syncbn

void bind_runtime(py::module_& m) {
  m.def("set_card", [](int64_t sms, int64_t l2_bytes) { runtime.card = {sms, l2_bytes}; });
  m.def("set_stream", [](uintptr_t stream) { runtime.stream = reinterpret_cast<Stream>(stream); });
  m.def("events", [] { return std::exchange(runtime.events, {}); });
  m.def("begin_capture", [] {
    runtime.graphs.emplace_back();
    runtime.capturing = true;
  });
  m.def("end_capture", [] {
    runtime.capturing = false;
    return runtime.graphs.size() - 1;
  });
  m.def("replay", &replay);
}
