#include "cohort/launch/member.h"

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
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
  return place;
}

}  // namespace

Member::Member(const Endpoint& endpoint, const RunOptions& options)
    : endpoint_(endpoint), options_(options), began_(Clock::now()), beat_at_(began_) {}

void Member::join(int store_port) {
  const json message = {{"say", "join"},
                        {"version", kProtocolVersion},
                        {"id", options_.rdzv_id},
                        {"nnodes", options_.nnodes.text()},
                        {"max_restarts", options_.max_restarts},
                        {"nproc", options_.nproc_per_node},
                        {"port", store_port}};
  if (connected_) {
    line_.send(text_of(message));
  } else {
    to_join_ = text_of(message);
  }
}

void Member::tell_done(int code) {
  line_.send(text_of({{"say", "done"}, {"round", round_}, {"code", code}}));
}

void Member::tell_failed(const Verdict& verdict, const std::string& why) {
  line_.send(text_of({{"say", "failed"},
                      {"round", round_},
                      {"code", verdict.exit_code},
                      {"meaning", static_cast<int>(verdict.meaning)},
                      {"why", why}}));
}

void Member::connect() {
  line_ = LineSocket(try_to_connect(endpoint_));
  connected_ = line_.open();
  if (connected_ && !to_join_.empty()) line_.send(to_join_);
}

void Member::turn() {
  if (over_) return;
  if (!connected_) connect();
  line_.turn();
  if (Clock::now() < beat_at_) return;
  beat_at_ = Clock::now() + kHeartbeat;
  line_.send(text_of({{"say", "alive"}}));
}

Order Member::lost(const std::string& how) const {
  return {
      Order::Kind::kEnd, {}, kExitLostPeer, "the coordinator at " + endpoint_.text() + " " + how};
}

std::optional<Order> Member::next() {
  if (over_) return std::nullopt;
  while (const auto line = line_.next()) {
    const json message = json::parse(*line, nullptr, /*allow_exceptions=*/false);
    try {
      const std::string kind = message.at("say");
      if (kind == "round") {
        round_ = JsonField(message, "round");
        return Order{Order::Kind::kRound, place_of(message), 0, ""};
      }
      if (kind == "stop") return Order{Order::Kind::kStop, {}, 0, printable(message.at("why"))};
      if (kind == "end") {
        over_ = true;
        line_.close();
        return Order{
            Order::Kind::kEnd, {}, JsonField(message, "code"), printable(message.at("why"))};
      }
    } catch (const json::exception&) {
      over_ = true;
      return lost("does not speak as a launcher does");
    }
  }
  const auto now = Clock::now();
  std::string how;
  if (!connected_ && now - began_ >= options_.rdzv_timeout) how = "did not answer in time";
  if (connected_ && !line_.open()) how = "closed the connection";
  if (connected_ && now - line_.heard() > kSilence) how = "fell silent";
  if (how.empty()) return std::nullopt;
  over_ = true;
  line_.close();
  return lost(how);
}

}  // namespace cohort::launch
