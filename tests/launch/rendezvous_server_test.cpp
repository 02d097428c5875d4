// SPDX-License-Identifier: Apache-2.0
// Rendezvous over connections that break: messages, sessions, names and secrets.
#include "cohort/launch/rendezvous_server.h"

#include <arpa/inet.h>
#include <functional>
#include <gtest/gtest.h>
#include <list>
#include <netinet/in.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <unistd.h>

#include "cohort/base/secret.h"
#include "cohort/launch/rendezvous_client.h"
#include "cohort/launch/store_socket.h"

namespace cohort::launch {
namespace rendezvous_server_test {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using std::chrono::milliseconds;

// Both ends of a connection.
std::pair<LineSocket, Fd> connection() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  return {LineSocket(Fd(ends[0])), Fd(ends[1])};
}

TEST(MessageChannelTest, EachMessageComesOnceAndInOrderHoweverOftenTheConnectionBreaks) {
  std::mt19937 random(1);
  MessageChannel a, b;
  const auto connect = [&] {
    auto [of_a, of_b] = connection();
    a.attach(std::move(of_a), b.received());
    b.attach(LineSocket(std::move(of_b)), a.received());
  };
  std::vector<std::string> sent_by_a, sent_by_b, got_by_a, got_by_b;
  const auto take = [](MessageChannel& channel, std::vector<std::string>& got) {
    channel.poll();
    while (const auto text = channel.next()) got.push_back(*text);
  };
  int breaks = 0;
  for (int i = 0; i < 2000; ++i) {
    switch (random() % 8) {
      case 0:
        connect();
        ++breaks;
        break;
      case 1:
        a.send_heartbeat();
        b.send_heartbeat();
        break;
      case 2:
        take(a, got_by_a);
        break;
      case 3:
        take(b, got_by_b);
        break;
      default:
        sent_by_a.push_back("a" + std::to_string(i));
        a.send(sent_by_a.back());
        sent_by_b.push_back("b" + std::to_string(i));
        b.send(sent_by_b.back());
    }
  }
  connect();
  take(a, got_by_a);
  take(b, got_by_b);
  EXPECT_GT(breaks, 100);
  EXPECT_EQ(got_by_b, sent_by_a);
  EXPECT_EQ(got_by_a, sent_by_b);
}

TEST(MessageChannelTest, WhatIsNoMessageEndsTheConnection) {
  for (const char* line : {"", "{}", "1", "1 0", "x 0 text", "-1 0 text", "1 -1 text", "2 0 text",
                           "1 1 text", "99999999999999999999 0 text", "1  text"}) {
    auto [socket, peer] = connection();
    MessageChannel channel;
    channel.attach(std::move(socket), 0);
    const std::string text = std::string(line) + "\n1 0 afterwards\n";
    ASSERT_EQ(::write(peer.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    channel.poll();
    EXPECT_EQ(channel.next(), std::nullopt) << line;
    EXPECT_FALSE(channel.connected()) << line;
  }
}

int port_of(const Fd& socket) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  return ntohs(address.sin_port);
}

Fd listen_here() {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(::listen(fd.get(), 64), 0);
  return fd;
}

Fd connect_here(int port) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{.sin_family = AF_INET,
                      .sin_port = htons(static_cast<uint16_t>(port)),
                      .sin_addr = {htonl(INADDR_LOOPBACK)}};
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

// Carries connections to `port`, until it is told to break them or to be silent.
class Link {
 public:
  explicit Link(int port) : listener_(listen_here()), port_(port) {}

  Endpoint endpoint() const { return {.host = "127.0.0.1", .port = port_of(listener_)}; }
  int num_connections() const { return num_connections_; }
  void cut() { pairs_.clear(); }
  void be_silent(bool silent) { silent_ = silent; }
  void poll() {
    while (Fd fd = Fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC))) {
      pairs_.push_back({std::move(fd), connect_here(port_)});
      ++num_connections_;
    }
    if (silent_) return;
    pairs_.remove_if([](const auto& pair) {
      return !carry(pair.first, pair.second) || !carry(pair.second, pair.first);
    });
  }

