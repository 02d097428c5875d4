// SPDX-License-Identifier: Apache-2.0
// Servers over gRPC: which clients have access, and limits on messages.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/rpc/rpc_server.h"

#include "tests/ps/scratch_folder.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace rpc_test {

using cohort::test::message_of;

// Certificates of an authority made for the test.
class Authority {
 public:
  Authority(const ScratchFolder& folder, const std::string& name) : folder_(folder), name_(name) {
    openssl("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=" +
            name + " -keyout " + key(name) + " -out " + certificate(name));
  }

  /// A certificate that bears `common_name`, and the same as alternative name.
  SecurityOptions issue(const std::string& file, const std::string& common_name,
                        int days = 1) const {
    openssl("req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=" + common_name +
            " -keyout " + key(file) + " -out " + path(file + ".csr"));
    std::ofstream(path(file + ".ext")) << "subjectAltName=DNS:" << common_name << "\n";
    openssl("x509 -req -days " + std::to_string(days) + " -CAcreateserial -in " +
            path(file + ".csr") + " -CA " + certificate(name_) + " -CAkey " + key(name_) +
            " -extfile " + path(file + ".ext") + " -out " + certificate(file));
    return {.authority = certificate(name_), .certificate = certificate(file), .key = key(file)};
  }

 private:
  std::string path(const std::string& file) const { return folder_.path(file); }
  std::string key(const std::string& file) const { return path(file + ".key"); }
  std::string certificate(const std::string& file) const { return path(file + ".pem"); }
  static void openssl(const std::string& arguments) {
    ASSERT_EQ(std::system(("openssl " + arguments + " 2> /dev/null").c_str()), 0) << arguments;
  }

  const ScratchFolder& folder_;
  const std::string name_;
};

