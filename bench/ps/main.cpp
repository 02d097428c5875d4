// SPDX-License-Identifier: Apache-2.0
// Rows and keys a second through a parameter server on this machine, beside a plain protobuf
// service and beside gRPC alone. Prints one line of JSON.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/client/distinct_ids.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/row_merger.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/table/pages.h"

#include "bench/median.h"
#include "bench/ps/plain_server.h"

namespace {

using namespace cohort;
using cohort::bench::kWidth;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Flags {
  int64_t rows = 1'000'000;
  int64_t large_rows = 50'000'000;
  int rounds = 5;
  double seconds = 1;
  int64_t batch = 10'000;
  int64_t snapshot_rows = 10'000'000;
  double snapshot_log_mib = 512;
  bool keys_only = false;
  std::string only;

  // A side is a table's name, "_" and a call. --only gives a side, or a table for both its sides.
  bool measures(const std::string& side) const {
    return only.empty() || only == side || only == side.substr(0, side.rfind('_'));
  }
};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// User and system time of a process.
double cpu_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

double resident_bytes_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/statm");
  double total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

// A child that says a number when it is ready, and lives until it is killed.
struct Child {
  pid_t process = -1;
  int number = 0;
  std::string folder{};    // Of a parameter server.
  std::string endpoint{};  // Likewise.
};

Child start(const std::function<void(const std::function<void(int)>&)>& body) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("pipe");
  const pid_t process = ::fork();
  if (process == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // Also after an error of its parent.
    body([&](int number) { (void)!::write(ends[1], &number, sizeof(number)); });
    ::pause();
    ::_exit(0);
  }
  ::close(ends[1]);  // So that the end of a child that fails ends the wait.
  Child child{.process = process};
  if (::read(ends[0], &child.number, sizeof(child.number)) != sizeof(child.number))
    throw std::runtime_error("a server did not start");
  ::close(ends[0]);
  return child;
}

// As `cohort run` has it for servers of one host.
std::string endpoint_of(const std::string& folder) {
  return "unix:" + folder + ".socket";
}

enum class Network { kUnix, kTcp };

// With a log a server writes to disk what it is pushed: for long no faster than the disk. Snapshots
// by a server's default, unless `snapshot_log_bytes` is given.
Child start_server(const std::string& folder, ps::Durability durability,
                   std::optional<int64_t> snapshot_log_bytes = std::nullopt,
                   Network network = Network::kUnix) {
  const std::string socket = endpoint_of(folder);
  std::filesystem::create_directories(folder);
  Child child = start([&](const auto& ready) {
    const Log log({.console = LogConsole::kNever});
    ps::ServerOptions options{.folder = folder, .durability = durability};
    if (snapshot_log_bytes) options.snapshot_log_bytes = *snapshot_log_bytes;
    ps::Server server(options, log);
    const ps::RpcServer rpc(server,
                            {.endpoint = network == Network::kUnix ? socket : "127.0.0.1:0"});
    ready(rpc.port());
    server.wait();
  });
  child.folder = folder;
  child.endpoint = network == Network::kUnix ? socket : "127.0.0.1:" + std::to_string(child.number);
  return child;
}

ps::JobOptions job_of(int trainers, ps::WireDtype dtype) {
  ps::JobOptions job{.mode = ps::Mode::kAsync, .trainers = trainers};
  job.tables = {{.name = "ids", .width = static_cast<int64_t>(kWidth), .wire_dtype = dtype}};
  return job;
}

std::unique_ptr<ps::Client> connect(const Child& server, uint32_t trainer, int trainers,
                                    ps::WireDtype dtype = ps::WireDtype::kFloat32) {
  return std::make_unique<ps::Client>(
      ps::ClientOptions{.servers = {server.endpoint}, .trainer = trainer}, job_of(trainers, dtype));
}

using Batches = std::vector<std::vector<uint64_t>>;

// Batches of distinct ids out of [0, rows).
Batches draw(int64_t rows, int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Batches batches(64);
  for (auto& batch : batches) {
    while (static_cast<int64_t>(batch.size()) < size) {
      while (static_cast<int64_t>(batch.size()) < size)
        batch.push_back(random() % static_cast<uint64_t>(rows));
      std::sort(batch.begin(), batch.end());
      batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    }
    std::shuffle(batch.begin(), batch.end(), random);
  }
  return batches;
}

