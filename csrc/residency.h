// Who is in memory: table [layer, expert] -> slot, and per slot its state, its leases and a pointer per expert part.
//
//     free --reserve--> loading --last complete--> resident --evict--> free
//                          +--- last read failed ---> failed --last lease gone, collect_failed--> free
//
// A slot is a row in these tables, not a place in memory: the cache (Python) decides where the parts of an expert lie.
//
// Promises:
// - A slot leaves `loading` only when every one of its reads has ended, well or badly: until then its memory stays
//   untouchable, whatever happens to the request that wanted it.
// - Bytes written by a reader thread before complete() are visible to whoever saw the slot resident through
//   is_resident, acquire + wait_resident, or wait (release in complete, acquire here).
// - evict refuses slots that are leased or not resident.
// - Every lease taken is given back by exactly one release; acquire and reserve take one each per expert.
//
// Any thread may call anything. One mutex guards all changes: a layer takes it a handful of times, never per byte.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace expertide {

enum class SlotState : uint8_t { kFree = 0, kLoading = 1, kResident = 2, kFailed = 3 };

// What a reader knows about a read that did not deliver.
struct ReadFailure {
  int error = 0;  // errno; 0: end of file
  int file_id = -1;
  int64_t offset = 0;  // where the bytes asked for begin
  int64_t wanted = 0;
  int64_t got = 0;
};

class ReadFailed : public std::runtime_error {
 public:
  explicit ReadFailed(const ReadFailure& failure);
  const ReadFailure failure;
};

enum class Phase : int { kPrefill = 0, kDecode = 1 };

// Why a slot was loaded: because a step missed it, or before anybody asked.
enum class Origin : uint8_t { kDemand = 0, kFill = 1, kAhead = 2, kPredicted = 3 };
constexpr int kNumOrigins = 4;

// What came of loads that nobody had asked for yet. Sums since construction.
struct OriginCounters {
  int64_t loads = 0;
  int64_t useful = 0;  // asked for before they were evicted
  int64_t late = 0;    // of these: still on their way when they were asked for
  int64_t wasted = 0;  // evicted, or failed, without having been asked for
};

// Sums since construction, one set per phase. requests = hits + misses.
struct RequestCounters {
  int64_t requests = 0;      // distinct (layer, expert) per acquire
  int64_t hits = 0;          // resident or already loading
  int64_t misses = 0;
  int64_t needed_bytes = 0;  // requests times the bytes of one expert of that layer
};

class Residency {
 public:
  Residency(int num_layers, int num_experts, int num_parts, int max_slots);
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  int num_layers() const { return num_layers_; }
  int num_experts() const { return num_experts_; }
  int num_parts() const { return num_parts_; }
  int max_slots() const { return max_slots_; }

  // --- what a layer's computation uses -------------------------------------------------------------------------

  // Lease every distinct expert of ids[0..n) that is resident or loading (hits) and report the others (misses), both
  // in ascending order; bumps the use records of all of them. Clears the two vectors first. An expert whose load has
  // failed but is still leased elsewhere counts as a hit: waiting for it throws.
  // Throws std::out_of_range when an id or the layer is outside the table; nothing is leased then.
  void acquire(int layer, const int32_t* ids, int64_t n, std::vector<int32_t>* hits, std::vector<int32_t>* misses);

  // Lease an expert that acquire has just reported missing, if somebody else has taken it on since (the start-up fill
  // runs beside the step): the miss becomes a hit in the records. False: it is still absent, and nothing is leased.
  bool try_lease(int layer, int expert);

  // Slot of an expert, -1 when absent. Stable while the caller holds a lease on that expert.
  int slot_of(int layer, int expert) const {
    return table_[index(layer, expert)].load(std::memory_order_acquire);
  }
  SlotState state(int slot) const { return static_cast<SlotState>(states_[slot].load(std::memory_order_acquire)); }
  bool is_resident(int slot) const { return state(slot) == SlotState::kResident; }

