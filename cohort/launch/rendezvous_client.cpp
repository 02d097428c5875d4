// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/rendezvous_client.h"

#include <cerrno>
#include <utility>

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/message.h"
#include "cohort/launch/rendezvous_server.h"

namespace cohort::launch {
namespace {

using nlohmann::json;

NodeInfo node_info_of(const json& message) {
  NodeInfo node;
  node.node_rank = JsonField(message, "node_rank");
  node.num_nodes = JsonField(message, "nodes");
  node.base_rank = JsonField(message, "base_rank");
  node.world_size = JsonField(message, "world_size");
  node.master_addr = message.at("master_addr");
  node.master_port = JsonField(message, "master_port");
  node.restart_count = JsonField(message, "restart");
  node.round = JsonField(message, "round");
  node.job_id = printable(message.at("job_id"));
  node.job_secret = printable(message.value("job_secret", ""));
  return node;
}

}  // namespace

RendezvousClient::RendezvousClient(const Endpoint& endpoint, const RunOptions& options)
    : endpoint_(endpoint),
      options_(options),
      lost_since_(Clock::now()),
      heartbeat_at_(lost_since_) {
  hello_.node = random_hex(16);
  hello_.id = options_.rdzv_id;
  hello_.nnodes = options_.nnodes.text();
  hello_.max_restarts = options_.max_restarts;
  hello_.keep_alive = options_.keep_alive.interval;
  begin_session();
}

void RendezvousClient::begin_session() {
  ++hello_.session;
  channel_ = MessageChannel();
  welcomed_ = false;
}

void RendezvousClient::join(int store_port) {
  channel_.send(
      text_of({{"kind", "join"}, {"nproc", options_.nproc_per_node}, {"port", store_port}}));
}

void RendezvousClient::send_done(int code) {
  channel_.send(text_of({{"kind", "done"}, {"round", round_}, {"code", code}}));
}

void RendezvousClient::send_failed(const JobOutcome& job, const std::string& why) {
  channel_.send(text_of({{"kind", "failed"},
                         {"round", round_},
                         {"code", job.exit_code},
                         {"meaning", static_cast<int>(job.meaning)},
                         {"why", why}}));
}

void RendezvousClient::leave() {
  over_ = true;
  channel_.send(text_of({{"kind", "leave"}}));
  channel_.disconnect();
  line_.close();
}

void RendezvousClient::add_polls(std::vector<pollfd>& polls) const {
  line_.add_polls(polls);
  channel_.add_polls(polls);
}

void RendezvousClient::poll() {
  if (over_) return;
  if (channel_.connected()) {
    poll_channel();
  } else if (line_.open()) {
    poll_handshake();
  } else {
    connect();
  }
}

void RendezvousClient::on_disconnect() {
  lost_since_ = Clock::now();
  refused_since_.reset();
}

void RendezvousClient::connect() {
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

// A rendezvous server that accepts and sends nothing may be suspended: the next attempt retries.
void RendezvousClient::poll_handshake() {
  line_.poll();
  while (line_.open() && !channel_.connected()) {
    const auto line = line_.next();
    if (!line) break;
    handle_handshake(*line);
  }
  if (Clock::now() - connected_at_ > options_.keep_alive.interval) line_.close();
}

void RendezvousClient::handle_handshake(const std::string& line) {
  try {
    const json message = json::parse(line);
    const std::string kind = message.at("kind");
    if (kind == "end") {
      reject(printable(message.at("why")));
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
      pending_ = end_lost("sent a message that is not part of the protocol");
    }
  } catch (const json::exception&) {
    pending_ = end_lost("sent a message that is not part of the protocol");
  }
}

// A peer that says so has not proved to know the secret: it decides no exit code, and ends no workers.
void RendezvousClient::reject(const std::string& why) {
  if (was_welcomed_) return line_.close();
  pending_ = end(
      kExitUsage,
      why.empty() ? "the rendezvous server at " + endpoint_.text() + " rejected this node" : why);
}

void RendezvousClient::on_welcome(const Welcome& welcome) {
  const std::string expected = proof_of_server(options_.rdzv_secret, challenge_, hello_);
  if (!equal_secrets(welcome.proof, expected)) {
    pending_ = end(kExitUsage, "--rdzv-secret-file: the rendezvous server at " + endpoint_.text() +
                                   " has a different secret");
    return;
  }
  if (welcomed_ && !welcome.known) {
    line_.close();
    begin_session();
    pending_ = Directive{Directive::Kind::kStop,
                         {},
                         0,
                         "the rendezvous server at " + endpoint_.text() +
                             " received nothing from this node for too long and removed it"};
    return;
  }
  channel_.attach(std::move(line_), welcome.received);
  welcomed_ = was_welcomed_ = true;
  refused_since_.reset();
}

void RendezvousClient::poll_channel() {
  channel_.poll();
  const auto now = Clock::now();
  if (now - channel_.last_byte_at() > options_.keep_alive.interval) channel_.disconnect();
  if (!channel_.connected()) return on_disconnect();
  lost_since_ = now;  // A message that is not one, or one that is sent, closes it elsewhere.
  if (now < heartbeat_at_) return;
  heartbeat_at_ = now + options_.keep_alive.heartbeat_interval();
  channel_.send_heartbeat();
}

Directive RendezvousClient::end(int code, const std::string& why) {
  leave();
  return {Directive::Kind::kEnd, {}, code, why};
}

// The job is lost with its rendezvous server.
Directive RendezvousClient::end_lost(const std::string& how) {
  return end(kExitLostPeer, "the rendezvous server at " + endpoint_.text() + " " + how);
}

Directive RendezvousClient::handle_message(const std::string& text) {
  try {
    const json message = json::parse(text);
    const std::string kind = message.at("kind");
    if (kind == "round") {
      round_ = JsonField(message, "round");
      return {Directive::Kind::kRound, node_info_of(message), 0, ""};
    }
    if (kind == "stop") return {Directive::Kind::kStop, {}, 0, printable(message.at("why"))};
    if (kind == "end") return end(JsonField(message, "code"), printable(message.at("why")));
  } catch (const json::exception&) {
  }
  return end_lost("sent a message that is not part of the protocol");
}

// Returns how the rendezvous server was lost for good; empty if it was not.
std::string RendezvousClient::loss_reason() const {
  if (channel_.connected()) return "";
  const auto now = Clock::now();
  if (was_welcomed_ && refused_since_ && now - *refused_since_ > kReconnectTime)
    return "closed the connection";
  if (now - lost_since_ < options_.rdzv_timeout) return "";
  return was_welcomed_ ? "stopped responding" : "did not respond in time";
}

std::optional<Directive> RendezvousClient::next() {
  if (pending_) return std::exchange(pending_, std::nullopt);
  if (over_) return std::nullopt;
  if (const auto text = channel_.next()) return handle_message(*text);
  const std::string how = loss_reason();
  if (how.empty()) return std::nullopt;
  return end_lost(how);
}

}  // namespace cohort::launch
