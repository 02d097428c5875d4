// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/manifest.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace manifest_test {

Manifest two_files() {
  Manifest manifest{.update = 7, .metadata = {{"a \"fact\"", "\n"}}};
  manifest.files = {{"p.0-of-2", {"p-7.0-of-2.00.safetensors", "00", 8}},
                    {"p.1-of-2", {"p-7.1-of-2.11.safetensors", "11", 9}}};
  manifest.parts["p"]["w"] = {
      DType::kBF16,
      {3, 4},
      {{"p.0-of-2", {{0, 2}, {4, 6}, {8, 12}}}, {"p.1-of-2", {{2, 4}, {6, 8}}}}};
  manifest.parts["p"]["none"] = {DType::kI64, {0, 4}, {{"p.0-of-2", {}}}};
  return manifest;
}

TEST(ManifestTest, ReadsWhatItWrote) {
  const Manifest manifest = two_files();
  const Manifest read = Manifest::parse(manifest.to_json(), "here");
  EXPECT_EQ(read.to_json(), manifest.to_json());
  EXPECT_EQ(read.update, 7);
  EXPECT_EQ(read.metadata, manifest.metadata);
  EXPECT_EQ(read.parts.at("p").at("w").ranges, manifest.parts.at("p").at("w").ranges);
  read.check_coverage("here");
}

TEST(ManifestTest, EveryElementMustBeThereOnce) {
  const auto text = [](const std::vector<ElementRange>& second) {
    Manifest manifest = two_files();
    manifest.parts["p"]["w"].ranges["p.1-of-2"] = second;
    return test::message_of<ConfigError>([&] { manifest.check_coverage("here"); });
  };
  EXPECT_EQ(text({{2, 4}}), "here: elements 6 to 8 of w of p are in no file");
  EXPECT_EQ(text({}), "here: elements 2 to 4 of w of p are in no file");
  EXPECT_EQ(text({{2, 4}, {6, 9}}), "here: elements 8 to 9 of w of p are in two files");
  EXPECT_EQ(text({{0, 12}}), "here: elements 0 to 2 of w of p are in two files");
  Manifest manifest = two_files();
  manifest.parts["p"]["w"].ranges["p.0-of-2"].back().end = 11;
  EXPECT_EQ(test::message_of<ConfigError>([&] { manifest.check_coverage("here"); }),
            "here: elements 11 to 12 of w of p are in no file");
}

TEST(ManifestTest, SharesThatDisagreeAreNotPutTogether) {
  Manifest manifest = two_files();
  Manifest other = two_files();
  other.parts["p"]["w"].shape = {4, 3};
  EXPECT_EQ(test::message_of<ConfigError>([&] { manifest.add(other, "here"); }),
            "here: ranks do not agree on w of p: BF16 [3, 4] and BF16 [4, 3]");
}

// Each with one thing wrong, and a word of the complaint.
TEST(ManifestTest, BadContentIsNamed) {
  const std::string good = two_files().to_json();
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "expected a manifest"},
      {good.substr(0, good.size() / 2), "expected a manifest"},
      {"[]", "expected a manifest"},
      {replaced("\"version\": 2", "\"version\": 3"), "reads up to 2"},
      {replaced("\"version\": 2", "\"version\": -1"), "version"},
      {replaced("\"update\": 7", "\"update\": \"7\""), "update"},
      {replaced("\"p-7.0-of-2.00.safetensors\"", "\"../p\""), "without a folder"},
      {replaced("\"p-7.0-of-2.00.safetensors\"", "7"), "file p.0-of-2"},
      {replaced("\"bytes\":8", "\"bytes\":-8"), "number of bytes"},
      {replaced("\"dtype\":\"BF16\"", "\"dtype\":\"BF17\""), "BF17"},
      {replaced("\"shape\":[3,4]", "\"shape\":[-3,4]"), "sizes"},
      {replaced("\"shape\":[3,4]", "\"shape\":[3037000500,3037000500]"), "2^63"},
      {replaced("\"p.1-of-2\":[2,4,6,8]", "\"p.9-of-2\":[2,4,6,8]"), "p.9-of-2"},
      {replaced("[2,4,6,8]", "[2,4,6]"), "ascending"},
      {replaced("[2,4,6,8]", "[2,4,3,8]"), "ascending"},
      {replaced("[2,4,6,8]", "[4,4]"), "ascending"},
      {replaced("[2,4,6,8]", "[2,13]"), "within 12 elements"},
      {replaced("[2,4,6,8]", "[2.5,4]"), "ranges"},
  };
  for (const auto& [text, word] : bad) {
    const auto complaint =
        test::message_of<ConfigError>([&text = text] { Manifest::parse(text, "here"); });
    EXPECT_TRUE(complaint.starts_with("here: ")) << complaint;
    EXPECT_NE(complaint.find(word), std::string::npos) << word << " in: " << complaint;
  }
}

TEST(ManifestTest, NoFlippedBitIsOverlooked) {
  const std::string good = two_files().to_json();
  for (size_t i = 0; i < good.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      try {
        Manifest::parse(bad, "here");
        // The last line's own end: white space for white space.
        EXPECT_GE(i, good.size() - 3) << "bit " << bit << " of byte " << i;
      } catch (const ConfigError&) {
      }
    }
  }
}

TEST(ManifestTest, ChangedMetadataIsNotBelieved) {
  std::string text = two_files().to_json();
  text.replace(text.find("\\n"), 2, "no");
  EXPECT_EQ(test::message_of<ConfigError>([&] { Manifest::parse(text, "here"); }),
            "here: its SHA-256 is not the one in its last line: it was changed");
}

// What was written for a while: the same without the last line.
TEST(ManifestTest, OneWithoutItsOwnSumIsRead) {
  std::string text = two_files().to_json();
  text = text.substr(0, text.rfind(",\n  \"sha256\"")) + "\n}\n";
  EXPECT_EQ(Manifest::parse(text, "here").to_json(), two_files().to_json());
}

TEST(ManifestTest, MetadataThatIsNoTextIsRefused) {
  Manifest manifest = two_files();
  manifest.metadata["path"] = "a\xFF";
  EXPECT_NE(test::message_of<ConfigError>([&] { manifest.to_json(); }).find("UTF-8"),
            std::string::npos);
}

TEST(ManifestTest, AFolderWithoutOneSaysSo) {
  const TemporaryFolder folder;
  EXPECT_EQ(test::message_of<ConfigError>([&] { Manifest::read(folder.path().string()); }),
            folder / "manifest.json: no checkpoint here");
}

}  // namespace manifest_test
}  // namespace cohort
