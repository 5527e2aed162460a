// The routed experts of one layer: lease, compute, sum. One native call per layer when everything is resident.
//
//     run ----------------------------------------------> done      every expert leased and resident or loading
//     run --misses--> (caller reserves and issues reads) --> finish ... finish(last) --> done
//     any exception --> abort --> as if nothing had been asked
//
// Promises: each (token, k) result has its own place, and a token's K results are summed in float32 in the order k = 0, 1,
// …: neither the slot, nor the order of arrival, nor the split into waves can be seen in the output. Every lease this
// object holds is released once, by the computation or by abort().
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/expert_mlp.h"
#include "residency.h"
#include "thread_pool.h"

namespace expertide {

// Where a matrix of an expert lies: `offset` bytes into part `part` of its slot (gate and up may share a part).
struct PartSpec {
  int part;
  int64_t offset;
  int type;
};

// Memory of a step. Layers of one residency table share the few that are ever in use at once.
struct MoeWorkspace {
  std::vector<int32_t> ids;        // [T * K], as asked
  std::vector<float> topk_weights;  // [T * K]
  std::vector<int64_t> order;      // assignments t * K + k, grouped by expert
  std::vector<int64_t> first;      // [E + 1] where an expert's group begins
  std::vector<float> results;      // [T * K, H]
  std::vector<int32_t> hits, misses;
  std::vector<int32_t> waiting;    // leased by this step, not yet computed
  std::vector<int32_t> batch;
  std::vector<int64_t> tokens;     // of the batch's assignments
  std::vector<float*> places;      // of the batch's assignments
  std::vector<ExpertWork> work;
  TokenRows x;
  ExpertScratch experts;
};
class WorkspaceList;

class MoeLayer {
 public:
  // Throws std::invalid_argument when types, shapes, parts or the layer do not fit together.
  MoeLayer(std::shared_ptr<Residency> residency, int layer, int64_t hidden, int64_t inner, PartSpec gate, PartSpec up,
           PartSpec down);
  ~MoeLayer();

  // x [T, H], ids [T, K], weights [T, K], out [T, H]; all must stay in place until the step ends. Returns the misses,
  // ascending: with none the output is complete; otherwise nothing is computed yet and the hits stay leased.
  // defer: compute nothing yet, also with no misses, so that reads can be issued first; finish must follow.
  // Throws std::out_of_range for an id outside the table (nothing is leased), std::logic_error when the last step has not
  // ended, ReadFailed when a load that was already on its way failed (then call abort).
  const std::vector<int32_t>& run(ThreadPool& pool, const float* x, const int32_t* ids, const float* weights,
                                  int64_t num_tokens, int64_t k, float* out, bool defer = false);

  // Compute hits that are still to do, then each of `experts` as it arrives; those must be misses of this step with one
  // lease each, which pass to this object. `last` writes the sum into out and ends the step.
  // max_experts > 0 (not with last): return after about as many, the rest stays leased for the next call.
  // Returns the nanoseconds spent waiting. Throws ReadFailed (then call abort).
  int64_t finish(ThreadPool& pool, const std::vector<int32_t>& experts, bool last, int64_t max_experts = 0);

  // Experts leased by the step in progress and not computed yet.
  int64_t num_waiting() const { return workspace_ ? static_cast<int64_t>(workspace_->waiting.size()) : 0; }

  // End the step, releasing what this object still holds. Leases of misses never given to finish stay the caller's.
  void abort();

  bool is_pending() const { return workspace_ != nullptr; }

  // Nanoseconds that the last `run` waited for experts whose loads were under way.
  int64_t run_stall_ns() const { return stall_ns_; }

 private:
  void group_by_expert();
  int64_t compute_waiting(ThreadPool& pool, int64_t max_experts);
  void compute_batch(ThreadPool& pool);
  void sum_results(ThreadPool& pool);
  void end_step();
  Matrix matrix(int slot, const PartSpec& spec, int64_t rows, int64_t cols) const;

  const std::shared_ptr<Residency> residency_;
  const int layer_;
  const int64_t hidden_;
  const int64_t inner_;
  const PartSpec gate_, up_, down_;
  const std::shared_ptr<WorkspaceList> workspaces_;

  // The step in progress.
  std::unique_ptr<MoeWorkspace> workspace_;
  int64_t num_tokens_ = 0;
  int64_t k_ = 0;
  float* out_ = nullptr;
  int64_t stall_ns_ = 0;
};

// Bytes a step of this size needs besides x and out: for the memory plan.
int64_t moe_workspace_bytes(int64_t hidden, int64_t inner, int64_t num_tokens, int64_t k);

// y[t] = sum over k of weights[t, k] * results[t, k], k ascending, float32. results [T, K, H].
void moe_sum(ThreadPool& pool, const float* results, const float* weights, int64_t num_tokens, int64_t k,
             int64_t hidden, float* y);

}  // namespace expertide
