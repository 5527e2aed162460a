#include "kernels/moe.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "kernels/dispatch.h"
#include "kernels/linear.h"

namespace expertide {

// Workspaces that no step uses at the moment. Shared by all layers of one residency table: layers run one after another,
// so one or two workspaces serve them all.
class WorkspaceList {
 public:
  static std::shared_ptr<WorkspaceList> of(const Residency* residency) {
    static std::mutex mutex;
    static std::map<const Residency*, std::weak_ptr<WorkspaceList>> lists;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = lists.begin(); it != lists.end();) it = it->second.expired() ? lists.erase(it) : std::next(it);
    std::shared_ptr<WorkspaceList> list = lists[residency].lock();
    if (!list) {
      list = std::make_shared<WorkspaceList>();
      lists[residency] = list;
    }
    return list;
  }

  std::unique_ptr<MoeWorkspace> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<MoeWorkspace>();
    std::unique_ptr<MoeWorkspace> workspace = std::move(idle_.back());
    idle_.pop_back();
    return workspace;
  }

  void give_back(std::unique_ptr<MoeWorkspace> workspace) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<MoeWorkspace>> idle_;
};

namespace {

// Assignments computed together: enough for a decode step's experts to share one pass, few enough to bound the memory.
constexpr int64_t kBatchAssignments = 64;

// Results of a decode step are below this and stay for the next one. Those of a prefill chunk go back to the system: kept,
// they would come on top of the next layer's attention, and the plan counts the larger of the two, not their sum.
constexpr size_t kKeptResultBytes = size_t{1} << 20;

size_t as_size(int64_t n) { return static_cast<size_t>(n); }

template <class T>
void grow(std::vector<T>* values, int64_t n) {
  if (values->size() < as_size(n)) values->resize(as_size(n));
}

}  // namespace

MoeLayer::MoeLayer(std::shared_ptr<Residency> residency, int layer, int64_t hidden, int64_t inner, PartSpec gate,
                   PartSpec up, PartSpec down)
    : residency_(std::move(residency)),
      layer_(layer),
      hidden_(hidden),
      inner_(inner),
      gate_(gate),
      up_(up),
      down_(down),
      workspaces_(WorkspaceList::of(residency_.get())) {
  if (layer < 0 || layer >= residency_->num_layers()) {
    throw std::invalid_argument("layer " + std::to_string(layer) + " is outside the residency table");
  }
  if (hidden <= 0 || inner <= 0) throw std::invalid_argument("an expert has at least one row and one column");
  for (const PartSpec& spec : {gate, up, down}) {
    if (spec.part < 0 || spec.part >= residency_->num_parts() || spec.offset < 0) {
      throw std::invalid_argument("part " + std::to_string(spec.part) + " is not a part of an expert");
    }
  }
  check_expert({nullptr, inner, hidden, gate.type}, {nullptr, inner, hidden, up.type},
               {nullptr, hidden, inner, down.type});
}

MoeLayer::~MoeLayer() { abort(); }

const std::vector<int32_t>& MoeLayer::run(ThreadPool& pool, const float* x, const int32_t* ids, const float* weights,
                                          int64_t num_tokens, int64_t k, float* out, bool defer) {
  static const std::vector<int32_t> kNoMisses;
  stall_ns_ = 0;
  if (workspace_) throw std::logic_error("the last step of this layer has not ended: finish or abort it");
  if (num_tokens < 0 || k <= 0) throw std::invalid_argument("a step needs at least one expert per token");
  if (num_tokens == 0) return kNoMisses;
  std::unique_ptr<MoeWorkspace> workspace = workspaces_->take();
  workspace->ids.assign(ids, ids + num_tokens * k);
  workspace->topk_weights.assign(weights, weights + num_tokens * k);
  grow(&workspace->results, num_tokens * k * hidden_);
  workspace->x.reset(x, num_tokens, hidden_);
  residency_->acquire(layer_, ids, num_tokens * k, &workspace->hits, &workspace->misses);

  // From here on leases are held, and abort() knows them.
  workspace_ = std::move(workspace);
  workspace_->waiting = workspace_->hits;
  num_tokens_ = num_tokens;
  k_ = k;
  out_ = out;
  group_by_expert();
  if (defer || !workspace_->misses.empty()) return workspace_->misses;
  stall_ns_ = compute_waiting(pool, 0);
  sum_results(pool);
  end_step();
  return kNoMisses;
}

int64_t MoeLayer::finish(ThreadPool& pool, const std::vector<int32_t>& experts, bool last,
                         int64_t max_experts) {
  if (!workspace_) throw std::logic_error("no step is in progress");
  std::vector<int32_t>& misses = workspace_->misses;
  for (const int32_t expert : experts) {
    const auto found = std::find(misses.begin(), misses.end(), expert);
    if (found == misses.end()) {
      throw std::invalid_argument("expert " + std::to_string(expert) + " is not a miss of this step");
    }
    if (residency_->slot_of(layer_, expert) < 0) {
      throw std::invalid_argument("expert " + std::to_string(expert) + " was not reserved");
    }
    misses.erase(found);
    workspace_->waiting.push_back(expert);
  }
  if (last && !misses.empty()) {
    throw std::logic_error("expert " + std::to_string(misses.front()) + " was missing and never given");
  }
  const int64_t stall_ns = compute_waiting(pool, last ? 0 : max_experts);
  if (last) {
    sum_results(pool);
    end_step();
  }
  return stall_ns;
}

void MoeLayer::abort() {
  if (!workspace_) return;
  for (const int32_t expert : workspace_->waiting) residency_->release(layer_, expert);
  end_step();
}

