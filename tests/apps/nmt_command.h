// SPDX-License-Identifier: Apache-2.0
// A toy corpus, the flags that train on it in a second, and the translator's commands as a user
// runs them.
#pragma once
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "tests/support/shell.h"

namespace cohort::test {

namespace fs = std::filesystem;

inline std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}
inline std::vector<std::string> lines_of(const std::string& text) {
  return parts_of(text, '\n');
}
/// Of a line of `cohort-nmt __flags`.
inline std::vector<std::string> fields_of(const std::string& line) {
  return parts_of(line, '\t');
}

/// Processes whose environment has this run's log folder.
inline std::vector<std::pair<pid_t, std::string>> workers_of(const std::string& log_dir) {
  std::vector<std::pair<pid_t, std::string>> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string environment = contents(entry.path() / "environ");
    if (environment.find("COHORT_LOG_DIR=" + log_dir) == std::string::npos) continue;
    const size_t at = environment.find(std::string("\0RANK=", 6));
    found.emplace_back(std::stoi(name),
                       at == std::string::npos ? "" : environment.substr(at + 6, 1));
  }
  return found;
}

class NmtCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("cohort-nmt-test-" + std::to_string(getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    // A made-up language: words are spelt backwards, so there is something to learn.
    const std::vector<std::string> words = {"red",   "green", "blue", "one", "two",
                                            "three", "cat",   "dog",  "sun", "moon"};
    for (const auto& [name, count] : {std::pair{"train", 300}, {"valid", 40}}) {
      std::ofstream en(folder_ / (name + std::string(".en")));
      std::ofstream xx(folder_ / (name + std::string(".xx")));
      for (int i = 0; i < count; ++i) {
        std::string source, target;
        for (int k = 0; k <= i % 5; ++k) {
          const std::string& word =
              words[static_cast<size_t>(i * 7 + k * (3 + i / 10)) % words.size()];
          source += (k ? " " : "") + word;
          target += (k ? " " : "") + std::string(word.rbegin(), word.rend());
        }
        en << source << "\n";
        xx << target << "\n";
      }
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string train_flags(const std::string& model_dir) const {
    return "train --train-sets " + path("train.en") + " " + path("train.xx") + " --valid-sets " +
           path("valid.en") + " " + path("valid.xx") + " --model-dir " + path(model_dir) +
           " --preset tiny --dim-emb 32 --transformer-dim-ffn 64 --enc-depth 1 --dec-depth 1 "
           "--dim-vocabs 60 60" +
           " --mini-batch 16 --lr-warmup 20 --learn-rate 5e-3 --tokenize 13a --quiet ";
  }
  // The same at a learning rate so low that no score moves.
  std::string standing_still(const std::string& model_dir) const {
    std::string flags = train_flags(model_dir);
    const std::string learns = "--lr-warmup 20 --learn-rate 5e-3";
    return flags.replace(flags.find(learns), learns.size(), "--lr-warmup 1 --learn-rate 1e-9");
  }
  std::string on_ranks(int count, const std::string& flags,
                       const std::string& run_flags = "") const {
    return bin("cohort") + " run --nproc-per-node " + std::to_string(count) + " " + run_flags +
           " -- " + bin("cohort-nmt") + " " + flags;
  }
  // The command must end with code 2 and one line that contains `text`.
  void expect_refused(const std::string& flags, const std::string& text,
                      const std::string& environment = "") const {
    const Ended ended = shell("env " + environment + " " + bin("cohort-nmt") + " " + flags);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
    EXPECT_EQ(std::count(ended.output.begin(), ended.output.end(), '\n'), 1) << ended.output;
  }

  fs::path folder_;
};

}  // namespace cohort::test
