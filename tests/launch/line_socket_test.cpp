// SPDX-License-Identifier: Apache-2.0
// What a peer may send, and what it may not make of the memory at this end.
#include "cohort/launch/line_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <string>
#include <sys/socket.h>
#include <unistd.h>

namespace cohort::launch {
namespace line_socket_test {

constexpr size_t kMostBytes = 64 * 1024;

class LineSocketTest : public testing::Test {
 protected:
  LineSocketTest() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    peer_ = Fd(ends[0]);
    socket_ = LineSocket(Fd(ends[1]));
    const int large = 1 << 20;
    ::setsockopt(peer_.get(), SOL_SOCKET, SO_SNDBUF, &large, sizeof large);
  }
  // Sends what the kernel takes of it; returns how much.
  size_t send(const std::string& text) {
    const ssize_t size = ::send(peer_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    return size < 0 ? 0 : static_cast<size_t>(size);
  }
  std::string all_lines() {
    std::string text;
    while (const auto line = socket_.next()) text += *line + "\n";
    return text;
  }

  Fd peer_;
  LineSocket socket_;
};

TEST_F(LineSocketTest, LinesComeWholeHoweverTheyWereCut) {
  for (const char* part : {"on", "e\ntw", "", "o\n\nthree"}) {
    send(part);
    socket_.poll();
  }
  EXPECT_EQ(socket_.next(), "one");
  EXPECT_EQ(all_lines(), "two\n\n");
  send("\n");
  socket_.poll();
  EXPECT_EQ(socket_.next(), "three");
  EXPECT_EQ(socket_.next(), std::nullopt);
  EXPECT_TRUE(socket_.open());
}

TEST_F(LineSocketTest, LinesThatNobodyTakesStayWithTheKernel) {
  std::string text;
  while (text.size() < 4 * kMostBytes) text += "line " + std::to_string(text.size()) + "\n";
  const size_t sent = send(text);
  ASSERT_GT(sent, 2 * kMostBytes) << "the kernel takes less than this test needs";
  socket_.poll();
  socket_.poll();
  std::string taken = all_lines();
  EXPECT_GT(taken.size(), kMostBytes / 2);
  EXPECT_LE(taken.size(), kMostBytes + 4096);
  for (size_t before = 0; before != taken.size(); taken += all_lines()) {
    before = taken.size();
    socket_.poll();
  }
  EXPECT_EQ(taken, text.substr(0, text.rfind('\n', sent - 1) + 1));
  EXPECT_TRUE(socket_.open());
}

TEST_F(LineSocketTest, ALineWithoutAnEndIsTheEnd) {
  send("good\n" + std::string(kMostBytes + 1, 'x'));
  socket_.poll();
  EXPECT_EQ(socket_.next(), "good");
  for (int i = 0; i < 3; ++i) socket_.poll();
  EXPECT_FALSE(socket_.open());
  EXPECT_EQ(socket_.next(), std::nullopt);
}

TEST_F(LineSocketTest, WhatCameBeforeTheEndCanBeRead) {
  send("last\nhalf");
  peer_.reset();
  socket_.poll();
  EXPECT_FALSE(socket_.open());
  EXPECT_EQ(all_lines(), "last\n");
}

}  // namespace line_socket_test
}  // namespace cohort::launch
