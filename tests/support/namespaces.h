// Several hosts on one machine: network namespaces joined by a bridge.
#pragma once
#include <string>
#include <vector>

namespace cohort::test {

/// `count` hosts with addresses 10.77.0.1, 10.77.0.2 and so on, in namespaces of this process.
/// Needs root and `ip`; throws std::runtime_error that says what is missing. Removed at the end.
class Namespaces {
 public:
  explicit Namespaces(int count);
  ~Namespaces();
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  /// Returns `command` as it is run on host `index`; it replaces itself, so its pid stays.
  std::vector<std::string> on(int index, const std::vector<std::string>& command) const;
  static std::string address(int index);
  /// Cuts the host's cable without a word, as a pulled plug does.
  void unplug(int index) const;

 private:
  std::string name(int index) const;
  std::string hub() const;

  int count_;
};

}  // namespace cohort::test
