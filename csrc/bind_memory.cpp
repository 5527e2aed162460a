// Thread pool, file reader and residency table for Python. Calls that may block give up the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "file_reader.h"
#include "memory_rate.h"
#include "residency.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace expertide;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// A numpy view of a table; the view keeps the owner alive. No numpy is imported before the first view is asked for.
template <class T>
nb::object view(nb::handle owner, const void* data, std::initializer_list<size_t> shape) {
  return nb::cast(nb::ndarray<nb::numpy, T>(const_cast<void*>(data), shape, owner), nb::rv_policy::reference);
}

Residency& residency_of(nb::handle self) { return nb::cast<Residency&>(self); }

// ReadFailed carries its numbers as attributes.
void bind_read_failed(nb::module_& m) {
  PyObject* type = PyErr_NewExceptionWithDoc("expertide._native.ReadFailed",
                                             "A read did not deliver: attributes errno, file_id, offset, wanted, got.",
                                             PyExc_RuntimeError, nullptr);
  if (!type) throw nb::python_error();
  m.attr("ReadFailed") = nb::steal(type);
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* payload) {
        try {
          std::rethrow_exception(thrown);
        } catch (const ReadFailed& error) {
          nb::object type = nb::borrow(static_cast<PyObject*>(payload));
          nb::object instance = type(error.what());
          instance.attr("errno") = error.failure.error;
          instance.attr("file_id") = error.failure.file_id;
          instance.attr("offset") = error.failure.offset;
          instance.attr("wanted") = error.failure.wanted;
          instance.attr("got") = error.failure.got;
          PyErr_SetObject(type.ptr(), instance.ptr());
        }
      },
      type);
}

void bind_thread_pool(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool", "Persistent workers; the calling thread takes part.")
      .def(nb::init<int, const std::vector<int>&>(), "num_threads"_a, "cpus"_a = std::vector<int>{})
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def("close", &ThreadPool::close, Unlocked())
      .def(
          "sum_for_test",
          [](ThreadPool& pool, int64_t n, int64_t grain) {
            std::atomic<int64_t> sum{0};
            auto body = [&](int64_t begin, int64_t end) {
              int64_t part = 0;
              for (int64_t i = begin; i < end; ++i) part += i;
              sum.fetch_add(part, std::memory_order_relaxed);
            };
            pool.parallel_for(n, grain, body);
            return sum.load();
          },
          "n"_a, "grain"_a, Unlocked(), "0 + 1 + ... + n-1, by one parallel loop.");
  m.def(
      "xor_words",
      [](ThreadPool& pool, uint64_t data, int64_t nbytes) {
        return xor_words(pool, reinterpret_cast<const uint64_t*>(static_cast<uintptr_t>(data)), nbytes / 8);
      },
      "pool"_a, "data"_a, "nbytes"_a, Unlocked(),
      "Exclusive or of all 64-bit words: reads memory as fast as it comes, by all threads of the pool.");
}

