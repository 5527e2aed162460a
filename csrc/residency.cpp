#include "residency.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace expertide {
namespace {

std::string describe(const ReadFailure& failure) {
  return "file " + std::to_string(failure.file_id) + ": got " + std::to_string(failure.got) + " of " +
         std::to_string(failure.wanted) + " bytes at offset " + std::to_string(failure.offset) + " (errno " +
         std::to_string(failure.error) + ")";
}

int checked(int value, int least, const char* what) {
  if (value < least) throw std::invalid_argument(std::string(what) + " must be at least " + std::to_string(least));
  return value;
}

}  // namespace

ReadFailed::ReadFailed(const ReadFailure& what) : std::runtime_error(describe(what)), failure(what) {}

Residency::Residency(int num_layers, int num_experts, int num_parts, int max_slots)
    : num_layers_(checked(num_layers, 1, "num_layers")),
      num_experts_(checked(num_experts, 1, "num_experts")),
      num_parts_(checked(num_parts, 1, "num_parts")),
      max_slots_(checked(max_slots, 1, "max_slots")),
      table_(new std::atomic<int32_t>[static_cast<size_t>(num_layers) * num_experts]),
      states_(new std::atomic<uint8_t>[max_slots]),
      pointers_(static_cast<size_t>(max_slots) * num_parts, 0),
      leases_(max_slots, 0),
      slot_layers_(max_slots, -1),
      slot_experts_(max_slots, -1),
      pending_reads_(max_slots, 0),
      transient_(max_slots, 0),
      origins_(max_slots, Origin::kDemand),
      has_failure_(max_slots, 0),
      failures_(max_slots),
      frequency_(static_cast<size_t>(num_layers) * num_experts, 0.0f),
      last_use_(static_cast<size_t>(num_layers) * num_experts, -1),
      decode_requests_(static_cast<size_t>(num_layers) * num_experts, 0),
      expert_nbytes_(num_layers, 0),
      seen_(num_experts, 0) {
  const size_t num_names = static_cast<size_t>(num_layers) * num_experts;
  for (size_t i = 0; i < num_names; ++i) table_[i].store(-1, std::memory_order_relaxed);
  for (int slot = 0; slot < max_slots; ++slot) set_state(slot, SlotState::kFree);
}

void Residency::check_name(int layer, int expert) const {
  if (layer < 0 || layer >= num_layers_ || expert < 0 || expert >= num_experts_) {
    throw std::out_of_range("expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
                            " is outside the residency table");
  }
}

void Residency::check_slot(int slot) const {
  if (slot < 0 || slot >= max_slots_) throw std::out_of_range("slot " + std::to_string(slot) + " does not exist");
}

void Residency::acquire(int layer, const int32_t* ids, int64_t n, std::vector<int32_t>* hits,
                        std::vector<int32_t>* misses) {
  hits->clear();
  misses->clear();
  check_name(layer, 0);
  for (int64_t i = 0; i < n; ++i) check_name(layer, ids[i]);

  std::unique_lock<std::mutex> lock(mutex_);
  std::vector<int> loading;  // seldom any
  for (int64_t i = 0; i < n; ++i) seen_[ids[i]] = 1;
  const int64_t now = clock_.load(std::memory_order_relaxed) + 1;
  clock_.store(now, std::memory_order_relaxed);
  for (int expert = 0; expert < num_experts_; ++expert) {
    if (!seen_[expert]) continue;
    seen_[expert] = 0;
    const size_t i = index(layer, expert);
    const int64_t idle = last_use_[i] < 0 ? 0 : now - last_use_[i];
    frequency_[i] = static_cast<float>(frequency_[i] * std::pow(decay_, static_cast<double>(idle))) + 1.0f;
    last_use_[i] = now;
    if (phase_ == Phase::kDecode) ++decode_requests_[i];
    const int slot = table_[i].load(std::memory_order_relaxed);
    if (slot < 0) {
      misses->push_back(expert);
      continue;
    }
    lease(slot);
    hits->push_back(expert);
    if (state(slot) == SlotState::kLoading) loading.push_back(slot);
  }
  if (phase_ == Phase::kDecode) ++decode_steps_;
  RequestCounters& sums = counters_[static_cast<int>(phase_)];
  const auto num_hits = static_cast<int64_t>(hits->size());
  const auto num_misses = static_cast<int64_t>(misses->size());
  sums.requests += num_hits + num_misses;
  sums.hits += num_hits;
  sums.misses += num_misses;
  sums.needed_bytes += (num_hits + num_misses) * expert_nbytes_[layer];
  lock.unlock();
  if (loading.empty()) return;
  std::lock_guard<std::mutex> hook_lock(hook_mutex_);
  if (!urgent_hook_) return;
  for (const int slot : loading) urgent_hook_(slot);
}

