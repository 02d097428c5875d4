// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/shared_memory.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <vector>

#include "cohort/base/secret.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Keys of the store. The secret comes last; an empty one says that rank 0 has failed.
const char* const kSocket = "socket";
const char* const kSecret = "secret";

[[noreturn]] void fail_to_share(const std::string& what, int error = 0) {
  C10_THROW_ERROR(DistBackendError,
                  "shm: " + what + (error == 0 ? "" : std::string(": ") + std::strerror(error)));
}

milliseconds left_until(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), milliseconds(0));
}

// 0, or why not.
int allocate(const Fd& file, size_t begin, size_t bytes) {
  int error = EINTR;
  while (error == EINTR)
    error = posix_fallocate(file.get(), static_cast<off_t>(begin), static_cast<off_t>(bytes));
  return error;
}

Fd make_memory(size_t bytes, size_t room) {
  Fd file(memfd_create("cohort-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail_to_share("memfd_create", errno);
  if (ftruncate(file.get(), static_cast<off_t>(bytes + room)) != 0) {
    const std::string expected = std::to_string((bytes + room) >> 10U) + " KiB";
    fail_to_share(errno == EFBIG
                      ? "expected a limit of file sizes (ulimit -f) of at least " + expected
                      : "ftruncate",
                  errno);
  }
  // Now, not by a signal at the first write.
  if (const int error = allocate(file, 0, bytes); error != 0)
    fail_to_share(
        "expected " + std::to_string(bytes >> 20U) + " MiB of memory for the ranks to share",
        error);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail_to_share("F_ADD_SEALS", errno);
  return file;
}

// Abstract: a name of the network namespace, in no file system.
std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

Fd open_socket() {
  Fd opened(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!opened) fail_to_share("socket", errno);
  return opened;
}

bool wait_readable(const Fd& socket, Clock::time_point deadline) {
  pollfd entry{.fd = socket.get(), .events = POLLIN, .revents = 0};
  while (true) {
    const int ready = poll(&entry, 1, static_cast<int>(left_until(deadline).count()));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

// One message, with the descriptor of `file` beside it.
bool send_file(const Fd& connection, const Fd& file) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(connection.get(), &message, MSG_NOSIGNAL) == 1;
}

Fd receive_file(const Fd& connection) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (recvmsg(connection.get(), &message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return {};
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Fd(fd);
}

// The first message of a peer: who it is, and that it knows the store.
struct Hello {
  std::array<char, 32> secret{};
  int32_t rank = -1;
};

Hello hello_of(const std::string& secret, int rank) {
  Hello hello{.secret = {}, .rank = rank};
  std::memcpy(hello.secret.data(), secret.data(), std::min(secret.size(), hello.secret.size()));
  return hello;
}

// A process that is no rank of the group is not served, and delays the ranks for a second at most.
void serve(const Fd& listener, const Fd& file, const std::string& secret, int world_size,
           Clock::time_point deadline) {
  constexpr milliseconds kHelloLimit{1000};
  std::vector<bool> served(static_cast<size_t>(world_size), false);
  for (int left = world_size - 1; left > 0;) {
    if (Clock::now() > deadline || !wait_readable(listener, deadline))
      fail_to_share(std::to_string(left) + " of " + std::to_string(world_size - 1) +
                    " ranks have not fetched the memory in time");
    const Fd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection && errno != EINTR && errno != ECONNABORTED) fail_to_share("accept", errno);
    if (!connection || !is_peer_of_user(connection, geteuid())) continue;
    Hello hello;
    if (!wait_readable(connection, std::min(deadline, Clock::now() + kHelloLimit)) ||
        recv(connection.get(), &hello, sizeof hello, MSG_DONTWAIT) != sizeof hello)
      continue;
    if (hello.secret != hello_of(secret, 0).secret || hello.rank <= 0 || hello.rank >= world_size)
      continue;
    const auto index = static_cast<size_t>(hello.rank);
    if (served[index] || !send_file(connection, file)) continue;
    served[index] = true;
    --left;
  }
}

// With its size, which is at least `bytes`.
std::pair<Fd, size_t> fetch(const std::string& name, const std::string& secret, int rank,
                            size_t bytes, Clock::time_point deadline) {
  const Fd connection = open_socket();
  const auto [address, length] = address_of(name);
  if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
    fail_to_share("expected rank 0 on this host, its socket cannot be reached", errno);
  if (!is_peer_of_user(connection, geteuid()))
    fail_to_share("expected rank 0 to run as the same user");
  const Hello hello = hello_of(secret, rank);
  if (send(connection.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
    fail_to_share("rank 0 does not hand over its memory", errno);
  if (!wait_readable(connection, deadline))
    fail_to_share("rank 0 has not handed over its memory in time");
  Fd file = receive_file(connection);
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0) fail_to_share("rank 0 hands over no memory");
  const auto size = static_cast<size_t>(status.st_size);
  if (size < bytes)
    fail_to_share("expected " + std::to_string(bytes) + " bytes of rank 0, got " +
                  std::to_string(size));
  return {std::move(file), size};
}

void hand_over(const Fd& file, c10d::Store& store, int world_size, Clock::time_point deadline) {
  const std::string secret = random_hex(16);
  const std::string name = "cohort-" + random_hex(16);
  const Fd listener = open_socket();
  const auto [address, length] = address_of(name);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0)
    fail_to_share("bind", errno);
  store.set(kSocket, name);
  store.set(kSecret, secret);
  serve(listener, file, secret, world_size, deadline);
}

}  // namespace

bool is_peer_of_user(const Fd& connection, uid_t user) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == user;
}

SharedMemory::SharedMemory(Fd file, size_t bytes, bool has_room)
    : owner_(getpid()), file_(std::move(file)), bytes_(bytes) {
  const int flags = MAP_SHARED | (file_ ? 0 : MAP_ANONYMOUS);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
  if (mapped == MAP_FAILED) fail_to_share("mmap of " + std::to_string(bytes) + " bytes", errno);
  data_ = static_cast<std::byte*>(mapped);
  // A child that only forks does not keep it.
  madvise(mapped, bytes, MADV_DONTFORK);
  // Most of it is room, and what is not is no business of a core file that several ranks write.
  madvise(mapped, bytes, MADV_DONTDUMP);
  if (!has_room) file_.reset();
}

void SharedMemory::commit(size_t begin, size_t bytes) const {
  const int error = allocate(file_, begin, bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, error == 0, "shm: expected ", bytes,
                   " bytes of memory for a tensor that ranks share: ", std::strerror(error));
}

void SharedMemory::release(size_t begin, size_t bytes) const {
  if (getpid() != owner_) return;
  fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
            static_cast<off_t>(bytes));
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr && getpid() == owner_) munmap(data_, bytes_);
}

SharedMemory SharedMemory::share(c10d::Store& store, int rank, int world_size, size_t bytes,
                                 milliseconds timeout, size_t room) {
  const auto deadline = Clock::now() + timeout;
  if (world_size == 1) return {Fd(), bytes, false};
  if (rank != 0) {
    store.wait({kSecret}, timeout);
    const std::string secret = store.get_to_str(kSecret);
    if (secret.empty()) fail_to_share("rank 0 has no memory to share");
    auto [file, size] = fetch(store.get_to_str(kSocket), secret, rank, bytes, deadline);
    return {std::move(file), size, size > bytes};
  }
  try {
    Fd file = make_memory(bytes, room);
    hand_over(file, store, world_size, deadline);
    return {std::move(file), bytes + room, room > 0};
  } catch (const std::exception&) {
    if (!store.check({kSecret})) store.set(kSecret, std::string());
    throw;
  }
}

}  // namespace cohort::comm