void bind_file_reader(nb::module_& m) {
  nb::class_<FileReader>(m, "FileReader", "Reads windows of files to addresses, by its own threads.")
      .def(nb::init<int, bool>(), "num_threads"_a, "serial"_a = false)
      .def("open", &FileReader::open, "path"_a, Unlocked())
      .def("is_direct", &FileReader::is_direct, "file_id"_a)
      .def(
          "submit",
          [](FileReader& self, Residency& residency,
             const std::vector<std::tuple<int, int, int64_t, int64_t, int64_t, uint64_t>>& windows, bool background) {
            std::vector<WindowRead> reads;
            reads.reserve(windows.size());
            for (const auto& [slot, file_id, offset, window_nbytes, need_nbytes, dest] : windows) {
              reads.push_back({slot, file_id, offset, window_nbytes, need_nbytes, dest});
            }
            nb::gil_scoped_release unlocked;
            self.submit(&residency, reads, background ? Priority::kBackground : Priority::kDemand);
          },
          "residency"_a, "windows"_a, "background"_a = false, nb::keep_alive<1, 2>(),
          "Queue (slot, file_id, offset, window_nbytes, need_nbytes, dest) reads; each counts its slot down.")
      .def(
          "read_many",
          [](FileReader& self, const std::vector<std::tuple<int, int64_t, int64_t, uint64_t>>& ranges) {
            std::vector<ExactRead> reads;
            reads.reserve(ranges.size());
            for (const auto& [file_id, offset, nbytes, dest] : ranges) reads.push_back({file_id, offset, nbytes, dest});
            nb::gil_scoped_release unlocked;
            self.read_many(reads);
          },
          "ranges"_a, "Read (file_id, offset, nbytes, dest) ranges exactly; returns when all are there.")
      .def(
          "read",
          [](FileReader& self, int file_id, int64_t offset, int64_t nbytes, uint64_t dest) {
            self.read_many({{file_id, offset, nbytes, dest}});
          },
          "file_id"_a, "offset"_a, "nbytes"_a, "dest"_a, Unlocked())
      .def_prop_ro("num_submitted", &FileReader::num_submitted)
      .def(
          "stats",
          [](const FileReader& self, bool background) {
            const ReadStats stats = self.stats(background ? Priority::kBackground : Priority::kDemand);
            return std::make_tuple(stats.read_bytes, stats.num_reads, stats.busy_ns);
          },
          "background"_a = false)
      .def("set_background_limit", &FileReader::set_background_limit, "limit"_a)
      .def("wait_background", &FileReader::wait_background, "max_pending"_a, "timeout_ms"_a, Unlocked(),
           "Wait until at most so many background reads are queued or running; returns how many are.")
      .def("cancel_background", &FileReader::cancel_background, Unlocked())
      .def(
          "keep", [](FileReader&, nb::object) {}, "memory"_a, nb::keep_alive<1, 2>(),
          "Keep the owner of destinations alive as long as this reader, whose threads may be writing to them.")
      .def("inject_fault", &FileReader::inject_fault, "file_id"_a, "offset"_a, "nbytes"_a, "error"_a, "count"_a,
           "For tests: the next `count` kernel reads touching the range fail with errno `error`; 0: come short; -1: end "
           "of file.")
      .def("close", &FileReader::close, Unlocked());
}

