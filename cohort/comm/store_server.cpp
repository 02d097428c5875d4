// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/store_server.h"

#include <algorithm>
#include <array>
#include <c10/util/Exception.h>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fcntl.h>
#include <mutex>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <optional>
#include <poll.h>
#include <pthread.h>
#include <stdexcept>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <system_error>
#include <tuple>
#include <utility>

#include "cohort/base/secret.h"
#include "cohort/base/tcp.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTurn{100};  // Between two looks at what has a limit in time.
constexpr size_t kHelloSize = kStoreGreeting.size() + kStoreNonceSize + kStoreProofSize;
constexpr size_t kMaxReads = 16;  // Of one peer in one turn.

// A long message leaves no memory behind.
void take_off(std::string& text, size_t size) {
  text.erase(0, size);
  if (text.empty()) text.shrink_to_fit();
}

void receive(int fd, std::string& text, size_t most, bool& open) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): 64 KiB, which recv fills.
  std::array<char, 65536> buffer;
  for (size_t i = 0; i < kMaxReads && text.size() < most; ++i) {
    const ssize_t size =
        ::recv(fd, buffer.data(), std::min(buffer.size(), most - text.size()), MSG_DONTWAIT);
    if (size < 0 && would_block()) return;
    open = size > 0;
    if (!open) return;
    text.append(buffer.data(), static_cast<size_t>(size));
  }
}

// Held while a proof is made; for good at exit, when OpenSSL takes down what a proof needs though
// the servers of the process still run.
std::timed_mutex& proving() {
  static auto& mutex = *new std::timed_mutex;
  return mutex;
}

void make_no_proof_at_exit() {
  static std::once_flag once;
  std::call_once(once, [] {
    hmac_sha256("", "");  // OpenSSL's handler is registered before this one, which runs first.
    // Kept locked if it can be had: no proof begins any more.
    std::atexit([] { std::ignore = proving().try_lock_for(std::chrono::seconds(1)); });
  });
}

// Whether `request` has the fields of its kind, and keys of a bounded length.
bool is_well_formed(const StoreMessage& request) {
  const size_t count = request.fields.size();
  const auto keys_every = [&](size_t step) {
    for (size_t i = 0; i < count; i += step) {
      if (request.fields[i].size() > kLongestStoreKey) return false;
    }
    return true;
  };
  switch (request.kind) {
    case StoreWord::kSet:
      return count % 2 == 0 && keys_every(2);
    case StoreWord::kCompareSet:
      return count == 3 && keys_every(3);
    case StoreWord::kAdd:
    case StoreWord::kAppend:
      return count == 2 && keys_every(2);
    case StoreWord::kDelete:
      return count == 1 && keys_every(1);
    case StoreWord::kCheck:
    case StoreWord::kGet:
    case StoreWord::kWait:
      return keys_every(1);
    case StoreWord::kCount:
    case StoreWord::kCancel:
      return count == 0;
    default:
      return false;
  }
}

