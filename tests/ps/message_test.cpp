// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/wire/message.h"

#include <array>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "cohort/ps/crc32c.h"

#include "tests/support/message_of.h"

namespace cohort::ps {
namespace message_test {

using cohort::test::message_of;

// Rows of two tables and a block: odd numbers, so that there is padding.
Buffer push_message() {
  const std::array<SectionShape, 3> shapes{
      SectionShape{.kind = SectionKind::kRows, .table = 0, .width = 3, .count = 5},
      SectionShape{.kind = SectionKind::kRows, .table = 1, .width = 1, .count = 0},
      SectionShape{.kind = SectionKind::kBlock, .table = 7, .count = 3}};
  MessageWriter writer(shapes);
  for (size_t i = 0; i < 5; ++i) writer.ids(0)[i] = 1000 + i;
  for (size_t i = 0; i < 15; ++i) writer.values(0)[i] = static_cast<float>(i);
  for (size_t i = 0; i < 3; ++i) writer.values(2)[i] = -static_cast<float>(i);
  return writer.finish({.kind = MessageKind::kPush,
                        .job = 11,
                        .trainer = 2,
                        .trainer_incarnation = 3,
                        .server_incarnation = 4,
                        .sequence = 5,
                        .step = 6});
}

Buffer copy_of(std::span<const std::byte> bytes) {
  Buffer copy(bytes.size());
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

// What parse_message says of it, with the checksum in order so that the lengths must be looked at.
std::string refusal_of(std::span<const std::byte> bytes) {
  const Buffer copy = copy_of(bytes);
  return message_of<c10::ValueError>([&] { parse_message(copy.span(), Checksums::kIgnored); });
}

constexpr size_t kSectionCount = 8;  // Where a section's header has its count, and so on.
constexpr size_t kSectionWidth = 16;
constexpr size_t kSectionFlags = 20;

template <class Number>
Buffer with(size_t position, Number number) {
  Buffer message = push_message();
  std::memcpy(message.data() + position, &number, sizeof(number));
  return message;
}

TEST(MessageTest, WhatWasWrittenIsRead) {
  const Buffer bytes = push_message();
  const Message message = parse_message(bytes.span());
  EXPECT_EQ(message.header.job, 11U);
  EXPECT_EQ(message.header.trainer, 2U);
  EXPECT_EQ(message.header.trainer_incarnation, 3U);
  EXPECT_EQ(message.header.server_incarnation, 4U);
  EXPECT_EQ(message.header.sequence, 5U);
  EXPECT_EQ(message.header.step, 6U);
  ASSERT_EQ(message.sections.size(), 3U);
  EXPECT_EQ(message.sections[0].ids.size(), 5U);
  EXPECT_EQ(message.sections[0].ids[4], 1004U);
  EXPECT_EQ(message.sections[0].values[14], 14.0f);
  EXPECT_EQ(message.sections[0].width, 3U);
  EXPECT_TRUE(message.sections[1].ids.empty());
  EXPECT_EQ(message.sections[2].kind, SectionKind::kBlock);
  EXPECT_EQ(message.sections[2].table, 7U);
  EXPECT_EQ(message.sections[2].values[2], -2.0f);
}

TEST(MessageTest, SectionsWithoutIdsOrValuesHaveNone) {
  const std::array<SectionShape, 2> shapes{
      SectionShape{.table = 0, .width = 4, .count = 3, .has_values = false},
      SectionShape{.table = 1, .width = 4, .count = 3, .has_ids = false}};
  MessageWriter writer(shapes);
  writer.ids(0)[2] = 9;
  writer.values(1)[11] = 9;
  const Buffer bytes = writer.finish({.kind = MessageKind::kPull});
  const Message message = parse_message(bytes.span());
  EXPECT_EQ(message.sections[0].ids[2], 9U);
  EXPECT_TRUE(message.sections[0].values.empty());
  EXPECT_TRUE(message.sections[1].ids.empty());
  EXPECT_EQ(message.sections[1].values[11], 9.0f);
}

TEST(MessageTest, ResealedItHasAnotherHeaderAndTheSameSections) {
  Buffer bytes = push_message();
  Header header = parse_message(bytes.span()).header;
  header.server_incarnation = 99;
  reseal(bytes.span(), header);
  const Message message = parse_message(bytes.span());
  EXPECT_EQ(message.header.server_incarnation, 99U);
  EXPECT_EQ(message.sections[0].ids[4], 1004U);
}

TEST(MessageTest, TheChecksumOfAllOfItFollowsFromItsOwn) {
  const Buffer bytes = push_message();
  EXPECT_EQ(crc32c_of_checked(bytes.span()), crc32c(bytes.span()));
}

TEST(MessageTest, MemoryOfALargeBufferIsUsedAgain) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "not under the address sanitizer";
#elif defined(__has_feature)
  if (__has_feature(address_sanitizer)) GTEST_SKIP() << "not under the address sanitizer";
#endif
  const std::byte* place = nullptr;
  {
    Buffer first(size_t{3} << 20);
    Buffer second(size_t{3} << 20);
    EXPECT_NE(first.data(), second.data());
    const Buffer moved = std::move(first);
    place = moved.span().data();
    first = std::move(second);
  }
  Buffer larger(size_t{4} << 20);
  EXPECT_NE(larger.data(), place);
  Buffer one((size_t{3} << 20) - 1000), other(size_t{2} << 20);
  EXPECT_TRUE((one.data() == place) != (other.data() == place)) << "of those that fit, each once";
  EXPECT_EQ(one.size(), (size_t{3} << 20) - 1000);
}

TEST(MessageTest, EveryTruncationIsRefused) {
  const Buffer whole = push_message();
  for (size_t size = 0; size < whole.size(); ++size) {
    const Buffer copy = copy_of(whole.span().first(size));
    EXPECT_THROW(parse_message(copy.span()), c10::ValueError) << size;
    EXPECT_THROW(parse_message(copy.span(), Checksums::kIgnored), c10::ValueError) << size;
  }
  Buffer longer(whole.size() + 8);
  std::memset(longer.data(), 0, longer.size());
  std::memcpy(longer.data(), whole.span().data(), whole.size());
  EXPECT_EQ(refusal_of(longer.span()), "message: 8 bytes are left behind its sections");
}

TEST(MessageTest, EveryFlippedBitIsRefused) {
  const Buffer whole = push_message();
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Buffer copy = copy_of(whole.span());
    copy.data()[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_THROW(parse_message(copy.span()), c10::ValueError) << bit;
  }
}

// Counts whose product with the size of a row wraps around, or asks for all memory there is: what
// would be taken for them is seen by the sanitizers' and the system's limits alone, so the proof is
// that they are refused before a section exists.
TEST(MessageTest, AbsurdCountsAreRefusedByName) {
  const size_t section = sizeof(Header);
  for (const uint64_t count : {uint64_t{1} << 32, uint64_t{1} << 60, UINT64_MAX / 20,
                               UINT64_MAX / 20 + 1, (uint64_t{1} << 62) + 5, UINT64_MAX}) {
    EXPECT_EQ(refusal_of(with(section + kSectionCount, count).span())
                  .find("message: section 0: " + std::to_string(count) + " rows of 3 do not fit"),
              0U)
        << count;
  }
  EXPECT_EQ(refusal_of(with(section + kSectionWidth, uint32_t{0}).span()),
            "message: section 0 has width 0");
  EXPECT_EQ(refusal_of(with(section + kSectionWidth, UINT32_MAX).span()),
            "message: section 0 has width 4294967295");
  EXPECT_EQ(refusal_of(with(section + kSectionFlags, uint32_t{8}).span()),
            "message: section 0 has unknown flags");
  EXPECT_EQ(refusal_of(with(section + 4, uint32_t{2}).span()),
            "message: section 0 has the unknown kind 2");
  EXPECT_EQ(refusal_of(with(offsetof(Header, num_sections), UINT32_MAX).span())
                .find("message: 4294967295 sections do not fit"),
            0U);
  EXPECT_EQ(refusal_of(with(offsetof(Header, kind), uint32_t{0}).span()),
            "message: unknown kind 0");
  EXPECT_EQ(refusal_of(with(offsetof(Header, magic), uint32_t{0}).span()),
            "message: it does not begin with CPS1");
}

TEST(MessageTest, AnUnalignedMessageIsRefused) {
  const Buffer whole = push_message();
  Buffer shifted(whole.size() + 8);
  std::memcpy(shifted.data() + 4, whole.span().data(), whole.size());
  EXPECT_THROW(parse_message(shifted.span().subspan(4, whole.size())), c10::ValueError);
}

TEST(Crc32cTest, AgreesWithThePublishedValue) {
  // RFC 3720, B.4: 32 bytes of zeros, and the numbers 0 to 31.
  std::array<std::byte, 32> bytes{};
  EXPECT_EQ(crc32c(bytes), 0x8a9136aaU);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(bytes), 0x46dd794eU);
  EXPECT_EQ(crc32c(std::span(bytes).subspan(5), crc32c(std::span(bytes).first(5))), 0x46dd794eU);
}

TEST(Crc32cTest, ThoseOfTwoPartsAreJoined) {
  std::vector<std::byte> bytes(3'000'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i % 251);
  for (const size_t first : {0, 1, 8, 100}) {
    for (const size_t second : {0, 1, 7, 255, 4096, 2'900'000}) {
      const auto both = std::span<const std::byte>(bytes).first(first + second);
      EXPECT_EQ(crc32c_joined(crc32c(both.first(first)), crc32c(both.subspan(first)), second),
                crc32c(both))
          << first << " and " << second;
    }
  }
}

}  // namespace message_test
}  // namespace cohort::ps
