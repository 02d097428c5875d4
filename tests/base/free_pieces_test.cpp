// SPDX-License-Identifier: Apache-2.0
// Which piece is taken, and that every byte is free or taken, never both.
#include "cohort/base/free_pieces.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <vector>

namespace cohort {
namespace {

using Pieces = std::map<size_t, size_t>;

TEST(FreePiecesTest, TheShortestPieceThatIsLongEnoughIsTaken) {
  FreePieces free;
  EXPECT_EQ(free.take(1), std::nullopt);
  free.give_back(0, 100);
  free.give_back(200, 10);
  free.give_back(300, 20);
  EXPECT_EQ(free.take(101), std::nullopt);
  EXPECT_EQ(free.take(10), 200U);
  EXPECT_EQ(free.take(10), 300U);
  EXPECT_EQ(free.take(10), 310U);
  EXPECT_EQ(free.take(30), 0U);
  EXPECT_EQ(free.take_all(), (Pieces{{30, 70}}));
  EXPECT_EQ(free.take_all(), Pieces{});
}

TEST(FreePiecesTest, PiecesThatTouchBecomeOne) {
  FreePieces free;
  free.give_back(10, 10);
  free.give_back(30, 10);
  EXPECT_EQ(free.bytes_before(40), 10U);
  free.give_back(20, 10);  // Between the two.
  EXPECT_EQ(free.bytes_before(40), 30U);
  free.give_back(40, 5);  // After one.
  free.give_back(5, 5);   // Before one.
  EXPECT_EQ(free.bytes_before(45), 40U);
  EXPECT_EQ(free.bytes_before(44), 0U) << "within a piece";
  EXPECT_EQ(free.bytes_before(46), 0U) << "beyond one";
  EXPECT_EQ(free.bytes_before(5), 0U) << "where one begins";
  EXPECT_EQ(free.take_all(), (Pieces{{5, 40}}));
}

TEST(FreePiecesTest, EveryByteIsFreeOrTaken) {
  constexpr size_t kBytes = 200;
  std::mt19937 random(7);
  FreePieces free;
  std::vector<bool> is_free(kBytes, true);
  free.give_back(0, kBytes);
  Pieces taken;
  for (int turn = 0; turn < 20'000; ++turn) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % 40;
      const auto begin = free.take(bytes);
      if (begin) {
        for (size_t i = *begin; i < *begin + bytes; ++i) {
          ASSERT_TRUE(is_free.at(i)) << turn;
          is_free[i] = false;
        }
        taken.emplace(*begin, bytes);
      } else {
        const std::vector<bool> run(bytes, true);
        ASSERT_EQ(std::search(is_free.begin(), is_free.end(), run.begin(), run.end()),
                  is_free.end())
            << turn;
      }
    } else if (!taken.empty()) {
      const auto gone = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
      std::fill_n(is_free.begin() + static_cast<long>(gone->first), gone->second, true);
      free.give_back(gone->first, gone->second);
      taken.erase(gone);
    }
  }
  for (const auto& [begin, bytes] : taken) free.give_back(begin, bytes);
  EXPECT_EQ(free.take_all(), (Pieces{{0, kBytes}}));
}

}  // namespace
}  // namespace cohort