 private:
  static bool carry(const Fd& from, const Fd& to) {
    char bytes[4096];
    ssize_t size = 0;
    while ((size = ::recv(from.get(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
      if (::send(to.get(), bytes, static_cast<size_t>(size), MSG_NOSIGNAL) != size) return false;
    }
    return size < 0 && errno == EAGAIN;
  }

  const Fd listener_;
  const int port_;
  bool silent_ = false;
  int num_connections_ = 0;
  std::list<std::pair<Fd, Fd>> pairs_;
};

// A rendezvous server and nodes in one thread, with a link for each node.
class RendezvousServerTest : public ::testing::Test {
 protected:
  struct Node {
    Node(int port, const RunOptions& options) : link(port), client(link.endpoint(), options) {}
    Link link;
    RendezvousClient client;
    std::vector<Directive> directives;
    const Directive& last() const { return directives.back(); }
    int count(Directive::Kind kind) const {
      return static_cast<int>(std::count_if(directives.begin(), directives.end(),
                                            [&](const Directive& o) { return o.kind == kind; }));
    }
  };

  void host(int min, int max) {
    options_.nnodes = {.min = min, .max = max};
    Fd listener = listen_here();
    port_ = port_of(listener);
    server_.emplace(std::move(listener), "127.0.0.1", options_);
  }
  Node& add_node() { return nodes_.emplace_back(port_, options_); }

  void poll() {
    std::vector<pollfd> polls;
    server_->add_polls(polls);
    for (Node& node : nodes_) node.client.add_polls(polls);
    ::poll(polls.data(), polls.size(), 2);
    server_->poll();
    for (Node& node : nodes_) {
      node.client.poll();
      node.link.poll();
      while (const auto directive = node.client.next()) node.directives.push_back(*directive);
    }
  }
  // For `time`, and so often that what can happen does, where the machine stands still, too.
  void run_for(milliseconds time) {
    const auto end = Clock::now() + time;
    for (int polls = 0; polls < 50 || Clock::now() < end; ++polls) poll();
  }
  void run_until(const std::string& what, const std::function<bool()>& reached) {
    for (const auto end = Clock::now() + std::chrono::seconds(60); !reached();) {
      if (Clock::now() > end) throw std::runtime_error("not reached: " + what);
      poll();
    }
  }
  void all_join() {
    for (Node& node : nodes_) node.client.join(&node == &nodes_.front() ? 1234 : 0);
  }

  // All nodes are of this process: a busy machine that holds it up must silence none of them.
  RunOptions options_{.keep_alive = {.interval = milliseconds(200), .max_attempt = 100}};
  int port_ = 0;
  std::optional<RendezvousServer> server_;
  std::list<Node> nodes_;
};

TEST_F(RendezvousServerTest, BrokenConnectionsLoseNoMessageAndEndNothing) {
  host(2, 2);
  Node& first = add_node();
  Node& second = add_node();
  all_join();
  run_until("a round", [&] { return !first.directives.empty() && !second.directives.empty(); });
  ASSERT_EQ(second.last().kind, Directive::Kind::kRound);
  second.link.cut();
  second.client.send_done(0);  // Not delivered yet.
  first.link.cut();
  first.client.send_done(4);
  run_until("the end", [&] { return first.directives.size() > 1 && second.directives.size() > 1; });
  for (const Node& node : nodes_) {
    EXPECT_EQ(node.directives.size(), 2U);
    EXPECT_EQ(node.last().kind, Directive::Kind::kEnd);
    EXPECT_EQ(node.last().code, 4);
    EXPECT_EQ(node.last().why, "");
    EXPECT_GE(node.link.num_connections(), 2);
  }
}

TEST_F(RendezvousServerTest, ALinkThatIsSilentForLessThanTheLimitEndsNothing) {
  host(2, 2);
  add_node();
  Node& second = add_node();
  all_join();
  run_until("a round", [&] { return !second.directives.empty(); });
  second.link.be_silent(true);
  run_for(milliseconds(350));
  second.link.be_silent(false);
  second.client.send_done(0);
  nodes_.front().client.send_done(0);
  run_until("the end", [&] { return second.directives.size() > 1; });
  EXPECT_EQ(second.last().kind, Directive::Kind::kEnd);
  EXPECT_EQ(second.last().code, 0);
}

TEST_F(RendezvousServerTest, ARemovedNodeRejoinsUnderItsOldRank) {
  options_.keep_alive = {.interval = milliseconds(1000), .max_attempt = 5};
  host(2, 3);
  for (int i = 0; i < 3; ++i) {
    add_node();
    nodes_.back().client.join(i == 0 ? 1234 : 0);
    run_for(milliseconds(50));  // In this order.
  }
  Node& first = nodes_.front();
  Node& second = *std::next(nodes_.begin());
  Node& third = nodes_.back();
  run_until("a round", [&] { return !first.directives.empty() && !third.directives.empty(); });
  EXPECT_EQ(second.last().node.node_rank, 1);
  EXPECT_EQ(third.last().node.node_rank, 2);
  second.link.be_silent(true);
  run_until("a stop", [&] { return first.count(Directive::Kind::kStop) >= 1; });
  EXPECT_EQ(first.last().why, "node 1 stopped responding");
  first.client.join(1234);
  third.client.join(0);
  run_until("a round of two", [&] { return third.count(Directive::Kind::kRound) == 2; });
  EXPECT_EQ(third.last().node.node_rank, 1);
  EXPECT_EQ(third.last().node.num_nodes, 2);
  EXPECT_EQ(second.directives.size(), 1U);  // It knows nothing yet: its workers keep running.
  second.link.be_silent(false);
  run_until("a second directive", [&] { return second.directives.size() >= 2; });
  EXPECT_EQ(second.last().kind, Directive::Kind::kStop);
  EXPECT_NE(second.last().why.find("removed it"), std::string::npos) << second.last().why;
  second.client.join(0);
  run_until("stops", [&] { return third.count(Directive::Kind::kStop) == 2; });
  EXPECT_EQ(third.last().why, "a node joined");
  first.client.join(1234);
  third.client.join(0);
  run_until("a round of three", [&] { return second.count(Directive::Kind::kRound) == 2; });
  run_until("a round of three", [&] { return third.count(Directive::Kind::kRound) == 3; });
  EXPECT_EQ(second.last().node.node_rank, 1);
  EXPECT_EQ(third.last().node.node_rank, 2);
  EXPECT_EQ(third.last().node.restart_count, 0);
}

TEST_F(RendezvousServerTest,
       ARendezvousServerThatIsGoneEndsTheJobAndASilentOneDoesAfterTheTimeout) {
  options_.rdzv_timeout = milliseconds(4000);
  host(1, 1);
  Node& node = add_node();
  all_join();
  run_until("a round", [&] { return !node.directives.empty(); });
  node.link.be_silent(true);
  const auto begin = Clock::now();
  run_until("the end", [&] { return node.directives.size() == 2; });
  EXPECT_GE(Clock::now() - begin, options_.rdzv_timeout);
  EXPECT_EQ(node.last().kind, Directive::Kind::kEnd);
  EXPECT_EQ(node.last().code, 3);
  EXPECT_NE(node.last().why.find("stopped responding"), std::string::npos) << node.last().why;
}

// What unauthenticated peers send: nothing, nonsense, a forged hello, an older protocol.
TEST_F(RendezvousServerTest, StrangersChangeNothingAndLearnNothing) {
  options_.rdzv_secret = "the job's own secret";
  options_.rdzv_id = "the job's own name";
  options_.keep_alive.interval = std::chrono::seconds(20);  // It keeps its one connection.
  host(1, 3);
  Node& node = add_node();
  all_join();
  run_until("a round", [&] { return !node.directives.empty(); });
  const Hello forged{.node = "stranger", .session = 1, .nonce = "n", .proof = std::string(64, '0')};
  Hello forged_id = forged;
  forged_id.id = options_.rdzv_id;
  const std::vector<std::string> words{
      "",
      "GET / HTTP/1.1\r\n",
      "\n\n\n",
      line_of(forged) + "\n",
      line_of(forged_id) + "\n",
      R"({"kind": "join", "version": 3, "id": "the job's own name", "nproc": 1, "port": 0})"
      "\n",
      "1 0 {\"kind\": \"failed\", \"round\": 1, \"code\": 1, \"meaning\": 1, \"why\": \"x\"}\n",
      std::string(200'000, 'x'),
      R"({"kind": "hello", "version": 1e300})"
      "\n"};
  std::list<Fd> strangers;
  std::string received;
  const auto read_all = [&] {
    char bytes[4096];
    for (const Fd& fd : strangers) {
      const ssize_t size = ::recv(fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
      if (size > 0) received.append(bytes, static_cast<size_t>(size));
    }
  };
  for (int i = 0; i < 600; ++i) {
    strangers.push_back(connect_here(port_));
    const std::string& text = words[static_cast<size_t>(i) % words.size()];
    [[maybe_unused]] const ssize_t size =
        ::send(strangers.back().get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    poll();
    read_all();
    if (strangers.size() > 300) strangers.pop_front();
  }
  run_for(milliseconds(800));
  read_all();
  EXPECT_NE(received.find("--rdzv-secret-file: expected the secret"), std::string::npos)
      << received;
  EXPECT_EQ(received.find("own name"), std::string::npos);
  EXPECT_EQ(received.find("1:3"), std::string::npos);
  EXPECT_EQ(node.directives.size(), 1U);
  EXPECT_EQ(node.link.num_connections(), 1);
  node.client.send_done(0);
  run_until("the end", [&] { return node.directives.size() == 2; });
  EXPECT_EQ(node.last().code, 0);
}

TEST_F(RendezvousServerTest, ANodeWithAnotherSecretOrNoneIsRefused) {
  options_.rdzv_secret = "one";
  host(1, 2);
  for (const char* secret : {"", "two"}) {
    options_.rdzv_secret = secret;
    Node& node = add_node();
    node.client.join(0);
    run_until("the end", [&] { return !node.directives.empty(); });
    EXPECT_EQ(node.last().kind, Directive::Kind::kEnd);
    EXPECT_EQ(node.last().code, 2);
    EXPECT_EQ(node.last().why, "--rdzv-secret-file: expected the secret of the rendezvous server");
  }
}

void say(const Fd& peer, const std::string& words) {
  ASSERT_EQ(::write(peer.get(), words.data(), words.size()), static_cast<ssize_t>(words.size()));
}

// Polls so many times, a millisecond apart, or until there is a directive.
std::optional<Directive> directive_of(RendezvousClient& client, int times) {
  std::optional<Directive> directive;
  for (int i = 0; i < times && !directive; ++i) {
    client.poll();
    directive = client.next();
    ::usleep(1000);
  }
  return directive;
}

TEST_F(RendezvousServerTest, ARendezvousServerWithoutTheSecretIsRejected) {
  options_.rdzv_secret = "one";
  const Fd listener = listen_here();
  RendezvousClient client({.host = "127.0.0.1", .port = port_of(listener)}, options_);
  client.poll();
  const Fd impostor(::accept(listener.get(), nullptr, nullptr));
  ASSERT_TRUE(impostor);
  const std::string words =
      challenge_line("c") + "\n" +
      line_of(Welcome{.proof = hmac_sha256("", "whatever"), .received = 0, .known = false}) + "\n" +
      R"(1 0 {"kind": "round", "node_rank": 0, "nodes": 1, "base_rank": 0, "world_size": 1,)"
      R"( "master_addr": "127.0.0.1", "master_port": 1, "restart": 0, "round": 1})"
      "\n";
  say(impostor, words);
  const auto directive = directive_of(client, 1000);
  ASSERT_TRUE(directive.has_value());
  EXPECT_EQ(directive->kind, Directive::Kind::kEnd);
  EXPECT_EQ(directive->code, 2);
  EXPECT_NE(directive->why.find("has a different secret"), std::string::npos) << directive->why;
}

// A program that listens there first may send anything.
TEST_F(RendezvousServerTest, AnEndThatNobodyProvedDecidesNothing) {
  options_.keep_alive.interval = std::chrono::seconds(20);  // It keeps its first connection.
  options_.rdzv_timeout = std::chrono::milliseconds(2000);
  options_.rdzv_secret = "one";
  const Fd listener = listen_here();
  RendezvousClient client({.host = "127.0.0.1", .port = port_of(listener)}, options_);
  const auto accept = [&] {
    Fd peer(::accept(listener.get(), nullptr, nullptr));
    EXPECT_TRUE(peer);
    return peer;
  };
  const std::string ends = R"({"kind": "end", "code": 0, "why": ""})"
                           "\n";
  client.poll();
  {
    RendezvousClient stranger({.host = "127.0.0.1", .port = port_of(listener)}, options_);
    Fd first = accept();  // of `client`
    stranger.poll();
    const Fd impostor = accept();
    say(impostor, ends);
    const auto directive = directive_of(stranger, 1000);
    ASSERT_TRUE(directive.has_value());
    EXPECT_EQ(directive->code, 2);
    EXPECT_NE(directive->why, "");
    // The other one is welcome. Much later a message is broken: it reconnects, and hears the impostor.
    say(first, challenge_line("c") + "\n");
    EXPECT_FALSE(directive_of(client, 20));
    char line[4096];
    const ssize_t size = ::read(first.get(), line, sizeof(line));
    ASSERT_GT(size, 0);
    const std::string text(line, static_cast<size_t>(size));
    const Hello hello = parse_hello(text.substr(0, text.find('\n')));
    say(first, line_of(Welcome{.proof = proof_of_server("one", "c", hello)}) + "\n");
    EXPECT_FALSE(directive_of(client, 2100));  // longer than rdzv_timeout
    say(first, "garbage\n");
    EXPECT_FALSE(directive_of(client, 20));
  }
  const Fd impostor = accept();
  say(impostor, ends);
  EXPECT_FALSE(directive_of(client, 20));
}

TEST(SecretTest, HmacIsRfc4231s) {
  EXPECT_EQ(hmac_sha256("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_sha256(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(random_hex(16).size(), 32U);
  EXPECT_NE(random_hex(16), random_hex(16));
  EXPECT_TRUE(equal_secrets("abc", "abc"));
  EXPECT_FALSE(equal_secrets("abc", "abd"));
  EXPECT_FALSE(equal_secrets("abc", "ab"));
}

}  // namespace rendezvous_server_test
}  // namespace cohort::launch