class RpcTest : public testing::Test {
 protected:
  // Asks a server for its status, 20 seconds at most.
  Reply status(const std::string& endpoint, const SecurityOptions& security) {
    const auto channel = make_rpc_channel({.endpoint = endpoint, .security = security});
    return ask(*channel, {.call = Call::kStatus});
  }
  static Reply ask(Channel& channel, const Request& request) {
    auto promise = std::make_shared<std::promise<Reply>>();
    auto answer = promise->get_future();
    channel.send(request, 20'000, [promise](Reply reply) { promise->set_value(std::move(reply)); });
    return answer.get();
  }
  // What a server with these certificates is refused for; empty if it is not.
  std::string refusal(const SecurityOptions& security) {
    try {
      const RpcServer rpc(server_, {.security = security});
    } catch (const ConfigError& error) {
      return one_line(error);
    }
    return "";
  }
  static std::string endpoint_of(const RpcServer& rpc) {
    return "127.0.0.1:" + std::to_string(rpc.port());
  }

  const ScratchFolder folder_;
  const Log log_{LogOptions{.console = LogConsole::kNever}};
  Server server_{{.durability = Durability::kApplied}, log_};
};

TEST_F(RpcTest, BothSidesShowACertificateOfOneAuthorityWithTheRightName) {
  const Authority authority(folder_, "authority");
  const Authority stranger(folder_, "stranger");
  const RpcServer rpc(
      server_, {.endpoint = "0.0.0.0:0", .security = authority.issue("server", "cohort-server")});
  const std::string endpoint = endpoint_of(rpc);
  EXPECT_EQ(status(endpoint, authority.issue("trainer", "cohort-trainer")).code, Code::kOk);

  const Reply misnamed = status(endpoint, authority.issue("misnamed", "somebody"));
  EXPECT_EQ(misnamed.code, Code::kFailed);
  EXPECT_EQ(misnamed.text, "the caller's certificate has no name that is allowed here");

  // Of another authority: the handshake ends it, so the text is the library's.
  SecurityOptions foreign = stranger.issue("foreign", "cohort-trainer");
  EXPECT_EQ(status(endpoint, foreign).code, Code::kLost) << "the server is not of its authority";
  foreign.authority = folder_.path("authority.pem");
  EXPECT_EQ(status(endpoint, foreign).code, Code::kLost) << "it is not of the server's authority";
  EXPECT_EQ(status(endpoint, {}).code, Code::kLost) << "without TLS";
}

TEST_F(RpcTest, AServerWithASecretRefusesWhoHasNot) {
  const RpcServer rpc(server_, {.endpoint = "127.0.0.1:0", .security = {.job_secret = "one"}});
  const std::string endpoint = endpoint_of(rpc);
  EXPECT_EQ(status(endpoint, {.job_secret = "one"}).code, Code::kOk);
  for (const char* secret : {"", "two", "onetwo"}) {
    const auto channel =
        make_rpc_channel({.endpoint = endpoint, .security = {.job_secret = secret}});
    for (const Call call : {Call::kStatus, Call::kStop, Call::kPush, Call::kPull}) {
      Request request{.call = call};
      if (call == Call::kPush || call == Call::kPull)
        request.message = std::make_shared<const Buffer>(8);
      const Reply reply = ask(*channel, request);
      EXPECT_EQ(reply.code, Code::kFailed) << secret;
      EXPECT_EQ(reply.text,
                "the caller does not have the job's secret (--job-secret-file, COHORT_JOB_SECRET)");
    }
  }
  EXPECT_EQ(status(endpoint, {.job_secret = "one"}).code, Code::kOk);
}

TEST_F(RpcTest, TheSecretOfTheEnvironmentIsTheDefault) {
  ::setenv("COHORT_JOB_SECRET", "of the environment", 1);
  const RpcServer rpc(server_, {.endpoint = "127.0.0.1:0"});
  const Reply with = status(endpoint_of(rpc), {});
  ::unsetenv("COHORT_JOB_SECRET");
  EXPECT_EQ(with.code, Code::kOk) << with.text;
  EXPECT_EQ(status(endpoint_of(rpc), {}).code, Code::kFailed);
}

TEST_F(RpcTest, AServerWithAnotherNameIsNotTrusted) {
  const Authority authority(folder_, "authority");
  SecurityOptions security = authority.issue("server", "cohort-trainer");
  security.server_names = {"cohort-trainer"};
  const RpcServer rpc(server_, {.endpoint = "127.0.0.1:0", .security = security});
  const Reply reply = status(endpoint_of(rpc), authority.issue("trainer", "cohort-trainer"));
  EXPECT_EQ(reply.code, Code::kLost) << "a trainer's certificate makes no server";
}

TEST_F(RpcTest, AClientExpectsTheFirstOfTheServersNames) {
  const Authority authority(folder_, "authority");
  SecurityOptions own = authority.issue("server", "this-server");
  own.server_names = {"this-server"};
  const RpcServer rpc(server_, {.endpoint = "127.0.0.1:0", .security = own});
  SecurityOptions trainer = authority.issue("trainer", "cohort-trainer");
  trainer.server_names = {"this-server", "that-server"};
  EXPECT_EQ(status(endpoint_of(rpc), trainer).code, Code::kOk);
  trainer.server_names = {"that-server", "this-server"};
  EXPECT_EQ(status(endpoint_of(rpc), trainer).code, Code::kLost);
}

TEST_F(RpcTest, WithoutTlsAServerListensOnThisHostAlone) {
  EXPECT_EQ(message_of<ConfigError>([&] {
              RpcServer(server_, {.endpoint = "0.0.0.0:0"});
            }).find("--endpoint 0.0.0.0:0: without TLS a server listens on this host alone"),
            0U);
  for (const char* endpoint : {"example.org:1", "127.0.0.1.example.org:1", "[::]:0"}) {
    EXPECT_NE(message_of<ConfigError>([&] {
                RpcServer(server_, {.endpoint = endpoint});
              }).find("without TLS"),
              std::string::npos)
        << endpoint;
  }
  const RpcServer local(server_, {.endpoint = "unix:" + folder_.path("socket")});
  EXPECT_EQ(status("unix:" + folder_.path("socket"), {}).code, Code::kOk);
}

TEST_F(RpcTest, FilesOfCertificatesAreNamed) {
  EXPECT_EQ(
      message_of<ConfigError>([&] {
        RpcServer(
            server_,
            {.security = {.authority = folder_.path("none.pem"), .certificate = "x", .key = "y"}});
      }),
      folder_.path("none.pem") + ": expected the authority's certificate in PEM form");
  const SecurityOptions whole = Authority(folder_, "authority").issue("server", "cohort-server");
  EXPECT_EQ(refusal({.authority = whole.authority}),
            "TLS: expected all three files: --tls-certificate and --tls-key are missing");
  EXPECT_EQ(refusal({.authority = whole.authority, .key = whole.key}),
            "TLS: expected all three files: --tls-certificate is missing");
}

TEST_F(RpcTest, AKeyOfAnotherCertificateIsNamed) {
  const Authority authority(folder_, "authority");
  SecurityOptions security = authority.issue("server", "cohort-server");
  authority.issue("other", "cohort-server");
  security.key = folder_.path("other.key");
  const std::string expected =
      security.key + ": expected the key of the certificate " + security.certificate;
  EXPECT_EQ(refusal(security), expected);
  EXPECT_EQ(message_of<ConfigError>(
                [&] { make_rpc_channel({.endpoint = "127.0.0.1:1", .security = security}); }),
            expected);
}

TEST_F(RpcTest, AnExpiredCertificateIsNamedWithItsDate) {
  const Authority authority(folder_, "authority");
  const SecurityOptions security = authority.issue("server", "cohort-server", -1);
  const std::string expected = security.certificate + ": the certificate expired on 20";
  EXPECT_EQ(refusal(security).find(expected), 0U) << refusal(security);
  EXPECT_EQ(message_of<ConfigError>([&] {
              make_rpc_channel({.endpoint = "127.0.0.1:1", .security = security});
            }).find(expected),
            0U);
}

TEST_F(RpcTest, AServersCertificateBearsTheNameOfServers) {
  const Authority authority(folder_, "authority");
  SecurityOptions security = authority.issue("server", "cohort-trainer");
  EXPECT_EQ(refusal(security), security.certificate +
                                   ": expected a certificate with the name cohort-server "
                                   "(--tls-server-names)");
  EXPECT_NO_THROW(make_rpc_channel({.endpoint = "127.0.0.1:1", .security = security}));
  security.server_names = {"a-server", "b-server"};
  EXPECT_NE(refusal(security).find("with the name a-server or b-server"), std::string::npos);
  security.server_names.push_back("cohort-trainer");
  EXPECT_EQ(refusal(security), "");
}

TEST_F(RpcTest, WhereAUnixSocketCannotBeIsNamed) {
  const auto refused = [&](const std::string& endpoint) {
    return message_of<ConfigError>([&] { RpcServer(server_, {.endpoint = endpoint}); });
  };
  EXPECT_EQ(refused("unix:no-such-folder/socket"),
            "--endpoint unix:no-such-folder/socket: the folder no-such-folder does not exist");
  const std::string longest = "unix:/tmp/" + std::string(120, 'x');
  EXPECT_EQ(refused(longest), "--endpoint " + longest + ": expected a path of at most 107 bytes");
  const std::string endpoint = "unix:" + folder_.path("socket");
  const RpcServer rpc(server_, {.endpoint = endpoint});
  EXPECT_EQ(rpc.port(), 0);
  EXPECT_EQ(refused(endpoint),
            "--endpoint " + endpoint + ": cannot listen there: another process does");
}

TEST_F(RpcTest, AnEndpointInUseIsNamed) {
  const RpcServer rpc(server_, {});
  EXPECT_EQ(message_of<ConfigError>([&] { RpcServer(server_, {.endpoint = endpoint_of(rpc)}); }),
            "--endpoint " + endpoint_of(rpc) + ": cannot listen there: another process does");
  EXPECT_EQ(message_of<ConfigError>([&] {
              RpcServer(server_, {.endpoint = "127.0.0.1:70000"});
            }).find("--endpoint 127.0.0.1:70000: expected host:port"),
            0U);
}

TEST_F(RpcTest, AMessageThatIsTooLargeIsRefusedInOneLine) {
  const RpcServer rpc(server_, {.max_message_bytes = 100'000});
  const auto channel = make_rpc_channel({.endpoint = endpoint_of(rpc)});
  const SectionShape shape{.table = 0, .width = 1, .count = 50'000};
  MessageWriter writer(std::span(&shape, 1));
  const Reply reply =
      ask(*channel,
          {.call = Call::kPush,
           .message = std::make_shared<const Buffer>(writer.finish({.kind = MessageKind::kPush}))});
  EXPECT_EQ(reply.code, Code::kFailed);
  EXPECT_EQ(reply.text, "Received message larger than max (600096 vs. 100000)");
  EXPECT_EQ(ask(*channel, {.call = Call::kStatus}).code, Code::kOk) << "the next one is taken";
}

// What is no message at all.
TEST_F(RpcTest, BytesThatAreNoMessageAreRefused) {
  const RpcServer rpc(server_, {});
  const auto channel = make_rpc_channel({.endpoint = endpoint_of(rpc)});
  for (const size_t size : {size_t{1}, size_t{71}, size_t{72}, size_t{5'000}}) {
    Buffer noise(size);
    std::fill(noise.span().begin(), noise.span().end(), std::byte{0x5a});
    const Reply reply =
        ask(*channel,
            {.call = Call::kPull, .message = std::make_shared<const Buffer>(std::move(noise))});
    EXPECT_EQ(reply.code, Code::kInvalid);
    EXPECT_EQ(reply.text.find("message: "), 0U) << reply.text;
  }
}

// Of a newer client, which has calls that this server does not know.
TEST_F(RpcTest, AnUnknownCallIsRefusedByItsNumber) {
  const RpcServer rpc(server_, {});
  const auto channel = make_rpc_channel({.endpoint = endpoint_of(rpc)});
  for (const uint32_t number : {1'000U, 4'000'000'000U}) {
    const Reply reply = ask(*channel, {.call = static_cast<Call>(number)});
    EXPECT_EQ(reply.code, Code::kInvalid);
    EXPECT_EQ(reply.text, "unknown call " + std::to_string(number));
  }
  EXPECT_EQ(ask(*channel, {.call = Call::kStatus}).code, Code::kOk) << "it continues";
}

// gRPC ends a program when its last connection is given up in one of its own threads: here there is
// no server in the process, which would hold on to them.
TEST_F(RpcTest, ChannelsEndWhileCallsAreUnderWay) {
  constexpr int kChannels = 200, kCalls = 3;
  // Held by the callbacks, too: one that came after the test would find it.
  struct Answers {
    std::array<std::atomic<int>, kChannels * kCalls> of_call{};
    std::atomic<int> all{0}, lost{0};
  };
  const auto answers = std::make_shared<Answers>();
  for (int i = 0; i < kChannels; ++i) {
    const auto channel = make_rpc_channel({.endpoint = "unix:" + folder_.path("nobody")});
    for (int call = 0; call < kCalls; ++call) {
      channel->send({.call = Call::kStatus}, 5'000,
                    [answers, number = static_cast<size_t>(i * kCalls + call)](const Reply& reply) {
                      answers->lost += reply.code == Code::kLost && !reply.text.empty();
                      ++answers->of_call[number];
                      ++answers->all;
                    });
    }
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (answers->all < kChannels * kCalls && std::chrono::steady_clock::now() < end)
    std::this_thread::yield();
  EXPECT_EQ(answers->lost, kChannels * kCalls) << "each is told that nobody answered";
  for (const auto& count : answers->of_call) EXPECT_EQ(count, 1) << "once";
}

// A pull that waits inside the server must not hold up its end.
TEST_F(RpcTest, ItEndsWhileAPullWaits) {
  auto rpc = std::make_unique<RpcServer>(server_, RpcServerOptions{});
  const JobOptions job{.trainers = 2, .tables = {{.name = "rows", .width = 1}}};
  Client client({.servers = {endpoint_of(*rpc)},
                 .trainer = 0,
                 .link = {.attempt_timeout = std::chrono::seconds(60),
                          .server_timeout = std::chrono::milliseconds(5'000)}},
                job);
  const std::vector<uint64_t> ids{1};
  std::vector<float> row(1);
  const PushRows pushed{0, ids, row};
  const PullRows asked{0, ids, row};
  client.push(std::span(&pushed, 1), {});
  client.flush();
  PendingPull waiting = client.pull(std::span(&asked, 1), {});  // For the other trainer's push.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto began = std::chrono::steady_clock::now();
  server_.stop();
  server_.wait();
  rpc.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20));
  EXPECT_THROW(waiting.wait(), c10::DistError);
}

}  // namespace rpc_test
}  // namespace cohort::ps
