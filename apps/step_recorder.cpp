// SPDX-License-Identifier: Apache-2.0
#include "apps/step_recorder.h"

#include <ATen/core/Tensor.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <sys/resource.h>

namespace cohort::apps {
namespace {

// Callbacks of record functions are plain functions.
std::atomic<StepRecorder*>& present_recorder() {
  static std::atomic<StepRecorder*> recorder{nullptr};
  return recorder;
}

int64_t faults_of_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

// Sorted, and those that touch are one.
template <class Interval>
std::vector<Interval> merged(std::vector<Interval> all) {
  std::ranges::sort(all, {}, &Interval::begin);
  std::vector<Interval> result;
  for (const Interval& each : all) {
    if (result.empty() || each.begin > result.back().end) {
      result.push_back(each);
    } else {
      result.back().end = std::max(result.back().end, each.end);
    }
  }
  return result;
}

template <class Interval>
double length_of(const std::vector<Interval>& all) {
  return std::accumulate(all.begin(), all.end(), 0., [](double sum, const Interval& each) {
    return sum + std::chrono::duration<double>(each.end - each.begin).count();
  });
}

// What lies in both; each list is merged().
template <class Interval>
std::vector<Interval> common(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::vector<Interval> result;
  for (const Interval& x : a) {
    for (const Interval& y : b) {
      const auto begin = std::max(x.begin, y.begin), end = std::min(x.end, y.end);
      if (begin < end) result.push_back({begin, end});
    }
  }
  return result;
}

bool is_transposed(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 && matrix.stride(1) != 1;
}

// Of the operator c10d::allreduce_, whose first argument is a list of tensors.
int64_t reduced_bytes_of(const at::RecordFunction& range) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : range.inputs()[0].toTensorVector())
    bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace

struct StepRecorder::Entered : at::ObserverContext {
  Section before = Section::kOther;
};

struct StepRecorder::Operation : at::ObserverContext {
  Clock::time_point begin;
};

StepRecorder::StepRecorder() {
  TORCH_CHECK(present_recorder().exchange(this) == nullptr, "expected one StepRecorder at a time");
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(range_begins, range_ends)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                   at::RecordScope::USER_SCOPE}));
}

StepRecorder::~StepRecorder() {
  at::removeCallback(callback_);
  present_recorder() = nullptr;
}

void StepRecorder::begin() {
  step_ = {};
  outside_.clear();
  waits_.clear();
  {
    const std::lock_guard lock(mutex_);
    operations_.clear();
  }
  in_backward_ = false;
  now_ = Section::kOther;
  faults_ = faults_of_thread();
  since_ = Clock::now();
  recording_ = true;
}

RecordedStep StepRecorder::end() {
  const auto begin = outside_.empty() ? since_ : outside_.front().begin;  // a step begins outside
  go_to(Section::kOther);
  recording_ = false;
  const std::vector<Interval> whole{{begin, since_}};
  std::vector<Interval> under_way;
  {
    const std::lock_guard lock(mutex_);
    under_way = operations_;
  }
  // A blocking collective waits where no range is open.
  const double waited = length_of(common(merged(outside_), merged(under_way)));
  step_.section_seconds[static_cast<size_t>(Section::kOther)] -= waited;
  step_.section_seconds[static_cast<size_t>(Section::kCommunication)] += waited;
  under_way.insert(under_way.end(), waits_.begin(), waits_.end());
  step_.communication_seconds = length_of(common(merged(under_way), whole));
  return std::move(step_);
}

void StepRecorder::go_to(Section section) {
  const auto time = Clock::now();
  const int64_t faults = faults_of_thread();
  const auto index = static_cast<size_t>(now_);
  step_.section_seconds[index] += std::chrono::duration<double>(time - since_).count();
  step_.section_faults[index] += faults - faults_;
  if (now_ == Section::kOther) outside_.push_back({since_, time});
  if (now_ == Section::kCommunication) waits_.push_back({since_, time});
  now_ = section;
  since_ = time;
  faults_ = faults;
}

// Sections contain others where these stand for the rest of a whole: kOther, kElementwise and kLoss.
Section StepRecorder::section_of(std::string_view name, at::RecordScope scope) const {
  if (now_ != Section::kOther && now_ != Section::kElementwise && now_ != Section::kLoss)
    return now_;
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (scope == at::RecordScope::FUNCTION) {
    if (name.starts_with("c10d::")) return Section::kCommunication;
    return name == "aten::_foreach_norm" ? Section::kOptimizer : now_;
  }
  if (scope == at::RecordScope::BACKWARD_FUNCTION) {
    if (has("FusedAttention")) return Section::kAttention;
    return has("SmoothedCrossEntropy") ? Section::kLoss : now_;
  }
  if (name == "forward" || name == "backward") return Section::kElementwise;
  if (name == "attention") return Section::kAttention;
  if (name == "loss") return Section::kLoss;
  if (name == "product" || name == "weight_gradient") {
    if (now_ == Section::kLoss) return Section::kVocabulary;
    if (name == "weight_gradient") return Section::kWeightGradient;
    return in_backward_ ? Section::kInputGradient : Section::kForward;
  }
  if (name == "Optimizer.step") return Section::kOptimizer;
  return has(".wait ") || has("comm_hook ") ? Section::kCommunication : now_;
}

void StepRecorder::add_product(const at::RecordFunction& range, std::string_view name,
                               Section section) {
  const auto inputs = range.inputs();
  if (inputs.size() < 2 || !inputs[0].isTensor() || !inputs[1].isTensor()) return;
  at::Tensor a = inputs[0].toTensor();
  const at::Tensor& b = inputs[1].toTensor();
  const bool has_bias = inputs.size() > 2 && inputs[2].toTensor().defined();
  if (name == "weight_gradient") a = a.t();
  step_.products.push_back({section, a.size(0), a.size(1), b.size(1), is_transposed(a),
                            is_transposed(b), has_bias, b.scalar_type()});
}

std::unique_ptr<at::ObserverContext> StepRecorder::range_begins(const at::RecordFunction& range) {
  StepRecorder* recorder = present_recorder();
  return recorder == nullptr ? nullptr : recorder->enter(range);
}

std::unique_ptr<at::ObserverContext> StepRecorder::enter(const at::RecordFunction& range) {
  const std::string_view name = range.name();
  const bool here = std::this_thread::get_id() == thread_;
  // c10d marks the operations of a backend so. Gloo's begin on its own threads.
  if (range.isAsync()) {
    auto operation = std::make_unique<Operation>();
    operation->begin = Clock::now();
    return operation;
  }
  if (!here || !recording_) return nullptr;
  if (name == "c10d::allreduce_") step_.reduced_bytes.push_back(reduced_bytes_of(range));
  if (range.scope() == at::RecordScope::USER_SCOPE && (name == "forward" || name == "backward"))
    in_backward_ = name == "backward";
  const Section section = section_of(name, range.scope());
  if (section == now_) return nullptr;
  if (section <= Section::kVocabulary) add_product(range, name, section);
  auto entered = std::make_unique<Entered>();
  entered->before = now_;
  go_to(section);
  return entered;
}

void StepRecorder::range_ends(const at::RecordFunction& range, at::ObserverContext* context) {
  StepRecorder* recorder = present_recorder();
  if (recorder == nullptr || context == nullptr) return;
  if (range.isAsync()) {
    const std::lock_guard lock(recorder->mutex_);
    recorder->operations_.push_back({static_cast<Operation*>(context)->begin, Clock::now()});
  } else if (recorder->recording_) {
    recorder->go_to(static_cast<Entered*>(context)->before);
  }
}

}  // namespace cohort::apps
