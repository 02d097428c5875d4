// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/rendezvous.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/process_stat.h"
#include "cohort/comm/agent_store.h"
#include "cohort/comm/backends/shm/shm_backend.h"
#include "cohort/comm/listen.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const char* const kComplete = "complete";
const char* const kError = "error";
const char* const kTerms = "terms";
const char* const kNumJoined = "num_come";
const char* const kNumEntries = "num_entries";
const char* const kNumAcks = "num_heard";

std::string read_link(const char* path) {
  std::array<char, 256> text{};
  const ssize_t length = readlink(path, text.data(), text.size());
  return {text.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

// Empty if there is no such process.
std::string start_time(pid_t pid) {
  return process_stat(pid, 22);
}

std::string host_name_of_environment() {
  std::array<char, 256> own{};
  gethostname(own.data(), own.size() - 1);
  const std::string name = env_string("COHORT_HOST_NAME").value_or(own.data());
  if (name.find_first_of(" \t\n/") != std::string::npos)
    throw ConfigError("COHORT_HOST_NAME=" + name + ": expected a name without spaces and slashes");
  return name;
}

// A rank's entry in the member list.
struct Member {
  std::string host_name;
  std::string host;  // differs between machines, and between network and process namespaces of one
  pid_t pid = 0;
  std::string started;
  std::string token;    // differs between two groups of one process
  std::string sharing;  // memory_sharing(), or "-"

  static Member self() {
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::string boot_id;
    std::getline(boot, boot_id);
    return {host_name_of_environment(),
            boot_id + read_link("/proc/self/ns/net") + read_link("/proc/self/ns/pid"),
            getpid(),
            start_time(getpid()),
            std::to_string(std::random_device()()),
            memory_sharing().empty() ? "-" : memory_sharing()};
  }
  static Member parse(const std::string& line) {
    Member member;
    std::istringstream(line) >> member.host_name >> member.host >> member.pid >> member.started >>
        member.token >> member.sharing;
    return member;
  }
  std::string line() const {
    return host_name + " " + host + " " + std::to_string(pid) + " " + started + " " + token + " " +
           sharing;
  }
  std::string named_host() const { return host_name + "/" + host; }
  std::string describe() const { return "pid " + std::to_string(pid) + " on " + host_name; }
  // Known of processes of this host only.
  bool is_gone(const Member& self) const { return host == self.host && start_time(pid) != started; }
};

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}

// The member list of one rendezvous: a view of the store, and this rank's entry in it.
class MemberList {
 public:
  // `agent`: a connection for `ping` to an agent's store; none for any other.
  MemberList(StorePtr store, const Fd& agent, const RankInfo& info, Clock::time_point start,
             Clock::time_point deadline)
      : store_(std::move(store)), agent_(agent), info_(info), deadline_(deadline), start_(start) {}

  // Whether a rank has begun to register.
  bool is_begun() { return store_->check({kNumJoined}); }
  // Whether a rank has found all the others there, or has given up waiting for one.
  bool is_over() {
    return store_->check({kComplete}) ||
           (store_->check({kError}) && store_->get_to_str(kError).starts_with("p"));
  }
  // A new process may replace one that has ended; on another host that cannot be checked.
  void check_that_holder_is_gone() {
    const std::string key = member_key(info_.rank);
    if (!store_->check({key})) return;
    const Member holder = Member::parse(store_->get_to_str(key));
    if (holder.host == self_.host && !holder.is_gone(self_))
      throw ConfigError("rendezvous at " + rendezvous_point(info_) + ": " + clash_text(holder));
  }

  void register_rank(const std::string& terms) {
    store_->add(kNumJoined, 1);
    const std::string rank = std::to_string(info_.rank);
    // Before the entry: a rank that finds all entries knows that all terms agree.
    const std::string first = store_->compareSet(kTerms, "", rank + " " + terms);
    const size_t space = first.find(' ');
    if (first.substr(space + 1) != terms) {
      declare("rank " + rank + " comes with " + terms + " where rank " + first.substr(0, space) +
              " has " + first.substr(space + 1));
    }
    const std::string mine = self_.line();
    const std::string found = store_->compareSet(member_key(info_.rank), "", mine);
    if (found != mine) clash(Member::parse(found));
    store_->add(kNumEntries, 1);
  }

  std::vector<Member> wait_for_all() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < info_.world_size; ++rank) keys.push_back(member_key(rank));
    for (milliseconds pause{2}; !all_registered(); pause = std::min(pause * 2, milliseconds(100))) {
      check_for_error();
      if (Clock::now() > deadline_) {
        check_for_missing(keys);
        break;
      }
      std::this_thread::sleep_for(pause);
    }
    check_for_error();  // A rank may have given up just before the last one came.
    std::vector<Member> members;
    for (const std::vector<uint8_t>& entry : store_->multiGet(keys))
      members.push_back(Member::parse({entry.begin(), entry.end()}));
    if (!info_.store_file.empty()) {
      for (const Member& member : members) {
        if (member.is_gone(self_)) declare(stale(member));
      }
    }
    store_->set(kComplete, "");
    return members;
  }

  const Member& self() const { return self_; }

 private:
  // Asks for one number: W ranks that each ask for W entries would keep the store busy.
  bool all_registered() {
    // Of a store that has gone c10d's client would tell on stderr, too; so it is not asked.
    if (agent_) {
      const std::string reason =
          ping(agent_, info_, std::max(deadline_, Clock::now() + kAnswerTime));
      if (!reason.empty())
        C10_THROW_ERROR(DistNetworkError, "the host of the store is lost: " + reason);
    }
    store_->setTimeout(std::max(time_left(deadline_), kAnswerTime));
    return std::stoll(store_->get_to_str(kNumEntries)) >= info_.world_size;
  }

  [[noreturn]] void clash(const Member& other) {
    if (!info_.store_file.empty() && other.is_gone(self_)) declare(stale(other));
    std::string text = clash_text(other);
    if (!info_.store_file.empty())
      text += "; or " + info_.store_file + " was left by an earlier job: remove it";
    declare(text);
  }

  std::string clash_text(const Member& other) const {
    return "two processes are rank " + std::to_string(info_.rank) + ": " + other.describe() +
           " and " + self_.describe();
  }

  std::string stale(const Member& gone) const {
    return info_.store_file + " was left by an earlier job (" + gone.describe() +
           " is gone): remove it, then start again";
  }

  // Tells all ranks, then leaves with it.
  [[noreturn]] void declare(const std::string& text) {
    store_->set(kError, "c" + text);
    linger();
    throw ConfigError("rendezvous at " + rendezvous_point(info_) + ": " + text);
  }

  // No entry is missing if a rank has ended before it could count its own.
  void check_for_missing(const std::vector<std::string>& keys) {
    std::string ranks;
    for (int rank = 0; rank < info_.world_size; ++rank) {
      if (!store_->check({keys[static_cast<size_t>(rank)]})) ranks += std::to_string(rank) + " ";
    }
    if (ranks.empty()) return;
    // The first rank that gives up reports for all.
    store_->compareSet(kError, "", "p" + ranks);
    check_for_error();
    throw_missing(ranks);
  }

  void check_for_error() {
    if (!store_->check({kError})) return;
    const std::string text = store_->get_to_str(kError);
    linger();
    if (text.starts_with("p")) throw_missing(text.substr(1));
    throw ConfigError("rendezvous at " + rendezvous_point(info_) + ": " + text.substr(1));
  }

  [[noreturn]] void throw_missing(const std::string& ranks) const {
    std::vector<int> missing;
    std::istringstream in(ranks);
    for (int rank = 0; in >> rank;) missing.push_back(rank);
    const size_t come = static_cast<size_t>(info_.world_size) - missing.size();
    throw PeerError({.rank = info_.rank,
                     .lost_ranks = missing,
                     .operation = "rendezvous at " + rendezvous_point(info_),
                     .sequence = -1,
                     .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start_),
                     .cause = std::to_string(come) + " of " + std::to_string(info_.world_size) +
                              " ranks have come"});
  }

  // The store's host leaves last, so that the others read the error; a second is plenty for ranks
  // that poll every 100 ms.
  void linger() {
    store_->add(kNumAcks, 1);
    if (info_.rank != 0) return;
    const auto limit = Clock::now() + milliseconds(1000);
    while (store_->add(kNumAcks, 0) < store_->add(kNumJoined, 0) && Clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  }

  const StorePtr store_;
  const Fd& agent_;
  const RankInfo& info_;
  const Member self_ = Member::self();
  const Clock::time_point deadline_;
  const Clock::time_point start_;
};

