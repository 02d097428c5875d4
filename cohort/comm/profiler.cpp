// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/profiler.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <system_error>
#include <torch/csrc/autograd/profiler.h>
#include <unistd.h>
#include <vector>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"

// Exported by libtorch; its header needs Kineto's.
namespace torch::autograd::profiler {
TORCH_API void addMetadataJson(const std::string& key, const std::string& value);
}

namespace cohort {
namespace {

using Json = nlohmann::json;
namespace autograd_profiler = torch::autograd::profiler;

// Thread numbers of the communication tracks: above those of Linux, which end at 2^22, and within 32
// bits, without which Perfetto leaves a track out.
constexpr int64_t kFirstTrack = int64_t{1} << 30;

std::string file_of_rank(const std::string& file, int rank) {
  if (rank == 0) return file;
  const std::filesystem::path path(file);
  const std::string name = path.stem().string() + ".rank-" + std::to_string(rank);
  return (path.parent_path() / (name + path.extension().string())).string();
}

// Element sizes by the type names that Kineto writes.
int64_t size_of_type(const std::string& name) {
  static const std::map<std::string, int64_t> kSizes = {
      {"bool", 1},  {"unsigned char", 1}, {"signed char", 1},         {"short", 2},
      {"int", 4},   {"long int", 8},      {"c10::Half", 2},           {"c10::BFloat16", 2},
      {"float", 4}, {"double", 8},        {"c10::complex<float>", 8}, {"c10::complex<double>", 16}};
  const auto found = kSizes.find(name);
  return found == kSizes.end() ? 0 : found->second;
}

int64_t bytes_of(const Json& arguments) {
  const auto types = arguments.find("Input type"), shapes = arguments.find("Input Dims");
  if (types == arguments.end() || shapes == arguments.end()) return 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < std::min(types->size(), shapes->size()); ++i) {
    const Json& shape = (*shapes)[i];
    if (!(*types)[i].is_string() || !shape.is_array()) continue;
    int64_t size = size_of_type((*types)[i]);
    for (const Json& length : shape) size *= length.is_number() ? length.get<int64_t>() : 0;
    bytes += size;
  }
  return bytes;
}

// c10d records each operation of a backend as "gloo:all_reduce", from its beginning to its end, on
// the thread that finished it. Several overlap, and ranges of one track may not: each goes to the
// first track that is free.
void move_communication_to_own_tracks(Json& trace) {
  static const std::regex kOperation("[a-z][a-z0-9_]*:[a-z_]+");
  std::vector<Json*> operations;
  for (Json& event : trace.at("traceEvents")) {
    if (event.value("ph", "") == "X" && event.value("cat", "") == "user_annotation" &&
        std::regex_match(event.value("name", ""), kOperation))
      operations.push_back(&event);
  }
  std::sort(operations.begin(), operations.end(), [](const Json* a, const Json* b) {
    return a->at("ts").get<double>() < b->at("ts").get<double>();
  });
  std::vector<double> busy_until;
  for (Json* operation : operations) {
    const double begin = operation->at("ts");
    const auto free = std::find_if(busy_until.begin(), busy_until.end(),
                                   [&](double until) { return until <= begin; });
    const auto track = free - busy_until.begin();
    if (free == busy_until.end()) busy_until.push_back(0);
    busy_until[static_cast<size_t>(track)] = begin + operation->at("dur").get<double>();
    (*operation)["tid"] = kFirstTrack + track;
    (*operation)["cat"] = "communication";
    (*operation)["args"]["bytes"] = bytes_of((*operation)["args"]);
  }
  if (operations.empty()) return;
  const Json pid = operations.front()->at("pid");
  const auto describe = [&](const char* what, int64_t track, const Json& arguments) {
    trace["traceEvents"].push_back({{"ph", "M"},
                                    {"name", what},
                                    {"pid", pid},
                                    {"tid", kFirstTrack + track},
                                    {"ts", 0},
                                    {"args", arguments}});
  };
  for (int64_t track = 0; track < std::ssize(busy_until); ++track) {
    const std::string number = track == 0 ? "" : " " + std::to_string(track + 1);
    describe("thread_name", track, {{"name", "communication" + number}});
    describe("thread_sort_index", track, {{"sort_index", -10 + track}});
  }
}

// libtorch records no end of some operators, of set_data's check for one. Kineto gives these a time
// far in the future, for which a viewer makes room.
void drop_unfinished(Json& trace) {
  static const Json::json_pointer kFinished("/args/finished");
  std::erase_if(trace.at("traceEvents").get_ref<Json::array_t&>(),
                [](const Json& event) { return !event.value(kFinished, true); });
}

void name_process(Json& trace, int rank) {
  for (Json& event : trace.at("traceEvents")) {
    if (event.value("name", "") == "process_name")
      event["args"]["name"] = "rank " + std::to_string(rank);
  }
}

}  // namespace

