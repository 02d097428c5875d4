// SPDX-License-Identifier: Apache-2.0
#include "tests/support/namespaces.h"

#include <cstdlib>
#include <stdexcept>
#include <unistd.h>

namespace cohort::test {
namespace {

void ip(const std::string& arguments) {
  const std::string command = "ip " + arguments;
  if (std::system(command.c_str()) != 0)
    throw std::runtime_error("expected to succeed: " + command);
}

}  // namespace

Namespaces::Namespaces() = default;

// The delegation makes the object whole, so that its destructor removes what was made if a later
// step fails.
Namespaces::Namespaces(int count) : Namespaces() {
  const std::string first = "ip netns add " + hub();
  if (std::system(first.c_str()) != 0) {
    throw std::runtime_error(
        "expected root with CAP_SYS_ADMIN and CAP_NET_ADMIN, and iproute2: \"" + first +
        "\" did not succeed");
  }
  has_hub_ = true;
  ip("-n " + hub() + " link add bridge type bridge");
  ip("-n " + hub() + " link set bridge up");
  for (int i = 0; i < count; ++i) {
    const std::string cable = "cable" + std::to_string(i);
    ip("netns add " + name(i));
    ++count_;
    ip("-n " + hub() + " link add " + cable + " type veth peer name eth0 netns " + name(i));
    ip("-n " + hub() + " link set " + cable + " master bridge up");
    ip("-n " + name(i) + " addr add " + address(i) + "/24 dev eth0");
    ip("-n " + name(i) + " link set eth0 up");
    ip("-n " + name(i) + " link set lo up");
  }
}

Namespaces::~Namespaces() {
  for (int i = 0; i < count_; ++i) {
    static_cast<void>(std::system(("ip netns del " + name(i)).c_str()) == 0);
  }
  if (has_hub_) static_cast<void>(std::system(("ip netns del " + hub()).c_str()) == 0);
}

std::string Namespaces::hub() const {
  return "cohort-" + std::to_string(::getpid()) + "-hub";
}

std::string Namespaces::name(int index) const {
  return "cohort-" + std::to_string(::getpid()) + "-" + std::to_string(index);
}

std::string Namespaces::address(int index) {
  return "10.77.0." + std::to_string(index + 1);
}

std::vector<std::string> Namespaces::on(int index, const std::vector<std::string>& command) const {
  std::vector<std::string> words{"ip", "netns", "exec", name(index)};
  words.insert(words.end(), command.begin(), command.end());
  return words;
}

void Namespaces::unplug(int index) const {
  ip("-n " + hub() + " link set cable" + std::to_string(index) + " down");
}

void Namespaces::plug(int index) const {
  ip("-n " + hub() + " link set cable" + std::to_string(index) + " up");
}

}  // namespace cohort::test
