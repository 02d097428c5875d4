// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/handshake.h"

#include "cohort/base/json_field.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/message.h"

namespace cohort::launch {
namespace {

using nlohmann::json;

std::string proof(const std::string& secret, const std::string& role, const std::string& challenge,
                  const Hello& hello) {
  return hmac_sha256(secret, role + " " + challenge + " " + hello.nonce + " " + hello.node);
}

}  // namespace

std::string challenge_line(const std::string& nonce) {
  return text_of({{"kind", "challenge"}, {"version", kProtocolVersion}, {"nonce", nonce}});
}

std::string line_of(const Hello& hello) {
  return text_of({{"kind", "hello"},
                  {"version", hello.version},
                  {"node", hello.node},
                  {"session", hello.session},
                  {"nonce", hello.nonce},
                  {"proof", hello.proof},
                  {"received", hello.received},
                  {"id", hello.id},
                  {"nnodes", hello.nnodes},
                  {"max_restarts", hello.max_restarts},
                  {"keep_alive_ms", hello.keep_alive.count()}});
}

std::string line_of(const Welcome& welcome) {
  return text_of({{"kind", "welcome"},
                  {"proof", welcome.proof},
                  {"received", welcome.received},
                  {"known", welcome.known}});
}

std::string rejection_line(const std::string& why) {
  return text_of({{"kind", "end"}, {"code", kExitUsage}, {"why", why}});
}

Hello parse_hello(const std::string& line) {
  const json message = json::parse(line);
  Hello hello;
  hello.version = JsonField(message, "version");
  if (hello.version != kProtocolVersion) return hello;
  hello.node = message.at("node");
  hello.session = JsonField(message, "session");
  hello.nonce = message.at("nonce");
  hello.proof = message.at("proof");
  hello.received = JsonField(message, "received");
  hello.id = message.at("id");
  hello.nnodes = message.at("nnodes");
  hello.max_restarts = JsonField(message, "max_restarts");
  hello.keep_alive = std::chrono::milliseconds(JsonField(message, "keep_alive_ms"));
  return hello;
}

std::string proof_of_node(const std::string& secret, const std::string& challenge,
                          const Hello& hello) {
  return proof(secret, "node", challenge, hello);
}

std::string proof_of_server(const std::string& secret, const std::string& challenge,
                            const Hello& hello) {
  return proof(secret, "server", challenge, hello);
}

}  // namespace cohort::launch