  // Address of a part of a leased, resident slot.
  uint64_t part(int slot, int part) const { return pointers_[static_cast<size_t>(slot) * num_parts_ + part]; }
  const uint8_t* part_pointer(int slot, int part_index) const {
    return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(part(slot, part_index)));
  }

  // Block until a leased slot is resident; returns the nanoseconds spent blocked (0 when it was resident already).
  // Throws ReadFailed when its load failed; the lease is kept and must still be released.
  int64_t wait_resident(int slot);
  int64_t wait(int layer, int expert);  // the same by name

  // Give one lease back.
  void release(int layer, int expert);

  // Have `hook(slot)` called for each slot that acquire leases while it is loading: its reads may be queued behind others.
  // Called by the thread that acquires, without the mutex; empty: nobody is told. Returns when no call is in progress.
  void set_urgent_hook(std::function<void(int slot)> hook);

  // --- what a cache uses ---------------------------------------------------------------------------------------

  // free -> loading with one lease for the caller. `parts` holds num_parts addresses (unused ones 0); num_reads
  // completions make the slot resident (0: at once). Throws std::logic_error when the slot is not free or the expert
  // is not absent.
  void reserve(int slot, int layer, int expert, const uint64_t* parts, int num_reads, bool transient,
               Origin origin = Origin::kDemand);

  // One read of the slot has ended. The last one decides: resident, or failed when any of them failed (the first
  // failure is kept). Called by reader threads.
  void complete(int slot);
  void fail(int slot, const ReadFailure& failure);

  // resident -> free. False (and nothing happens) when the slot is leased or not resident.
  bool evict(int slot);

  // failed -> free for every failed slot whose last lease is gone; returns them, so that the cache frees their memory.
  std::vector<int32_t> collect_failed();

  // Block until no slot is loading.
  void wait_idle();

  // --- records -------------------------------------------------------------------------------------------------

  // Under which phase acquire counts from now on. A hit in decode makes a transient slot a normal one.
  void set_phase(Phase phase);
  void set_expert_nbytes(int layer, int64_t nbytes);
  RequestCounters counters(Phase phase) const;
  // Multiplier per clock tick for `frequency`: f(now) = f * decay^(now - last_use). One tick is one acquire.
  void set_decay(double per_tick);
  int64_t clock() const { return clock_.load(std::memory_order_relaxed); }
  int64_t total_leases() const;
  OriginCounters origins(Origin origin) const;
  int64_t decode_steps() const;  // acquires under Phase::kDecode

  // Raw arrays for views; written only under the mutex. Reading them without it is for choosing a victim and for
  // reports: evict checks again.
  const void* table_data() const { return table_.get(); }          // int32 [num_layers, num_experts]
  const uint64_t* pointer_data() const { return pointers_.data(); }  // [max_slots, num_parts]
  const void* state_data() const { return states_.get(); }         // uint8 [max_slots]
  const int32_t* lease_data() const { return leases_.data(); }      // [max_slots]
  const uint8_t* transient_data() const { return transient_.data(); }  // [max_slots]
  const int32_t* slot_layer_data() const { return slot_layers_.data(); }    // [max_slots], -1 when free
  const int32_t* slot_expert_data() const { return slot_experts_.data(); }  // [max_slots], -1 when free
  float* frequency_data() { return frequency_.data(); }             // [num_layers, num_experts], as of last_use
  int64_t* last_use_data() { return last_use_.data(); }             // [num_layers, num_experts], clock; -1 never
  // How many decode steps asked for each expert, never decayed: what a popularity profile is made of.
  const int64_t* decode_requests_data() const { return decode_requests_.data(); }  // [num_layers, num_experts]

 private:
  size_t index(int layer, int expert) const { return static_cast<size_t>(layer) * num_experts_ + expert; }
  void check_name(int layer, int expert) const;
  void check_slot(int slot) const;
  void set_state(int slot, SlotState state) {
    states_[slot].store(static_cast<uint8_t>(state), std::memory_order_release);
  }
  void end_read(int slot);           // mutex held
  void become_absent(int slot);      // mutex held: takes the name out of the table
  void become_free(int slot);        // mutex held
  void lease(int slot);              // mutex held: for a step that has asked for its expert
  void count_use(int slot);          // mutex held: somebody has asked for it
  void count_waste(int slot);        // mutex held: it goes; nobody may have asked for it

  const int num_layers_;
  const int num_experts_;
  const int num_parts_;
  const int max_slots_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a slot left `loading`
  int num_loading_ = 0;

  std::unique_ptr<std::atomic<int32_t>[]> table_;
  std::unique_ptr<std::atomic<uint8_t>[]> states_;
  std::vector<uint64_t> pointers_;
  std::vector<int32_t> leases_;
  std::vector<int32_t> slot_layers_;
  std::vector<int32_t> slot_experts_;
  std::vector<int32_t> pending_reads_;
  std::vector<uint8_t> transient_;
  std::vector<Origin> origins_;  // kDemand from the first request on
  std::vector<uint8_t> has_failure_;
  std::vector<ReadFailure> failures_;

  std::vector<float> frequency_;
  std::vector<int64_t> last_use_;
  std::vector<int64_t> decode_requests_;
  std::vector<int64_t> expert_nbytes_;  // [num_layers]
  std::vector<uint8_t> seen_;           // [num_experts], scratch of acquire; all 0 between calls
  std::mutex hook_mutex_;               // never together with mutex_
  std::function<void(int)> urgent_hook_;
  std::atomic<int64_t> clock_{0};
  double decay_ = 1.0;
  Phase phase_ = Phase::kPrefill;
  RequestCounters counters_[2];
  int64_t decode_steps_ = 0;
  OriginCounters origin_counters_[kNumOrigins];
};

}  // namespace expertide
