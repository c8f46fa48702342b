// The four launchers on NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "batch_norm.h"

namespace py = pybind11;
using namespace syncbn;

namespace {

// bfloat16 travels as uint16.
ScalarType scalar_type(const py::array& array) {
  switch (array.dtype().char_()) {
    case 'f':
      return ScalarType::Float;
    case 'd':
      return ScalarType::Double;
    case 'e':
      return ScalarType::Half;
    case 'H':
      return ScalarType::BFloat16;
    default:
      throw py::type_error("float32, float64, float16 or uint16 for bfloat16");
  }
}

void* data(const py::array& array) {
  if (!(array.flags() & py::array::c_style)) {
    throw py::value_error("not contiguous");
  }
  return const_cast<void*>(array.data());
}

double* doubles(const py::array& array) {
  if (scalar_type(array) != ScalarType::Double) {
    throw py::type_error("float64");
  }
  return static_cast<double*>(data(array));
}

ChannelVector channels(const py::object& object) {
  if (object.is_none()) {
    return {};
  }
  const auto array = py::cast<py::array>(object);
  return {data(array), scalar_type(array)};
}

// Forbids or allows all but elements begin to end of an array, in builds with AddressSanitizer.
void guard(const py::array& array, int64_t begin, int64_t end, bool forbid) {
#if defined(__SANITIZE_ADDRESS__)
  const auto* first = static_cast<const char*>(array.data());
  const int64_t size = array.itemsize(), edges[2][2] = {{0, begin}, {end, array.size()}};
  for (const auto& [from, to] : edges) {
    (forbid ? __asan_poison_memory_region : __asan_unpoison_memory_region)(first + from * size,
                                                                           (to - from) * size);
  }
#else
  static_cast<void>(array), static_cast<void>(begin), static_cast<void>(end);
  static_cast<void>(forbid);
#endif
}

// The layout of all activations, the card to plan for, the order of the emulator's fibers.
struct Emulation {
  Layout layout;
  Card card;
  emulator::Options options;
  int64_t row_stride;  // values from one row to the next; 0: the rows are dense

  Plan plan(const std::vector<py::array>& activations, Step step) const {
    const py::array& first = activations.at(0);
    Plan plan = dense_plan(activations, step);
    if (row_stride != 0) {
      WalkPlan& walk = plan.walk;
      walk.numel += (walk.rows - 1) * (row_stride - walk.row_stride);
      walk.step_rows = walk.step_rows / walk.row_stride * row_stride;
      walk.row_stride = row_stride;
    }
    for (const py::array& array : activations) {
      if (array.size() != plan.walk.numel || scalar_type(array) != scalar_type(first)) {
        throw py::value_error("not of the layout's size and one type");
      }
    }
    return plan;
  }

  Plan dense_plan(const std::vector<py::array>& activations, Step step) const {
    const int64_t size = activations.at(0).itemsize();
    const auto pointer = [&](size_t i) { return data(activations.at(i)); };
    switch (activations.size()) {
      case 1:
        return make_plan(layout, size, {pointer(0)}, card, step);
      case 2:
        return make_plan(layout, size, {pointer(0), pointer(1)}, card, step);
      default:
        return make_plan(layout, size, {pointer(0), pointer(1), pointer(2)}, card, step);
    }
  }

  void start() const { emulator::set_options(options); }

  template <typename Launch>
  void with_workspace(const Plan& plan, const Launch& launch) const {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    std::vector<Sums> partials(plan.partials(), {nan, nan});
    std::vector<unsigned> counters(plan.counters(), 0);
    start();
    launch(Workspace{partials.data(), counters.data()});
    for (const unsigned counter : counters) {
      if (counter != 0) {
        throw std::runtime_error("a counter was not wrapped back to 0");
      }
    }
  }

  void stats(const py::array& input, const py::array& stats) const {
    const Plan plan = this->plan({input}, Step::kReduce);
    const StatsArgs args{scalar_type(input), layout, data(input), doubles(stats)};
    with_workspace(
        plan, [&](const Workspace& workspace) { launch_stats(args, plan, workspace, nullptr); });
  }

  void elemt(const py::array& input, const py::array& output, const py::array& stats, double eps,
             const py::object& weight, const py::object& bias, const py::object& running_mean,
             const py::object& running_var, const py::object& num_batches_tracked,
             const py::object& momentum, bool skip_nonfinite) const {
    Running running{channels(running_mean),
                    channels(running_var),
                    nullptr,
                    momentum.is_none() ? 0 : py::cast<double>(momentum),
                    momentum.is_none(),
                    skip_nonfinite};
    if (!num_batches_tracked.is_none()) {
      const auto tracked = py::cast<py::array_t<int64_t>>(num_batches_tracked);
      running.num_batches_tracked = static_cast<int64_t*>(data(tracked));
    }
    start();
    launch_elemt({scalar_type(input), layout, data(input), data(output), doubles(stats), eps,
                  channels(weight), channels(bias), running},
                 plan({input, output}, Step::kWrite), nullptr);
  }