Profiler::Profiler(ProfilerOptions options, int rank, int world_size)
    : options_(std::move(options)), rank_(rank), world_size_(world_size) {
  TORCH_CHECK_VALUE(options_.skip_steps >= 0 && options_.num_steps > 0,
                    "Profiler: expected skip_steps >= 0 and num_steps > 0, got ",
                    options_.skip_steps, " and ", options_.num_steps);
  if (options_.file.empty()) {
    state_ = State::kWritten;
    return;
  }
  const auto folder = std::filesystem::absolute(options_.file).parent_path();
  if (::access(folder.c_str(), W_OK) != 0) {
    throw ConfigError("profile " + options_.file + ": expected a folder that can be written, but " +
                      folder.string() + ": " + std::generic_category().message(errno));
  }
}

Profiler::~Profiler() {
  scope_.reset();
  if (state_ == State::kRecording) autograd_profiler::disableProfiler();
}

void Profiler::start() {
  TORCH_CHECK_VALUE(!torch::profiler::impl::profilerEnabled(),
                    "Profiler: expected no other profiler that records in this process");
  // Kineto reports a missing GPU as an error.
  ::setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO,
                                                     /*report_input_shapes=*/true);
  std::set<torch::profiler::impl::ActivityType> activities{
      torch::profiler::impl::ActivityType::CPU};
  if (at::detail::getCUDAHooks().hasCUDA())
    activities.insert(torch::profiler::impl::ActivityType::CUDA);
  autograd_profiler::prepareProfiler(config, activities);
  autograd_profiler::enableProfiler(config, activities);
  state_ = State::kRecording;
}

void Profiler::step() {
  if (state_ == State::kWritten) return;
  scope_.reset();
  const int64_t step = next_step_++;
  if (step == options_.skip_steps + options_.num_steps) return write();
  if (step == options_.skip_steps) start();
  if (state_ != State::kRecording) return;
  label_ = "ProfilerStep#" + std::to_string(step);
  scope_ = std::make_unique<ProfileScope>(label_);
}

void Profiler::finish() {
  if (state_ == State::kWritten) return;
  scope_.reset();
  if (state_ == State::kRecording) return write();
  state_ = State::kWritten;
  throw ConfigError("profile " + options_.file + ": the loop ended after " +
                    std::to_string(next_step_) + " steps, and the first " +
                    std::to_string(options_.skip_steps) +
                    " are skipped: nothing was recorded. Skip fewer, or train for longer");
}

void Profiler::write() {
  state_ = State::kWritten;
  const Json job = {{"rank", rank_}, {"world_size", world_size_}};
  autograd_profiler::addMetadataJson("distributedInfo", job.dump());
  const auto result = autograd_profiler::disableProfiler();
  const std::string file = file_of_rank(options_.file, rank_);
  const std::string raw = file + ".unfinished";
  result->save(raw);
  std::ifstream stream(raw);
  Json trace = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove(raw);
  TORCH_CHECK(trace.is_object(), "profile ", file,
              ": libtorch wrote no trace: the disk may be full");
  drop_unfinished(trace);
  move_communication_to_own_tracks(trace);
  name_process(trace, rank_);
  write_atomically(file, trace.dump());
}

}  // namespace cohort
