#include "cohort/comm/rendezvous.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/listen.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

const char* const kError = "error";
const char* const kTerms = "terms";
const char* const kNumCome = "num_come";
const char* const kNumHeard = "num_heard";

std::string read_link(const char* path) {
  std::array<char, 256> text{};
  const ssize_t length = readlink(path, text.data(), text.size());
  return {text.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

// When the process began, in clock ticks since the machine's start; empty if there is no such
// process.
std::string start_time(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;  // the 22nd; the name in parentheses is the 2nd
  return fields ? field : "";
}

// A rank's line in the roster.
struct Member {
  std::string host_name;
  std::string host;  // differs between machines, and between network and process namespaces of one
  pid_t pid = 0;
  std::string started;
  std::string token;  // differs between two groups of one process

  static Member self() {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    std::ifstream boot("/proc/sys/kernel/random/boot_id");
    std::string boot_id;
    std::getline(boot, boot_id);
    return {name.data(), boot_id + read_link("/proc/self/ns/net") + read_link("/proc/self/ns/pid"),
            getpid(), start_time(getpid()), std::to_string(std::random_device()())};
  }
  static Member parse(const std::string& line) {
    Member member;
    std::istringstream(line) >> member.host_name >> member.host >> member.pid >> member.started >>
        member.token;
    return member;
  }
  std::string line() const {
    return host_name + " " + host + " " + std::to_string(pid) + " " + started + " " + token;
  }
  std::string describe() const { return "pid " + std::to_string(pid) + " on " + host_name; }
  // Known of processes of this host only.
  bool is_gone(const Member& self) const { return host == self.host && start_time(pid) != started; }
};

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}

// The roster of one rendezvous: a view of the store, and this rank's place in it.
class Roster {
 public:
  Roster(StorePtr store, const Place& place, Clock::time_point start, milliseconds timeout)
      : store_(std::move(store)), place_(place), deadline_(start + timeout), start_(start) {}

  void sign(const std::string& terms) {
    store_->add(kNumCome, 1);
    const std::string rank = std::to_string(place_.rank);
    // Before the name: who finds all names knows that all terms agree.
    const std::string first = store_->compareSet(kTerms, "", rank + " " + terms);
    const size_t space = first.find(' ');
    if (first.substr(space + 1) != terms) {
      declare("rank " + rank + " comes with " + terms + " where rank " + first.substr(0, space) +
              " has " + first.substr(space + 1));
    }
    const std::string mine = self_.line();
    const std::string found = store_->compareSet(member_key(place_.rank), "", mine);
    if (found != mine) clash(Member::parse(found));
  }

  std::vector<Member> wait_for_all() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < place_.world_size; ++rank) keys.push_back(member_key(rank));
    for (milliseconds pause{2}; !store_->check(keys);
         pause = std::min(pause * 2, milliseconds(100))) {
      hear_error();
      if (Clock::now() > deadline_) miss(keys);
      std::this_thread::sleep_for(pause);
    }
    std::vector<Member> members;
    for (const std::string& key : keys) members.push_back(Member::parse(store_->get_to_str(key)));
    if (!place_.store_file.empty()) {
      for (const Member& member : members) {
        if (member.is_gone(self_)) declare(stale(member));
      }
    }
    return members;
  }

  const Member& self() const { return self_; }

 private:
  [[noreturn]] void clash(const Member& other) {
    if (!place_.store_file.empty() && other.is_gone(self_)) declare(stale(other));
    std::string text = "two processes are rank " + std::to_string(place_.rank) + ": " +
                       other.describe() + " and " + self_.describe();
    if (!place_.store_file.empty())
      text += "; or " + place_.store_file + " was left by an earlier job: remove it";
    declare(text);
  }

  std::string stale(const Member& gone) const {
    return place_.store_file + " was left by an earlier job (" + gone.describe() +
           " is gone): remove it, then start again";
  }

  // Tells all ranks, then leaves with it.
  [[noreturn]] void declare(const std::string& text) {
    store_->set(kError, "c" + text);
    linger();
    throw ConfigError("rendezvous at " + meeting_point(place_) + ": " + text);
  }

  [[noreturn]] void miss(const std::vector<std::string>& keys) {
    std::string ranks;
    for (int rank = 0; rank < place_.world_size; ++rank) {
      if (!store_->check({keys[static_cast<size_t>(rank)]})) ranks += std::to_string(rank) + " ";
    }
    // The first to give up speaks for all.
    store_->compareSet(kError, "", "p" + ranks);
    hear_error();
    throw_missing(ranks);
  }

  void hear_error() {
    if (!store_->check({kError})) return;
    const std::string text = store_->get_to_str(kError);
    linger();
    if (text.starts_with("p")) throw_missing(text.substr(1));
    throw ConfigError("rendezvous at " + meeting_point(place_) + ": " + text.substr(1));
  }

  [[noreturn]] void throw_missing(const std::string& ranks) const {
    std::vector<int> missing;
    std::istringstream in(ranks);
    for (int rank = 0; in >> rank;) missing.push_back(rank);
    const size_t come = static_cast<size_t>(place_.world_size) - missing.size();
    throw PeerError({.rank = place_.rank,
                     .lost_ranks = missing,
                     .operation = "rendezvous at " + meeting_point(place_),
                     .sequence = -1,
                     .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start_),
                     .cause = std::to_string(come) + " of " + std::to_string(place_.world_size) +
                              " ranks have come"});
  }

  // The store's host leaves last, so that the others hear why; a second is plenty for ranks that
  // look every 100 ms.
  void linger() {
    store_->add(kNumHeard, 1);
    if (place_.rank != 0) return;
    const auto limit = Clock::now() + milliseconds(1000);
    while (store_->add(kNumHeard, 0) < store_->add(kNumCome, 0) && Clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  }

  const StorePtr store_;
  const Place& place_;
  const Member self_ = Member::self();
  const Clock::time_point deadline_;
  const Clock::time_point start_;
};

