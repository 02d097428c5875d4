// SPDX-License-Identifier: Apache-2.0
// `cohort ps` as a user runs it.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/client/local_channel.h"
#include "cohort/ps/server/server.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/shell.h"

namespace ps_command_test {

namespace ps = cohort::ps;
using cohort::read_file;
using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

class PsCommandTest : public testing::Test {
 protected:
  // Starts a server in the background, runs `commands` with $PORT, then stops it.
  Ended with_server(const std::string& flags, const std::string& commands,
                    const std::string& through = "",
                    const std::string& endpoint = "127.0.0.1:0") const {
    return shell(through + bin("cohort") + " ps server --endpoint " + endpoint + " --port-file " +
                 folder_ / "port" + " --folder " + folder_ / "server" + " " + flags + " > " +
                 folder_ / "log" +
                 " 2>&1 &\nSERVER=$!\n"
                 "for i in $(seq 300); do [ -s " +
                 folder_ / "port" + " ] && break; sleep 0.1; done\nPORT=$(cat " + folder_ / "port" +
                 ")\n" + commands + "\ncode=$?\nkill $SERVER; wait $SERVER; (exit $code)");
  }
  std::string train(const std::string& more = "",
                    const std::string& servers = "127.0.0.1:$PORT") const {
    return bin("ps_ledger_trainer") + " --pservers " + servers +
           " --trainers 1 --seconds 0.5 --mode sync " + more;
  }
  // Makes the checkpoint of a job with a table much larger than its dense parameters.
  std::string checkpoint() const {
    const cohort::Log log({.console = cohort::LogConsole::kNever});
    const auto server = std::make_shared<ps::Server>(
        ps::ServerOptions{.durability = ps::Durability::kApplied}, log);
    const ps::JobOptions job{
        .trainers = 1, .blocks = {{"w", 0, 4, 0}}, .tables = {{.name = "rows", .width = 16}}};
    ps::Client client({.servers = {"in-process"}}, job,
                      [&](int) { return std::make_unique<ps::LocalChannel>(server); });
    const std::vector<float> dense(4);
    const std::span<const float> values(dense);
    client.initialise(std::span(&values, 1));
    std::vector<uint64_t> ids(2000);
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<float> gradients(ids.size() * 16, 1);
    const ps::PushRows rows{.ids = ids, .gradients = gradients};
    client.push(std::span(&rows, 1), {values});
    client.flush();
    client.save(folder_ / "checkpoint");
    return folder_ / "checkpoint";
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

// A limit of 4 KiB a file: to the log a full disk.
TEST_F(PsCommandTest, StatusSaysWhyAServerCannotLog) {
  const Ended ended = with_server(
      "",
      "timeout 20 " + train() + " > /dev/null 2>&1 &\nTRAINER=$!\nfor i in $(seq 100); do " +
          bin("cohort") + " ps status --pservers 127.0.0.1:$PORT > " + folder_ / "shown" +
          "\n  grep -q 'cannot log' " + folder_ / "shown" + " && break; sleep 0.1; done\n" +
          "kill $TRAINER; cat " + folder_ / "shown",
      "sh -c 'ulimit -f 8; exec \"$@\"' sh ");
  EXPECT_NE(ended.output.find("\n  cannot log: " + folder_ / "server/log/"), std::string::npos)
      << ended.output;
}

TEST_F(PsCommandTest, ThreadsShareTheRowsOfTables) {
  const Ended ended = with_server("--table-threads 3",
                                  train() + " && " + train("--read") +
                                      " && cat /proc/$SERVER/task/*/comm | grep ps-table | sort");
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_TRUE(ended.output.ends_with("ps-table-1\nps-table-2\n")) << ended.output;
  for (const std::string threads : {"0", "65"}) {
    const Ended refused = shell("timeout 60 " + bin("cohort") + " ps server --table-threads " +
                                threads + " --folder " + folder_ / "other");
    EXPECT_EQ(refused.code, 2) << refused.output;
    EXPECT_NE(refused.output.find("--table-threads " + threads + ": expected 1 to 64"),
              std::string::npos)
        << refused.output;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "other"));
  }
}

TEST_F(PsCommandTest, DenseParametersLiveOnADeviceThroughLibtorch) {
  const Ended ended = with_server("--device cpu", train() + " && " + train("--read"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  const auto pushes = nlohmann::json::parse(ended.output.substr(0, ended.output.find('\n')));
  const auto weights = nlohmann::json::parse(ended.output.substr(ended.output.find("{\"dense")));
  EXPECT_GT(pushes.at("pushes").get<int>(), 0);
  EXPECT_EQ(weights.at("dense").at(0).get<int>(), pushes.at("pushes").get<int>());
}

// Where there is a card CUDA_VISIBLE_DEVICES hides it; a server that took a device would serve until the time limit.
TEST_F(PsCommandTest, ADeviceThatIsNotThereIsRefused) {
  for (const auto& [device, text] :
       {std::pair<std::string, std::string>{"quantum",
                                            "--device quantum: expected host, cpu, cuda or cuda:N"},
        {"cuda", "CUDA cannot be used: "},
        {"cuda:1", "CUDA cannot be used: "},
        {"cuda:x", "device \"cuda:x\": expected cpu, cuda or cuda:N"}}) {
    const Ended refused = shell("CUDA_VISIBLE_DEVICES= timeout 60 " + bin("cohort") +
                                " ps server --device " + device + " --folder " + folder_ / "other");
    EXPECT_EQ(refused.code, 2) << refused.output;
    EXPECT_NE(refused.output.find("cohort ps: error: " + text), std::string::npos)
        << refused.output;
    EXPECT_EQ(std::count(refused.output.begin(), refused.output.end(), '\n'), 1) << refused.output;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "other"));
  }
}

// A rule that the processor's own blocks know and libtorch's do not tells which of them a server
// has.
TEST_F(PsCommandTest, BlocksAreLibtorchsWithADeviceAlone) {
  const ps::JobOptions job{
      .trainers = 1, .dense_rule = {.rule = ps::Rule::kRowwiseAdagrad}, .blocks = {{"w", 0, 4, 0}}};
  const auto error_with = [&](const std::string& flags) {
    std::filesystem::remove_all(folder_ / "server");
    std::filesystem::remove(folder_ / "port");
    std::filesystem::remove(folder_ / "done");
    auto server = std::async(std::launch::async, [&] {
      return with_server(flags, "for i in $(seq 600); do [ -e " + folder_ / "done" +
                                    " ] && break; sleep 0.1; done");
    });
    while (!std::filesystem::exists(folder_ / "port") &&
           server.wait_for(std::chrono::milliseconds(10)) == std::future_status::timeout) {
    }
    const std::string text = cohort::test::message_of<c10::Error>([&] {
      const std::string port = read_file(folder_ / "port");
      ps::Client client({.servers = {"127.0.0.1:" + port.substr(0, port.find('\n'))}}, job);
    });
    std::ofstream(folder_ / "done");
    EXPECT_EQ(server.get().code, 0) << read_file(folder_ / "log");
    return text;
  };
  EXPECT_EQ(error_with(""), "nothing was thrown");
  EXPECT_NE(error_with("--device cpu")
                .find("dense parameters on a device: rowwise_adagrad is a rule of rows"),
            std::string::npos);
}

// The parent of a server may ignore SIGCHLD, and a program inherits that.
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

TEST_F(PsCommandTest, StatusShowsAllThatAnswerAndNamesTheOthers) {
  const std::string status =
      bin("cohort") + " ps status --pservers 127.0.0.1:1,127.0.0.1:$PORT --timeout 5";
  const Ended shown = with_server("--server-id 1 --servers 2", status);
  EXPECT_EQ(shown.code, 3) << shown.output;
  for (const char* part :
       {"server 0 at 127.0.0.1:1: no reply\nserver 1 at 127.0.0.1:",
        "cohort ps: error: 1 of 2 servers did not reply: server 0 (127.0.0.1:1): "})
    EXPECT_NE(shown.output.find(part), std::string::npos) << part << "\n" << shown.output;

  std::filesystem::remove_all(folder_ / "server");
  std::filesystem::remove(folder_ / "port");
  const Ended json =
      with_server("--server-id 1 --servers 2", status + " --json 2>" + folder_ / "errors");
  EXPECT_EQ(json.code, 3) << json.output;
  const auto servers = nlohmann::json::parse(json.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_EQ(servers.size(), 2) << json.output;
  EXPECT_EQ(servers.at(0),
            (nlohmann::json{{"server", 0}, {"endpoint", "127.0.0.1:1"}, {"no_reply", true}}));
  EXPECT_EQ(servers.at(1).at("server"), 1);
  EXPECT_FALSE(servers.at(1).contains("no_reply"));
}

// One that is gone is no reason to leave the others running.
TEST_F(PsCommandTest, StopEndsAllThatAnswerAndNamesTheOthers) {
  const Ended ended = with_server(
      "--server-id 1 --servers 2",
      bin("cohort") +
          " ps stop --pservers 127.0.0.1:1,127.0.0.1:$PORT,127.0.0.1:2 --timeout 5; echo code $?\n"
          "for i in $(seq 100); do kill -0 $SERVER 2> /dev/null || break; sleep 0.1; done\n"
          "kill -0 $SERVER 2> /dev/null && echo runs; true");
  EXPECT_NE(ended.output.find("code 3\n"), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("runs\n"), std::string::npos) << ended.output;
  EXPECT_NE(
      ended.output.find("cohort ps: error: 2 of 3 servers did not reply and may still be running: "
                        "server 0 (127.0.0.1:1): "),
      std::string::npos)
      << ended.output;
  EXPECT_NE(ended.output.find("; server 2 (127.0.0.1:2): "), std::string::npos) << ended.output;
}

TEST_F(PsCommandTest, AUnixSocketServesStatusTrainersAndStop) {
  const std::string endpoint = "unix:" + folder_ / "socket";
  const Ended ended = with_server(
      "",
      train("", endpoint) + " && PADDLE_PSERVERS_IP_PORT_LIST=" + endpoint + " " + bin("cohort") +
          " ps status && (cd " + folder_.path().string() + " && " + bin("cohort") +
          " ps stop --pservers unix:socket) && wait $SERVER && echo stopped",
      "", endpoint);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("server 0 at " + endpoint + ", start 1"), std::string::npos)
      << ended.output;
  EXPECT_NE(ended.output.find("stopped\n"), std::string::npos) << ended.output;
  EXPECT_EQ(read_file(folder_ / "log").find("port="), std::string::npos)
      << read_file(folder_ / "log");
}

TEST_F(PsCommandTest, AnotherServerDoesNotTakeAUnixSocketAway) {
  const std::string endpoint = "unix:" + folder_ / "socket";
  const Ended ended =
      with_server("",
                  "timeout 20 " + bin("cohort") + " ps server --endpoint " + endpoint +
                      " --folder " + folder_ / "second" + "; echo code $?; " + bin("cohort") +
                      " ps status --pservers " + endpoint,
                  "", endpoint);
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("--endpoint " + endpoint +
                              ": cannot listen there: another process does\ncode 2\n"),
            std::string::npos)
      << ended.output;
}

