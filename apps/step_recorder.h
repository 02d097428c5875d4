// SPDX-License-Identifier: Apache-2.0
// Where the time of a training step of the translator goes, on the CPU: each moment of the training thread belongs to one
// section. What tells them apart are libtorch's record functions (ATen/record_function.h), as for a trace.
#pragma once
#include <ATen/record_function.h>
#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::apps {

enum class Section : uint8_t {
  kForward,         ///< Products of layers in forward.
  kInputGradient,   ///< Products that make gradients of inputs, dX.
  kWeightGradient,  ///< Products that make gradients of weights, dW.
  kVocabulary,      ///< The three products of the projection to the vocabulary.
  kAttention,       ///< By heads, forward and backward, without its projections.
  kLoss,            ///< Softmax and cross-entropy over the vocabulary, without the products.
  kElementwise,     ///< The rest of forward and backward: norms, dropout, activations, casts, sums.
  kOptimizer,       ///< The gradients' norm and Adam.
  kCommunication,   ///< The thread waits for other ranks, or hands tensors to a backend.
  kOther,           ///< Outside of all these.
};
inline constexpr size_t kNumSections = 10;

/// A product that was computed: [M, K] times [K, N].
struct Product {
  Section section;
  int64_t m, k, n;
  bool a_transposed, b_transposed, has_bias;
  at::ScalarType type;
  double flop() const {
    return 2 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
  }
  auto operator<=>(const Product&) const = default;
};

struct RecordedStep {
  /// They add up to the time from begin() to end().
  std::array<double, kNumSections> section_seconds{};
  std::array<int64_t, kNumSections> section_faults{};  ///< Page faults of the training thread.
  /// In which at least one operation of a backend was under way; not below the section's time.
  double communication_seconds = 0;
  std::vector<Product> products;       ///< In the order of the calls.
  std::vector<int64_t> reduced_bytes;  ///< Of each all_reduce that the training thread started.
};

/// Records steps of the calling thread: the CPU's backward runs on it, too.
///
/// Owner:   outlives the operations that the steps start. One at a time in a process.
/// Threads: one; operations of backends may begin and end on any.
class StepRecorder {
 public:
  StepRecorder();
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void begin();
  RecordedStep end();

 private:
  using Clock = std::chrono::steady_clock;
  struct Interval {
    Clock::time_point begin, end;
  };
  struct Entered;    // a range that changed the section
  struct Operation;  // of a backend
  static std::unique_ptr<at::ObserverContext> range_begins(const at::RecordFunction& range);
  static void range_ends(const at::RecordFunction& range, at::ObserverContext* context);
  std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& range);
  Section section_of(std::string_view name, at::RecordScope scope) const;
  void go_to(Section section);
  void add_product(const at::RecordFunction& range, std::string_view name, Section section);

  const std::thread::id thread_ = std::this_thread::get_id();
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  bool recording_ = false;
  bool in_backward_ = false;
  Section now_ = Section::kOther;
  Clock::time_point since_;
  int64_t faults_ = 0;
  RecordedStep step_;
  std::vector<Interval> outside_;  // of kOther
  std::vector<Interval> waits_;    // of kCommunication
  std::mutex mutex_;
  std::vector<Interval> operations_;  // guarded by mutex_
};

}  // namespace cohort::apps