// A store serves one group of all ranks after another, each with its own generation of keys. A
// generation that this process has been in is over for it, whether the rendezvous succeeded or not.
// Ranks may have tried a different number of times, and one may be a new process: the store
// tells which generation is open.
class Generation {
 public:
  Generation(c10d::Store& store, int rank)
      : store_(store.compareSet("name", "", std::to_string(std::random_device()()))), rank_(rank) {
    const std::lock_guard lock(mutex());
    const auto known = next().find({store_, rank_});
    is_first = known == next().end();
    if (!is_first) number = known->second;
  }
  ~Generation() {
    const std::lock_guard lock(mutex());
    next()[{store_, rank_}] = number + 1;
  }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  int64_t number = 0;
  bool is_first = true;  // of this process as this rank of this store

 private:
  // By store and rank, for the ranks of one job may be threads of one process.
  static std::map<std::pair<std::string, int>, int64_t>& next() {
    static std::map<std::pair<std::string, int>, int64_t> numbers;
    return numbers;
  }
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }

  const std::string store_;
  const int rank_;
};

StorePtr part_of(const StorePtr& store, int64_t generation, const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(std::to_string(generation) + "/" + name, store);
}

}  // namespace

std::string own_host() {
  return Member::self().named_host();
}

cpu_set_t cores_of(pid_t process) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(process, sizeof cores, &cores) != 0) CPU_ZERO(&cores);
  return cores;
}

