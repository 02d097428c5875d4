// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stop_request.h"

#include <array>
#include <atomic>
#include <csignal>

namespace cohort {
namespace {

constexpr std::array kSignals = {SIGTERM, SIGINT, SIGHUP};
std::atomic<int> received{0};
std::array<struct sigaction, kSignals.size()> earlier{};
static_assert(std::atomic<int>::is_always_lock_free, "it is written by a signal handler");

void note(int signal) {
  received = signal;
}

}  // namespace

StopRequest::StopRequest() {
  received = 0;
  struct sigaction action {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    // A shell and the kernel each send one SIGHUP when a terminal goes.
    const bool ends_the_program_next = kSignals[i] != SIGHUP;
    action.sa_flags = SA_RESTART | (ends_the_program_next ? static_cast<int>(SA_RESETHAND) : 0);
    sigaction(kSignals[i], &action, &earlier[i]);
    const bool outlives_terminal = kSignals[i] == SIGHUP && earlier[i].sa_handler == SIG_IGN;
    if (outlives_terminal) sigaction(SIGHUP, &earlier[i], nullptr);  // nohup
  }
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &earlier[i], nullptr);
}

int StopRequest::signal() const {
  return received;
}

}  // namespace cohort