void fill(ps::Client& client, int64_t rows) {
  std::vector<uint64_t> ids;
  const std::vector<float> gradients(10'000 * kWidth, 0.01f);
  for (int64_t next = 0; next < rows;) {
    ids.clear();
    while (next < rows && ids.size() < 10'000) ids.push_back(static_cast<uint64_t>(next++));
    const ps::PushRows push{.ids = ids,
                            .gradients = std::span(gradients).first(ids.size() * kWidth)};
    client.push(std::span(&push, 1), {});
  }
  client.flush();
}

// Rows that a trainer gets through in `seconds`, and what a row costs the server and the trainer.
struct Rate {
  double rows_per_s = 0;
  double server_cpu_ns_per_row = 0;
  double trainer_cpu_ns_per_row = 0;
};

// What a row of a table in memory costs at least: two cache lines at random, fetched ahead, one
// that says where the row is and the one that its weights fill, which are copied. Nanoseconds.
double gather_cost(int64_t rows, const Batches& batches) {
  static_assert(kWidth * sizeof(float) == 64);
  constexpr size_t kAhead = 16;
  const auto pages = [](size_t bytes) {
    const size_t unit = size_t{1} << 21;
    return ps::Pages((bytes + unit - 1) / unit * unit);
  };
  const auto count = static_cast<uint64_t>(rows);
  const ps::Pages place_pages = pages(count * sizeof(uint64_t));
  const ps::Pages row_pages = pages(count * 64);
  auto* const places = reinterpret_cast<uint64_t*>(place_pages.data());
  for (uint64_t i = 0; i < count; ++i) places[i] = ps::splitmix64_finalizer(i) % count;
  std::byte* const weights = row_pages.data();
  std::memset(weights, 0, count * 64);
  std::vector<std::byte> out(batches.front().size() * 64);
  std::vector<double> costs;
  for (int round = 0; round < 9; ++round) {
    const auto begin = Clock::now();
    size_t copied = 0;
    for (const auto& ids : batches) {
      for (size_t i = 0; i < ids.size() + 2 * kAhead; ++i) {
        if (i < ids.size()) __builtin_prefetch(places + ids[i]);
        if (const size_t j = i - kAhead; j < ids.size())
          __builtin_prefetch(weights + places[ids[j]] * 64);
        if (const size_t j = i - 2 * kAhead; j < ids.size())
          std::memcpy(out.data() + j * 64, weights + places[ids[j]] * 64, 64);
      }
      copied += ids.size();
    }
    costs.push_back(seconds_since(begin) / static_cast<double>(copied) * 1e9);
  }
  return bench::median_of(costs);
}

// Two calls are under way at any time: two threads, or one whose calls do not wait.
using Call = std::function<void(std::span<const uint64_t>, int thread)>;
Rate measure(const Batches& batches, double seconds, pid_t server, int threads, const Call& call,
             const std::function<void()>& end) {
  std::vector<int64_t> rows(static_cast<size_t>(threads));
  const double cpu = cpu_of(server), own_cpu = cpu_of(::getpid());
  const auto begin = Clock::now();
  {
    std::vector<std::jthread> workers;
    for (int thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&, thread] {
        for (size_t i = static_cast<size_t>(thread); seconds_since(begin) < seconds;
             i += static_cast<size_t>(threads)) {
          const auto& batch = batches[i % batches.size()];
          call(batch, thread);
          rows[static_cast<size_t>(thread)] += static_cast<int64_t>(batch.size());
        }
      });
    }
  }
  end();
  const double elapsed = seconds_since(begin);
  double total = 0;
  for (const int64_t count : rows) total += static_cast<double>(count);
  return {total / elapsed, (cpu_of(server) - cpu) / total * 1e9,
          (cpu_of(::getpid()) - own_cpu) / total * 1e9};
}

// One thing that is measured, round after round.
struct Side {
  std::string name;
  std::function<Rate()> run;
  std::vector<double> rates, costs, trainer_costs;
};

json summary(const Side& side) {
  const auto [least, most] = std::minmax_element(side.rates.begin(), side.rates.end());
  const double cost = bench::median_of(side.costs);
  return {{"rows_per_s", bench::median_of(side.rates)},
          {"least", *least},
          {"most", *most},
          {"server_cpu_ns_per_row", cost},
          {"trainer_cpu_ns_per_row", bench::median_of(side.trainer_costs)},
          {"rows_per_s_and_server_core", 1e9 / cost}};
}

