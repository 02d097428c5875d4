#include "cohort/launch/coordinator.h"

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

constexpr std::chrono::milliseconds kFarewell{2000};
constexpr std::chrono::milliseconds kHandshake{10'000};
constexpr std::chrono::milliseconds kStopTime{60'000};  // Beyond the grace.
constexpr std::chrono::milliseconds kStandstill{1000};  // Turns come four times a second.
constexpr size_t kMostGuests = 256;

std::string seconds(std::chrono::milliseconds duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

}  // namespace

Coordinator::Coordinator(Fd listener, std::string master_addr, const RunOptions& options)
    : listener_(std::move(listener)),
      master_addr_(std::move(master_addr)),
      options_(options),
      job_id_(random_hex(8)),
      job_secret_(options.rdzv_secret.empty() ? random_hex(16) : ""),
      turned_at_(Clock::now()),
      awake_since_(turned_at_),
      too_few_since_(turned_at_),
      beat_at_(turned_at_) {}

void Coordinator::add_polls(std::vector<pollfd>& polls) const {
  polls.push_back({listener_.get(), POLLIN, 0});
  for (const Guest& guest : guests_) guest.line.add_polls(polls);
  for (const Node& node : nodes_) node.channel.add_polls(polls);
}

void Coordinator::turn() {
  // While this process stood still nobody could be heard: that time is not theirs.
  const auto now = Clock::now();
  if (now - turned_at_ > kStandstill) awake_since_ = now;
  turned_at_ = now;
  accept_guests();
  listen_to_guests();
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

// Strangers can fill neither memory nor descriptors: who has waited longest goes first.
void Coordinator::accept_guests() {
  for (size_t i = 0; i < kMostGuests; ++i) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return;
    if (guests_.size() == kMostGuests) guests_.pop_front();
    Guest& guest = guests_.emplace_back();
    guest.line = LineSocket(std::move(fd));
    guest.challenge = random_hex(16);
    guest.since = Clock::now();
    guest.line.send(challenge_line(guest.challenge));
  }
}

void Coordinator::listen_to_guests() {
  for (auto guest = guests_.begin(); guest != guests_.end();) {
    guest->line.turn();
    const auto line = guest->line.next();
    const bool over = (line && hear(*guest, *line)) || !guest->line.open() ||
                      Clock::now() - guest->since > kHandshake;
    guest = over ? guests_.erase(guest) : std::next(guest);
  }
}

// Returns whether the guest is one no more. A refused one closes its connection when it has read
// why.
bool Coordinator::hear(Guest& guest, const std::string& line) {
  if (guest.refused) return false;
  try {
    const Hello hello = parse_hello(line);
    const std::string refusal = refusal_of(guest, hello);
    if (refusal.empty()) {
      admit(guest, hello);
      return true;
    }
    guest.line.send(refusal_line(refusal));
    guest.refused = true;
    return false;
  } catch (const json::exception&) {
    return true;  // Not one of us.
  }
}

// Returns why a node may not take part; empty if it may. Who has not the secret learns no setting.
std::string Coordinator::refusal_of(const Guest& guest, const Hello& hello) const {
  if (hello.version != kProtocolVersion)
    return "another version of the launcher coordinates this job";
  if (!equal_secrets(hello.proof, proof_of_node(options_.rdzv_secret, guest.challenge, hello))) {
    return std::string("--rdzv-secret-file: expected ") +
           (options_.rdzv_secret.empty() ? "none, as the coordinator was given"
                                         : "the secret that the coordinator was given");
  }
  const auto differs = [](const std::string& flag, const std::string& ours,
                          const std::string& theirs) {
    return flag + ": expected " + ours + ", got " + theirs;
  };
  if (hello.id != options_.rdzv_id) return differs("--rdzv-id", options_.rdzv_id, hello.id);
  std::string refusal;
  if (hello.nnodes != options_.nnodes.text()) {
    refusal = differs("--nnodes", options_.nnodes.text(), hello.nnodes);
  }
  if (hello.max_restarts != options_.max_restarts) {
    refusal += (refusal.empty() ? "" : "; ") + differs("--max-restarts",
                                                       std::to_string(options_.max_restarts),
                                                       std::to_string(hello.max_restarts));
  }
  return refusal.empty() ? "" : refusal + ": every node of the job is started with the same";
}

// A session that is known goes on over the new connection; any other begins.
void Coordinator::admit(Guest& guest, const Hello& hello) {
  auto node = std::find_if(nodes_.begin(), nodes_.end(),
                           [&](const Node& known) { return known.name == hello.node; });
  if (node != nodes_.end() && node->session != hello.session) {
    lose(node, "left and came back");
    node = nodes_.end();
  }
  const bool known = node != nodes_.end();
  if (!known) {
    node = nodes_.emplace(nodes_.end());
    node->name = hello.node;
    node->session = hello.session;
  }
  node->closed_since.reset();
  guest.line.send(
      line_of(Welcome{.proof = proof_of_coordinator(options_.rdzv_secret, guest.challenge, hello),
                      .received = node->channel.received(),
                      .known = known}));
  node->channel.attach(std::move(guest.line), hello.received);
}

void Coordinator::listen_to(Node& node) {
  node.channel.turn();
  while (const auto text = node.channel.next()) {
    const json message = json::parse(*text, nullptr, /*allow_exceptions=*/false);
    try {
      const std::string kind = message.at("say");
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
      node.has_left = true;  // Not one of us.
      return;
    }
  }
}

void Coordinator::on_join(Node& node, int num_workers, int store_port) {
  if (num_workers < 1 || num_workers > kMostWorkers) {
    node.channel.send(
        text_of({{"say", "end"},
                 {"code", kExitUsage},
                 {"why", "--nproc-per-node: expected 1 to " + std::to_string(kMostWorkers) +
                             ", got " + std::to_string(num_workers)}}));
    node.state = State::kNew;
    return;
  }
  seniority_.emplace(node.name, seniority_.size());
  const bool is_new = node.state == State::kNew;
  node.state = State::kReady;
  node.num_workers = num_workers;
  node.store_port = store_port;
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
  if (consequence) failure.decide_at += options_.keep_alive.limit() + milliseconds(1000);
  failure_ = std::move(failure);
}

// Returns why `node` counts no more; empty if it does.
std::string Coordinator::why_lost(Node& node) const {
  const auto now = Clock::now();
  if (node.has_left) return "left";
  if (now - std::max(node.channel.heard(), awake_since_) > options_.keep_alive.limit())
    return "fell silent";
  if (!node.channel.connected() && !node.closed_since) node.closed_since = now;
  if (node.closed_since && now - *node.closed_since > kReturn) return "left";
  const bool stuck =
      node.state == State::kStopping && now - node.stopping_since > options_.grace + kStopTime;
  return stuck ? "did not stop its workers" : "";
}

void Coordinator::lose(std::list<Node>::iterator node, const std::string& why) {
  const bool in_round = node->state == State::kInRound || node->state == State::kDone;
  const std::string name = "node " + std::to_string(node->number);
  nodes_.erase(node);
  // A failure that is known and no consequence of this loss goes first.
  const bool explained = failure_ && failure_->meaning != kExitLostPeer;
  if (in_round && round_runs_ && !ended_ && !explained) stop_round(name + " " + why);
}

void Coordinator::drop_lost_nodes() {
  for (auto node = nodes_.begin(); node != nodes_.end();) {
    const auto here = node++;
    if (const std::string why = why_lost(*here); !why.empty()) lose(here, why);
  }
}

void Coordinator::heartbeat() {
  const auto now = Clock::now();
  if (now < beat_at_) return;
  beat_at_ = now + options_.keep_alive.beat();
  for (Node& node : nodes_) node.channel.beat();
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
  if (count >= options_.nnodes.max || now - *enough_since_ >= options_.last_call_timeout)
    begin_round(members);
}

void Coordinator::begin_round(const std::vector<Node*>& members) {
  std::vector<Node*> chosen(members);
  std::sort(chosen.begin(), chosen.end(), [this](const Node* a, const Node* b) {
    const auto place = [this](const Node* n) {
      return std::pair(n->store_port == 0, seniority_.at(n->name));
    };
    return place(a) < place(b);
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
    node.channel.send(text_of({{"say", "round"},
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
    node.stopping_since = Clock::now();
    node.channel.send(text_of({{"say", "stop"}, {"why", why}}));
  }
}

void Coordinator::end_job(int code, const std::string& why) {
  ended_ = true;
  for (Node& node : nodes_)
    node.channel.send(text_of({{"say", "end"}, {"code", code}, {"why", why}}));
}

void Coordinator::finish(int code, const std::string& why) {
  if (!ended_) end_job(code, why);
  const auto end = Clock::now() + kFarewell;
  // A socket closed with unread bytes would take back what was sent: wait until nodes close theirs.
  const auto is_gone = [this](Node& node) { return !why_lost(node).empty(); };
  while (!nodes_.empty() && Clock::now() < end) {
    std::vector<pollfd> polls;
    add_polls(polls);
    ::poll(polls.data(), polls.size(), 50);
    accept_guests();
    listen_to_guests();
    for (Node& node : nodes_) listen_to(node);
    nodes_.remove_if(is_gone);
  }
}

}  // namespace cohort::launch
