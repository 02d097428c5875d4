// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <tuple>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace safetensors_test {

std::vector<std::byte> counted_bytes(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i % 2);  // Good BOOLs too.
  return bytes;
}

const std::vector<DType> kAllTypes = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16,
                                      DType::kI64, DType::kI32, DType::kI16, DType::kI8,
                                      DType::kU8,  DType::kBool};

// A tensor of each type, shape [2, 3], a scalar and an empty one, with odd sizes among them.
class SafetensorsFileTest : public testing::Test {
 protected:
  SafetensorsFileTest() {
    for (DType dtype : kAllTypes) add(to_string(dtype), dtype, {2, 3});
    add("scalar", DType::kF32, {});
    add("empty", DType::kI64, {0, 5});
    add("odd \"name\" \xC3\xA9", DType::kU8, {3});
    write_safetensors(path_, tensors_, {{"format", "pt"}, {"step", "7"}});
  }

  void add(const std::string& name, DType dtype, std::vector<int64_t> shape) {
    const auto elements =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    bytes_.push_back(counted_bytes(static_cast<size_t>(elements) * item_size(dtype)));
    tensors_.push_back({name, dtype, std::move(shape), bytes_.back()});
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_ / "model.safetensors";
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<TensorView> tensors_;
};

std::string with_header(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string content(8, '\0');
  std::memcpy(content.data(), &length, 8);
  return content + header + std::string(data_bytes, '\1');
}

TEST_F(SafetensorsFileTest, ReadsBackWhatWasWritten) {
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), (TensorMetadata{{"format", "pt"}, {"step", "7"}}));
  ASSERT_EQ(file.tensors().size(), tensors_.size());
  for (const TensorView& expected : tensors_) {
    const TensorView& found = file.at(expected.name);
    EXPECT_EQ(found.dtype, expected.dtype);
    EXPECT_EQ(found.shape, expected.shape);
    EXPECT_TRUE(std::ranges::equal(found.bytes, expected.bytes)) << expected.name;
    if (!found.bytes.empty()) {
      EXPECT_EQ(std::bit_cast<uintptr_t>(found.bytes.data()) % item_size(found.dtype), 0U)
          << expected.name;
    }
  }
  EXPECT_EQ(file.find("absent"), nullptr);
  EXPECT_THROW(file.at("absent"), ConfigError);
}

TEST_F(SafetensorsFileTest, EqualInputInAnyOrderGivesAnEqualFile) {
  std::reverse(tensors_.begin(), tensors_.end());
  write_safetensors(folder_ / "other", tensors_, {{"step", "7"}, {"format", "pt"}});
  EXPECT_EQ(read_file(folder_ / "other"), read_file(path_));
}

TEST_F(SafetensorsFileTest, AFileWithoutTensorsIsFine) {
  write_safetensors(path_, {});
  EXPECT_TRUE(SafetensorsFile(path_).tensors().empty());
}

TEST_F(SafetensorsFileTest, RefusesToWriteNonsense) {
  const auto bytes = counted_bytes(8);
  const auto write = [&](std::vector<TensorView> tensors) {
    write_safetensors(folder_ / "bad", tensors);
  };
  const TensorView good{"a", DType::kF32, {2}, bytes};
  EXPECT_THROW(write({good, good}), ConfigError);
  EXPECT_THROW(write({{"a", DType::kF32, {3}, bytes}}), ConfigError);
  EXPECT_THROW(write({{"a", DType::kF32, {-1, -2}, bytes}}), ConfigError);
  EXPECT_THROW(write({{"a", DType::kF32, {INT64_MAX, 3}, bytes}}), ConfigError);
  EXPECT_THROW(write({{"__metadata__", DType::kF32, {2}, bytes}}), ConfigError);
  EXPECT_THROW(write({{"\xFF", DType::kF32, {2}, bytes}}), ConfigError);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "bad"));
}

TEST_F(SafetensorsFileTest, StreamsAreWrittenAsTheirBytesAndCountedToo) {
  const std::vector<uint8_t> bytes = {1, 2, 3, 4, 5};
  const auto stream = [&](int64_t size) {
    return TensorStream{"x", DType::kU8, {size}, [&](const ByteSink& write) {
                          write(std::as_bytes(std::span(bytes)).first(2));
                          write(std::as_bytes(std::span(bytes)).subspan(2));
                        }};
  };
  const std::vector<TensorStream> right = {stream(5)};
  stream_safetensors(path_, right);
  const SafetensorsFile file(path_);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(),
                         reinterpret_cast<const uint8_t*>(file.at("x").bytes.data())));
  const std::vector<TensorStream> wrong = {stream(6)};
  EXPECT_EQ(test::message_of<ConfigError>([&] { stream_safetensors(folder_ / "wrong", wrong); }),
            folder_ / "wrong" +
                ": cannot write tensor \"x\": expected 6 bytes by dtype and shape, found 5");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "wrong"));
}

