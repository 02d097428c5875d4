// SPDX-License-Identifier: Apache-2.0
// A bad cable: carries TCP connections to a port of this host, delays them, and breaks them.
#pragma once
#include <arpa/inet.h>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/fd.h"

namespace cohort::ps {

/// Every piece that it carries may be late (2 %), or the last one (`break_probability`): then both
/// sides are reset, or one direction dies silently and the other lives for a while.
class TcpProxy {
 public:
  TcpProxy(uint64_t seed, double break_probability)
      : break_probability_(break_probability), seeds_(seed) {
    listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = local(0);
    ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
    ::listen(listener_.get(), 64);
    socklen_t size = sizeof(address);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~TcpProxy() {
    stopping_ = true;
    acceptor_.join();
    for (std::thread& thread : connections_) thread.join();
  }
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  int port() const { return port_; }
  /// Where new connections lead.
  void set_target(int port) { target_ = port; }
  int broken() const { return broken_; }

 private:
  static sockaddr_in local(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  void accept_all() {
    while (!stopping_) {
      pollfd ready{listener_.get(), POLLIN, 0};
      if (::poll(&ready, 1, 50) <= 0) continue;
      Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      Fd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      const sockaddr_in address = local(target_);
      if (!client || ::connect(server.get(), reinterpret_cast<const sockaddr*>(&address),
                               sizeof(address)) != 0)
        continue;
      connections_.emplace_back([this, seed = seeds_(), client = std::move(client),
                                 server = std::move(server)]() mutable {
        carry(std::mt19937_64(seed), std::move(client), std::move(server));
      });
    }
  }

  static void reset(Fd& socket) {
    const linger none{.l_onoff = 1, .l_linger = 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
    socket.reset();
  }

  void carry(std::mt19937_64 random, Fd client, Fd server) {
    const auto draw = [&random] { return std::uniform_real_distribution<>(0, 1)(random); };
    std::array<bool, 2>
        dead{};  // Directions that carry nothing more: to the server, to the client.
    auto end = std::chrono::steady_clock::time_point::max();
    std::array<char, 1 << 16> piece;
    while (!stopping_ && std::chrono::steady_clock::now() < end) {
      std::array<pollfd, 2> ready{pollfd{client.get(), POLLIN, 0}, pollfd{server.get(), POLLIN, 0}};
      if (::poll(ready.data(), ready.size(), 50) <= 0) continue;
      for (size_t side = 0; side < 2; ++side) {
        if (ready[side].revents == 0) continue;
        const ssize_t bytes = ::recv(ready[side].fd, piece.data(), piece.size(), 0);
        if (bytes <= 0) return;
        if (draw() < 0.02)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
        if (draw() < break_probability_) {
          ++broken_;
          if (random() % 2 == 0) {
            reset(client);
            reset(server);
            return;
          }
          dead[side] = true;
          ::shutdown(ready[1 - side].fd, SHUT_WR);
          end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
        }
        if (dead[side]) continue;
        for (ssize_t sent = 0; sent < bytes;) {
          const ssize_t more = ::send(ready[1 - side].fd, piece.data() + sent,
                                      static_cast<size_t>(bytes - sent), MSG_NOSIGNAL);
          if (more <= 0) return;
          sent += more;
        }
      }
    }
  }

  const double break_probability_;
  std::mt19937_64 seeds_;
  Fd listener_;
  int port_ = 0;
  std::atomic<int> target_{0};
  std::atomic<int> broken_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> connections_;
  std::thread acceptor_;
};

}  // namespace cohort::ps