// A corrected command line finds the folder as the refused one found it.
TEST_F(PsCommandTest, ARefusedStartLeavesNoFolder) {
  const auto refused = [&](const std::string& flags, const std::string& text) {
    const std::string folder = folder_ / "fresh";
    const Ended ended = with_server("", "timeout 20 " + bin("cohort") + " ps server --folder " +
                                            folder + "/inner " + flags + "; echo code $?");
    EXPECT_NE(ended.output.find("code 2\n"), std::string::npos) << flags << "\n" << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
    EXPECT_FALSE(std::filesystem::exists(folder)) << flags;
    std::filesystem::remove_all(folder);
    std::filesystem::remove_all(folder_ / "server");
    std::filesystem::remove(folder_ / "port");
  };
  refused("--endpoint 127.0.0.1:$PORT", ": cannot listen there: another process does\n");
  refused("--endpoint 0.0.0.0:7001", "without TLS a server listens on this host alone");
  refused("--endpoint unix:absent/socket",
          "--endpoint unix:absent/socket: the folder absent does not exist\n");
  refused("--metrics 127.0.0.1:$PORT", ": cannot listen there: another process does\n");
  refused("--metrics 0.0.0.0:7001", "--metrics 0.0.0.0:7001: expected an address of this host");
  refused("--tls-key " + folder_ / "none", "none: expected the key in PEM form");
  refused("--load " + folder_ / "nothing", "expected a checkpoint of servers");
  refused("--port-file " + folder_ / "absent/port", "absent/port");
}