void MoeLayer::end_step() {
  workspace_->waiting.clear();
  std::vector<float>& results = workspace_->results;
  if (results.size() * sizeof(float) > kKeptResultBytes) std::vector<float>().swap(results);
  workspaces_->give_back(std::move(workspace_));
  workspace_.reset();
}

// Counting sort: order lists the assignments expert by expert, tokens ascending inside.
void MoeLayer::group_by_expert() {
  MoeWorkspace& w = *workspace_;
  w.first.assign(as_size(residency_->num_experts() + 1), 0);
  for (const int32_t expert : w.ids) ++w.first[as_size(expert + 1)];
  for (size_t e = 1; e < w.first.size(); ++e) w.first[e] += w.first[e - 1];
  grow(&w.order, static_cast<int64_t>(w.ids.size()));
  for (size_t i = 0; i < w.ids.size(); ++i) w.order[as_size(w.first[as_size(w.ids[i])]++)] = static_cast<int64_t>(i);
  // The walk moved each begin to its end, which is the next one's begin.
  for (size_t e = w.first.size() - 1; e > 0; --e) w.first[e] = w.first[e - 1];
  w.first[0] = 0;
}

// Compute and release every expert of `waiting`, those in memory first. Returns the nanoseconds spent waiting.
int64_t MoeLayer::compute_waiting(ThreadPool& pool, int64_t max_experts) {
  MoeWorkspace& w = *workspace_;
  int64_t stall_ns = 0;
  int64_t num_computed = 0;
  while (!w.waiting.empty() && (max_experts <= 0 || num_computed < max_experts)) {
    w.batch.clear();
    int64_t assignments = 0;
    for (const int32_t expert : w.waiting) {
      const int64_t count = w.first[as_size(expert + 1)] - w.first[as_size(expert)];
      if (!w.batch.empty() && assignments + count > kBatchAssignments) continue;
      if (!residency_->is_resident(residency_->slot_of(layer_, expert))) continue;
      w.batch.push_back(expert);
      assignments += count;
    }
    if (w.batch.empty()) {
      stall_ns += residency_->wait_resident(residency_->slot_of(layer_, w.waiting.front()));
      continue;
    }
    compute_batch(pool);
    for (const int32_t expert : w.batch) {
      w.waiting.erase(std::find(w.waiting.begin(), w.waiting.end(), expert));
      residency_->release(layer_, expert);
    }
    num_computed += static_cast<int64_t>(w.batch.size());
  }
  return stall_ns;
}

void MoeLayer::compute_batch(ThreadPool& pool) {
  MoeWorkspace& w = *workspace_;
  w.work.clear();
  w.tokens.clear();
  w.places.clear();
  for (const int32_t expert : w.batch) {
    const int slot = residency_->slot_of(layer_, expert);
    const int64_t begin = w.first[as_size(expert)];
    const int64_t end = w.first[as_size(expert + 1)];
    w.work.push_back({matrix(slot, gate_, inner_, hidden_), matrix(slot, up_, inner_, hidden_),
                      matrix(slot, down_, hidden_, inner_), static_cast<int64_t>(w.tokens.size()), end - begin});
    for (int64_t i = begin; i < end; ++i) {
      const int64_t assignment = w.order[as_size(i)];
      w.tokens.push_back(assignment / k_);
      w.places.push_back(w.results.data() + assignment * hidden_);
    }
  }
  compute_experts(pool, active_isa(), w.work, w.x, w.tokens.data(), w.places.data(), w.experts);
}

Matrix MoeLayer::matrix(int slot, const PartSpec& spec, int64_t rows, int64_t cols) const {
  return {residency_->part_pointer(slot, spec.part) + spec.offset, rows, cols, spec.type};
}

void MoeLayer::sum_results(ThreadPool& pool) {
  moe_sum(pool, workspace_->results.data(), workspace_->topk_weights.data(), num_tokens_, k_, hidden_, out_);
}

int64_t moe_workspace_bytes(int64_t hidden, int64_t inner, int64_t num_tokens, int64_t k) {
  const int64_t assignments = num_tokens * k;
  const int64_t batch = std::min(assignments, std::max(kBatchAssignments, num_tokens));
  const int64_t planes = activation_bits() / 8;
  // Two forms: gate, up and down of one expert may want activations in blocks of 32 and of 256.
  const int64_t quantised = num_tokens * (quantized_layout(32, hidden).nbytes + quantized_layout(kSuperBlock, hidden).nbytes) +
                            batch * (quantized_layout(32, inner).nbytes + quantized_layout(kSuperBlock, inner).nbytes);
  const int64_t pointers = assignments * 16 + batch * 64;
  return 4 * (assignments * hidden + 2 * batch * inner) + planes * quantised + pointers;
}

void moe_sum(ThreadPool& pool, const float* results, const float* weights, int64_t num_tokens, int64_t k,
             int64_t hidden, float* y) {
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* result = results + t * k * hidden;
      const float* weight = weights + t * k;
      float* sum = y + t * hidden;
      for (int64_t h = 0; h < hidden; ++h) sum[h] = weight[0] * result[h];
      for (int64_t i = 1; i < k; ++i) {
        for (int64_t h = 0; h < hidden; ++h) sum[h] = sum[h] + weight[i] * result[i * hidden + h];
      }
    }
  };
  if (num_tokens * k * hidden < kSmallWork) {
    body(0, num_tokens);
  } else {
    pool.parallel_for(num_tokens, body);
  }
}

}  // namespace expertide
