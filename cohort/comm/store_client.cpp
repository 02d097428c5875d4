// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/store_client.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <system_error>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/base/tcp.h"
#include "cohort/comm/listen.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string text_of(int error) {
  return std::strerror(error);
}

std::string text_of(const StoreAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

std::string_view view(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Deadline deadline_in(milliseconds limit) {
  return limit == c10d::Store::kNoTimeout ? Deadline::max() : Clock::now() + limit;
}

void check_keys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    TORCH_CHECK_VALUE(key.size() <= kLongestStoreKey, "store: expected a key of at most ",
                      kLongestStoreKey, " bytes, got one of ", key.size());
  }
}

// Reads `size` bytes, which begin with `front`. Returns why they are not there; nothing if they
// are.
std::string read_exactly(const Fd& connection, size_t size, std::string_view front,
                         Deadline deadline, std::string& text) {
  text.clear();
  while (text.size() < size) {
    if (!is_ready(connection, POLLIN, deadline)) return "the port is open, but silent";
    std::array<char, 128> buffer{};
    const ssize_t count =
        ::recv(connection.get(), buffer.data(), std::min(buffer.size(), size - text.size()), 0);
    if (count < 0 && would_block()) continue;
    if (count < 0) return text_of(errno);
    if (count == 0) return "the connection was closed";
    text.append(buffer.data(), static_cast<size_t>(count));
    if (!text.starts_with(front.substr(0, text.size()))) return "no store";
  }
  return "";
}

[[noreturn]] void refuse_secret(const StoreAddress& address, const std::string& server) {
  throw ConfigError("COHORT_JOB_SECRET: expected the same in all processes of the job, or none; " +
                    server + " " + text_of(address) +
                    " has another one than this process, which has " +
                    (address.secret.empty() ? "none" : "one"));
}

// The client's part of the handshake. Returns why there is no store, as read_exactly.
std::string shake_hands(const StoreAddress& address, const Fd& connection, Deadline deadline) {
  const int yes = 1;
  ::setsockopt(connection.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  const auto send = [&](const std::string& text) {
    return ::send(connection.get(), text.data(), text.size(), MSG_NOSIGNAL) >= 0;
  };
  const std::string nonce = random_hex(kStoreNonceSize / 2);
  if (!send(std::string(kStoreGreeting) + nonce)) return text_of(errno);
  // A launcher listens long before rank 0 does: silence is no reason to leave.
  std::string said;
  std::string why = read_exactly(connection, kStoreGreeting.size() + kStoreNonceSize,
                                 kStoreGreeting, deadline, said);
  if (why == "no store") {
    throw ConfigError("MASTER_ADDR and MASTER_PORT: what answers at " + text_of(address) +
                      " is no store of Cohort's");
  }
  if (!why.empty()) return why;
  const std::string theirs = said.substr(kStoreGreeting.size());
  // A connection within one host may meet itself where nobody listens.
  if (theirs == nonce) return text_of(ECONNREFUSED);
  if (!send(store_proof(address.secret, "client", nonce, theirs))) return text_of(errno);
  why = read_exactly(connection, kStoreProofSize, "",
                     std::max(deadline, Clock::now() + kAnswerTime), said);
  if (!why.empty()) return why;
  if (said == kStoreRefusal) refuse_secret(address, "the store at");
  if (!equal_secrets(said, store_proof(address.secret, "server", nonce, theirs)))
    refuse_secret(address, "what answers at");
  return "";
}

}  // namespace

std::mutex& connecting() {
  static std::mutex mutex;
  return mutex;
}

Fd find_store(const std::string& host, int port, Deadline deadline,
              const std::function<std::string(const Fd& connection)>& talk) {
  const Addresses addresses = resolve_master(host, port, SOCK_STREAM, deadline);
  std::string why;
  for (milliseconds pause{10};; pause = std::min(pause * 2, milliseconds(500))) {
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      Fd connection;
      // Another address, or another try, may do better than a host that drops what it gets.
      const auto limit = std::min(deadline, Clock::now() + std::chrono::seconds(3));
      const int error = [&] {
        const std::lock_guard lock(connecting());
        return connect_to(*address, limit, connection);
      }();
      why = error != 0 ? text_of(error) : talk(connection);
      if (why.empty()) return connection;
    }
    if (Clock::now() >= deadline) C10_THROW_ERROR(DistNetworkError, "nobody answers there: " + why);
    std::this_thread::sleep_until(std::min(deadline, Clock::now() + pause));
  }
}

StoreClient::StoreClient(StoreAddress address, Deadline deadline, milliseconds timeout,
                         milliseconds silence)
    : Store(timeout),
      address_(std::move(address)),
      silence_(std::max(silence, kAnswerTime)),
      connection_(find_store(
          address_.host, address_.port, deadline,
          [&](const Fd& connection) { return shake_hands(address_, connection, deadline); })),
      interrupted_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!interrupted_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  return c10::make_intrusive<StoreClient>(address_, deadline_in(timeout_), timeout_, silence_);
}

void StoreClient::set(const std::string& key, const Bytes& value) {
  check_keys({key});
  ask(StoreWord::kSet, {key, view(value)});
}

std::vector<uint8_t> StoreClient::compareSet(const std::string& key, const Bytes& expected,
                                             const Bytes& desired) {
  check_keys({key});
  return ask(StoreWord::kCompareSet, {key, view(expected), view(desired)});
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  return wait_for(StoreWord::kGet, {key}, timeout_).at(0);
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  check_keys({key});
  const Bytes sum = ask(StoreWord::kAdd, {key, std::to_string(value)});
  return std::stoll(std::string(view(sum)));
}