void Residency::set_urgent_hook(std::function<void(int slot)> hook) {
  std::lock_guard<std::mutex> lock(hook_mutex_);
  urgent_hook_ = std::move(hook);
}

bool Residency::try_lease(int layer, int expert) {
  check_name(layer, expert);
  std::lock_guard<std::mutex> lock(mutex_);
  const int slot = slot_of(layer, expert);
  if (slot < 0) return false;
  lease(slot);
  RequestCounters& sums = counters_[static_cast<int>(phase_)];
  ++sums.hits;
  --sums.misses;
  return true;
}

int64_t Residency::wait_resident(int slot) {
  check_slot(slot);
  if (is_resident(slot)) return 0;  // the usual case needs no lock: the lease keeps the state from changing back
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  if (leases_[slot] < 1) throw std::logic_error("waiting for slot " + std::to_string(slot) + " without a lease on it");
  changed_.wait(lock, [&] { return state(slot) != SlotState::kLoading; });
  if (state(slot) == SlotState::kFailed) throw ReadFailed(failures_[slot]);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

int64_t Residency::wait(int layer, int expert) {
  check_name(layer, expert);
  const int slot = slot_of(layer, expert);
  if (slot < 0) {
    throw std::logic_error("waiting for expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
                           ", which is absent");
  }
  return wait_resident(slot);
}

void Residency::release(int layer, int expert) {
  check_name(layer, expert);
  std::lock_guard<std::mutex> lock(mutex_);
  const int slot = slot_of(layer, expert);
  if (slot < 0 || leases_[slot] < 1) {
    throw std::logic_error("releasing expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
                           ", which is not leased");
  }
  if (--leases_[slot] == 0 && state(slot) == SlotState::kFailed) become_absent(slot);
}

void Residency::reserve(int slot, int layer, int expert, const uint64_t* parts, int num_reads, bool transient,
                        Origin origin) {
  check_slot(slot);
  check_name(layer, expert);
  std::lock_guard<std::mutex> lock(mutex_);
  if (state(slot) != SlotState::kFree) throw std::logic_error("slot " + std::to_string(slot) + " is not free");
  if (slot_of(layer, expert) >= 0) {
    throw std::logic_error("expert " + std::to_string(expert) + " of layer " + std::to_string(layer) +
                           " already has a slot");
  }
  std::copy(parts, parts + num_parts_, pointers_.begin() + static_cast<size_t>(slot) * num_parts_);
  slot_layers_[slot] = layer;
  slot_experts_[slot] = expert;
  leases_[slot] = 1;
  pending_reads_[slot] = num_reads;
  transient_[slot] = transient ? 1 : 0;
  has_failure_[slot] = 0;
  origins_[slot] = origin;
  ++origin_counters_[static_cast<int>(origin)].loads;
  if (num_reads > 0) {
    set_state(slot, SlotState::kLoading);
    ++num_loading_;
  } else {
    set_state(slot, SlotState::kResident);
  }
  table_[index(layer, expert)].store(slot, std::memory_order_release);
}

void Residency::complete(int slot) {
  check_slot(slot);
  std::lock_guard<std::mutex> lock(mutex_);
  end_read(slot);
}

void Residency::fail(int slot, const ReadFailure& failure) {
  check_slot(slot);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_failure_[slot]) {
    has_failure_[slot] = 1;
    failures_[slot] = failure;
  }
  end_read(slot);
}