std::optional<int64_t> number_of(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

StoreServer::StoreServer(Fd listener, StoreServerOptions options)
    : listener_(std::move(listener)),
      options_(std::move(options)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw std::system_error(errno, std::generic_category(), "eventfd");
  make_no_proof_at_exit();
  ::fcntl(listener_.get(), F_SETFD, FD_CLOEXEC);
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  thread_ = std::jthread([this] { serve(); });
  ::pthread_setname_np(thread_.native_handle(), "cohort-store");
}

StoreServer::~StoreServer() {
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
}

void StoreServer::serve() {
  while (true) {
    try {
      if (!turn()) return;
    } catch (const std::exception&) {  // No memory: another turn may have some.
      std::this_thread::sleep_for(kTurn);
    }
  }
}

// Returns whether another turn is to come.
bool StoreServer::turn() {
  sort_peers();
  std::vector<pollfd> polls{{wake_.get(), POLLIN, 0},
                            {may_accept() ? listener_.get() : -1, POLLIN, 0}};
  for (const auto* peers : {&newcomers_, &clients_}) {
    for (const Peer& peer : *peers) {
      const int event = peer.out.empty() ? POLLIN : POLLOUT;
      polls.push_back({peer.fd.get(), static_cast<short>(event), 0});
    }
  }
  ::poll(polls.data(), polls.size(), poll_timeout());
  if (polls[0].revents != 0) return false;
  auto poll = polls.begin() + 2;
  for (auto* peers : {&newcomers_, &clients_}) {
    for (Peer& peer : *peers) {
      if ((poll++)->revents != 0) serve_peer(peer);
    }
  }
  if (polls[1].revents != 0) accept_newcomers();
  return true;
}

int StoreServer::poll_timeout() const {
  const bool has_limits =
      !newcomers_.empty() || accept_at_ > Clock::now() ||
      std::any_of(clients_.begin(), clients_.end(), [](const Peer& p) { return !p.out.empty(); });
  return has_limits ? static_cast<int>(kTurn.count()) : -1;
}

// A connection that is new is not closed: ranks that connect all at once would close each other's.
bool StoreServer::may_accept() const {
  const auto now = Clock::now();
  return now >= accept_at_ &&
         (newcomers_.size() < options_.max_newcomers || now - newcomers_.front().since >= kTurn);
}

void StoreServer::accept_newcomers() {
  while (may_accept()) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd && (would_block() || errno == ECONNABORTED)) return;
    if (!fd) {
      // The listening socket stays readable, which must not keep this thread busy.
      newcomers_.clear();
      accept_at_ = Clock::now() + kTurn;
      return;
    }
    const int yes = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (newcomers_.size() >= options_.max_newcomers) newcomers_.pop_front();
    Peer& peer = newcomers_.emplace_back();
    peer.fd = std::move(fd);
    peer.nonce = random_hex(kStoreNonceSize / 2);
    peer.since = Clock::now();
    peer.out = std::string(kStoreGreeting) + peer.nonce;
    serve_peer(peer);
  }
}

// What goes wrong with one peer ends that one, and nothing else.
void StoreServer::serve_peer(Peer& peer) {
  try {
    send(peer);
    if (!peer.out.empty()) return;
    receive(peer.fd.get(), peer.in, peer.proven ? kLongestStoreMessage + 4 : kHelloSize, peer.open);
    if (peer.proven) {
      read_requests(peer);
    } else {
      authenticate(peer);
    }
  } catch (const std::exception&) {
    peer.open = false;
  }
}

void StoreServer::sort_peers() {
  const auto now = Clock::now();
  for (auto next = newcomers_.begin(); next != newcomers_.end();) {
    const auto peer = next++;
    if (!peer->open || (!peer->proven && now - peer->since > options_.handshake_limit)) {
      newcomers_.erase(peer);
    } else if (peer->proven) {
      clients_.splice(clients_.end(), newcomers_, peer);
    }
  }
  clients_.remove_if([&](const Peer& peer) {
    return !peer.open || (!peer.out.empty() && now - peer.since > options_.answer_limit);
  });
}

void StoreServer::authenticate(Peer& peer) {
  const std::string_view said = peer.in;
  if (said.substr(0, kStoreGreeting.size()) != kStoreGreeting.substr(0, said.size())) {
    peer.open = false;
  }
  if (!peer.open || said.size() < kHelloSize) return;
  const std::string_view nonce = said.substr(kStoreGreeting.size(), kStoreNonceSize);
  {
    const std::lock_guard lock(proving());
    peer.proven = equal_secrets(said.substr(kHelloSize - kStoreProofSize),
                                store_proof(options_.secret, "client", nonce, peer.nonce));
    peer.out = peer.proven ? store_proof(options_.secret, "server", nonce, peer.nonce)
                           : std::string(kStoreRefusal);
  }
  peer.in.clear();
  send(peer);
  peer.open = peer.open && peer.proven;
}

// One answer at a time: a client that does not read it gets no further one.
void StoreServer::read_requests(Peer& peer) {
  while (peer.out.empty()) {
    const auto request = first_message(peer.in);
    if (!request) return;
    if (!is_well_formed(*request)) throw std::invalid_argument("no request");
    handle(peer, *request);
    take_off(peer.in, request->size);
  }
}