bool StoreClient::deleteKey(const std::string& key) {
  check_keys({key});
  return view(ask(StoreWord::kDelete, {key})) == "1";
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  check_keys(keys);
  return view(ask(StoreWord::kCheck, {keys.begin(), keys.end()})) == "1";
}

int64_t StoreClient::getNumKeys() {
  return std::stoll(std::string(view(ask(StoreWord::kCount, {}))));
}

void StoreClient::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void StoreClient::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  wait_for(StoreWord::kWait, keys, timeout);
}

void StoreClient::append(const std::string& key, const Bytes& value) {
  check_keys({key});
  ask(StoreWord::kAppend, {key, view(value)});
}

std::vector<std::vector<uint8_t>> StoreClient::multiGet(const std::vector<std::string>& keys) {
  return wait_for(StoreWord::kGet, keys, timeout_);
}

void StoreClient::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: expected a value for each of ",
                    keys.size(), " keys, got ", values.size());
  check_keys(keys);
  Fields fields;
  for (size_t i = 0; i < keys.size(); ++i) {
    fields.push_back(keys[i]);
    fields.push_back(view(values[i]));
  }
  ask(StoreWord::kSet, fields);
}

void StoreClient::shut_down() const {
  ::shutdown(connection_.get(), SHUT_RDWR);
}

void StoreClient::interrupt() const {
  ::eventfd_write(interrupted_.get(), 1);
}

void StoreClient::lose(const std::string& how) const {
  shut_down();
  C10_THROW_ERROR(DistNetworkError, "the store at " + text_of(address_) + " " + how);
}

std::vector<std::vector<uint8_t>>& StoreClient::fields_of(Answer& answer) {
  if (answer.kind == StoreWord::kRefused)
    C10_THROW_ERROR(DistStoreError, std::string(view(answer.fields.at(0))));
  return answer.fields;
}

std::vector<uint8_t> StoreClient::ask(StoreWord word, const Fields& fields) {
  const std::string frame = frame_of(word, fields);
  const std::lock_guard lock(mutex_);
  const Deadline deadline = std::max(deadline_in(timeout_), Clock::now() + kAnswerTime);
  send(frame, deadline);
  auto answer = receive(deadline);
  if (!answer) lose("does not answer");
  return std::move(fields_of(*answer).at(0));
}

std::vector<std::vector<uint8_t>> StoreClient::wait_for(StoreWord word,
                                                        const std::vector<std::string>& keys,
                                                        milliseconds limit) {
  check_keys(keys);
  const std::string frame = frame_of(word, {keys.begin(), keys.end()});
  const std::lock_guard lock(mutex_);
  const Deadline deadline = deadline_in(limit);
  send(frame, std::max(deadline, Clock::now() + silence_));
  auto answer = receive(deadline, /*until_interrupted=*/true);
  if (!answer) {
    eventfd_t ignored = 0;
    ::eventfd_read(interrupted_.get(), &ignored);
    answer = cancel();
  }
  if (answer) return std::move(fields_of(*answer));
  std::string list;
  for (const std::string& key : keys) list += (list.empty() ? "" : ", ") + key;
  C10_THROW_ERROR(DistStoreError,
                  "wait timeout after " + std::to_string(limit.count()) + "ms, keys: " + list);
}

// Returns the answer that was on its way all the same, if one was.
std::optional<StoreClient::Answer> StoreClient::cancel() {
  send(frame_of(StoreWord::kCancel, {}), Clock::now() + silence_);
  std::optional<Answer> found;
  while (true) {
    auto answer = receive(Clock::now() + silence_);
    if (!answer) lose("does not answer");
    if (answer->kind == StoreWord::kCancelled) return found;
    found = std::move(answer);
  }
}

void StoreClient::send(const std::string& frame, Deadline deadline) {
  for (size_t num_sent = 0; num_sent < frame.size();) {
    const ssize_t size =
        ::send(connection_.get(), frame.data() + num_sent, frame.size() - num_sent, MSG_NOSIGNAL);
    if (size >= 0) {
      num_sent += static_cast<size_t>(size);
    } else if (!would_block()) {
      lose(errno == EPIPE ? "closed the connection" : "is lost: " + text_of(errno));
    } else if (!is_ready(connection_, POLLOUT, deadline)) {
      lose("does not answer");
    }
  }
}

// Returns the next answer; nothing if it is not there in time.
std::optional<StoreClient::Answer> StoreClient::receive(Deadline deadline, bool until_interrupted) {
  const Fd* interrupt = until_interrupted ? &interrupted_ : nullptr;
  std::optional<StoreMessage> message;
  while (!(message = first_message(in_))) {
    if (!is_ready(connection_, POLLIN, deadline, interrupt)) return std::nullopt;
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): 64 KiB, which recv fills.
    std::array<char, 65536> buffer;
    const ssize_t size = ::recv(connection_.get(), buffer.data(), buffer.size(), 0);
    if (size < 0 && would_block()) continue;
    if (size == 0) lose("closed the connection");
    if (size < 0) lose("is lost: " + text_of(errno));
    in_.append(buffer.data(), static_cast<size_t>(size));
  }
  Answer answer{.kind = message->kind, .fields = {}};
  for (const std::string_view field : message->fields)
    answer.fields.emplace_back(field.begin(), field.end());
  in_.erase(0, message->size);
  if (in_.empty()) in_.shrink_to_fit();
  return answer;
}

}  // namespace cohort::comm
