// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/image_loader.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <pthread.h>
#include <stop_token>
#include <thread>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/image/unreadable_file.h"

namespace cohort::image {
namespace {

// A batch in the making. Every row is written by one thread.
struct Slot {
  ImageBatch batch;
  std::vector<int64_t> pictures;
  std::vector<std::exception_ptr> damage;  // One a row; null: none.
  size_t num_begun = 0;
  size_t num_done = 0;
};

}  // namespace

struct ImageLoader::Impl {
  Impl(const ImageFolder& f, std::vector<std::vector<int64_t>> b, const ImageLoaderOptions& o)
      : folder(f), options(o), batches(std::move(b)) {}

  void work(const std::stop_token& stop);
  void work_until_done(const std::stop_token& stop);
  std::shared_ptr<Slot> slot_with_work();
  std::shared_ptr<Slot> new_slot(std::vector<int64_t> pictures) const;
  void make(Slot& slot, size_t row) const;
  ImageBatch finish(Slot& slot);

  const ImageFolder& folder;
  const ImageLoaderOptions options;
  std::mutex mutex;
  std::condition_variable_any changed;
  // The four below are guarded by `mutex`, as are the counts of slots.
  std::vector<std::vector<int64_t>> batches;
  size_t num_opened = 0;  // Of `batches`, moved into slots.
  std::deque<std::shared_ptr<Slot>> slots;
  std::exception_ptr failure;  // Of a thread, not of an image: no memory for a batch.
  int64_t num_skipped = 0;     // This and the next belong to the caller's thread.
  std::chrono::nanoseconds waited{0};
  std::vector<std::jthread> threads;  // Last: they use all of the above.
};

std::shared_ptr<Slot> ImageLoader::Impl::new_slot(std::vector<int64_t> pictures) const {
  auto slot = std::make_shared<Slot>();
  const auto size = static_cast<int64_t>(pictures.size());
  const int64_t side = options.transforms.size;
  const auto memory = at::TensorOptions().pinned_memory(options.pin_memory);
  slot->batch.images_BCHW = torch::empty({size, 3, side, side}, memory.dtype(at::kFloat));
  slot->batch.labels_B = torch::empty({size}, memory.dtype(at::kLong));
  slot->damage.resize(pictures.size());
  slot->pictures = std::move(pictures);
  return slot;
}

// The first batch with a row that no thread has begun, if memory allows one. The lock is held.
std::shared_ptr<Slot> ImageLoader::Impl::slot_with_work() {
  for (const auto& slot : slots) {
    if (slot->num_begun < slot->pictures.size()) return slot;
  }
  while (num_opened < batches.size() && std::ssize(slots) < options.batches_ahead) {
    slots.push_back(new_slot(std::move(batches[num_opened++])));
    if (!slots.back()->pictures.empty()) return slots.back();
    changed.notify_all();  // An empty batch is complete.
  }
  return nullptr;
}

void ImageLoader::Impl::make(Slot& slot, size_t row) const {
  const auto place = static_cast<int64_t>(row);
  const int64_t numbers = 3 * options.transforms.size * options.transforms.size;
  const LabelledPath& picture = folder.at(slot.pictures[row]);
  slot.batch.labels_B.mutable_data_ptr<int64_t>()[place] = picture.label;
  const std::span<float> out(slot.batch.images_BCHW.mutable_data_ptr<float>() + place * numbers,
                             static_cast<size_t>(numbers));
  const EncodedImage encoded = EncodedImage::read(picture.path);
  if (options.transform == Transform::kEvaluation) {
    transform_for_evaluation(encoded, options.transforms, out);
    return;
  }
  const data::SplitMix64 epoch_random(options.seed, static_cast<uint64_t>(options.epoch));
  data::SplitMix64 random(data::SplitMix64(epoch_random).next(),
                          static_cast<uint64_t>(slot.pictures[row]));
  transform_for_training(encoded, options.transforms, random, out);
}

void ImageLoader::Impl::work(const std::stop_token& stop) {
  try {
    work_until_done(stop);
  } catch (...) {
    const std::scoped_lock lock(mutex);
    failure = std::current_exception();
  }
  changed.notify_all();
}

void ImageLoader::Impl::work_until_done(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    const std::shared_ptr<Slot> slot = slot_with_work();
    if (slot == nullptr) {
      if (num_opened == batches.size()) return;
      changed.wait(lock, stop, [this] {
        return num_opened == batches.size() || std::ssize(slots) < options.batches_ahead;
      });
      continue;
    }
    const size_t row = slot->num_begun++;
    lock.unlock();
    std::exception_ptr damage;
    try {
      make(*slot, row);
    } catch (...) {
      damage = std::current_exception();
    }
    lock.lock();
    slot->damage[row] = std::move(damage);
    if (++slot->num_done == slot->pictures.size()) changed.notify_all();
  }
}

