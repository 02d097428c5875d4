// SPDX-License-Identifier: Apache-2.0
// A smoothed copy of the parameters, which translates better than the last update's.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <utility>
#include <vector>

namespace cohort::optim {

/// Exponential moving average of parameters.
///
/// After update t (from 1): average += rate * (parameter - average), with rate = max(alpha, 9 / (t
/// + 9)), so that the first updates, which are far from any good value, are soon forgotten.
/// Owner:   the averages, one tensor of the same shape and type per parameter.
/// Threads: one. Local: ranks with equal parameters have equal averages. Source of the idea: Polyak
///          and Juditsky 1992; the warm start is TensorFlow's.
class ExponentialAverage {
 public:
  /// `alpha` in (0, 1): the weight of the newest parameters.
  /// Errors: c10::ValueError if it is not, or a tensor is listed twice.
  ExponentialAverage(std::vector<at::Tensor> parameters, double alpha);

  /// Adds the parameters of one more update to the average.
  void update();

  /// Resets the averages to the current parameters. num_updates(), and so the rate, stays: call
  /// set_num_updates(0), too, to begin with the rate of the first update.
  void begin_anew();

  /// Exchanges parameters and averages; a second call restores. Call `update` only after an even
  /// number of calls.
  void swap();

  /// To be saved or filled, with `num_updates`: one tensor per parameter, in their order.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  int64_t num_updates() const { return num_updates_; }
  void set_num_updates(int64_t num_updates) { num_updates_ = num_updates; }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> averages_;
  double alpha_;
  int64_t num_updates_ = 0;
};

/// The parameters hold their averages while this object lives. A null average does nothing. Of a
/// sharded model these are the local shards: begin it before ModelWrapper::unsharded(), which shows
/// them as they are when it begins.
class AveragesInPlace {
 public:
  explicit AveragesInPlace(ExponentialAverage* average) : average_(average) {
    if (average_ != nullptr) average_->swap();
  }
  ~AveragesInPlace() {
    if (average_ != nullptr) average_->swap();
  }
  AveragesInPlace(const AveragesInPlace&) = delete;
  AveragesInPlace& operator=(const AveragesInPlace&) = delete;

 private:
  ExponentialAverage* average_;
};

}  // namespace cohort::optim
