#include "cohort/launch/coordinator.h"

#include <algorithm>
#include <fcntl.h>
#include <sys/socket.h>

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
#include "cohort/launch/message.h"

namespace cohort::launch {
namespace {

using nlohmann::json;

constexpr std::chrono::milliseconds kLastCall{1000};  // For more nodes, once there are enough.
constexpr std::chrono::milliseconds kSettle{6000};    // Longer than a silent node is believed.
constexpr std::chrono::milliseconds kFarewell{2000};

std::string seconds(std::chrono::milliseconds duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

Coordinator::Coordinator(Fd listener, std::string master_addr, const RunOptions& options)
    : listener_(std::move(listener)),
      master_addr_(std::move(master_addr)),
      options_(options),
      too_few_since_(Clock::now()),
      beat_at_(Clock::now()) {}

void Coordinator::add_polls(std::vector<pollfd>& polls) const {
  polls.push_back({listener_.get(), POLLIN, 0});
  for (const Node& node : nodes_) node.line.add_polls(polls);
}

void Coordinator::turn() {
  accept_nodes();
  for (Node& node : nodes_) listen_to(node);
  drop_lost_nodes();
  heartbeat();
  if (ended_) return;
  if (round_runs_) {
    watch_round();
  } else {
    gather();
  }
}

void Coordinator::accept_nodes() {
  while (true) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return;
    nodes_.emplace_back().line = LineSocket(std::move(fd));
  }
}

void Coordinator::listen_to(Node& node) {
  node.line.turn();
  while (const auto line = node.line.next()) {
    const json message = json::parse(*line, nullptr, /*allow_exceptions=*/false);
    try {
      const std::string kind = message.at("say");
      const bool of_this_round =
          message.contains("round") && static_cast<int64_t>(JsonField(message, "round")) == round_;
      if (kind == "join") {
        on_join(node,
                {.version = JsonField(message, "version"),
                 .id = message.at("id"),
                 .nnodes = message.value("nnodes", std::string()),  // Version 1 had no settings.
                 .max_restarts = message.contains("max_restarts")
                                     ? static_cast<int>(JsonField(message, "max_restarts"))
                                     : 0,
                 .num_workers = JsonField(message, "nproc"),
                 .store_port = JsonField(message, "port")});
      } else if (kind == "failed" && of_this_round) {
        on_failed(node, {.code = JsonField(message, "code"),
                         .meaning = JsonField(message, "meaning"),
                         .why = message.at("why"),
                         .decide_at = Clock::now()});
      } else if (kind == "done" && of_this_round && node.state == State::kInRound) {
        node.state = State::kDone;
        node.code = JsonField(message, "code");
      }
    } catch (const json::exception&) {
      node.line.close();  // Not one of us.
      return;
    }
  }
}

// Returns why a node may not take part; empty if it may.
std::string Coordinator::refusal_of(const Joining& joining) const {
  if (joining.version != kProtocolVersion)
    return "another version of the launcher coordinates this job";
  if (joining.num_workers < 1) return "a node needs a worker";
  if (joining.num_workers > kMostWorkers)
    return "a node has " + std::to_string(kMostWorkers) + " workers at most";
  const auto differs = [](const std::string& flag, const std::string& ours,
                          const std::string& theirs) {
    return flag + ": expected " + ours + ", got " + theirs;
  };
  if (joining.id != options_.rdzv_id) return differs("--rdzv-id", options_.rdzv_id, joining.id);
  std::string refusal;
  if (joining.nnodes != options_.nnodes.text()) {
    refusal = differs("--nnodes", options_.nnodes.text(), joining.nnodes);
  }
  if (joining.max_restarts != options_.max_restarts) {
    refusal += (refusal.empty() ? "" : "; ") + differs("--max-restarts",
                                                       std::to_string(options_.max_restarts),
                                                       std::to_string(joining.max_restarts));
  }
  return refusal.empty() ? "" : refusal + ": every node of the job is started with the same";
}

void Coordinator::on_join(Node& node, const Joining& joining) {
  if (const std::string refusal = refusal_of(joining); !refusal.empty()) {
    node.line.send(text_of({{"say", "end"}, {"code", kExitUsage}, {"why", refusal}}));
    node.state = State::kNew;
    return;
  }
  const bool is_new = node.state == State::kNew;
  node.state = State::kReady;
  node.num_workers = joining.num_workers;
  node.store_port = joining.store_port;
  const auto in_round = std::count_if(nodes_.begin(), nodes_.end(), [](const Node& n) {
    return n.state == State::kInRound || n.state == State::kDone;
  });
  if (is_new && round_runs_ && in_round < options_.nnodes.max) stop_round("a node joined");
}

void Coordinator::on_failed(const Node& node, Failure failure) {
  if (!round_runs_) return;
  const bool consequence = failure.meaning == kExitLostPeer;
  if (failure_ && (failure_->meaning != kExitLostPeer || consequence)) return;
  failure.why = "node " + std::to_string(node.number) + ": " + failure.why;
  if (consequence) failure.decide_at += kSettle;
  failure_ = std::move(failure);
}

void Coordinator::drop_lost_nodes() {
  const auto now = Clock::now();
  for (auto node = nodes_.begin(); node != nodes_.end();) {
    const bool silent = now - node->line.heard() > kSilence;
    if (node->line.open() && !silent) {
      ++node;
      continue;
    }
    const bool in_round = node->state == State::kInRound || node->state == State::kDone;
    const std::string name = "node " + std::to_string(node->number);
    nodes_.erase(node++);
    // A failure that is known and no consequence of this loss goes first.
    const bool explained = failure_ && failure_->meaning != kExitLostPeer;
    if (in_round && round_runs_ && !ended_ && !explained) {
      stop_round(name + (silent ? " fell silent" : " left"));
    }
  }
}

void Coordinator::heartbeat() {
  const auto now = Clock::now();
  if (now < beat_at_) return;
  beat_at_ = now + kHeartbeat;
  for (Node& node : nodes_) node.line.send(text_of({{"say", "alive"}}));
}

void Coordinator::gather() {
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
  if (count >= options_.nnodes.max || now - *enough_since_ >= kLastCall) begin_round(members);
}

void Coordinator::begin_round(const std::vector<Node*>& members) {
  std::vector<Node*> chosen(members);
  std::stable_partition(chosen.begin(), chosen.end(),
                        [](const Node* n) { return n->store_port != 0; });
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
    node.line.send(text_of({{"say", "round"},
                            {"round", round_},
                            {"node_rank", node.number},
                            {"nodes", chosen.size()},
                            {"base_rank", base_rank},
                            {"world_size", world_size},
                            {"master_addr", master_addr_},
                            {"master_port", chosen.front()->store_port},
                            {"restart", num_restarts_}}));
    base_rank += node.num_workers;
  }
}

void Coordinator::watch_round() {
  if (failure_ && Clock::now() >= failure_->decide_at) return decide_failure();
  int code = 0;
  for (const Node& node : nodes_) {
    if (node.state == State::kInRound) return;
    if (node.state == State::kDone) code = std::max(code, node.code);
  }
  if (!failure_) end_job(code, "");
}

void Coordinator::decide_failure() {
  const Failure failure = *failure_;
  if (failure.meaning == kExitUsage || num_restarts_ >= options_.max_restarts) {
    return end_job(failure.code, failure.why);
  }
  ++num_restarts_;
  stop_round(failure.why + "; restart " + std::to_string(num_restarts_) + " of " +
             std::to_string(options_.max_restarts));
}

void Coordinator::stop_round(const std::string& why) {
  round_runs_ = false;
  failure_.reset();
  too_few_since_ = Clock::now();
  for (Node& node : nodes_) {
    if (node.state != State::kInRound && node.state != State::kDone) continue;
    node.state = State::kStopping;
    node.line.send(text_of({{"say", "stop"}, {"why", why}}));
  }
}

void Coordinator::end_job(int code, const std::string& why) {
  ended_ = true;
  for (Node& node : nodes_) node.line.send(text_of({{"say", "end"}, {"code", code}, {"why", why}}));
}

void Coordinator::finish(int code, const std::string& why) {
  if (!ended_) end_job(code, why);
  const auto end = Clock::now() + kFarewell;
  // A socket closed with unread bytes would take back what was sent: wait until nodes close theirs.
  while (!nodes_.empty() && Clock::now() < end) {
    std::vector<pollfd> polls;
    for (const Node& node : nodes_) node.line.add_polls(polls);
    ::poll(polls.data(), polls.size(), 50);
    for (Node& node : nodes_) node.line.turn();
    nodes_.remove_if([](const Node& node) { return !node.line.open(); });
  }
}

}  // namespace cohort::launch