bool ends_with_unfinished(const std::filesystem::directory_entry& entry) {
  return entry.path().extension() == ".unfinished";
}

bool is_snapshot(const std::filesystem::directory_entry& entry) {
  return entry.path().filename().string().starts_with("snapshot.") && !ends_with_unfinished(entry);
}

template <class Condition>
bool has_entry(const std::string& folder, const Condition& condition) {
  std::error_code ignored;
  const std::filesystem::directory_iterator entries(folder, ignored);
  return std::any_of(begin(entries), end(entries), condition);
}

// Adds the names of whole snapshots that a server has.
void note_snapshots(const std::string& folder, std::set<std::string>& names) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (is_snapshot(entry)) names.insert(entry.path().filename().string());
  }
}

json measure_rows(const Flags& flags, const std::string& folder) {
  struct Table {
    std::string name;
    int64_t rows;
    Child server;
    ps::WireDtype dtype;
    std::unique_ptr<ps::Client> client{};
    Batches batches{};
    std::set<std::string> snapshots{};
  };
  std::vector<Table> tables;
  const auto add_table = [&](const std::string& name, int64_t rows, ps::Durability durability,
                             ps::WireDtype dtype = ps::WireDtype::kFloat32,
                             Network network = Network::kUnix) {
    const bool is_asked = flags.measures(name + "_pull") || flags.measures(name + "_push");
    if (rows > 0 && is_asked)
      tables.push_back({name, rows,
                        start_server(folder + "/" + name, durability, std::nullopt, network),
                        dtype});
  };
  add_table("small", flags.rows, ps::Durability::kApplied);
  add_table("logged", flags.rows, ps::Durability::kLogged);
  // The same with half the bytes of values; both once more through the network's stack.
  constexpr auto kLogged = ps::Durability::kLogged;
  constexpr auto kFloat32 = ps::WireDtype::kFloat32, kBfloat16 = ps::WireDtype::kBfloat16;
  add_table("logged_bfloat16", flags.rows, kLogged, kBfloat16);
  add_table("tcp", flags.rows, kLogged, kFloat32, Network::kTcp);
  add_table("tcp_bfloat16", flags.rows, kLogged, kBfloat16, Network::kTcp);
  add_table("large", flags.large_rows, ps::Durability::kLogged);
  const Child plain_server = start([](const auto& ready) {
    const bench::PlainServer server;
    ready(server.port());
    ::pause();
  });
  bench::PlainClient plain(plain_server.number);
  const size_t floats = static_cast<size_t>(flags.batch) * kWidth;
  std::array<std::vector<float>, 2> weights{std::vector<float>(floats), std::vector<float>(floats)};
  const std::vector<float> gradients(floats, 0.001f);
  std::vector<Side> sides;
  for (Table& table : tables) {
    table.client = connect(table.server, 0, 1, table.dtype);
    fill(*table.client, table.rows);
    table.batches = draw(table.rows, flags.batch, 1);
    sides.push_back({table.name + "_pull", [&] {
                       return measure(
                           table.batches, flags.seconds, table.server.process, 2,
                           [&](auto ids, int thread) {
                             const ps::PullRows pull{
                                 .ids = ids, .weights = weights[static_cast<size_t>(thread)]};
                             table.client->pull(std::span(&pull, 1), {}).wait();
                           },
                           [] {});
                     }});
    sides.push_back({table.name + "_push", [&] {
                       return measure(
                           table.batches, flags.seconds, table.server.process, 1,
                           [&](auto ids, int) {
                             const ps::PushRows push{.ids = ids, .gradients = gradients};
                             table.client->push(std::span(&push, 1), {});
                           },
                           [&] {
                             table.client->flush();
                             note_snapshots(table.server.folder, table.snapshots);
                           });
                     }});
  }
  const Batches batches = draw(flags.rows, flags.batch, 1);
  const auto add_plain = [&](const std::string& name, const Call& call) {
    sides.push_back({name, [&, call] {
                       return measure(batches, flags.seconds, plain_server.process, 2, call, [] {});
                     }});
  };
  const auto out = [&](int thread) { return std::span(weights[static_cast<size_t>(thread)]); };
  add_plain("plain_pull", [&](auto ids, int thread) { plain.pull(ids, out(thread)); });
  add_plain("plain_push", [&](auto ids, int) { plain.push(ids, gradients); });
  add_plain("grpc_pull", [&](auto ids, int thread) { plain.raw_pull(ids, out(thread)); });
  add_plain("grpc_push", [&](auto ids, int) { plain.raw_push(ids, gradients); });
  for (const auto& batch : batches) plain.push(batch, gradients);
  std::erase_if(sides, [&](const Side& side) { return !flags.measures(side.name); });
  if (sides.empty()) throw ConfigError("--only " + flags.only + ": no such side");
  for (int round = 0; round < flags.rounds; ++round) {
    for (Side& side : sides) {
      const Rate rate = side.run();
      side.rates.push_back(rate.rows_per_s);
      side.costs.push_back(rate.server_cpu_ns_per_row);
      side.trainer_costs.push_back(rate.trainer_cpu_ns_per_row);
    }
  }
  json result;
  for (Table& table : tables) {
    if (!flags.only.empty() || (table.name != "small" && table.name != "large")) continue;
    result[table.name + "_gather_ns_per_row"] = gather_cost(table.rows, table.batches);
  }
  for (const Side& side : sides) result[side.name] = summary(side);
  const auto rate = [&](const std::string& name) {
    return result[name]["rows_per_s"].get<double>();
  };
  for (const Table& table : tables) {
    for (const std::string call : {"pull", "push"}) {
      const std::string name = table.name + "_" + call;
      if (!flags.only.empty()) continue;
      if (table.dtype == kBfloat16) {  // What the others are compared with has more bytes.
        const std::string wide = table.name.substr(0, table.name.find('_'));
        result[name]["of_float32"] = rate(name) / rate(wide + "_" + call);
        continue;
      }
      result[name]["of_plain"] = rate(name) / rate("plain_" + call);
      result[name]["of_grpc"] = rate(name) / rate("grpc_" + call);
    }
    const json status = json::parse(table.client->status().front()).at("tables").front();
    result[table.name + "_table"] = {{"rows", status.at("rows")},
                                     {"bytes_per_row", status.at("bytes_per_row")},
                                     {"resident_bytes", resident_bytes_of(table.server.process)},
                                     {"snapshots", table.snapshots.size()}};
  }
  for (const Table& table : tables) ::kill(table.server.process, SIGKILL);
  ::kill(plain_server.process, SIGKILL);
  while (::wait(nullptr) > 0) {
  }
  return result;
}

