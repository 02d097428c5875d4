// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/session.h"

#include <algorithm>
#include <array>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <tuple>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/comm/host_copy.h"
#include "cohort/ps/client/local_channel.h"
#include "cohort/ps/module/prefetched_rows.h"
#include "cohort/ps/role.h"

namespace cohort::ps {

namespace {

constexpr std::pair<const char*, Training> kTrainings[] = {{"local", Training::kLocal},
                                                           {"sync", Training::kSync},
                                                           {"async", Training::kAsync},
                                                           {"half-async", Training::kHalfAsync},
                                                           {"geo", Training::kGeo}};

std::span<float> values_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

std::string name_of(Training training) {
  for (const auto& [word, one] : kTrainings) {
    if (one == training) return word;
  }
  return "?";
}

// Refuses what only another training reads.
void check_read(const SessionOptions& options) {
  const SessionOptions defaults;
  const auto refuse = [&](const std::string& member, const std::string& only) {
    throw ConfigError("session: " + member + ": only " + only + " reads it, got " +
                      name_of(options.training));
  };
  const Training training = options.training;
  if (options.max_merge != defaults.max_merge && training != Training::kHalfAsync)
    refuse("max_merge " + std::to_string(options.max_merge), "half-async");
  if (options.geo_steps != defaults.geo_steps && training != Training::kGeo)
    refuse("geo_steps " + std::to_string(options.geo_steps), "geo");
  if (options.reduce != defaults.reduce && training != Training::kSync &&
      training != Training::kLocal)
    refuse("reduce sum", "sync or local");
}

// A job without servers gets the partition of one: one block each, all here.
SessionOptions checked(SessionOptions options) {
  // The count of pushes is that of steps in async alone.
  if (options.max_staleness >= 0 && options.training != Training::kAsync)
    throw ConfigError("session: max_staleness " + std::to_string(options.max_staleness) +
                      ": expected -1, only async has a bound, got " + name_of(options.training));
  if (options.max_merge < 1)
    throw ConfigError("session: max_merge: expected 1 or more, got " +
                      std::to_string(options.max_merge));
  if (options.geo_steps < 1)
    throw ConfigError("session: geo_steps: expected 1 or more, got " +
                      std::to_string(options.geo_steps));
  check_read(options);
  if (options.training != Training::kLocal) {
    if (!options.load.empty())
      throw ConfigError("session: with servers, the servers load a checkpoint (" + options.load +
                        "), by `cohort ps server --load`");
    return options;
  }
  if (!options.servers.empty())
    throw ConfigError("session: local training has no servers, " +
                      std::to_string(options.servers.size()) + " were given");
  if (options.trainer != 0 || options.trainers != 1)
    throw ConfigError("session: local training is of one trainer, got trainer " +
                      std::to_string(options.trainer) + " of " + std::to_string(options.trainers));
  options.servers = {"unix:in-process"};  // Never called: the plan and errors want a name for it.
  return options;
}

}  // namespace

Training training_named(const std::string& name) {
  std::string names;
  for (const auto& [word, training] : kTrainings) {
    if (name == word) return training;
    names += (names.empty() ? "" : ", ") + std::string(word);
  }
  throw ConfigError("training: expected one of " + names + ", got '" + name + "'");
}

SessionOptions with_environment(SessionOptions options) {
  const auto info = role_from_environment();
  if (!info)
    throw ConfigError(
        "PADDLE_TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM and "
        "PADDLE_TRAINER_ID: expected the variables of a trainer with servers; `cohort run "
        "--servers N --trainers M -- PROGRAM` sets them");
  if (info->role != Role::kTrainer)
    throw ConfigError("PADDLE_TRAINING_ROLE: expected TRAINER, this is a server's environment");
  options.servers = info->servers;
  options.trainer = info->trainer_id;
  options.trainers = info->trainers;
  return options;
}

Session::Session(const SessionOptions& options)
    : options_(checked(options)),
      log_(LogOptions{.rank = options_.trainer,
                      .world_size = options_.trainers,
                      .level = LogLevel::kWarn,
                      .console = LogConsole::kAlways}) {}

Session::~Session() = default;

Embedding Session::embedding(const TableOptions& table, const EmbeddingOptions& options) {
  TORCH_CHECK_VALUE(!communicator_, "session: tables are added before start()");
  const auto number = static_cast<uint32_t>(tables_.size());
  auto rows = std::make_shared<PrefetchedRows>(
      table, [this, number](std::span<const uint64_t> ids, std::span<float> weights,
                            bool prediction) { fetch(number, ids, weights, prediction); });
  tables_.push_back(rows);
  return Embedding(std::move(rows), table.width, options);
}

void Session::add(const std::string& name, const torch::nn::Module& module) {
  TORCH_CHECK_VALUE(!communicator_, "session: modules are added before start()");
  for (const auto& parameter : module.named_parameters()) {
    const at::Tensor& value = parameter.value();
    if (!value.requires_grad()) continue;
    const std::string full = name + "." + parameter.key();
    TORCH_CHECK_VALUE(
        value.scalar_type() == at::kFloat && value.is_contiguous() && !value.is_meta(),
        "session: parameter '", full, "': expected contiguous float32, got ", value.toString(),
        " of strides ", value.strides());
    TORCH_CHECK_VALUE(learning_.empty() || value.device() == learning_.front().device(),
                      "session: parameter '", full, "' is on ", value.device(),
                      ": expected all on one device, as those before, on ",
                      learning_.empty() ? value.device() : learning_.front().device());
    names_.push_back(full);
    parameters_.push_back(value.is_cpu() ? value.detach() : value.detach().cpu().pin_memory());
    learning_.push_back(value);
  }
}

bool Session::is_on_host() const {
  return learning_.empty() || learning_.front().is_cpu();
}

void Session::start() {
  TORCH_CHECK_VALUE(!communicator_, "session: it was started before");
  make_plan();
  const JobOptions job = job_options();
  ClientOptions client = options_.client;
  client.servers = plan_.servers;
  client.trainer = static_cast<uint32_t>(options_.trainer);
  client.repeats_pushes = options_.training == Training::kAsync;
  if (!client.link.on_wait)
    client.link.on_wait = [this](const std::string& line) { log_.warn(line); };
  if (options_.host.rank > 0) {
    // Rank 0 has the client.
  } else if (options_.training == Training::kLocal) {
    local_ = std::make_shared<Server>(
        ServerOptions{
            .load = options_.load, .durability = Durability::kApplied, .snapshot_log_bytes = 0},
        log_);
    client_ = std::make_unique<Client>(
        client, job, [this](int) { return std::make_unique<LocalChannel>(local_); });
  } else {
    client_ = std::make_unique<Client>(client, job);
  }
  communicator_ = client_ ? make_communicator() : nullptr;
  if (options_.host.size > 1)
    communicator_ = make_host_communicator(job, options_.host, std::move(communicator_));
  find_steps_before();
  if (options_.trainer == 0 && client_ && client_->needs_initial_values()) {
    if (!is_on_host())  // They may have changed since add().
      for (size_t i = 0; i < learning_.size(); ++i) parameters_[i].copy_(learning_[i].detach());
    std::vector<std::span<const float>> values;
    for (const at::Tensor& parameter : parameters_) values.push_back(values_of(parameter));
    client_->initialise(values);
  }
  start_pull();
  pull();
}

void Session::start_pull() {
  TORCH_CHECK_VALUE(communicator_, "session: start() comes first");
  TORCH_CHECK_VALUE(!finish_pull_, "session: a pull is under way already");
  std::vector<PullRows> rows;
  for (uint32_t number = 0; number < tables_.size(); ++number) {
    if (const auto batch = tables_[number]->start_pull())
      rows.push_back({number, batch->distinct.ids(), batch->weights});
  }
  // The last pull's values may still be on their way to the device.
  if (copied_ && !copied_->query()) copied_->synchronize();
  std::vector<std::span<float>> values;
  for (const at::Tensor& parameter : parameters_) values.push_back(values_of(parameter));
  finish_pull_ = communicator_->pull(std::move(rows), std::move(values));
}

void Session::pull() {
  if (!finish_pull_) start_pull();
  std::exchange(finish_pull_, nullptr)();
  if (!is_on_host()) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < learning_.size(); ++i)
      learning_[i].copy_(parameters_[i], /*non_blocking=*/true);
    const auto* device = c10::impl::getDeviceGuardImpl(learning_.front().device().type());
    copied_.emplace(learning_.front().device().type());
    copied_->record(device->getStream(learning_.front().device()));
  }
  for (const auto& table : tables_) table->finish_pull();
}

