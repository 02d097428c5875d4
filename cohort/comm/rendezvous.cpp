#include "cohort/comm/rendezvous.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <poll.h>
#include <random>
#include <sstream>
#include <sys/socket.h>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/tcp.h"
#include "cohort/comm/listen.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A store that has answered once has this long to answer again, however late it is.
constexpr milliseconds kAnswerTime{1000};

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

// What c10d's client sends first, and what its store answers with the number.
struct [[gnu::packed]] Validation {
  c10d::detail::QueryType query = c10d::detail::QueryType::VALIDATE;
  uint32_t magic = c10d::detail::validationMagicNumber;
};
struct [[gnu::packed]] Ping {
  c10d::detail::QueryType query = c10d::detail::QueryType::PING;
  uint32_t number = std::random_device()();
};

std::string text_of(int error) {
  return std::strerror(error);
}

// Asks the store of `place`, at the other end of `connection`, for a sign of life. Returns why none
// came; nothing if one did.
std::string ping(const Fd& connection, const Place& place, Clock::time_point deadline) {
  const Ping question;
  uint32_t answer = 0;
  if (send(connection.get(), &question, sizeof question, MSG_NOSIGNAL) < 0) return text_of(errno);
  if (!is_ready(connection, POLLIN, deadline)) return "the port is open, but silent";
  const ssize_t count = recv(connection.get(), &answer, sizeof answer, 0);
  if (count < 0) return text_of(errno);
  if (count == 0) return "the connection was closed";
  if (count == sizeof answer && answer == question.number) return "";
  throw ConfigError("MASTER_ADDR and MASTER_PORT: what answers at " + meeting_point(place) +
                    " is no store");
}

// Connects to the store of `place` at one of its addresses. Returns why none answers there; nothing
// if one does.
std::string try_address(const addrinfo& address, const Place& place, Clock::time_point deadline,
                        Fd& connection) {
  // Another address, or another try, may do better than a host that drops what it gets.
  const int error =
      connect_to(address, std::min(deadline, Clock::now() + std::chrono::seconds(3)), connection);
  if (error != 0) return text_of(error);
  const Validation validation;
  if (send(connection.get(), &validation, sizeof validation, MSG_NOSIGNAL | MSG_MORE) < 0)
    return text_of(errno);
  // A launcher listens long before rank 0 does: silence is no reason to leave.
  return ping(connection, place, deadline);
}

// Waits until the store of `place` answers; returns a connection to it. c10d's client would wait,
// too, but up to three times as long as it is told, with a page on stderr for every try.
Fd await_store(const Place& place, Clock::time_point deadline) {
  const Addresses addresses = resolve_master(place.master_addr, place.master_port, SOCK_STREAM);
  Fd connection;
  std::string reason;
  for (milliseconds pause{10};; pause = std::min(pause * 2, milliseconds(500))) {
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      reason = try_address(*address, place, deadline, connection);
      if (reason.empty()) return connection;
    }
    if (Clock::now() >= deadline)
      C10_THROW_ERROR(DistNetworkError, "nobody answers there: " + reason);
    std::this_thread::sleep_until(std::min(deadline, Clock::now() + pause));
  }
}

// The roster of one rendezvous: a view of the store, and this rank's place in it.
class Roster {
 public:
  // `host`: a connection to the store's host; none on the host itself and for a file.
  Roster(StorePtr store, const Fd& host, const Place& place, Clock::time_point start,
         Clock::time_point deadline)
      : store_(std::move(store)), host_(host), place_(place), deadline_(deadline), start_(start) {}

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
    for (milliseconds pause{2}; !have_come(keys); pause = std::min(pause * 2, milliseconds(100))) {
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
  // Of a store that has gone the client would tell on stderr, too; so it is not asked.
  bool have_come(const std::vector<std::string>& keys) {
    if (host_.get() >= 0) {
      const std::string reason =
          ping(host_, place_, std::max(deadline_, Clock::now() + kAnswerTime));
      if (!reason.empty())
        C10_THROW_ERROR(DistNetworkError, "the host of the store is lost: " + reason);
    }
    return store_->check(keys);
  }

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
  const Fd& host_;
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

bool is_host(const Place& place) {
  return place.rank == 0 && !place.agent_store;
}

StorePtr connect_tcp(const Place& place, Clock::time_point deadline, bool may_host) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.master_port);
  options.timeout = std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), kAnswerTime);
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(place.world_size);
  if (is_host(place) && may_host) {
    options.isServer = true;
    options.masterListenFd = listening_socket(place);
  }
  StorePtr store = c10::make_intrusive<c10d::TCPStore>(
      is_host(place) ? "localhost" : place.master_addr, options);
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

StorePtr connect_store(const Place& place, Clock::time_point deadline, bool may_host) {
  if (place.store_file.empty()) return connect_tcp(place, deadline, may_host);
  check_file(place.store_file);
  // With no number of connections to expect, the last one to close removes the file; with a number
  // two that close at once may each take the other for the last.
  return c10::make_intrusive<c10d::FileStore>(place.store_file, 0);
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "::ffff:127.0.0.1";
}

}  // namespace

void find_host(Place& place, const std::vector<std::string>& hosts) {
  const auto own = hosts.begin() + place.rank;
  place.local_rank = static_cast<int>(std::count(hosts.begin(), own, *own));
  place.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), *own));
  place.finds_host = false;
}

std::string meeting_point(const Place& place) {
  return place.store_file.empty() ? place.master_addr + ":" + std::to_string(place.master_port)
                                  : place.store_file;
}

Meeting meet(const Place& place, const RendezvousOptions& options) {
  const auto start = Clock::now();
  const auto deadline = start + options.timeout;
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
    const Fd host =
        is_host(place) || !place.store_file.empty() ? Fd() : await_store(place, deadline);
    Connections sockets;
    meeting.store = connect_store(place, deadline, /*may_host=*/true);
    meeting.store->setTimeout(options.timeout);
    sockets.note_new();
    sockets.limit_waiting(options.timeout);
    Roster roster(c10::make_intrusive<c10d::PrefixStore>("roster", meeting.store), host, place,
                  start, deadline);
    roster.sign(options.terms);
    const auto members = roster.wait_for_all();
    for (const Member& member : members) meeting.hosts.push_back(member.host);
    const bool several_hosts =
        std::any_of(meeting.hosts.begin(), meeting.hosts.end(),
                    [&](const std::string& other) { return other != roster.self().host; });
    if (several_hosts && asked.name.empty() && is_loopback(meeting.address))
      meeting.address = first_outside_address();
    meeting.watch_sockets = {};
    meeting.watch_store = connect_store(place, deadline, /*may_host=*/false);
    meeting.watch_store->setTimeout(options.timeout);
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