// What a process holds: its own pages, with those of its children that they do not share, and of
// its own those that are huge.
struct Memory {
  double resident_bytes = 0;
  double with_children_bytes = 0;
  double huge_bytes = 0;
};

double of_rollup(pid_t process, const std::string& field) {
  std::ifstream file("/proc/" + std::to_string(process) + "/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":"))
      return std::stod(line.substr(field.size() + 1)) * 1024;  // kB.
  }
  return 0;
}

Memory memory_of(pid_t process) {
  Memory memory{.resident_bytes = of_rollup(process, "Rss"),
                .with_children_bytes = of_rollup(process, "Pss"),
                .huge_bytes = of_rollup(process, "AnonHugePages")};
  std::error_code ignored;
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks, ignored)) {
    std::ifstream children(task.path() / "children");
    for (pid_t child = 0; children >> child;) memory.with_children_bytes += of_rollup(child, "Pss");
  }
  return memory;
}

// Of calls made one after another, whose times these are. Sorts them.
json times_of(std::vector<double>& calls_s) {
  if (calls_s.empty()) throw std::runtime_error("expected time for at least one call, got none");
  std::sort(calls_s.begin(), calls_s.end());
  const auto at = [&](double share) {
    return calls_s[static_cast<size_t>(share * static_cast<double>(calls_s.size() - 1))] * 1e3;
  };
  return {{"ms_median", at(0.5)}, {"ms_p99", at(0.99)}, {"ms_most", at(1)}};
}