void Session::push() {
  TORCH_CHECK_VALUE(communicator_, "session: start() comes first");
  std::vector<PushRows> rows;
  for (uint32_t number = 0; number < tables_.size(); ++number) {
    const auto gradients = tables_[number]->gradients();
    rows.push_back({.table = number, .ids = gradients.ids, .gradients = gradients.values});
  }
  std::vector<comm::HostCopy> gradients;
  for (const at::Tensor& parameter : learning_) {
    const at::Tensor& gradient = parameter.grad();
    gradients.emplace_back(gradient.defined() ? gradient.contiguous() : at::zeros_like(parameter));
  }
  std::vector<std::span<const float>> values;
  for (comm::HostCopy& gradient : gradients) values.push_back(values_of(gradient.wait()));
  communicator_->push(std::move(rows), std::move(values));
  ++steps_;
  for (at::Tensor& parameter : learning_) parameter.mutable_grad() = at::Tensor();
  for (auto& table : tables_) table->forget();
}

int64_t Session::step() const {
  if (options_.training != Training::kSync) return steps_before_ + steps_;
  return client_ ? static_cast<int64_t>(client_->step()) : first_step_ + steps_;
}

int64_t Session::steps_before() const {
  TORCH_CHECK_VALUE(communicator_, "session: start() comes first");
  return steps_before_;
}

