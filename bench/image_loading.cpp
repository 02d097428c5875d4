// SPDX-License-Identifier: Apache-2.0
// How fast pictures are decoded and augmented, and how long a ResNet-18 step waits for them.
//
//   build/release/bin/image_loading --workers 2 --steps 10
//
// Draws its own JPEGs of 500 x 375, ImageNet's mean size. Prints one JSON line: pictures per second
// of the loader alone, of training steps that find their pictures ready made, and of training steps
// that share the cores with the loader, with the share of the latter's time spent waiting.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/image/image_loader.h"

#include "examples/imagenet/resnet.h"
#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"

namespace {

using Clock = std::chrono::steady_clock;
using cohort::image::ImageBatch;
using cohort::image::ImageLoader;

constexpr int64_t kPictures = 96;

struct Options {
  int64_t steps = 10;
  int64_t warmup = 2;
  int64_t batch = 32;
  int workers = 2;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<std::vector<int64_t>> batches(int64_t count, int64_t size) {
  std::vector<std::vector<int64_t>> all(static_cast<size_t>(count));
  int64_t next = 0;
  for (auto& batch : all) {
    for (int64_t i = 0; i < size; ++i) batch.push_back(next++ % kPictures);
  }
  return all;
}

class Trainer {
 public:
  void step(const ImageBatch& batch) {
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(model_->forward(batch.images_BCHW), batch.labels_B);
    sgd_.zero_grad();
    loss.backward();
    sgd_.step();
  }

 private:
  imagenet::ResNet model_{imagenet::ResNetOptions{.arch = "resnet18"}};
  torch::optim::SGD sgd_{model_->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
};

int run(const Options& options) {
  const cohort::TemporaryFolder folder;
  cohort::test::draw_image_folders(folder.path().string(), 2, 1, 8, 8);
  std::filesystem::remove_all(folder / "train");
  std::filesystem::create_directories(folder / "train/all");
  for (int64_t i = 0; i < kPictures; ++i) {
    cohort::test::write_jpeg(folder / ("train/all/" + std::to_string(i) + ".jpg"),
                             cohort::test::draw_shape(375, 500, i % 3, static_cast<uint64_t>(i)));
  }
  const cohort::image::ImageFolder pictures(folder / "train");
  const auto all = batches(options.warmup + options.steps, options.batch);
  const cohort::image::ImageLoaderOptions loading{.num_threads = options.workers};
  const auto images = static_cast<double>(options.steps * options.batch);

  auto start = Clock::now();
  ImageBatch ready;
  {
    ImageLoader loader(pictures, all, loading);
    while (auto batch = loader.next()) ready = std::move(*batch);
  }
  const double loaded_per_s =
      static_cast<double>((options.warmup + options.steps) * options.batch) / seconds_since(start);

  Trainer trainer;
  for (int64_t i = 0; i < options.warmup; ++i) trainer.step(ready);
  start = Clock::now();
  for (int64_t i = 0; i < options.steps; ++i) trainer.step(ready);
  const double ready_per_s = images / seconds_since(start);

  ImageLoader loader(pictures, all, loading);
  for (int64_t i = 0; i < options.warmup; ++i) trainer.step(*loader.next());
  start = Clock::now();
  const auto waited_before = loader.waited();
  while (const auto batch = loader.next()) trainer.step(*batch);
  const double time = seconds_since(start);
  const double waited = std::chrono::duration<double>(loader.waited() - waited_before).count();
  std::printf("%s\n", nlohmann::json({{"workers", options.workers},
                                      {"batch", options.batch},
                                      {"steps", options.steps},
                                      {"loader_images_per_s", loaded_per_s},
                                      {"resnet18_images_per_s_data_ready", ready_per_s},
                                      {"resnet18_images_per_s", images / time},
                                      {"wait_share", waited / time}})
                          .dump()
                          .c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Loads drawn JPEGs for a ResNet-18");
  app.add_option("--steps", options.steps, "Steps to measure")->capture_default_str();
  app.add_option("--warmup", options.warmup, "Steps before")->capture_default_str();
  app.add_option("--batch", options.batch, "Pictures of a step")->capture_default_str();
  app.add_option("--workers", options.workers, "Decoding threads")->capture_default_str();
  return cohort::run_program("image_loading", [&] {
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