// Pulls of one trainer, one after another, beside pushes of another, each of which waits until it is
// on the disk.
json measure_synced(const Flags& flags, const std::string& folder) {
  const Child server = start_server(folder, ps::Durability::kSynced);
  const auto puller = connect(server, 0, 2), pusher = connect(server, 1, 2);
  fill(*pusher, flags.rows);
  const Batches batches = draw(flags.rows, flags.batch, 1);
  const size_t floats = static_cast<size_t>(flags.batch) * kWidth;
  std::vector<double> pulls_s, pushes_s;
  {
    const std::jthread pushes([&](const std::stop_token& stop) {
      const std::vector<float> gradients(floats, 0.001f);
      for (size_t i = 0; !stop.stop_requested(); ++i) {
        const ps::PushRows push{.ids = batches[i % batches.size()], .gradients = gradients};
        const auto began = Clock::now();
        pusher->push(std::span(&push, 1), {});
        pusher->flush();
        pushes_s.push_back(seconds_since(began));
      }
    });
    std::vector<float> weights(floats);
    const auto begin = Clock::now();
    for (size_t i = 0; seconds_since(begin) < flags.seconds * flags.rounds; ++i) {
      const ps::PullRows pull{.ids = batches[i % batches.size()], .weights = weights};
      const auto began = Clock::now();
      puller->pull(std::span(&pull, 1), {}).wait();
      pulls_s.push_back(seconds_since(began));
    }
  }
  ::kill(server.process, SIGKILL);
  ::waitpid(server.process, nullptr, 0);
  return {{"pull", times_of(pulls_s)}, {"push", times_of(pushes_s)}};
}

// Pushes one after another, each until it is acknowledged: before a server's first snapshot, while
// a child writes it, and for as long as `seconds` after it.
json measure_snapshot(const Flags& flags, const std::string& folder) {
  const auto log_bytes = static_cast<int64_t>(flags.snapshot_log_mib * 1024 * 1024);
  // Ids and gradients: what filling the table writes.
  const int64_t fill_bytes = flags.snapshot_rows * static_cast<int64_t>(8 + kWidth * sizeof(float));
  const Child server = start_server(folder, ps::Durability::kLogged, fill_bytes + log_bytes);
  const auto client = connect(server, 0, 1);
  fill(*client, flags.snapshot_rows);
  const Batches batches = draw(flags.snapshot_rows, flags.batch, 1);
  const std::vector<float> gradients(static_cast<size_t>(flags.batch) * kWidth, 0.001f);
  struct Phase {
    const char* name;
    std::vector<double> calls_s{};
    Memory memory{};
  };
  std::array<Phase, 3> phases{Phase{"before"}, Phase{"during"}, Phase{"after"}};
  phases[0].memory = memory_of(server.process);
  // Looking at memory takes time of the server's: beside the calls, and seldom.
  std::jthread looks([&](const std::stop_token& stop) {
    Memory& most = phases[1].memory;
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      if (!has_entry(folder, ends_with_unfinished)) continue;
      const Memory now = memory_of(server.process);
      if (now.with_children_bytes > most.with_children_bytes) most = now;
    }
  });
  const auto begin = Clock::now();
  std::optional<Clock::time_point> finished;
  for (size_t i = 0; !finished || seconds_since(*finished) < flags.seconds; ++i) {
    if (!finished && seconds_since(begin) > 600)
      throw std::runtime_error("no snapshot within 600 s");
    const auto& ids = batches[i % batches.size()];
    const ps::PushRows push{.ids = ids, .gradients = gradients};
    const auto began = Clock::now();
    client->push(std::span(&push, 1), {});
    client->flush();
    const double took = seconds_since(began);
    const bool writes = has_entry(folder, ends_with_unfinished);
    if (!finished && !writes && has_entry(folder, is_snapshot)) finished = Clock::now();
    phases[finished ? 2 : writes ? 1 : 0].calls_s.push_back(took);
  }
  looks.request_stop();
  looks.join();
  phases[2].memory = memory_of(server.process);
  ::kill(server.process, SIGKILL);
  ::waitpid(server.process, nullptr, 0);
  json result{{"rows", flags.snapshot_rows}, {"log_mib", flags.snapshot_log_mib}};
  for (Phase& phase : phases) {
    auto& calls = phase.calls_s;
    if (calls.empty()) throw std::runtime_error(std::string("no push ") + phase.name);
    double sum = 0;
    for (const double call : calls) sum += call;
    result[phase.name] = times_of(calls);
    result[phase.name].update(
        {{"pushes", calls.size()},
         {"rows_per_s", static_cast<double>(flags.batch) * static_cast<double>(calls.size()) / sum},
         {"resident_bytes", phase.memory.resident_bytes},
         {"resident_bytes_with_child", phase.memory.with_children_bytes},
         {"huge_bytes", phase.memory.huge_bytes}});
  }
  return result;
}