// Rank 0 hosts the store on a socket that is bound here or by the launcher: no port is ever raced
// for.
int listening_socket(const Place& place) {
  const int fd = place.store_fd ? *place.store_fd : listen_on(place.master_port);
  if (port_of(fd) != place.master_port) {
    throw ConfigError("COHORT_STORE_FD listens on port " + std::to_string(port_of(fd)) +
                      ": expected MASTER_PORT=" + std::to_string(place.master_port));
  }
  return fd;
}

StorePtr connect_tcp(const Place& place, milliseconds timeout, bool may_host) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.master_port);
  options.timeout = timeout;
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(place.world_size);
  const bool is_host = place.rank == 0 && !place.agent_store;
  if (is_host && may_host) {
    options.isServer = true;
    options.masterListenFd = listening_socket(place);
  }
  StorePtr store =
      c10::make_intrusive<c10d::TCPStore>(is_host ? "localhost" : place.master_addr, options);
  if (!place.agent_store) return store;
  // torchrun's agents keep one store over all restarts.
  const auto attempt = env_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  return c10::make_intrusive<c10d::PrefixStore>("/worker/attempt_" + std::to_string(attempt),
                                                store);
}

// A file of the store's making begins with the length of its first key.
void check_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0)
    throw ConfigError("--dist-url file://" + path + " cannot be opened: " + std::strerror(errno));
  uint32_t length = 1;
  const ssize_t count = read(fd, &length, sizeof length);
  ::close(fd);
  if (count != 0 && (count != sizeof length || length == 0 || length > 4096)) {
    throw ConfigError("--dist-url file://" + path +
                      ": the file holds something else; expected none, or an empty one");
  }
}

StorePtr connect_store(const Place& place, milliseconds timeout, bool may_host) {
  if (place.store_file.empty()) return connect_tcp(place, timeout, may_host);
  check_file(place.store_file);
  // With no number of connections to expect, the last one to close removes the file; with a number
  // two that close at once may each take the other for the last.
  return c10::make_intrusive<c10d::FileStore>(place.store_file, 0);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "::ffff:127.0.0.1";
}

}  // namespace

std::string meeting_point(const Place& place) {
  return place.store_file.empty() ? place.master_addr + ":" + std::to_string(place.master_port)
                                  : place.store_file;
}

Meeting meet(const Place& place, const RendezvousOptions& options) {
  const auto start = Clock::now();
  try {
    const Interface asked = options.interface.empty()
                                ? interface_of_environment()
                                : find_interface(options.interface, "--interface");
    Meeting meeting;
    meeting.interface = asked.name;
    meeting.address = !asked.name.empty() ? asked.address
                      : place.store_file.empty()
                          ? local_address_towards(place.master_addr, place.master_port)
                          : "127.0.0.1";
    Connections sockets;
    meeting.store = connect_store(place, options.timeout, /*may_host=*/true);
    meeting.store->setTimeout(options.timeout);
    sockets.note_new();
    sockets.limit_waiting(options.timeout);
    Roster roster(c10::make_intrusive<c10d::PrefixStore>("roster", meeting.store), place, start,
                  options.timeout);
    roster.sign(options.terms);
    const auto members = roster.wait_for_all();
    const bool several_hosts = std::any_of(members.begin(), members.end(), [&](const Member& m) {
      return m.host != roster.self().host;
    });
    if (several_hosts && asked.name.empty() && is_loopback(meeting.address))
      meeting.address = first_outside_address();
    meeting.watch_sockets = {};
    meeting.watch_store = connect_store(place, options.timeout, /*may_host=*/false);
    meeting.watch_sockets.note_new();
    return meeting;
  } catch (const c10::ValueError&) {
    throw;
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError({.rank = place.rank,
                     .lost_ranks = {},
                     .operation = "rendezvous at " + meeting_point(place),
                     .sequence = -1,
                     .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start),
                     .cause = one_line(error)});
  }
}

}  // namespace cohort::comm