ImageBatch ImageLoader::Impl::finish(Slot& slot) {
  std::vector<int64_t> good;
  for (size_t row = 0; row < slot.damage.size(); ++row) {
    if (!slot.damage[row]) {
      good.push_back(static_cast<int64_t>(row));
      continue;
    }
    if (options.on_damage == OnDamage::kThrow) std::rethrow_exception(slot.damage[row]);
    try {
      std::rethrow_exception(slot.damage[row]);
    } catch (const UnreadableFile&) {
      throw;  // The disk's fault, or that of too many open files.
    } catch (const ConfigError&) {
      ++num_skipped;  // Only corrupt files are skipped; running out of memory is not.
    }
  }
  if (good.size() == slot.damage.size()) return std::move(slot.batch);
  const at::Tensor rows = torch::tensor(good, at::kLong);
  const auto kept = [&](const at::Tensor& all) {
    const at::Tensor some = all.index_select(0, rows);
    return options.pin_memory ? some.pin_memory() : some;
  };
  return {.images_BCHW = kept(slot.batch.images_BCHW), .labels_B = kept(slot.batch.labels_B)};
}

ImageLoader::ImageLoader(const ImageFolder& folder, std::vector<std::vector<int64_t>> batches,
                         const ImageLoaderOptions& options)
    : impl_(std::make_unique<Impl>(folder, std::move(batches), options)) {
  TORCH_CHECK_VALUE(options.num_threads > 0 && options.batches_ahead > 0 &&
                        options.transforms.size > 0 &&
                        options.transforms.resize >= options.transforms.size,
                    "ImageLoader: expected num_threads, batches_ahead and size above 0 and resize "
                    "not below size, got ",
                    options.num_threads, ", ", options.batches_ahead, ", ", options.transforms.size,
                    " and ", options.transforms.resize);
  for (int i = 0; i < options.num_threads; ++i) {
    auto& thread = impl_->threads.emplace_back([this](std::stop_token stop) { impl_->work(stop); });
    pthread_setname_np(thread.native_handle(), ("decode-" + std::to_string(i)).c_str());
  }
}

ImageLoader::~ImageLoader() = default;

std::optional<ImageBatch> ImageLoader::next() {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(impl_->mutex);
  const auto complete = [&] {
    return !impl_->slots.empty() &&
           impl_->slots.front()->num_done == impl_->slots.front()->pictures.size();
  };
  impl_->changed.wait(lock, [&] {
    return impl_->failure || complete() ||
           (impl_->slots.empty() && impl_->num_opened == impl_->batches.size());
  });
  impl_->waited += std::chrono::steady_clock::now() - start;
  if (impl_->failure) std::rethrow_exception(impl_->failure);
  if (impl_->slots.empty()) return std::nullopt;
  const std::shared_ptr<Slot> slot = impl_->slots.front();
  impl_->slots.pop_front();
  lock.unlock();
  impl_->changed.notify_all();
  return impl_->finish(*slot);
}

int64_t ImageLoader::num_skipped() const {
  return impl_->num_skipped;
}

std::chrono::nanoseconds ImageLoader::waited() const {
  return impl_->waited;
}

}  // namespace cohort::image