bool has_core_each(const std::vector<cpu_set_t>& cores, const std::vector<int>& ranks) {
  cpu_set_t theirs;
  CPU_ZERO(&theirs);
  for (const int rank : ranks) CPU_OR(&theirs, &theirs, &cores[static_cast<size_t>(rank)]);
  const auto sharing = std::ranges::count_if(cores, [&](const cpu_set_t& of_rank) {
    cpu_set_t common;
    CPU_AND(&common, &of_rank, &theirs);
    return CPU_COUNT(&common) > 0;
  });
  return sharing > 0 && sharing <= CPU_COUNT(&theirs);
}

void find_host(RankInfo& info, const std::vector<std::string>& hosts) {
  const auto own = hosts.begin() + info.rank;
  info.local_rank = static_cast<int>(std::count(hosts.begin(), own, *own));
  info.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), *own));
  info.finds_host = false;
}

Rendezvous join_rendezvous(const RankInfo& info, const RendezvousOptions& options) {
  const auto start = Clock::now();
  const auto deadline = start + options.timeout;
  try {
    const Interface asked = options.interface.empty()
                                ? interface_of_environment()
                                : find_interface(options.interface, "--interface");
    Rendezvous rendezvous;
    rendezvous.interface = asked.name;
    rendezvous.address = !asked.name.empty() ? asked.address
                         : info.store_file.empty()
                             ? local_address_towards(info.master_addr, info.master_port, deadline)
                             : "127.0.0.1";
    const Fd agent = info.agent_store ? await_agent_store(info, deadline) : Fd();
    const StoreConnection connection = connect_store(info, deadline, options.timeout);
    Generation generation(*connection.store, info.rank);
    const auto list_of = [&](int64_t number) {
      return MemberList(part_of(connection.store, number, "roster"), agent, info, start, deadline);
    };
    while (list_of(generation.number).is_over() || list_of(generation.number + 1).is_begun())
      ++generation.number;
    if (generation.is_first && generation.number > 0)
      list_of(generation.number - 1).check_that_holder_is_gone();
    MemberList list = list_of(generation.number);
    list.register_rank(options.terms);
    const auto members = list.wait_for_all();
    for (const Member& member : members) {
      rendezvous.hosts.push_back(member.named_host());
      rendezvous.memory_sharing.push_back(member.sharing == "-" ? "" : member.sharing);
      rendezvous.processes.push_back(member.host == list.self().host
                                         ? PeerProcess(member.pid, member.started)
                                         : PeerProcess());
      rendezvous.cores.push_back(member.host == list.self().host ? cores_of(member.pid)
                                                                 : cpu_set_t{});
    }
    const bool several_hosts = std::ranges::any_of(
        members, [&](const Member& other) { return other.host != list.self().host; });
    if (several_hosts && asked.name.empty() && is_loopback(rendezvous.address))
      rendezvous.address = first_outside_address();
    connection.store->setTimeout(options.timeout);
    rendezvous.store = part_of(connection.store, generation.number, "group");
    // A host that is suspended for a while is not lost.
    rendezvous.watch = connect_store(info, deadline, options.timeout, /*silence=*/options.timeout);
    rendezvous.watch.store = part_of(rendezvous.watch.store, generation.number, "watch");
    return rendezvous;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError({.rank = info.rank,
                     .lost_ranks = {},
                     .operation = "rendezvous at " + rendezvous_point(info),
                     .sequence = -1,
                     .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start),
                     .cause = one_line(error)});
  }
}

}  // namespace cohort::comm
