// `cohort ps` as a user runs it.
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace {

using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

class PsCommandTest : public testing::Test {
 protected:
  // Starts a server in the background, runs `commands` with $PORT, then stops it.
  Ended with_server(const std::string& flags, const std::string& commands,
                    const std::string& through = "") const {
    return shell(through + bin("cohort") + " ps server --endpoint 127.0.0.1:0 --port-file " +
                 folder_ / "port" + " --folder " + folder_ / "server" + " " + flags + " > " +
                 folder_ / "log" +
                 " 2>&1 &\nSERVER=$!\n"
                 "for i in $(seq 300); do [ -s " +
                 folder_ / "port" + " ] && break; sleep 0.1; done\nPORT=$(cat " + folder_ / "port" +
                 ")\n" + commands + "\ncode=$?\nkill $SERVER; wait $SERVER; (exit $code)");
  }
  std::string train(const std::string& more = "") const {
    return bin("ps_ledger_trainer") +
           " --pservers 127.0.0.1:$PORT --trainers 1 --seconds 0.5 --mode sync " + more;
  }

  const TemporaryFolder folder_;
};

TEST_F(PsCommandTest, ServesShowsItsStateAndStops) {
  const Ended ended = with_server("", train() + " && " + train("--read") + " && " + bin("cohort") +
                                          " ps status --pservers 127.0.0.1:$PORT --json");
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto lines = nlohmann::json::parse(ended.output.substr(ended.output.find("[\n")));
  EXPECT_EQ(lines.at(0).at("mode"), "sync");
  EXPECT_EQ(lines.at(0).at("tables").at(0).at("name"), "ids");
  EXPECT_GT(lines.at(0).at("steps").get<int>(), 0);
  EXPECT_EQ(lines.at(0).at("trainers").at(0).at("member"), false) << "it left";
}

TEST_F(PsCommandTest, DenseParametersLiveOnADeviceThroughLibtorch) {
  const Ended ended = with_server("--device cpu", train() + " && " + train("--read"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto pushes = nlohmann::json::parse(ended.output.substr(0, ended.output.find('\n')));
  const auto weights = nlohmann::json::parse(ended.output.substr(ended.output.find("{\"dense")));
  EXPECT_GT(pushes.at("pushes").get<int>(), 0);
  EXPECT_EQ(weights.at("dense").at(0).get<int>(), pushes.at("pushes").get<int>());
  const Ended refused =
      shell(bin("cohort") + " ps server --device quantum --folder " + folder_ / "other");
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_NE(refused.output.find("--device quantum"), std::string::npos) << refused.output;
}

// Whoever starts a server may ignore the ends of its children, and a program inherits that.
TEST_F(PsCommandTest, AServerLearnsHowItsChildrenEndWhoeverStartedIt) {
  const Ended ended = with_server("", "grep SigIgn /proc/$SERVER/status",
                                  "/usr/bin/python3 -c 'import os,signal,sys; "
                                  "signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
                                  "os.execv(sys.argv[1], sys.argv[1:])' ");
  ASSERT_EQ(ended.code, 0) << ended.output;
  const size_t colon = ended.output.find("SigIgn:");
  ASSERT_NE(colon, std::string::npos) << ended.output;
  const uint64_t ignored = std::stoull(ended.output.substr(colon + 7), nullptr, 16);
  EXPECT_EQ(ignored & (uint64_t{1} << (SIGCHLD - 1)), 0U) << ended.output;
}

TEST_F(PsCommandTest, PrometheusReadsItsFigures) {
  // Below the ports that the system gives to others.
  const Ended ended = with_server(
      "--metrics 127.0.0.1:$((20000 + $$ % 10000))",
      train() + " && " + bin("cohort") + " ps status --pservers 127.0.0.1:$PORT > /dev/null && " +
          "/usr/bin/python3 -c 'import urllib.request,sys; "
          "print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())' "
          "http://127.0.0.1:$((20000 + $$ % 10000))/metrics");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("cohort_ps_pushes_total "), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("cohort_ps_table_rows{table=\"ids\"} "), std::string::npos);
  EXPECT_NE(ended.output.find("cohort_ps_trainer_pushes{trainer=\"0\"} "), std::string::npos);
}

TEST_F(PsCommandTest, MistakesAreNamed) {
  const auto refused = [&](const std::string& flags, const std::string& text) {
    const Ended ended = shell("timeout 20 " + bin("cohort") + " ps " + flags);
    EXPECT_EQ(ended.code, 2) << flags << "\n" << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  };
  refused("server --endpoint 0.0.0.0:7001 --folder " + folder_ / "a",
          "without TLS a server listens on this host alone");
  refused("server --server-id 2 --servers 2 --folder " + folder_ / "b",
          "--server-id: expected 0 to 1, got 2");
  refused("server --load " + folder_ / "nothing" + " --folder " + folder_ / "c",
          "expected a checkpoint of servers");
  refused("status", "--pservers: expected the servers' endpoints");
  refused("export " + folder_ / "nothing" + " --output " + folder_ / "d",
          "expected a checkpoint of servers");
  refused("export " + folder_ / "nothing" + " --output " + folder_ / "d" +
              " --pushed-since 1700000000000",
          "--pushed-since: expected seconds since 1970, at most 4294967295, got 1700000000000");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "d"));
  const Ended lost = shell(bin("cohort") + " ps status --pservers 127.0.0.1:1 --timeout 1");
  EXPECT_EQ(lost.code, 3) << lost.output;
}

}  // namespace