TEST_F(PsCommandTest, AnExportIsWholeOrNotThere) {
  const std::string from = checkpoint(), to = folder_ / "made/export";
  const auto export_with = [&](const std::string& before) {
    return shell("(" + before + bin("cohort") + " ps export " + from + " --output " + to + ")");
  };
  const std::string no_room = "ulimit -f 16; ";  // Of files; the table needs 140 KiB.
  const Ended first = export_with(no_room);
  EXPECT_EQ(first.code, 1) << first.output;
  EXPECT_NE(first.output.find("rows.safetensors"), std::string::npos) << first.output;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "made"));

  const Ended whole = export_with("");
  ASSERT_EQ(whole.code, 0) << whole.output;
  EXPECT_NE(whole.output.find(to + "/dense.safetensors  1 parameter\n" + to +
                              "/rows.safetensors  2000 rows\n"),
            std::string::npos)
      << whole.output;
  cohort::write_file(to + "/dense.safetensors", "older");
  cohort::write_file(to + "/other", "is nobody's");
  const std::string rows = read_file(to + "/rows.safetensors");
  EXPECT_EQ(export_with(no_room).code, 1);
  EXPECT_EQ(read_file(to + "/dense.safetensors"), "older");
  EXPECT_EQ(read_file(to + "/rows.safetensors"), rows);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(to), {}), 3);

  EXPECT_EQ(export_with("").code, 0);
  EXPECT_NE(read_file(to + "/dense.safetensors"), "older");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(to), {}), 3);
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
  refused("server --acknowledge applied --snapshot-log 8 --folder " + folder_ / "c",
          "--snapshot-log: expected --acknowledge logged or synced, for applied keeps no log");
  refused("server --tls-trainer-names a --folder " + folder_ / "c",
          "--tls-trainer-names requires --tls-authority");
  const std::string limits = ": expected seconds above 0 and below 10000000";
  for (const std::string flag : {"--trainer-timeout 1e17", "--evict-period 1e17"})
    refused("server " + flag + " --folder " + folder_ / "c", flag + limits);
  for (const std::string command : {"status", "stop"})
    refused(command + " --pservers 127.0.0.1:1 --timeout 1e17", "--timeout 1e17" + limits);
  const Ended role = shell(
      "PADDLE_TRAINING_ROLE=TRAINER PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:7001 "
      "PADDLE_TRAINERS_NUM=1 PADDLE_TRAINER_ID=0 timeout 20 " +
      bin("cohort") + " ps server --folder " + folder_ / "c");
  EXPECT_EQ(role.code, 2) << role.output;
  EXPECT_NE(
      role.output.find(
          "PADDLE_TRAINING_ROLE, TRAINING_ROLE: expected PSERVER, or --endpoint, --server-id"),
      std::string::npos)
      << role.output;
  refused("server --load " + folder_ / "nothing" + " --folder " + folder_ / "c",
          "expected a checkpoint of servers");
  refused("status",
          "--pservers: expected the servers' endpoints, HOST:PORT,HOST:PORT, here or in "
          "PADDLE_PSERVERS_IP_PORT_LIST");
  refused("export " + folder_ / "nothing" + " --output " + folder_ / "d",
          "expected a checkpoint of servers");
  refused("export " + folder_ / "nothing" + " --output " + folder_ / "d" +
              " --pushed-since 1700000000000",
          "--pushed-since: expected seconds since 1970, at most 4294967295, got 1700000000000");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "d"));
  const Ended lost = shell(bin("cohort") + " ps status --pservers 127.0.0.1:1 --timeout 1");
  EXPECT_EQ(lost.code, 3) << lost.output;
}

}  // namespace ps_command_test
