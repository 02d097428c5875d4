// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/image_folder.h"

#include <filesystem>
#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort::image {
namespace image_folder_test {

void add(const TemporaryFolder& folder, const std::string& file) {
  std::filesystem::create_directories(std::filesystem::path(folder / file).parent_path());
  write_file(folder / file, "picture");
}

void expect_refused(const std::string& root, const std::string& text) {
  try {
    const ImageFolder images(root);
    FAIL() << "accepted, with " << images.size() << " pictures";
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find(text), std::string::npos) << one_line(error);
  }
}

TEST(ImageFolderTest, ClassesAndPicturesAreSorted) {
  const TemporaryFolder folder;
  for (const char* file : {"dog/b.PNG", "dog/a.jpeg", "cat/deep/er/z.jpg", "cat/y.JPG",
                           "Zebra/a-b/1.png", "Zebra/a/1.png", "dog/notes.txt", "readme.jpg"}) {
    add(folder, file);
  }
  const ImageFolder images(folder.path().string());
  EXPECT_EQ(images.classes(), (std::vector<std::string>{"Zebra", "cat", "dog"}));
  ASSERT_EQ(images.size(), 6);
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"Zebra/a/1.png", 0},     {"Zebra/a-b/1.png", 0}, {"cat/y.JPG", 1},
      {"cat/deep/er/z.jpg", 1}, {"dog/a.jpeg", 2},      {"dog/b.PNG", 2}};
  for (int64_t i = 0; i < 6; ++i) {
    const auto& [path, label] = expected[static_cast<size_t>(i)];
    EXPECT_EQ(images.at(i).path, folder / path);
    EXPECT_EQ(images.at(i).label, label);
  }
  EXPECT_EQ(ImageFolder(folder.path().string(), {".jpg", ".png"}).size(), 5);
}

TEST(ImageFolderTest, WhatIsMissingIsNamed) {
  const TemporaryFolder folder;
  expect_refused(folder / "absent", "absent: expected a folder of classes");
  expect_refused(folder.path().string(), "expected one folder for each class, found none");
  add(folder, "cat/a.jpg");
  add(folder, "dog/a.gif");
  expect_refused(folder.path().string(), "dog: class without images (.jpg, .jpeg, .png)");
}

}  // namespace image_folder_test
}  // namespace cohort::image