void Residency::end_read(int slot) {
  if (state(slot) != SlotState::kLoading) {
    throw std::logic_error("a read ended for slot " + std::to_string(slot) + ", which is not loading");
  }
  if (--pending_reads_[slot] > 0) return;
  --num_loading_;
  if (has_failure_[slot]) {
    set_state(slot, SlotState::kFailed);
    if (leases_[slot] == 0) become_absent(slot);
  } else {
    set_state(slot, SlotState::kResident);
  }
  // Under the mutex: a waiter that has just looked at the state is either asleep already or will look again.
  changed_.notify_all();
}

void Residency::lease(int slot) {
  ++leases_[slot];
  count_use(slot);
  if (phase_ == Phase::kDecode) transient_[slot] = 0;
}

void Residency::count_use(int slot) {
  if (origins_[slot] == Origin::kDemand) return;
  OriginCounters& sums = origin_counters_[static_cast<int>(origins_[slot])];
  ++sums.useful;
  if (state(slot) == SlotState::kLoading) ++sums.late;
  origins_[slot] = Origin::kDemand;
}

void Residency::count_waste(int slot) {
  if (origins_[slot] == Origin::kDemand) return;
  ++origin_counters_[static_cast<int>(origins_[slot])].wasted;
  origins_[slot] = Origin::kDemand;
}

void Residency::become_absent(int slot) {
  count_waste(slot);
  table_[index(slot_layers_[slot], slot_experts_[slot])].store(-1, std::memory_order_release);
}

void Residency::become_free(int slot) {
  slot_layers_[slot] = -1;
  slot_experts_[slot] = -1;
  transient_[slot] = 0;
  has_failure_[slot] = 0;
  std::fill_n(pointers_.begin() + static_cast<size_t>(slot) * num_parts_, num_parts_, 0);
  set_state(slot, SlotState::kFree);
}

bool Residency::evict(int slot) {
  check_slot(slot);
  std::lock_guard<std::mutex> lock(mutex_);
  if (state(slot) != SlotState::kResident || leases_[slot] != 0) return false;
  become_absent(slot);
  become_free(slot);
  return true;
}

std::vector<int32_t> Residency::collect_failed() {
  std::vector<int32_t> collected;
  std::lock_guard<std::mutex> lock(mutex_);
  for (int slot = 0; slot < max_slots_; ++slot) {
    if (state(slot) != SlotState::kFailed || leases_[slot] != 0) continue;
    become_free(slot);
    collected.push_back(slot);
  }
  return collected;
}

void Residency::wait_idle() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return num_loading_ == 0; });
}

void Residency::set_phase(Phase phase) {
  std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
}

void Residency::set_expert_nbytes(int layer, int64_t nbytes) {
  check_name(layer, 0);
  std::lock_guard<std::mutex> lock(mutex_);
  expert_nbytes_[layer] = nbytes;
}

RequestCounters Residency::counters(Phase phase) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_[static_cast<int>(phase)];
}

void Residency::set_decay(double per_tick) {
  if (!(per_tick > 0.0 && per_tick <= 1.0)) throw std::invalid_argument("decay must lie in (0, 1]");
  std::lock_guard<std::mutex> lock(mutex_);
  decay_ = per_tick;
}

OriginCounters Residency::origins(Origin origin) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return origin_counters_[static_cast<int>(origin)];
}

int64_t Residency::decode_steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return decode_steps_;
}

int64_t Residency::total_leases() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (int32_t leases : leases_) sum += leases;
  return sum;
}

}  // namespace expertide
