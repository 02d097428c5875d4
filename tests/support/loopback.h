// SPDX-License-Identifier: Apache-2.0
// A TCP connection of the process to itself; nothing is ever sent.
#pragma once
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "cohort/base/fd.h"

namespace cohort::test {

struct Loopback {
  Loopback() {
    const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.get(), any, length), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), any, &length), 0);
    port = ntohs(address.sin_port);
    near = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(near.get(), any, length), 0);
    far = Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    EXPECT_GE(far.get(), 0);
  }
  bool is_open() const {
    char byte = 0;  // The end of what is sent shows as 0 bytes read.
    return ::recv(far.get(), &byte, 1, MSG_DONTWAIT) < 0;
  }
  int port = 0;  // The far end's.
  Fd near, far;
};

}  // namespace cohort::test
