// SPDX-License-Identifier: Apache-2.0
// The agent of a node of an elastic job: a rendezvous decides who is in each round.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "cohort/launch/agent.h"
#include "cohort/launch/rendezvous_thread.h"

namespace cohort::launch {

/// Joins the rendezvous at options.rdzv_endpoint, runs the rounds that it directs, and tells it how
/// they end.
class ElasticAgent : public Agent {
 public:
  using Agent::Agent;

 private:
  int run_job() override;
  void add_polls(std::vector<pollfd>& polls) const override;
  void handle_events() override;
  void wait_for_endpoint();
  void wait_for_round();
  std::optional<int> run_round();
  void report_failure();
  Directive stopped() const;
  int finish_job();
  int conclude_with(const Directive& end);

  std::unique_ptr<RendezvousThread> rendezvous_;
  std::optional<NodeInfo> node_;  // Of a round that was directed and not started.
  std::optional<Directive> end_;
  bool stop_received_ = false;
  bool failure_reported_ = false;
};

}  // namespace cohort::launch