  void backward_reduce(const py::array& grad_out, const py::array& input, const py::array& stats,
                       double eps, const py::array& sums, const py::object& grad_weight,
                       const py::object& grad_bias) const {
    const Plan plan = this->plan({grad_out, input}, Step::kReduce);
    const BackwardReduceArgs args{scalar_type(input), layout, data(grad_out), data(input),
                                  doubles(stats),     eps,    doubles(sums),  channels(grad_weight),
                                  channels(grad_bias)};
    with_workspace(plan, [&](const Workspace& workspace) {
      launch_backward_reduce(args, plan, workspace, nullptr);
    });
  }

  void backward_elemt(const py::array& grad_out, const py::array& input,
                      const py::array& grad_input, const py::array& stats, const py::array& sums,
                      double eps, const py::object& weight) const {
    start();
    launch_backward_elemt({scalar_type(input), layout, data(grad_out), data(input),
                           data(grad_input), doubles(stats), doubles(sums), eps, channels(weight)},
                          plan({grad_out, input, grad_input}, Step::kWrite), nullptr);
  }
};

}  // namespace

void bind_faults(py::module_& m);   // faults.cpp
void bind_runtime(py::module_& m);  // runtime.cpp

PYBIND11_MODULE(SYNCBN_MODULE, m) {
  bind_faults(m);
  bind_runtime(m);
  m.def("guard", &guard);
  py::class_<Plan>(m, "Plan")
      .def_readonly("vec", &Plan::vec)
      .def_readonly("threads", &Plan::threads)
      .def_readonly("tile", &Plan::tile)
      .def_readonly("streaming", &Plan::streaming)
      .def_property_readonly("blocks", &Plan::blocks)
      .def_property_readonly("tiles", [](const Plan& plan) { return plan.walk.tiles; })
      .def_property_readonly("splits", [](const Plan& plan) { return plan.walk.splits; })
      .def_property_readonly("lanes", [](const Plan& plan) { return plan.walk.lanes; })
      .def_property_readonly("packs", [](const Plan& plan) { return plan.walk.each; })
      .def_property_readonly("columns", [](const Plan& plan) { return plan.walk.columns; })
      .def_property_readonly("span", [](const Plan& plan) { return plan.walk.span; })
      .def_property_readonly("fan", [](const Plan& plan) { return plan.tree.fan; });
  py::class_<Emulation>(m, "Emulation")
      .def(py::init([](int64_t N, int64_t C, int64_t S, bool channels_last, int64_t sms,
                       int64_t l2_bytes, uint64_t seed, int blocks_alive, int64_t row_stride) {
             return Emulation{
                 {N, C, S, channels_last}, {sms, l2_bytes}, {seed, blocks_alive}, row_stride};
           }),
           py::arg("N"), py::arg("C"), py::arg("S"), py::arg("channels_last"), py::kw_only(),
           py::arg("sms") = 1, py::arg("l2_bytes") = 1 << 20, py::arg("seed") = 0,
           py::arg("blocks_alive") = 4, py::arg("row_stride") = 0)
      .def(
          "plan",
          [](const Emulation& emulation, const std::vector<py::array>& activations, bool writes) {
            return emulation.plan(activations, writes ? Step::kWrite : Step::kReduce);
          },
          py::arg("activations"), py::kw_only(), py::arg("writes") = false)
      .def(
          "plan_aligned",
          [](const Emulation& emulation, int64_t size, bool writes) {
            return make_plan(emulation.layout, size, {nullptr}, emulation.card,
                             writes ? Step::kWrite : Step::kReduce);
          },
          py::arg("size"), py::kw_only(), py::arg("writes") = false)
      .def("stats", &Emulation::stats, py::arg("input"), py::arg("stats"))
      .def("elemt", &Emulation::elemt, py::arg("input"), py::arg("output"), py::arg("stats"),
           py::arg("eps"), py::arg("weight") = py::none(), py::arg("bias") = py::none(),
           py::arg("running_mean") = py::none(), py::arg("running_var") = py::none(),
           py::arg("num_batches_tracked") = py::none(), py::arg("momentum") = py::none(),
           py::arg("skip_nonfinite") = false)
      .def("backward_reduce", &Emulation::backward_reduce, py::arg("grad_out"), py::arg("input"),
           py::arg("stats"), py::arg("eps"), py::arg("sums"), py::arg("grad_weight") = py::none(),
           py::arg("grad_bias") = py::none())
      .def("backward_elemt", &Emulation::backward_elemt, py::arg("grad_out"), py::arg("input"),
           py::arg("grad_input"), py::arg("stats"), py::arg("sums"), py::arg("eps"),
           py::arg("weight") = py::none());
}