// What `body` returns, in a child: its gRPC has threads that no fork after it would take along.
json in_child(const std::function<json()>& body) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("pipe");
  const pid_t process = ::fork();
  if (process == 0) {
    ::close(ends[0]);
    const int code = run_program("bench_ps", [&] {
      const std::string text = body().dump();
      return ::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size())
                 ? kExitOk
                 : kExitFailure;
    });
    ::_exit(code);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> part{};
  for (ssize_t bytes = 0; (bytes = ::read(ends[0], part.data(), part.size())) > 0;)
    text.append(part.data(), static_cast<size_t>(bytes));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(process, &status, 0);
  if (status != 0) throw std::runtime_error("a measurement failed");
  return json::parse(text);
}

// Keys: ids as a model's batch has them, of which 43 in 100 are distinct.
std::vector<std::vector<int64_t>> draw_keys(int64_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int64_t>> batches(64);
  for (auto& batch : batches) {
    const auto distinct = static_cast<size_t>(0.43 * static_cast<double>(size));
    for (size_t i = 0; i < distinct; ++i)
      batch.push_back(static_cast<int64_t>(random() % 1'000'000));
    while (static_cast<int64_t>(batch.size()) < size) batch.push_back(batch[random() % distinct]);
    std::shuffle(batch.begin(), batch.end(), random);
  }
  return batches;
}

// A trainer by itself: pulls keys of rows that are there, distinct ones travelling, each key's row
// copied to its place; then pushes a gradient for each key. Keys a second of both.
std::array<double, 2> train_keys(const Flags& flags, const Child& server, uint32_t trainer,
                                 const std::function<void()>& meet) {
  const auto client = connect(server, trainer, 2);
  const auto batches = draw_keys(flags.batch, trainer);
  const auto keys = static_cast<size_t>(flags.batch);
  std::array<double, 2> rates{};
  struct Slot {
    ps::DistinctIds distinct;
    std::vector<float> rows;
    std::optional<ps::PendingPull> pull;
  };
  std::array<Slot, 2> slots;
  std::vector<float> out(keys * kWidth), gradients(keys * kWidth, 0.001f);
  const auto finish = [&](Slot& slot) {
    slot.pull->wait();
    slot.pull.reset();
    const auto positions = slot.distinct.positions();
    for (size_t i = 0; i < positions.size(); ++i)
      std::copy_n(&slot.rows[static_cast<size_t>(positions[i]) * kWidth], kWidth, &out[i * kWidth]);
  };
  ps::DistinctIds distinct;
  std::vector<float> sums;
  const auto push = [&](const std::vector<int64_t>& batch) {
    distinct.assign(batch, nullptr);
    sums.assign(distinct.ids().size() * kWidth, 0.0f);
    const auto positions = distinct.positions();
    for (size_t i = 0; i < positions.size(); ++i) {
      float* const sum = &sums[static_cast<size_t>(positions[i]) * kWidth];
      for (size_t j = 0; j < kWidth; ++j) sum[j] += gradients[i * kWidth + j];
    }
    const ps::PushRows rows{.ids = distinct.ids(), .gradients = sums};
    client->push(std::span(&rows, 1), {});
  };
  // All rows are there before any is pulled: one that is not costs no look at memory.
  for (const auto& batch : batches) push(batch);
  client->flush();
  meet();
  auto begin = Clock::now();
  int64_t done = 0;
  for (size_t step = 0; seconds_since(begin) < flags.seconds; ++step) {
    Slot& slot = slots[step % 2];
    if (slot.pull) finish(slot);
    slot.distinct.assign(batches[step % batches.size()], nullptr);
    slot.rows.resize(slot.distinct.ids().size() * kWidth);
    const ps::PullRows pull{.ids = slot.distinct.ids(), .weights = slot.rows};
    slot.pull.emplace(client->pull(std::span(&pull, 1), {}));
    done += flags.batch;
  }
  for (Slot& slot : slots) {
    if (slot.pull) finish(slot);
  }
  rates[0] = static_cast<double>(done) / seconds_since(begin);
  meet();
  begin = Clock::now();
  done = 0;
  for (size_t step = 0; seconds_since(begin) < flags.seconds; ++step) {
    push(batches[step % batches.size()]);
    done += flags.batch;
  }
  client->flush();
  rates[1] = static_cast<double>(done) / seconds_since(begin);
  meet();
  client->leave();
  return rates;
}