void Session::find_steps_before() {
  const bool counts = options_.training == Training::kSync || options_.training == Training::kAsync;
  if (client_ && counts) steps_before_ = static_cast<int64_t>(client_->pushed_before());
  if (client_) first_step_ = static_cast<int64_t>(client_->step());
  if (options_.host.size == 1) return;
  // Rank 0 of the host has the client.
  std::array steps{steps_before_, first_step_};
  std::vector<std::byte> bytes(sizeof steps);
  std::memcpy(bytes.data(), steps.data(), bytes.size());
  options_.host.broadcast(bytes);
  TORCH_CHECK_VALUE(bytes.size() == sizeof steps, "session: expected ", sizeof steps,
                    " bytes from rank 0 of the host, got ", bytes.size());
  std::memcpy(steps.data(), bytes.data(), bytes.size());
  std::tie(steps_before_, first_step_) = std::tuple(steps[0], steps[1]);
}

void Session::flush() {
  TORCH_CHECK_VALUE(communicator_, "session: start() comes first");
  communicator_->flush();
}

void Session::finish() {
  if (!communicator_) return;
  flush();
  if (client_) client_->leave();
}

void Session::save(const std::string& folder) {
  flush();
  if (client_) client_->save(folder);
}

Client& Session::client() {
  TORCH_CHECK_VALUE(client_,
                    "session: before start(), and on other ranks of a host than 0, there is "
                    "no client");
  return *client_;
}

void Session::make_plan() {
  std::vector<ParameterShape> shapes;
  for (size_t i = 0; i < names_.size(); ++i)
    shapes.push_back({names_[i], parameters_[i].sizes().vec()});
  std::string servers;
  for (const std::string& server : options_.servers)
    servers += (servers.empty() ? "" : ",") + server;
  plan_ = ps::plan(std::move(shapes), {.trainer_id = options_.trainer,
                                       .trainers = options_.trainers,
                                       .pservers = servers,
                                       .sync_mode = options_.training == Training::kSync,
                                       .slice_var_up = options_.slice_var_up,
                                       .split_method = options_.split_method,
                                       .min_block_size = options_.min_block_size});
}

JobOptions Session::job_options() const {
  const bool waits = options_.training == Training::kSync;
  JobOptions job{.mode = waits ? Mode::kSync : Mode::kAsync,
                 .reduce = options_.reduce,
                 .trainers = options_.trainers,
                 .max_trainers = std::max(JobOptions().max_trainers, options_.trainers),
                 .servers = static_cast<int>(plan_.servers.size()),
                 .max_staleness = options_.max_staleness,
                 .batch_size = options_.batch_size,
                 .error_if_nonfinite = options_.error_if_nonfinite,
                 .dense_rule = options_.dense_rule,
                 .dense_wire_dtype = options_.dense_wire_dtype};
  for (const Block& block : plan_.blocks) {
    job.blocks.push_back({plan_.parameters[static_cast<size_t>(block.parameter)].name, block.begin,
                          block.end, block.server});
  }
  for (const auto& table : tables_) job.tables.push_back(table->table());
  if (options_.training == Training::kGeo) {
    job.dense_rule = {.rule = Rule::kAdd};
    for (TableOptions& table : job.tables) table.rule = {.rule = Rule::kAdd};
  }
  return job;
}

std::unique_ptr<Communicator> Session::make_communicator() {
  if (options_.training == Training::kHalfAsync)
    return make_half_async_communicator(*client_, options_.max_merge);
  if (options_.training != Training::kGeo) return make_direct_communicator(*client_);
  GeoOptions geo{.dense_rule = options_.dense_rule,
                 .steps = options_.geo_steps,
                 .trainers = options_.trainers};
  for (const auto& table : tables_) geo.table_rules.push_back(table->table().rule);
  return make_geo_communicator(*client_, geo);
}

// Rows that were not prefetched.
void Session::fetch(uint32_t number, std::span<const uint64_t> ids, std::span<float> weights,
                    bool prediction) {
  TORCH_CHECK_VALUE(communicator_, "session: start() comes before forward");
  communicator_->pull({{number, ids, weights}}, {}, prediction)();
}

}  // namespace cohort::ps
