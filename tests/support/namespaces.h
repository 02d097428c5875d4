// SPDX-License-Identifier: Apache-2.0
// Several hosts on one machine: network namespaces joined by a bridge.
#pragma once
#include <string>
#include <vector>

namespace cohort::test {

/// `count` hosts with addresses 10.77.0.1, 10.77.0.2 and so on, in namespaces of this process.
/// Needs `ip`, and root with CAP_SYS_ADMIN and CAP_NET_ADMIN; throws std::runtime_error that says
/// so. Removed at the end, also when the constructor throws.
class Namespaces {
 public:
  explicit Namespaces(int count);
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  /// Returns `command` as it is run on host `index`; it replaces itself, so its pid stays.
  std::vector<std::string> on(int index, const std::vector<std::string>& command) const;
  static std::string address(int index);
  /// Cuts the host's link silently, as a pulled plug does.
  void unplug(int index) const;
  /// Puts it back.
  void plug(int index) const;

 private:
  Namespaces();
  std::string name(int index) const;
  std::string hub() const;

  bool has_hub_ = false;
  int count_ = 0;  // Of hosts made.
};

}  // namespace cohort::test
