#include "cohort/launch/member.h"

#include <cerrno>
#include <utility>

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/coordinator.h"
#include "cohort/launch/message.h"

namespace cohort::launch {
namespace {

using nlohmann::json;

NodePlace place_of(const json& message) {
  NodePlace place;
  place.node_rank = JsonField(message, "node_rank");
  place.num_nodes = JsonField(message, "nodes");
  place.base_rank = JsonField(message, "base_rank");
  place.world_size = JsonField(message, "world_size");
  place.master_addr = message.at("master_addr");
  place.master_port = JsonField(message, "master_port");
  place.restart_count = JsonField(message, "restart");
  place.round = JsonField(message, "round");
  place.job_id = printable(message.at("job_id"));
  place.job_secret = printable(message.value("job_secret", ""));
  return place;
}

}  // namespace

Member::Member(const Endpoint& endpoint, const RunOptions& options)
    : endpoint_(endpoint), options_(options), lost_since_(Clock::now()), beat_at_(lost_since_) {
  hello_.node = random_hex(16);
  hello_.id = options_.rdzv_id;
  hello_.nnodes = options_.nnodes.text();
  hello_.max_restarts = options_.max_restarts;
  begin_session();
}

void Member::begin_session() {
  ++hello_.session;
  channel_ = MessageChannel();
  welcomed_ = false;
}

void Member::join(int store_port) {
  channel_.send(
      text_of({{"say", "join"}, {"nproc", options_.nproc_per_node}, {"port", store_port}}));
}

void Member::tell_done(int code) {
  channel_.send(text_of({{"say", "done"}, {"round", round_}, {"code", code}}));
}

void Member::tell_failed(const Verdict& verdict, const std::string& why) {
  channel_.send(text_of({{"say", "failed"},
                         {"round", round_},
                         {"code", verdict.exit_code},
                         {"meaning", static_cast<int>(verdict.meaning)},
                         {"why", why}}));
}

void Member::leave() {
  over_ = true;
  channel_.send(text_of({{"say", "leave"}}));
  channel_.disconnect();
  line_.close();
}

void Member::add_polls(std::vector<pollfd>& polls) const {
  line_.add_polls(polls);
  channel_.add_polls(polls);
}

void Member::turn() {
  if (over_) return;
  if (channel_.connected()) {
    talk();
  } else if (line_.open()) {
    greet();
  } else {
    connect();
  }
}

void Member::note_loss() {
  lost_since_ = Clock::now();
  refused_since_.reset();
}

void Member::connect() {
  int error = 0;
  line_ = LineSocket(try_to_connect(endpoint_, error));
  connected_at_ = Clock::now();
  challenge_.clear();
  if (error != ECONNREFUSED) {
    refused_since_.reset();
  } else if (!refused_since_) {
    refused_since_ = connected_at_;
  }
}

// A coordinator that accepts and says nothing may be suspended: another connection asks again.
void Member::greet() {
  line_.turn();
  while (line_.open() && !channel_.connected()) {
    const auto line = line_.next();
    if (!line) break;
    hear(*line);
  }
  if (Clock::now() - connected_at_ > options_.keep_alive.interval) line_.close();
}

void Member::hear(const std::string& line) {
  try {
    const json message = json::parse(line);
    const std::string kind = message.at("say");
    if (kind == "end") {
      to_give_ = end(JsonField(message, "code"), printable(message.at("why")));
    } else if (kind == "challenge" && challenge_.empty()) {
      challenge_ = message.at("nonce");
      hello_.nonce = random_hex(16);
      hello_.received = channel_.received();
      hello_.proof = proof_of_node(options_.rdzv_secret, challenge_, hello_);
      line_.send(line_of(hello_));
    } else if (kind == "welcome" && !challenge_.empty()) {
      on_welcome({.proof = message.at("proof"),
                  .received = JsonField(message, "received"),
                  .known = message.at("known")});
    } else {
      to_give_ = end_by("does not speak as a launcher does");
    }
  } catch (const json::exception&) {
    to_give_ = end_by("does not speak as a launcher does");
  }
}

void Member::on_welcome(const Welcome& welcome) {
  const std::string expected = proof_of_coordinator(options_.rdzv_secret, challenge_, hello_);
  if (!equal_secrets(welcome.proof, expected)) {
    to_give_ = end(kExitUsage, "--rdzv-secret-file: the coordinator at " + endpoint_.text() +
                                   " has another secret");
    return;
  }
  if (welcomed_ && !welcome.known) {
    line_.close();
    begin_session();
    to_give_ = Order{Order::Kind::kStop,
                     {},
                     0,
                     "the coordinator at " + endpoint_.text() +
                         " heard nothing from this node for too long, and gave it up"};
    return;
  }
  channel_.attach(std::move(line_), welcome.received);
  welcomed_ = was_welcomed_ = true;
  refused_since_.reset();
}

void Member::talk() {
  channel_.turn();
  const auto now = Clock::now();
  if (now - channel_.heard() > options_.keep_alive.interval) channel_.disconnect();
  if (!channel_.connected()) return note_loss();
  if (now < beat_at_) return;
  beat_at_ = now + options_.keep_alive.beat();
  channel_.beat();
}

Order Member::end(int code, const std::string& why) {
  leave();
  return {Order::Kind::kEnd, {}, code, why};
}

// The job is lost with its coordinator.
Order Member::end_by(const std::string& how) {
  return end(kExitLostPeer, "the coordinator at " + endpoint_.text() + " " + how);
}

Order Member::obey(const std::string& text) {
  try {
    const json message = json::parse(text);
    const std::string kind = message.at("say");
    if (kind == "round") {
      round_ = JsonField(message, "round");
      return {Order::Kind::kRound, place_of(message), 0, ""};
    }
    if (kind == "stop") return {Order::Kind::kStop, {}, 0, printable(message.at("why"))};
    if (kind == "end") return end(JsonField(message, "code"), printable(message.at("why")));
  } catch (const json::exception&) {
  }
  return end_by("does not speak as a launcher does");
}

// Returns how the coordinator was lost for good; empty if it was not.
std::string Member::why_lost() const {
  if (channel_.connected()) return "";
  const auto now = Clock::now();
  if (was_welcomed_ && refused_since_ && now - *refused_since_ > kReturn)
    return "closed the connection";
  if (now - lost_since_ < options_.rdzv_timeout) return "";
  return was_welcomed_ ? "fell silent" : "did not answer in time";
}

std::optional<Order> Member::next() {
  if (to_give_) return std::exchange(to_give_, std::nullopt);
  if (over_) return std::nullopt;
  if (const auto text = channel_.next()) return obey(*text);
  const std::string how = why_lost();
  if (how.empty()) return std::nullopt;
  return end_by(how);
}

}  // namespace cohort::launch