TEST_F(SafetensorsFileTest, EveryTruncationIsAnErrorThatNamesTheFile) {
  write_safetensors(path_, std::span(tensors_).last(4), {{"step", "7"}});
  const std::string whole = read_file(path_);
  for (size_t length = whole.size(); length-- > 0;) {
    std::filesystem::resize_file(path_, length);
    try {
      const SafetensorsFile file(path_);
      ADD_FAILURE() << "no exception at " << length;
    } catch (const ConfigError& error) {
      EXPECT_NE(one_line(error).find(path_), std::string::npos) << one_line(error);
    }
  }
  write_file(path_, whole + "x");
  EXPECT_THROW(SafetensorsFile{path_}, ConfigError);
}

TEST_F(SafetensorsFileTest, DamagedHeadersAreErrorsOrDescribeTheSameData) {
  write_safetensors(path_, std::span(tensors_).last(4), {{"step", "7"}});
  const std::string whole = read_file(path_);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, whole.data(), 8);
  const std::string data = whole.substr(8 + header_bytes);
  size_t refused = 0;
  size_t accepted = 0;
  const auto check = [&](const std::string& damaged) {
    // In place: writing the whole file each time takes the disk too long.
    std::fstream(path_, std::ios::in | std::ios::out | std::ios::binary) << damaged;
    try {
      const SafetensorsFile file(path_);
      // A flipped letter in a name cannot be noticed; the bytes must be all of the data, once.
      std::string found;
      for (const TensorView& tensor : file.tensors()) {
        found.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
      }
      EXPECT_EQ(found, data);
      ++accepted;
    } catch (const ConfigError&) {
      ++refused;
    }
  };
  for (size_t place = 0; place < 8 + header_bytes; ++place) {
    for (int bit : {0, 1, 4, 7}) {
      std::string damaged = whole;
      damaged[place] = static_cast<char>(damaged[place] ^ (1 << bit));
      check(damaged);
    }
  }
  std::minstd_rand random(1);
  for (int i = 0; i < 1000; ++i) {
    std::string damaged = whole;
    for (int j = 0; j < 3; ++j) {
      damaged[random() % (8 + header_bytes)] = "\"{}[],:0123456789-eE.\\\0\xFF "[random() % 24];
    }
    check(damaged);
  }
  EXPECT_GT(refused, accepted);
}

TEST_F(SafetensorsFileTest, EachKindOfDamageIsNamed) {
  const std::string f32 = R"("dtype":"F32","shape":[2],"data_offsets":)";
  const std::vector<std::tuple<std::string, size_t, std::string>> cases = {
      {"{}", 1, "expected 0 bytes of data, found 1"},
      {"[]", 0, "JSON object"},
      {"{", 0, "not JSON"},
      {"", 0, "not JSON"},
      {R"({"a":{)" + f32 + R"([0,8]}}x)", 8, "not JSON"},
      {R"({"a":{)" + f32 + R"([0,8]},"a":{)" + f32 + R"([8,16]}})", 16, "\"a\" occurs twice"},
      {R"({"a":{"dtype":"F32",)" + f32 + R"([0,8]}})", 8, "\"dtype\" occurs twice"},
      {R"({"a":{)" + f32 + R"([0,4]}})", 4, "expected 8 bytes by dtype and shape, found 4"},
      {R"({"a":{)" + f32 + R"([0,8]}})", 4, "cut short"},
      {R"({"a":{)" + f32 + R"([4,12]}})", 12, "begins at 4, expected 0"},
      {R"({"a":{)" + f32 + R"([0,8]},"b":{)" + f32 + R"([4,12]}})", 12, "begins at 4, expected 8"},
      {R"({"a":{)" + f32 + R"([8,0]}})", 8, "ascending"},
      {R"({"a":{)" + f32 + R"([0,-8]}})", 8, "two offsets"},
      {R"({"a":{)" + f32 + R"([0,8.0]}})", 8, "two offsets"},
      {R"({"a":{)" + f32 + R"([0,18446744073709551615]}})", 8, "two offsets"},
      {R"({"a":{)" + f32 + R"([0,99999999999999999999]}})", 8, "two offsets"},
      {R"({"a":{)" + f32 + R"([0,8],"more":1}})", 8, "exactly dtype, shape and data_offsets"},
      {R"({"a":{"dtype":"F8","shape":[8],"data_offsets":[0,8]}})", 8, "found F8"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "fewer than 2^64"},
      {R"({"a":[[[[0]]]]})", 0, "nested too deeply"},
      {R"({"a":7})", 0, "exactly dtype, shape and data_offsets"},
      {R"({"__metadata__":{"a":1}})", 0, "to be a string"},
      {R"({"__metadata__":[]})", 0, "to be an object"},
  };
  for (const auto& [header, data_bytes, text] : cases) {
    write_file(path_, with_header(header, data_bytes));
    try {
      const SafetensorsFile file(path_);
      ADD_FAILURE() << "no exception for " << header;
    } catch (const ConfigError& error) {
      EXPECT_NE(one_line(error).find(text), std::string::npos) << header << one_line(error);
      EXPECT_NE(one_line(error).find(path_), std::string::npos) << one_line(error);
    }
  }
}