void StoreServer::handle(Peer& peer, const StoreMessage& request) {
  if (request.kind == StoreWord::kCancel) {
    peer.waits = StoreWord::kDone;
    return answer(peer, StoreWord::kCancelled, {});
  }
  if (peer.waits != StoreWord::kDone) throw std::invalid_argument("a request within a request");
  if (request.kind == StoreWord::kGet || request.kind == StoreWord::kWait) {
    peer.waits = request.kind;
    peer.awaited.assign(request.fields.begin(), request.fields.end());
    return answer_if_there(peer);
  }
  try {
    answer(peer, StoreWord::kDone, {apply(request)});
  } catch (const c10::ValueError& error) {
    return answer(peer, StoreWord::kRefused, {error.msg()});
  }
  if (request.kind <= StoreWord::kAppend) answer_waiting();
}

// As c10d's stores do, also where compareSet finds no value and expects one.
std::string StoreServer::apply(const StoreMessage& request) {
  const auto& fields = request.fields;
  const auto value = fields.empty() ? values_.end() : values_.find(fields[0]);
  const bool is_there = value != values_.end();
  switch (request.kind) {
    case StoreWord::kSet:
      for (size_t i = 0; i < fields.size(); i += 2) values_[std::string(fields[i])] = fields[i + 1];
      return "";
    case StoreWord::kCompareSet:
      if (!is_there && !fields[1].empty()) return std::string(fields[1]);
      if (!is_there || value->second == fields[1]) values_[std::string(fields[0])] = fields[2];
      return values_.find(fields[0])->second;
    case StoreWord::kAdd: {
      const auto old = is_there ? number_of(value->second) : 0;
      const auto more = number_of(fields[1]);
      TORCH_CHECK_VALUE(old && more, "add: expected a number, the key holds something else");
      const auto sum = static_cast<uint64_t>(*old) + static_cast<uint64_t>(*more);
      return values_[std::string(fields[0])] = std::to_string(static_cast<int64_t>(sum));
    }
    case StoreWord::kAppend: {
      const size_t size = (is_there ? value->second.size() : 0) + fields[1].size();
      TORCH_CHECK_VALUE(size < kLongestStoreMessage, "append: expected a value below ",
                        kLongestStoreMessage, " bytes, got ", size);
      values_[std::string(fields[0])] += fields[1];
      return "";
    }
    case StoreWord::kDelete:
      if (is_there) values_.erase(value);
      return is_there ? "1" : "0";
    case StoreWord::kCheck:
      return std::all_of(fields.begin(), fields.end(),
                         [&](std::string_view key) { return values_.contains(key); })
                 ? "1"
                 : "0";
    default:  // kCount
      return std::to_string(values_.size());
  }
}

void StoreServer::answer_if_there(Peer& peer) {
  if (peer.waits == StoreWord::kDone) return;
  std::vector<std::string_view> found;
  for (const std::string& key : peer.awaited) {
    const auto value = values_.find(key);
    if (value == values_.end()) return;
    if (peer.waits == StoreWord::kGet) found.push_back(value->second);
  }
  peer.waits = StoreWord::kDone;
  answer(peer, StoreWord::kDone, found);
}

void StoreServer::answer_waiting() {
  for (Peer& peer : clients_) {
    try {
      answer_if_there(peer);
    } catch (const std::exception&) {  // No memory.
      peer.open = false;
    }
  }
}

void StoreServer::answer(Peer& peer, StoreWord kind, const std::vector<std::string_view>& fields) {
  try {
    peer.out = frame_of(kind, fields);
  } catch (const c10::ValueError& error) {  // Values that are too long together.
    peer.out = frame_of(StoreWord::kRefused, {error.msg()});
  }
  peer.since = Clock::now();
  send(peer);
}

void StoreServer::send(Peer& peer) {
  while (peer.num_sent < peer.out.size()) {
    const ssize_t size = ::send(peer.fd.get(), peer.out.data() + peer.num_sent,
                                peer.out.size() - peer.num_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size < 0) {
      if (!would_block()) peer.open = false;
      return;
    }
    peer.num_sent += static_cast<size_t>(size);
    peer.since = Clock::now();
  }
  take_off(peer.out, std::exchange(peer.num_sent, 0));
}

}  // namespace cohort::comm
