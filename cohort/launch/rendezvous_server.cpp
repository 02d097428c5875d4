// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/rendezvous_server.h"

#include <algorithm>
#include <fcntl.h>
#include <sys/socket.h>

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/message.h"

namespace cohort::launch {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr std::chrono::milliseconds kFinishTimeout{2000};
constexpr std::chrono::milliseconds kHandshakeTimeout{10'000};
constexpr std::chrono::milliseconds kStopTime{60'000};  // Beyond the grace.
constexpr std::chrono::milliseconds kMaxPollGap{1000};  // poll() runs four times a second.
constexpr size_t kMaxPending = 256;

std::string seconds(std::chrono::milliseconds duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

RendezvousServer::RendezvousServer(Fd listener, std::string master_addr, const RunOptions& options)
    : listener_(std::move(listener)),
      master_addr_(std::move(master_addr)),
      options_(options),
      job_id_(random_hex(8)),
      job_secret_(options.rdzv_secret.empty() ? random_hex(16) : ""),
      polled_at_(Clock::now()),
      awake_since_(polled_at_),
      too_few_since_(polled_at_),
      heartbeat_at_(polled_at_) {}

void RendezvousServer::add_polls(std::vector<pollfd>& polls) const {
  polls.push_back({listener_.get(), POLLIN, 0});
  for (const PendingConnection& connection : pending_) connection.line.add_polls(polls);
  for (const Node& node : nodes_) node.channel.add_polls(polls);
}

void RendezvousServer::poll() {
  // While this process was suspended it received nothing: that time does not count against nodes.
  const auto now = Clock::now();
  if (now - polled_at_ > kMaxPollGap) awake_since_ = now;
  polled_at_ = now;
  accept_connections();
  poll_pending();
  for (Node& node : nodes_) handle_messages(node);
  remove_lost_nodes();
  send_heartbeats();
  if (ended_) return;
  if (round_runs_) {
    check_round();
  } else {
    try_begin_round();
  }
}

// Unauthenticated peers can exhaust neither memory nor descriptors: the oldest is dropped first.
void RendezvousServer::accept_connections() {
  for (size_t i = 0; i < kMaxPending; ++i) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return;
    if (pending_.size() == kMaxPending) pending_.pop_front();
    PendingConnection& connection = pending_.emplace_back();
    connection.line = LineSocket(std::move(fd));
    connection.challenge = random_hex(16);
    connection.since = Clock::now();
    connection.line.send(challenge_line(connection.challenge));
  }
}

void RendezvousServer::poll_pending() {
  for (auto connection = pending_.begin(); connection != pending_.end();) {
    connection->line.poll();
    const auto line = connection->line.next();
    const bool over = (line && handle_hello(*connection, *line)) || !connection->line.open() ||
                      Clock::now() - connection->since > kHandshakeTimeout;
    connection = over ? pending_.erase(connection) : std::next(connection);
  }
}

// Returns whether the connection is no longer pending. A rejected peer closes it after reading the
// reason.
bool RendezvousServer::handle_hello(PendingConnection& connection, const std::string& line) {
  if (connection.rejected) return false;
  try {
    const Hello hello = parse_hello(line);
    const std::string rejection = rejection_reason(connection, hello);
    if (rejection.empty()) {
      accept(connection, hello);
      return true;
    }
    connection.line.send(rejection_line(rejection));
    connection.rejected = true;
    return false;
  } catch (const json::exception&) {
    return true;  // Not a launcher.
  }
}

// Returns why a node is rejected; empty if it is accepted. Without the secret it learns no setting.
std::string RendezvousServer::rejection_reason(const PendingConnection& connection,
                                               const Hello& hello) const {
  if (hello.version != kProtocolVersion)
    return "the rendezvous server runs another version of `cohort run`: install the same one on "
           "every node";
  if (!equal_secrets(hello.proof,
                     proof_of_node(options_.rdzv_secret, connection.challenge, hello))) {
    return std::string("--rdzv-secret-file: expected ") +
           (options_.rdzv_secret.empty() ? "none, as on the rendezvous server"
                                         : "the secret of the rendezvous server");
  }
  const auto differs = [](const std::string& flag, const std::string& ours,
                          const std::string& theirs) {
    return flag + ": expected " + ours + ", got " + theirs;
  };
  if (hello.id != options_.rdzv_id) return differs("--rdzv-id", options_.rdzv_id, hello.id);
  std::string rejection;
  const auto compare = [&](const std::string& flag, const std::string& ours,
                           const std::string& theirs) {
    if (ours != theirs) rejection += (rejection.empty() ? "" : "; ") + differs(flag, ours, theirs);
  };
  compare("--nnodes", options_.nnodes.text(), hello.nnodes);
  compare("--max-restarts", std::to_string(options_.max_restarts),
          std::to_string(hello.max_restarts));
  compare("--rdzv-conf keep_alive_interval", seconds_text(options_.keep_alive.interval),
          seconds_text(hello.keep_alive));
  return rejection.empty() ? "" : rejection + ": start every node of the job with the same values";
}

// A known session resumes over the new connection; any other begins.
void RendezvousServer::accept(PendingConnection& connection, const Hello& hello) {
  auto node = std::find_if(nodes_.begin(), nodes_.end(),
                           [&](const Node& known) { return known.name == hello.node; });
  if (node != nodes_.end() && node->session != hello.session) {
    remove(node, "restarted its launcher");
    node = nodes_.end();
  }
  const bool known = node != nodes_.end();
  if (!known) {
    node = nodes_.emplace(nodes_.end());
    node->name = hello.node;
    node->session = hello.session;
  }
  node->closed_since.reset();
  connection.line.send(
      line_of(Welcome{.proof = proof_of_server(options_.rdzv_secret, connection.challenge, hello),
                      .received = node->channel.received(),
                      .known = known}));
  node->channel.attach(std::move(connection.line), hello.received);
}

void RendezvousServer::handle_messages(Node& node) {
  node.channel.poll();
  while (const auto text = node.channel.next()) {
    const json message = json::parse(*text, nullptr, /*allow_exceptions=*/false);
    try {
      const std::string kind = message.at("kind");
      const bool of_this_round =
          message.contains("round") && static_cast<int64_t>(JsonField(message, "round")) == round_;
      if (kind == "join") {
        on_join(node, JsonField(message, "nproc"), JsonField(message, "port"));
      } else if (kind == "failed" && of_this_round) {
        on_failed(node, {.code = JsonField(message, "code"),
                         .meaning = JsonField(message, "meaning"),
                         .why = message.at("why"),
                         .decide_at = Clock::now()});
      } else if (kind == "done" && of_this_round && node.state == State::kInRound) {
        node.state = State::kDone;
        node.code = JsonField(message, "code");
      } else if (kind == "leave") {
        node.has_left = true;
      }
    } catch (const json::exception&) {
      node.has_left = true;  // Not a launcher.
      return;
    }
  }
}

void RendezvousServer::on_join(Node& node, int num_workers, int store_port) {
  if (num_workers < 1 || num_workers > kMostWorkers) {
    node.channel.send(
        text_of({{"kind", "end"},
                 {"code", kExitUsage},
                 {"why", "--nproc-per-node: expected 1 to " + std::to_string(kMostWorkers) +
                             ", got " + std::to_string(num_workers)}}));
    node.state = State::kNew;
    return;
  }
  join_order_.emplace(node.name, join_order_.size());
  const bool is_new = node.state == State::kNew;
  node.state = State::kReady;
  node.num_workers = num_workers;
  node.store_port = store_port;
  const auto in_round = std::count_if(nodes_.begin(), nodes_.end(), [](const Node& n) {
    return n.state == State::kInRound || n.state == State::kDone;
  });
  if (is_new && round_runs_ && in_round < options_.nnodes.max) stop_round("a node joined");
}

void RendezvousServer::on_failed(const Node& node, Failure failure) {
  if (!round_runs_) return;
  const bool consequence = failure.meaning == kExitLostPeer;
  if (failure_ && (failure_->meaning != kExitLostPeer || consequence)) return;
  failure.why = "node " + std::to_string(node.number) + ": " + failure.why;
  if (consequence) failure.decide_at += options_.keep_alive.limit() + milliseconds(1000);
  failure_ = std::move(failure);
}

// Returns why `node` is lost; empty if it is not.
std::string RendezvousServer::loss_reason(Node& node) const {
  const auto now = Clock::now();
  if (node.has_left) return "left";
  if (now - std::max(node.channel.last_byte_at(), awake_since_) > options_.keep_alive.limit())
    return "stopped responding";
  if (!node.channel.connected() && !node.closed_since) node.closed_since = now;
  if (node.closed_since && now - *node.closed_since > kReconnectTime) return "left";
  const bool stuck =
      node.state == State::kStopping && now - node.stopping_since > options_.grace + kStopTime;
  return stuck ? "did not stop its workers" : "";
}

void RendezvousServer::remove(std::list<Node>::iterator node, const std::string& why) {
  const bool in_round = node->state == State::kInRound || node->state == State::kDone;
  const std::string name = "node " + std::to_string(node->number);
  nodes_.erase(node);
  // A known failure that is not a consequence of this loss takes precedence.
  const bool explained = failure_ && failure_->meaning != kExitLostPeer;
  if (in_round && round_runs_ && !ended_ && !explained) stop_round(name + " " + why);
}

void RendezvousServer::remove_lost_nodes() {
  for (auto node = nodes_.begin(); node != nodes_.end();) {
    const auto here = node++;
    if (const std::string why = loss_reason(*here); !why.empty()) remove(here, why);
  }
}

void RendezvousServer::send_heartbeats() {
  const auto now = Clock::now();
  if (now < heartbeat_at_) return;
  heartbeat_at_ = now + options_.keep_alive.heartbeat_interval();
  for (Node& node : nodes_) node.channel.send_heartbeat();
}

void RendezvousServer::try_begin_round() {
  std::vector<Node*> members;
  bool stopping = false;
  bool has_host = false;
  for (Node& node : nodes_) {
    stopping |= node.state == State::kStopping;
    if (node.state != State::kReady) continue;
    has_host |= node.store_port != 0;
    members.push_back(&node);
  }
  const auto now = Clock::now();
  const int count = static_cast<int>(members.size());
  if (count < options_.nnodes.min) {
    enough_since_.reset();
    if (stopping) too_few_since_ = now;
    if (now - too_few_since_ >= options_.rdzv_timeout) {
      end_job(kExitLostPeer, "--nnodes: expected at least " + std::to_string(options_.nnodes.min) +
                                 " nodes within " + seconds(options_.rdzv_timeout) + ", got " +
                                 std::to_string(count));
    }
    return;
  }
  too_few_since_ = now;
  if (!enough_since_) enough_since_ = now;
  if (stopping || !has_host) return;
  if (count >= options_.nnodes.max || now - *enough_since_ >= options_.last_call_timeout)
    begin_round(members);
}

void RendezvousServer::begin_round(const std::vector<Node*>& members) {
  std::vector<Node*> chosen(members);
  std::sort(chosen.begin(), chosen.end(), [this](const Node* a, const Node* b) {
    const auto key = [this](const Node* n) {
      return std::pair(n->store_port == 0, join_order_.at(n->name));
    };
    return key(a) < key(b);
  });
  chosen.resize(std::min(chosen.size(), static_cast<size_t>(options_.nnodes.max)));
  int world_size = 0;
  for (const Node* node : chosen) world_size += node->num_workers;
  ++round_;
  round_runs_ = true;
  failure_.reset();
  enough_since_.reset();
  int base_rank = 0;
  for (size_t i = 0; i < chosen.size(); ++i) {
    Node& node = *chosen[i];
    node.number = static_cast<int>(i);
    node.state = State::kInRound;
    node.channel.send(text_of({{"kind", "round"},
                               {"round", round_},
                               {"node_rank", node.number},
                               {"nodes", chosen.size()},
                               {"base_rank", base_rank},
                               {"world_size", world_size},
                               {"master_addr", master_addr_},
                               {"master_port", chosen.front()->store_port},
                               {"restart", num_restarts_},
                               {"job_id", job_id_},
                               {"job_secret", job_secret_}}));
    base_rank += node.num_workers;
  }
}

void RendezvousServer::check_round() {
  if (failure_ && Clock::now() >= failure_->decide_at) return decide_failure();
  int code = 0;
  for (const Node& node : nodes_) {
    if (node.state == State::kInRound) return;
    if (node.state == State::kDone) code = std::max(code, node.code);
  }
  if (!failure_) end_job(code, "");
}

void RendezvousServer::decide_failure() {
  const Failure failure = *failure_;
  if (failure.meaning == kExitUsage || num_restarts_ >= options_.max_restarts) {
    return end_job(failure.code, failure.why);
  }
  ++num_restarts_;
  stop_round(failure.why + "; restart " + std::to_string(num_restarts_) + " of " +
             std::to_string(options_.max_restarts));
}

void RendezvousServer::stop_round(const std::string& why) {
  round_runs_ = false;
  failure_.reset();
  too_few_since_ = Clock::now();
  for (Node& node : nodes_) {
    if (node.state != State::kInRound && node.state != State::kDone) continue;
    node.state = State::kStopping;
    node.stopping_since = Clock::now();
    node.channel.send(text_of({{"kind", "stop"}, {"why", why}}));
  }
}

void RendezvousServer::end_job(int code, const std::string& why) {
  ended_ = true;
  for (Node& node : nodes_)
    node.channel.send(text_of({{"kind", "end"}, {"code", code}, {"why", why}}));
}

void RendezvousServer::finish(int code, const std::string& why) {
  if (!ended_) end_job(code, why);
  const auto end = Clock::now() + kFinishTimeout;
  // A socket closed with unread bytes would take back what was sent: wait until nodes close theirs.
  const auto is_gone = [this](Node& node) { return !loss_reason(node).empty(); };
  while (!nodes_.empty() && Clock::now() < end) {
    std::vector<pollfd> polls;
    add_polls(polls);
    ::poll(polls.data(), polls.size(), 50);
    accept_connections();
    poll_pending();
    for (Node& node : nodes_) handle_messages(node);
    nodes_.remove_if(is_gone);
  }
}

}  // namespace cohort::launch