TEST_F(SafetensorsFileTest, RefusesHugeHeadersAndWhatIsNoFile) {
  std::string content = with_header("{}", 0);
  content[7] = '\x7F';
  write_file(path_, content);
  EXPECT_THROW(SafetensorsFile{path_}, ConfigError);
  EXPECT_THROW(SafetensorsFile{folder_ / "absent"}, ConfigError);
  EXPECT_THROW(SafetensorsFile{folder_ / "."}, ConfigError);
}

// Runs Python with safetensors and numpy; the package must be there.
void run_python(const std::string& script) {
  const auto python = env_string("COHORT_TEST_PYTHON");
  ASSERT_TRUE(python) << "COHORT_TEST_PYTHON names no Python: run scripts/setup";
  const std::string command = "'" + *python + "' -c '" + script + "'";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

TEST_F(SafetensorsFileTest, PythonReadsWhatWeWrite) {
  ASSERT_NO_FATAL_FAILURE(run_python(R"(
from safetensors import deserialize, safe_open
path = ")" + path_ +
                                     R"("
tensors = dict(deserialize(open(path, "rb").read()))
assert len(tensors) == 13, len(tensors)
for name, size in dict(F64=8, F32=4, F16=2, BF16=2, I64=8, I32=4, I16=2, I8=1, U8=1, BOOL=1).items():
    assert tensors[name]["dtype"] == name
    assert tensors[name]["shape"] == [2, 3]
    assert bytes(tensors[name]["data"]) == bytes(i % 2 for i in range(6 * size)), name
assert tensors["scalar"]["shape"] == [] and tensors["empty"]["shape"] == [0, 5]
with safe_open(path, "np") as file:
    assert file.metadata() == dict(format="pt", step="7")
    assert file.get_tensor("I64").tolist() == [[int.from_bytes(b"\x00\x01" * 4, "little")] * 3] * 2
)"));
}

TEST_F(SafetensorsFileTest, WeReadWhatPythonWrites) {
  ASSERT_NO_FATAL_FAILURE(run_python(R"(
import numpy
from safetensors.numpy import save_file
save_file({"w": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
           "long": numpy.array([1 << 40, -1]), "flag": numpy.array([True, False, True])},
          ")" + path_ + R"(", metadata={"who": "python"})
)"));
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata().at("who"), "python");
  EXPECT_EQ(file.at("w").shape, (std::vector<int64_t>{2, 3}));
  std::array<float, 6> w{};
  ASSERT_EQ(file.at("w").bytes.size(), sizeof(w));
  std::memcpy(w.data(), file.at("w").bytes.data(), sizeof(w));
  EXPECT_EQ(w, (std::array<float, 6>{0, 1, 2, 3, 4, 5}));
  std::array<int64_t, 2> longs{};
  ASSERT_EQ(file.at("long").bytes.size(), sizeof(longs));
  std::memcpy(longs.data(), file.at("long").bytes.data(), sizeof(longs));
  EXPECT_EQ(longs, (std::array<int64_t, 2>{int64_t{1} << 40, -1}));
  EXPECT_EQ(file.at("flag").dtype, DType::kBool);
  EXPECT_EQ(file.at("flag").bytes.size(), 3U);
}

}  // namespace safetensors_test
}  // namespace cohort
