// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the lines that launchers of several nodes send each other. An input that begins with
// 'm' is what the rendezvous server sends to a node, without that byte; any other is what two nodes
// send to the rendezvous server, line by line: those that begin with '2' are the second's, without
// that digit. A line that begins with '{' is made a message with its number; one that does not is
// sent as it is. Where the second byte is '!', the lines stand for the handshake, which otherwise
// goes well.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "cohort/launch/handshake.h"
#include "cohort/launch/rendezvous_client.h"
#include "cohort/launch/rendezvous_server.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;
using namespace cohort::launch;

RunOptions options() {
  return {.nnodes = {.min = 1, .max = 2}, .max_restarts = 1};
}

// A socket in a file system would stay; the system picks a name for this one.
Fd listen_without_name(sockaddr_un& address, socklen_t& length) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  address.sun_family = AF_UNIX;
  length = sizeof(address);
  const bool good =
      fd && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) == 0 &&
      ::listen(fd.get(), 4) == 0 &&
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0;
  TORCH_CHECK(good, "cannot listen");
  return fd;
}

Fd connect_to(const sockaddr_un& address, socklen_t length) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  TORCH_CHECK(fd && ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0,
              "cannot connect");
  return fd;
}

void send(const Fd& fd, std::string_view bytes) {
  [[maybe_unused]] const auto sent =
      ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// What has come; all of it.
std::string receive(const Fd& fd) {
  std::string text(64 * 1024, '\0');
  const ssize_t size = ::recv(fd.get(), text.data(), text.size(), MSG_DONTWAIT);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

std::string nonce_of(const std::string& challenge) {
  const std::string key = R"("nonce":")";
  const size_t begin = challenge.find(key) + key.size();
  return challenge.substr(begin, challenge.find('"', begin) - begin);
}

void shake_hands(const Fd& node, RendezvousServer& server, const char* name) {
  const std::string challenge = nonce_of(receive(node));
  Hello hello{.node = name, .session = 1, .nonce = "n", .id = "none", .nnodes = "1:2"};
  hello.max_restarts = 1;
  hello.keep_alive = KeepAlive{}.interval;
  hello.proof = proof_of_node("", challenge, hello);
  send(node, line_of(hello) + "\n");
  server.poll();
  TORCH_CHECK(receive(node).find("welcome") != std::string::npos, "not welcomed");
}

// A line of the input as it is sent.
std::string framed(std::string_view line, int& number) {
  if (!line.starts_with('{')) return std::string(line);
  return std::to_string(++number) + " 0 " + std::string(line);
}

void to_server(std::string_view text) {
  sockaddr_un address{};
  socklen_t length = 0;
  Fd listener = listen_without_name(address, length);
  const Fd first = connect_to(address, length);
  const Fd second = connect_to(address, length);
  RendezvousServer server(std::move(listener), "127.0.0.1", options());
  server.poll();
  const bool raw = text.starts_with('!');
  if (raw) {
    text.remove_prefix(1);
  } else {
    shake_hands(first, server, "first");
    shake_hands(second, server, "second");
  }
  int of_first = 0, of_second = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end);
    const bool is_second = line.starts_with('2');
    if (is_second) line.remove_prefix(1);
    const std::string sent =
        raw ? std::string(line) : framed(line, is_second ? of_second : of_first);
    send(is_second ? second : first, sent);
    server.poll();
  }
  server.poll();
}

// The listener that all inputs share.
class Listener {
 public:
  Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    TORCH_CHECK(fd_ && ::bind(fd_.get(), any, sizeof(address)) == 0 &&
                    ::listen(fd_.get(), 4) == 0 && ::getsockname(fd_.get(), any, &length) == 0,
                "cannot listen");
    endpoint_ = {.host = "127.0.0.1", .port = ntohs(address.sin_port)};
  }
  const Endpoint& endpoint() const { return endpoint_; }
  // Its end is a reset: otherwise ports would run out.
  Fd accept() const {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    TORCH_CHECK(fd, "cannot accept");
    const linger reset{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    return fd;
  }

 private:
  Fd fd_;
  Endpoint endpoint_;
};

void to_client(std::string_view text) {
  static const Listener listener;
  RendezvousClient client(listener.endpoint(), options());
  client.poll();  // It connects.
  {
    const Fd server = listener.accept();
    int number = 0;
    if (text.starts_with('!')) {
      send(server, text.substr(1));
    } else {
      send(server, challenge_line("c") + "\n");
      client.poll();
      std::string line = receive(server);
      line.resize(std::min(line.find('\n'), line.size()));
      const Hello hello = parse_hello(line);
      send(server, line_of(Welcome{.proof = proof_of_server("", "c", hello)}) + "\n");
      while (!text.empty()) {
        const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
        send(server, framed(text.substr(0, end), number));
        text.remove_prefix(end);
      }
    }
    for (int turn = 0; turn < 3; ++turn) {
      client.poll();
      while (const auto directive = client.next()) {
        TORCH_CHECK(directive->kind != Directive::Kind::kEnd || !client.next(),
                    "a directive after the end");
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'm') {
    to_client(text);
  } else {
    to_server(text);
  }
  return 0;
}