json measure_keys(const Flags& flags, const std::string& folder) {
  std::array<std::vector<double>, 2> all;
  for (int round = 0; round < flags.rounds; ++round) {
    const Child server =
        start_server(folder + "/keys" + std::to_string(round), ps::Durability::kLogged);
    std::array<int, 2> results{};
    if (::pipe(results.data()) != 0) throw std::runtime_error("pipe");
    std::array<std::array<int, 2>, 2> tokens{};  // To each trainer, from the other.
    for (auto& pair : tokens) {
      if (::pipe(pair.data()) != 0) throw std::runtime_error("pipe");
    }
    std::vector<pid_t> trainers;
    for (uint32_t trainer = 0; trainer < 2; ++trainer) {
      const pid_t process = ::fork();
      if (process == 0) {
        const auto meet = [&] {
          char token = 0;
          (void)!::write(tokens[1 - trainer][1], &token, 1);
          (void)!::read(tokens[trainer][0], &token, 1);
        };
        const auto rates = train_keys(flags, server, trainer, meet);
        (void)!::write(results[1], rates.data(), sizeof(rates));
        ::_exit(0);
      }
      trainers.push_back(process);
    }
    for (size_t i = 0; i < trainers.size(); ++i) {
      std::array<double, 2> rates{};
      if (::read(results[0], rates.data(), sizeof(rates)) != sizeof(rates))
        throw std::runtime_error("a trainer failed");
      all[0].push_back(rates[0]);
      all[1].push_back(rates[1]);
    }
    for (const pid_t process : trainers) ::waitpid(process, nullptr, 0);
    ::kill(server.process, SIGKILL);
    ::waitpid(server.process, nullptr, 0);
    for (const auto& pair : tokens) {
      ::close(pair[0]);
      ::close(pair[1]);
    }
    ::close(results[0]);
    ::close(results[1]);
  }
  json result;
  for (size_t i = 0; i < 2; ++i) {
    const auto [least, most] = std::minmax_element(all[i].begin(), all[i].end());
    result[i == 0 ? "pulled" : "pushed"] = {
        {"keys_per_s_and_trainer", bench::median_of(all[i])}, {"least", *least}, {"most", *most}};
  }
  return result;
}

int run(int argc, char** argv) {
  Flags flags;
  CLI::App app("Measures parameter servers on this machine", "bench_ps");
  app.add_option("--rows", flags.rows, "Rows of the small table")->capture_default_str();
  app.add_option("--large-rows", flags.large_rows, "Rows of the large one (0: none)")
      ->capture_default_str();
  app.add_option("--rounds", flags.rounds, "Rounds of all sides in turn")->capture_default_str();
  app.add_option("--seconds", flags.seconds, "Of each measurement")->capture_default_str();
  app.add_option("--batch", flags.batch, "Ids of a call")->capture_default_str();
  app.add_option("--snapshot-rows", flags.snapshot_rows,
                 "Rows of the table of which a snapshot is written (0: none)")
      ->capture_default_str();
  app.add_option("--snapshot-log", flags.snapshot_log_mib, "Log before that snapshot")
      ->type_name(cohort::kMebibytes)
      ->check(cli::above_zero())
      ->capture_default_str();
  app.add_flag("--keys-only", flags.keys_only, "Only the keys of two trainers");
  app.add_option("--only", flags.only,
                 "One table or side of the rows alone: large, small_pull ...; or synced");
  if (const auto ended = cli::parse(app, argc, argv)) return *ended;
  const std::string folder =
      std::filesystem::temp_directory_path() / ("cohort-bench-ps-" + std::to_string(::getpid()));
  // Children are forked before gRPC has a thread here: keys first, whose trainers are children.
  json result{{"width", kWidth},
              {"batch", flags.batch},
              {"rounds", flags.rounds},
              {"seconds", flags.seconds}};
  if (flags.only.empty()) result["keys"] = measure_keys(flags, folder);
  if (flags.only.empty() && !flags.keys_only && flags.snapshot_rows > 0)
    result["snapshot"] = in_child([&] { return measure_snapshot(flags, folder + "/snapshot"); });
  const bool is_synced_asked = flags.only.empty() ? !flags.keys_only : flags.only == "synced";
  if (is_synced_asked)
    result["synced"] = in_child([&] { return measure_synced(flags, folder + "/synced"); });
  if (!flags.keys_only && flags.only != "synced") result["rows"] = measure_rows(flags, folder);
  std::filesystem::remove_all(folder);
  std::printf("%s\n", result.dump().c_str());
  return kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("bench_ps", [&] { return run(argc, argv); });
}