void bind_residency(nb::module_& m) {
  nb::class_<Residency>(m, "Residency", "Table [layer, expert] -> slot, with states, leases and part pointers.")
      .def(nb::init<int, int, int, int>(), "num_layers"_a, "num_experts"_a, "num_parts"_a, "max_slots"_a)
      .def_prop_ro("num_layers", &Residency::num_layers)
      .def_prop_ro("num_experts", &Residency::num_experts)
      .def_prop_ro("num_parts", &Residency::num_parts)
      .def_prop_ro("max_slots", &Residency::max_slots)
      .def(
          "acquire",
          [](Residency& self, int layer, uint64_t ids_address, int64_t n) {
            std::vector<int32_t> hits, misses;
            self.acquire(layer, reinterpret_cast<const int32_t*>(static_cast<uintptr_t>(ids_address)), n, &hits, &misses);
            return std::make_tuple(hits, misses);
          },
          "layer"_a, "ids_address"_a, "n"_a)
      .def("try_lease", &Residency::try_lease, "layer"_a, "expert"_a,
           "Lease a miss that somebody else has taken on since; False when it is still absent.")
      .def("slot_of",
           [](const Residency& self, int layer, int expert) {
             if (layer < 0 || layer >= self.num_layers() || expert < 0 || expert >= self.num_experts()) {
               throw std::out_of_range("expert outside the residency table");
             }
             return self.slot_of(layer, expert);
           },
           "layer"_a, "expert"_a)
      .def("wait", &Residency::wait, "layer"_a, "expert"_a, Unlocked(), "Nanoseconds waited; raises ReadFailed.")
      .def("wait_resident", &Residency::wait_resident, "slot"_a, Unlocked())
      .def("release", &Residency::release, "layer"_a, "expert"_a)
      .def(
          "reserve",
          [](Residency& self, int slot, int layer, int expert, const std::vector<uint64_t>& parts, int num_reads,
             bool transient, int origin) {
            if (origin < 0 || origin >= kNumOrigins) throw std::invalid_argument("no such origin of a load");
            if (parts.size() != static_cast<size_t>(self.num_parts())) {
              throw std::invalid_argument("one address per part is needed");
            }
            self.reserve(slot, layer, expert, parts.data(), num_reads, transient, static_cast<Origin>(origin));
          },
          "slot"_a, "layer"_a, "expert"_a, "parts"_a, "num_reads"_a, "transient"_a, "origin"_a = 0,
          "origin: 0 demand, 1 start-up fill, 2 read ahead, 3 predicted")
      .def("complete", &Residency::complete, "slot"_a)
      .def(
          "fail",
          [](Residency& self, int slot, int error, int file_id, int64_t offset, int64_t wanted, int64_t got) {
            self.fail(slot, {error, file_id, offset, wanted, got});
          },
          "slot"_a, "error"_a, "file_id"_a, "offset"_a, "wanted"_a, "got"_a)
      .def("evict", &Residency::evict, "slot"_a)
      .def("collect_failed", &Residency::collect_failed)
      .def("wait_idle", &Residency::wait_idle, Unlocked())
      .def(
          "set_phase", [](Residency& self, int phase) { self.set_phase(phase ? Phase::kDecode : Phase::kPrefill); },
          "phase"_a, "0: prefill, 1: decode")
      .def("set_expert_nbytes", &Residency::set_expert_nbytes, "layer"_a, "nbytes"_a)
      .def("set_decay", &Residency::set_decay, "per_tick"_a)
      .def("counters",
           [](const Residency& self, int phase) {
             const RequestCounters sums = self.counters(phase ? Phase::kDecode : Phase::kPrefill);
             return std::make_tuple(sums.requests, sums.hits, sums.misses, sums.needed_bytes);
           },
           "phase"_a, "(requests, hits, misses, needed_bytes) since construction")
      .def("origins",
           [](const Residency& self, int origin) {
             if (origin < 0 || origin >= kNumOrigins) throw std::invalid_argument("no such origin of a load");
             const OriginCounters sums = self.origins(static_cast<Origin>(origin));
             return std::make_tuple(sums.loads, sums.useful, sums.late, sums.wasted);
           },
           "origin"_a, "(loads, useful, late, wasted) since construction")
      .def_prop_ro("decode_requests",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const int64_t>(self, r.decode_requests_data(),
                                                {size_t(r.num_layers()), size_t(r.num_experts())});
                   })
      .def_prop_ro("decode_steps", &Residency::decode_steps)
      .def_prop_ro("clock", &Residency::clock)
      .def("total_leases", &Residency::total_leases)
      .def_prop_ro("table",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const int32_t>(self, r.table_data(), {size_t(r.num_layers()), size_t(r.num_experts())});
                   })
      .def_prop_ro("pointers",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const uint64_t>(self, r.pointer_data(), {size_t(r.max_slots()), size_t(r.num_parts())});
                   })
      .def_prop_ro("state",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const uint8_t>(self, r.state_data(), {size_t(r.max_slots())});
                   })
      .def_prop_ro("num_leases",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const int32_t>(self, r.lease_data(), {size_t(r.max_slots())});
                   })
      .def_prop_ro("transient",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const uint8_t>(self, r.transient_data(), {size_t(r.max_slots())});
                   })
      .def_prop_ro("slot_layer",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const int32_t>(self, r.slot_layer_data(), {size_t(r.max_slots())});
                   })
      .def_prop_ro("slot_expert",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<const int32_t>(self, r.slot_expert_data(), {size_t(r.max_slots())});
                   })
      .def_prop_ro("frequency",
                   [](nb::handle self) {
                     Residency& r = residency_of(self);
                     return view<float>(self, r.frequency_data(), {size_t(r.num_layers()), size_t(r.num_experts())});
                   })
      .def_prop_ro("last_use", [](nb::handle self) {
        Residency& r = residency_of(self);
        return view<int64_t>(self, r.last_use_data(), {size_t(r.num_layers()), size_t(r.num_experts())});
      });
}

}  // namespace

void bind_memory(nb::module_& m) {
  bind_read_failed(m);
  bind_thread_pool(m);
  bind_file_reader(m);
  bind_residency(m);
}
