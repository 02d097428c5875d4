// SPDX-License-Identifier: Apache-2.0
// What the group asks of backends that keep the data of different calls apart.
#pragma once
#include <c10/util/Exception.h>
#include <cstdint>

namespace cohort::comm {

/// A c10d::Backend that matches collectives by number: data of calls of different numbers never
/// meet.
///
/// Threads: the one that calls the collectives.
class NumberedBackend {
 public:
  virtual ~NumberedBackend() = default;
  /// Gives the next collective that number, and those after it the following ones. Without this it
  /// counts from 0. Local.
  virtual void number_next(uint32_t number) = 0;
  /// Whether ranks whose numbers differ are told so as soon as they meet, by CallMismatch. Others
  /// wait for each other until the time is up.
  virtual bool compares_numbers() const = 0;
};

/// What such a backend throws, from `wait`.
class CallMismatch : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

}  // namespace cohort::comm
