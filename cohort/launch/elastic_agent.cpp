// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/elastic_agent.h"

#include <netdb.h>
#include <sys/socket.h>
#include <utility>

#include "cohort/base/program.h"
#include "cohort/base/tcp.h"
#include "cohort/launch/endpoint.h"
#include "cohort/launch/report.h"

namespace cohort::launch {
namespace {

constexpr int kResolvePollMs = 500;
constexpr std::chrono::seconds kPatience{5};

}  // namespace

void ElasticAgent::add_polls(std::vector<pollfd>& polls) const {
  polls.push_back({rendezvous_->fd(), POLLIN, 0});
}

// A host's name may come to resolve later: a pod's does once the pod has an address.
void ElasticAgent::wait_for_endpoint() {
  const Endpoint endpoint = parse_endpoint(options_.rdzv_endpoint);
  const auto deadline = Clock::now() + options_.rdzv_timeout;
  for (bool told = false; Clock::now() < deadline && !stop_requested(); told = true) {
    int error = 0;
    resolve(endpoint.host, endpoint.port, SOCK_STREAM, error);
    if (error == 0) return;
    if (!told) {
      print_line("--rdzv-endpoint " + endpoint.text() + " does not resolve yet: " +
                 ::gai_strerror(error) + "; waiting until --rdzv-timeout");
      err_.flush();
    }
    pollfd signal{signals_.fd(), POLLIN, 0};
    ::poll(&signal, 1, kResolvePollMs);
    while (const auto arrived = signals_.next()) handle_signal(*arrived);
  }
}

// Says for what it waits, unless the others come at once.
void ElasticAgent::wait_for_round() {
  std::optional<Clock::time_point> tell_at = Clock::now() + kPatience;
  while (!node_ && !end_ && !stop_received_ && !stop_requested()) {
    run_once(tell_at);
    if (node_ || !tell_at || Clock::now() < *tell_at) continue;
    tell_at.reset();
    print_line("waiting at " + options_.rdzv_endpoint + " for a round of " +
               options_.nnodes.text() + " nodes (--nnodes); too few for " +
               seconds_text(options_.rdzv_timeout) + " (--rdzv-timeout) end the job");
    err_.flush();
  }
}

int ElasticAgent::run_job() {
  wait_for_endpoint();
  if (stop_requested()) return conclude_with(stopped());
  rendezvous_ = std::make_unique<RendezvousThread>(options_);
  while (true) {
    node_.reset();
    stop_received_ = false;
    failure_reported_ = false;
    if (rendezvous_->hosts()) bind_store();
    rendezvous_->join(rendezvous_->hosts() ? store_.port : 0);
    wait_for_round();
    if (end_ || stop_requested()) return finish_job();
    if (!node_) continue;  // The round was cancelled before it started.
    start_round(*std::exchange(node_, std::nullopt));
    if (const auto code = run_round()) return *code;
  }
}

// Runs one round of an elastic job; returns the job's exit code, or nothing if another round
// follows.
std::optional<int> ElasticAgent::run_round() {
  while (group_->running()) {
    run_once();
    if (stop_received_ || end_)
      group_->stop(options_.grace, end_ ? "the job ended: " + end_->why : "a new round begins");
    report_failure();
  }
  end_group();
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!stop_received_ && !end_) {
    if (job.root_cause && !failure_reported_) {
      rendezvous_->send_failed(job, describe(*job.root_cause, log_dir_));
    } else if (!job.root_cause && job.exit_code <= kExitStopped) {
      rendezvous_->send_done(job.exit_code);
    }
  }
  const bool killed_by_request = !job.root_cause && job.exit_code > 128;
  while (!stop_received_ && !end_ && !killed_by_request && num_stop_requests_ < 2 && !must_leave())
    run_once(leave_at_);
  // The node whose worker ended the job reports more than the others know.
  const bool own_failure = job.root_cause && (!stop_received_ || stop_requested());
  if (end_ && own_failure && end_->code == job.exit_code) {
    rendezvous_->finish(end_->code, end_->why);
    return conclude(job);
  }
  if (!end_ && !stop_requested()) return std::nullopt;
  return finish_job();
}

// Reports a failure that is not a consequence while the other workers are still stopping.
void ElasticAgent::report_failure() {
  if (failure_reported_ || stop_received_ || end_) return;
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!job.root_cause || job.meaning == kExitLostPeer) return;
  failure_reported_ = true;
  rendezvous_->send_failed(job, describe(*job.root_cause, log_dir_));
}

int ElasticAgent::finish_job() {
  const int code = end_ ? end_->code : 128 + stop_signal_;
  const std::string why =
      end_ ? end_->why
           : "the rendezvous server's node was stopped by signal " + signal_name(stop_signal_);
  rendezvous_->finish(code, why);
  if (end_ && code == kExitOk && !group_)
    print_line("the job ended before a round admitted this node");
  return conclude_with(end_ ? *end_ : stopped());
}

Directive ElasticAgent::stopped() const {
  return {Directive::Kind::kEnd,
          {},
          128 + stop_signal_,
          "stopped by signal " + signal_name(stop_signal_)};
}

void ElasticAgent::handle_events() {
  while (const auto directive = rendezvous_->next()) {
    if (directive->kind == Directive::Kind::kRound) {
      node_ = directive->node;
      print_line("node " + std::to_string(node_->node_rank) + " of " +
                 std::to_string(node_->num_nodes) + ", " + std::to_string(node_->world_size) +
                 " ranks");
    } else if (directive->kind == Directive::Kind::kStop) {
      node_.reset();
      stop_received_ = true;
      print_line("new round: " + directive->why);
    } else {
      end_ = *directive;
    }
  }
}

int ElasticAgent::conclude_with(const Directive& end) {
  return finish(end.why.empty() || !end_ ? end.why : "the job ended: " + end.why, end.code);
}

}  // namespace cohort::launch
