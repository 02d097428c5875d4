// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/table_file.h"

#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <new>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/ps/table_support.h"
#include "tests/support/message_of.h"

namespace {
int64_t num_allocations = 0;
}  // namespace

void* operator new(size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t /*size*/) noexcept {
  std::free(memory);
}

namespace cohort::ps {
namespace table_file_test {

using test::message_of;

constexpr int64_t kWidth = 3;

bool every(uint64_t /*id*/) {
  return true;
}

TableOptions options_of(AtCap at_cap, int64_t cap_rows, const EntryPolicy& entry) {
  TableOptions options{.name = "t",
                       .width = kWidth,
                       .rule = {.rule = Rule::kAdam},
                       .entry = entry,
                       .eviction = {.time_to_live_s = 40'000},
                       .at_cap = at_cap};
  options.memory_cap_bytes = cap_rows * row_bytes(options);
  return options;
}

// Two tables get the same pushes and evictions; one goes through a file after each third of them.
TEST(TableFileTest, ATableThatWentThroughAFileGoesOnAsIfItHadNot) {
  const TemporaryFolder folder;
  using Kind = EntryPolicy::Kind;
  for (const TableOptions& options :
       {options_of(AtCap::kRefuse, 0, {}), options_of(AtCap::kRefuse, 300, {}),
        options_of(AtCap::kEvictLeastUsed, 300, {}),
        options_of(AtCap::kEvictLeastUsed, 400, {.kind = Kind::kCount, .pushes = 2}),
        options_of(AtCap::kRefuse, 0, {.kind = Kind::kProbability, .probability = 0.3})}) {
    RowTable straight(options);
    auto stored = std::make_unique<RowTable>(options);
    const auto pushes = some_pushes(150, 3000, kWidth);
    for (const Push& push : pushes) {
      apply(straight, push);
      apply(*stored, push);
      if (push.step % 20 == 0) {
        straight.evict(push.now);
        stored->evict(push.now);
      }
      if (push.step % 50 != 0) continue;
      write_table_file(*stored, folder / "table");
      stored = std::make_unique<RowTable>(options);
      load_table_file(folder / "table", *stored, every);
    }
    EXPECT_GT(straight.statistics().evicted, 0);
    EXPECT_EQ(rows_of(straight), rows_of(*stored)) << to_text(options);
    EXPECT_EQ(counts_of(straight), counts_of(*stored)) << to_text(options);
    EXPECT_EQ(counts_of(straight).empty(), options.entry.kind != Kind::kCount);
  }
}

TEST(TableFileTest, WritingTakesNoMemory) {
  const TemporaryFolder folder;
  RowTable table(options_of(AtCap::kRefuse, 0, {.kind = EntryPolicy::Kind::kCount, .pushes = 2}));
  for (const Push& push : some_pushes(3000, 100'000, kWidth)) apply(table, push);
  ASSERT_GT(table.statistics().rows * 40, 1 << 20);  // Several blocks.
  TableFileWriter writer(table);
  const Fd file(::open((folder / "table").c_str(), O_WRONLY | O_CREAT, 0666));
  const int64_t before = num_allocations;
  EXPECT_EQ(writer.write(file.get()), 0);
  EXPECT_EQ(num_allocations, before);
  EXPECT_EQ(writer.bytes(), read_file(folder / "table").size());
}

TEST(TableFileTest, AServerLoadsTheRowsThatItWants) {
  const TemporaryFolder folder;
  const TableOptions options = options_of(AtCap::kRefuse, 0, {});
  RowTable table(options);
  for (const Push& push : some_pushes(20, 1000, kWidth)) apply(table, push);
  write_table_file(table, folder / "table");
  std::map<uint64_t, OwnedRow> all;
  for (const uint64_t rest : {0, 1, 2}) {
    RowTable part(options);
    load_table_file(folder / "table", part, [&](uint64_t id) { return id % 3 == rest; });
    EXPECT_GT(part.statistics().rows, 0);
    all.merge(rows_of(part));
  }
  EXPECT_EQ(all, rows_of(table));
  TableOptions other = options;
  other.seed = 2;
  RowTable wrong(other);
  EXPECT_EQ(message_of<ConfigError>([&] { load_table_file(folder / "table", wrong, every); }),
            "table \"t\": seed: stored rows have 1, the options say 2");
}

TEST(TableFileTest, EveryDamageIsRefusedWithFileAndOffset) {
  const TemporaryFolder folder;
  RowTable table(options_of(AtCap::kRefuse, 0, {.kind = EntryPolicy::Kind::kCount, .pushes = 2}));
  for (const Push& push : some_pushes(4, 60, kWidth, 10)) apply(table, push);
  const std::string path = folder / "table";
  write_table_file(table, path);
  const std::string good = read_file(path);
  const auto complaint = [&] {
    return message_of<ConfigError>(
        [&] { TableFileReader(path).read([](auto) {}, [](uint64_t, uint32_t) {}); });
  };
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto put = [&](size_t at, char byte) {
    file.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
  };
  EXPECT_EQ(complaint(), "nothing was thrown");
  const std::string prefix = path + ": damaged at offset ";
  for (size_t i = 0; i < good.size(); ++i) {
    put(i, static_cast<char>(good[i] ^ 0x10));
    ASSERT_EQ(complaint().rfind(prefix, 0), 0) << "byte " << i;
    put(i, good[i]);
  }
  // The first block begins behind the header and its text.
  const size_t first = 20 + to_text(table.options()).size();
  put(first + 30, static_cast<char>(good[first + 30] + 1));
  EXPECT_EQ(complaint(), prefix + std::to_string(first) + ": the block's checksum is wrong");
  put(first + 30, good[first + 30]);
  put(good.size(), 'x');
  EXPECT_EQ(complaint(), prefix + std::to_string(good.size()) + ": expected the file to end");
  for (size_t size = good.size(); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    ASSERT_EQ(complaint().rfind(prefix, 0), 0) << "cut at " << size;
  }
  EXPECT_EQ(complaint(), prefix + "0: the file ends in the header");
}

TEST(TableFileTest, AFullDiskIsReported) {
  RowTable table(options_of(AtCap::kRefuse, 0, {}));
  EXPECT_EQ(message_of<c10::Error>([&] { write_table_file(table, "/dev/full"); }),
            "/dev/full: writing: No space left on device");
}

}  // namespace table_file_test
}  // namespace cohort::ps
