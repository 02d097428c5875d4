// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/process_group.h"

#include <ATen/ops/tensor.h>
#include <algorithm>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/backends/hierarchical/host_groups.h"
#include "cohort/comm/backends/shm/shm_backend.h"
#include "cohort/comm/operations.h"
#include "cohort/comm/process_group_impl.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

// c10d keeps one backend of each type. The names that it does not know have one type in common,
// which is then free for a plug-in.
c10d::ProcessGroup::BackendType backend_type(const std::string& backend) {
  if (backend == "shm" || backend == "hierarchical") return c10d::ProcessGroup::BackendType::UCC;
  return c10d::ProcessGroup::strToBackendType(backend);
}

milliseconds left_of(milliseconds limit, int64_t start_ns) {
  return std::max(limit - milliseconds((steady_now_ns() - start_ns) / 1'000'000), milliseconds(1));
}

milliseconds since(int64_t start_ns) {
  return milliseconds((steady_now_ns() - start_ns) / 1'000'000);
}

// Whatever keeps a backend from connecting, but bad settings, is the network's or a peer's fault.
c10::intrusive_ptr<c10d::Backend> make_backend(const BackendPlugin& plugin,
                                               const BackendRequest& request) {
  try {
    return plugin.make(request);
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::DistError&) {
    throw;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(DistError, one_line(error));
  }
}

void check_device(const ProcessGroupOptions& options) {
  if (!options.device) return;
  const bool chosen = options.backend == "auto" && options.device->is_cuda();
  const c10::DeviceType served = chosen                      ? options.device->type()
                                 : options.backend == "auto" ? c10::DeviceType::CPU
                                                             : find_backend(options.backend).device;
  if (options.device->type() == served) return;
  throw ConfigError("backend " + options.backend + ": expected one of tensors on " +
                    options.device->str() + ", got one of " +
                    c10::DeviceTypeName(served, /*lower_case=*/true) + " tensors");
}

}  // namespace

std::string call_text(const std::string& operation, const at::Tensor& tensor) {
  if (!tensor.defined()) return operation;
  std::string text = operation + " of " + type_name(tensor.scalar_type());
  if (tensor.is_sparse()) return text;
  text += '[';
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
  }
  return text + ']';
}

ProcessGroup::Impl::Impl(std::shared_ptr<Job> j, std::string group_id, std::string group_name,
                         std::vector<int> global_ranks, int own_rank,
                         const SubgroupOptions& own_options)
    : job(std::move(j)),
      id(std::move(group_id)),
      name(std::move(group_name)),
      ranks(std::move(global_ranks)),
      rank(own_rank),
      asked_backend(own_options.backend.value_or(job->options.backend)),
      timeout(own_options.timeout.value_or(job->options.timeout)),
      matcher(ranks.size() > 1 ? job->options.check_collectives : CheckCollectives::kOff) {}

ProcessGroup::Impl::~Impl() {
  if (getpid() == process) return;
  using Kept = std::pair<std::shared_ptr<Job>, c10::intrusive_ptr<c10d::ProcessGroup>>;
  static auto* const kept = new std::vector<Kept>;
  kept->emplace_back(std::move(job), std::move(c10d_group));
}

c10::intrusive_ptr<c10d::ProcessGroup> ProcessGroup::Impl::make_group(const BackendPlugin& plugin) {
  if (plugin.device == c10::DeviceType::CPU || size() == 1)
    return c10::make_intrusive<c10d::ProcessGroup>(store, rank, size());
  const auto calls = std::make_shared<DeviceCalls>(DeviceGroupInfo{.id = id,
                                                                   .name = name,
                                                                   .ranks = ranks,
                                                                   .timeout = timeout,
                                                                   .device = plugin.device,
                                                                   .progress = plugin.progress});
  job->add(calls);
  auto group = c10::make_intrusive<DeviceGroup>(store, rank, job->log, calls);
  device_group = group.get();
  return group;
}

void ProcessGroup::Impl::connect(c10::intrusive_ptr<c10d::Store> group_store, milliseconds limit) {
  store = std::move(group_store);
  backend_name = asked_backend;
  if (asked_backend == "auto") {
    const auto& device = job->options.device;
    backend_name = device && device->is_cuda() ? "nccl" : cpu_backend();
  }
  users_store = c10::make_intrusive<c10d::PrefixStore>("user", store);
  const BackendPlugin& plugin = find_backend(backend_name);
  c10d_group = make_group(plugin);
  const auto add = [&](const std::string& type, c10::DeviceType device, const BackendPlugin& from) {
    BackendRequest request{
        .store = c10::make_intrusive<c10d::PrefixStore>(c10::DeviceTypeName(device, true), store),
        .rank = rank,
        .world_size = size(),
        .timeout = limit,
        .address = job->rendezvous.address,
        .interface = job->rendezvous.interface,
        .memory = memory(),
        .has_core_each = has_core_each(job->rendezvous.cores, ranks)};
    auto made = make_backend(from, request);
    made->setTimeout(timeout);
    c10d_group->setBackend(device, backend_type(type), made);
  };
  c10d_group->setDefaultBackend(backend_type(backend_name));
  add(backend_name, plugin.device, plugin);
  // Lengths, comparisons and barriers stay on the CPU.
  if (plugin.device != c10::DeviceType::CPU)
    add(cpu_backend(), c10::DeviceType::CPU, find_backend(cpu_backend()));
  numbered = dynamic_cast<NumberedBackend*>(c10d_group->getBackend(c10::DeviceType::CPU).get());
  c10d_group->setGroupName(is_world() ? "cohort" : "cohort/" + name);
  job->add(c10d_group);
}

ProcessGroup::ProcessGroup(const RankInfo& info, const ProcessGroupOptions& options) {
  check_device(options);
  check_limit(options.timeout, "process group");
  check_limit(options.rendezvous_timeout, "rendezvous");
  if (options.backend != "auto") find_backend(options.backend);
  std::vector<int> ranks(static_cast<size_t>(info.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto job = std::make_shared<Job>(info, options);
  impl_ = std::make_shared<Impl>(job, "", "world", std::move(ranks), info.rank, SubgroupOptions{});
  const int64_t start = steady_now_ns();
  const Call call{.operation = "rendezvous at " + rendezvous_point(info),
                  .site = {},
                  .compared = Compared::kNever};
  impl_->guarded(call, [&] {
    job->join();
    impl_->connect(job->rendezvous.store, left_of(options.rendezvous_timeout, start));
  });
  job->start_watch();
  impl_->follow_next();
}

ProcessGroup::ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  return ProcessGroup(rank_info_from_environment(), options);
}

ProcessGroup::Impl& ProcessGroup::impl() const {
  TORCH_CHECK_VALUE(impl_, "expected a process group, got an empty handle");
  return *impl_;
}

int ProcessGroup::rank() const {
  return impl().rank;
}
int ProcessGroup::size() const {
  return impl().size();
}
int ProcessGroup::global_rank(int rank) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size(), "global_rank: expected a rank in [0, ", size(),
                    "), got ", rank);
  return impl().ranks[static_cast<size_t>(rank)];
}
std::vector<std::string> ProcessGroup::hosts() const {
  return impl().hosts();
}
const std::string& ProcessGroup::name() const {
  return impl().name;
}
const std::string& ProcessGroup::backend() const {
  return impl().backend_name;
}
const RankInfo& ProcessGroup::rank_info() const {
  return impl().job->info;
}
at::Device ProcessGroup::device() const {
  const c10::DeviceType type = find_backend(impl().backend_name).device;
  if (type == c10::DeviceType::CPU) return type;
  const auto& chosen = impl().job->options.device;
  if (chosen && chosen->type() == type) return *chosen;
  const bool has_driver = c10::impl::hasDeviceGuardImpl(type);
  const int count = has_driver ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
  return {type, static_cast<c10::DeviceIndex>(device_index(rank_info(), count))};
}
c10d::ProcessGroup& ProcessGroup::c10d_group() const {
  impl().check_open();
  return *impl_->c10d_group;
}
c10d::Store& ProcessGroup::store() const {
  impl().check_open();
  return *impl_->users_store;
}

ProcessGroup ProcessGroup::subgroup(const std::vector<int>& ranks, const std::string& name,
                                    const SubgroupOptions& options, CallSite site) const {
  if (options.backend && *options.backend != "auto") find_backend(*options.backend);
  if (options.timeout) check_limit(*options.timeout, "subgroup \"" + name + "\"");
  impl().check_open();
  TORCH_CHECK_VALUE(impl_->job->watch || rank_info().world_size == 1, "subgroup \"", name,
                    "\": expected an open group of all ranks, but it was closed");
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(!sorted.empty(), "subgroup \"", name, "\": expected at least one rank");
  TORCH_CHECK_VALUE(sorted.front() >= 0 && sorted.back() < size(), "subgroup \"", name,
                    "\": expected ranks in [0, ", size(), "), got ", ranks);
  TORCH_CHECK_VALUE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "subgroup \"",
                    name, "\": expected every rank once, got ", ranks);
  std::vector<int> members = options.keep_order ? ranks : sorted;
  std::string operation = "subgroup \"" + name + "\" of";
  for (int& member : members) {
    operation += " " + std::to_string(member);
    member = global_rank(member);
  }
  if (options.backend) operation += ", backend " + *options.backend;
  if (options.timeout) operation += ", timeout " + std::to_string(options.timeout->count()) + " ms";
  impl_->run({.call = {.operation = operation, .site = site, .moves_data = false},
              .begin = [](bool) { return BackendWork(); }});
  const std::string unique = name + "#" + std::to_string(impl_->num_subgroups++);
  const auto own = std::find(members.begin(), members.end(), impl_->job->info.rank);
  if (own == members.end()) return {};
  const int own_rank = static_cast<int>(own - members.begin());
  const SubgroupOptions own_options{.timeout = options.timeout.value_or(impl_->timeout),
                                    .backend = options.backend.value_or(impl_->asked_backend)};
  auto impl = std::make_shared<Impl>(impl_->job, impl_->id + "/" + unique, name, std::move(members),
                                     own_rank, own_options);
  auto store = c10::make_intrusive<c10d::PrefixStore>("sub/" + unique, impl_->store);
  impl->guarded({.operation = operation, .site = site, .compared = Compared::kNever},
                [&] { impl->connect(store, impl_->job->options.rendezvous_timeout); });
  impl->follow_next();
  return ProcessGroup(std::move(impl));
}

void ProcessGroup::Impl::fail(const std::string& operation, int64_t start_ns,
                              const std::string& cause, bool disagreement) {
  const bool was_dead = std::exchange(job->dead, true);
  const auto elapsed = since(start_ns);
  const FailureReport report = job->watch ? job->watch->report() : FailureReport{};
  disagreement = (disagreement || !report.mismatch.empty()) && report.lost.empty();
  std::string text = cause;
  if (disagreement && !report.mismatch.empty()) {
    text = report.mismatch;
  } else if (!report.others.empty()) {
    text = report.others + " (" + cause + ")";
  }
  const std::string call = is_world() ? operation : operation + " of group \"" + name + "\"";
  if (!was_dead) {
    job->failed_call = call + (sequence > 0 ? " #" + std::to_string(sequence) : "");
  } else if (disagreement && !job->failed_call.empty()) {
    text += " (" + cause + ": the ranks disagreed in " + job->failed_call + ")";
  }
  throw PeerError({.rank = job->info.rank,
                   .lost_ranks = report.lost,
                   .operation = call,
                   .sequence = sequence > 0 ? sequence : -1,
                   .elapsed = elapsed,
                   .cause = text,
                   .disagreement = disagreement});
}

void ProcessGroup::Impl::guarded(const Call& call, const std::function<void()>& body) {
  check_open();
  if (call.compared == Compared::kBeforeData) ++sequence;
  const int64_t start = steady_now_ns();
  if (job->dead)
    fail(call.operation, start, "the group is dead since an earlier call failed", false);
  // A backend of the host says so itself.
  if (device_group != nullptr && job->is_aborted())
    fail(call.operation, start, "the watching thread has ended the group", false);
  const TraceRecord entry = record(call);
  std::optional<MatchedCall> matched;
  if (call.compared != Compared::kNever) {
    matched = {.group = id,
               .what = call_text(call.operation, call.tensor),
               .site = entry.call_site.data()};
    if (call.compared == Compared::kBeforeData) matcher.add(matched->what);
  }
  if (device_group != nullptr) present = matched.value_or(MatchedCall{});
  present.number = job->log->begin(entry, std::move(matched));
  try {
    body();
    job->log->end();
    return;
  } catch (const PeerError&) {
    job->dead = true;
    throw;
  } catch (const CallMismatch& error) {
    fail(call.operation, start, one_line(error), true);
  } catch (const c10::DistError& error) {
    fail(call.operation, start, one_line(error), false);
  } catch (const std::bad_alloc&) {
    job->log->end();
    throw;
  } catch (const std::exception& error) {
    // Gloo's IoException is a std::runtime_error and its EnforceNotMet a std::exception; c10d
    // reports a failed collective of the Reducer as a plain c10::Error with Gloo's text in it.
    // Those texts begin with the place in Gloo's sources.
    const std::string text = one_line(error);
    if (text.find("/third_party/gloo/gloo/") == std::string::npos) {
      job->log->end();
      throw;
    }
    fail(call.operation, start, text, false);
  }
}

TraceRecord ProcessGroup::Impl::record(const Call& call) const {
  TraceRecord result;
  set_field(result.group, name);
  set_field(result.operation, call.operation);
  const CallSite site = CallSiteScope::outermost_or(call.site);
  if (site.line > 0) set_call_site(result, site);
  result.sequence = sequence;
  if (call.tensor.defined()) {
    set_field(result.dtype, type_name(call.tensor.scalar_type()));
    result.num_dims = static_cast<int32_t>(std::min<int64_t>(call.tensor.dim(), 8));
    std::copy_n(call.tensor.sizes().begin(), result.num_dims, result.dims.begin());
  }
  return result;
}

// Gloo only matches data of one number, so ranks whose calls differ wait for each other until the
// watching threads compare their records. Otherwise it would take one's data for the other's, and
// end the process from its own thread, where nothing can catch, if they are longer than expected.
void ProcessGroup::Impl::match(const Call& call, bool blocking) {
  if (call.compared != Compared::kBeforeData || !matcher.is_on()) return;
  const bool is_numbered =
      numbered != nullptr && find_backend(backend_name).device == c10::DeviceType::CPU;
  const bool compares_itself = is_numbered && numbered->compares_numbers();
  if (compares_itself) {
    if (!call.moves_data) meet(call);
  } else if (matcher.must_compare(!call.moves_data || (blocking && !is_numbered))) {
    compare(call);
  }
  if (numbered != nullptr) numbered->number_next(matcher.data_number());
}

void ProcessGroup::Impl::meet(const Call& call) {
  numbered->number_next(matcher.data_number());
  c10d::BarrierOptions options;
  options.timeout = call.limit.value_or(timeout);
  options.asyncOp = false;
  c10d_group->getBackend(c10::DeviceType::CPU)->barrier(options)->wait();
}

void ProcessGroup::Impl::compare(const Call& call) {
  const int64_t start = steady_now_ns();
  if (numbered != nullptr) numbered->number_next(matcher.next_comparison());
  const at::Tensor maxima = at::tensor(matcher.fingerprint());
  std::vector<at::Tensor> tensors{maxima};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.timeout = call.limit.value_or(timeout);
  options.asyncOp = false;
  c10d_group->allreduce(tensors, options)->wait();
  const auto* values = maxima.const_data_ptr<int64_t>();
  if (!CallMatcher::agree({values[0], values[1]}))
    fail(call.operation, start, "their calls differ since more than 64 calls ago", true);
}

// "shm" where all ranks can share memory, "hierarchical" where some can on one of several hosts.
std::string ProcessGroup::Impl::cpu_backend() const {
  const auto known = hosts();
  const auto shared = memory();
  const auto groups = host_groups(shared);
  const bool one_host = std::ranges::count(known, known.front()) == std::ssize(known);
  if (one_host && groups.size() == 1 && !shared.front().empty()) return "shm";
  const std::string taken = one_host || std::ssize(groups) == size() ? "gloo" : "hierarchical";
  const auto own = static_cast<size_t>(rank);
  if (shared[own].empty() && std::ranges::count(known, known[own]) > 1) {
    TORCH_WARN_ONCE(
        "backend auto takes ", taken,
        ": this rank shares no memory with the others of its host: ", why_no_memory_sharing());
  }
  return taken;
}

std::vector<std::string> ProcessGroup::Impl::memory() const {
  std::vector<std::string> memory;
  for (const int member : ranks) {
    const auto each = static_cast<size_t>(member);
    const std::string& sharing = job->rendezvous.memory_sharing[each];
    memory.push_back(sharing.empty() ? "" : job->rendezvous.hosts[each] + " " + sharing);
  }
  return memory;
}

std::vector<std::string> ProcessGroup::Impl::hosts() const {
  std::vector<std::string> hosts;
  for (const int member : ranks)
    hosts.push_back(job->rendezvous.hosts[static_cast<size_t>(member)]);
  return hosts;
}

void ProcessGroup::Impl::check_open() const {
  TORCH_CHECK_VALUE(!closed, "expected an open group, but \"", name, "\" was closed");
}

void ProcessGroup::Impl::run(const Operation& operation) {
  const at::NoGradGuard no_grad;
  guarded(operation.call, [&] {
    match(operation.call, /*blocking=*/true);
    if (const BackendWork work = begin(operation, /*async_op=*/false)) work->wait();
    if (operation.finish) operation.finish();
  });
}

// Messages have no number: they are between two ranks.
BackendWork ProcessGroup::Impl::begin(const Operation& operation, bool async_op) const {
  const at::Tensor& tensor = operation.call.tensor;
  const c10::DeviceType device = tensor.defined() ? tensor.device().type() : operation.call.device;
  if (device_group == nullptr || device == c10::DeviceType::CPU || present.number == 0)
    return operation.begin(async_op);
  return device_group->begin(present, [&] { return operation.begin(async_op); });
}

void ProcessGroup::Impl::follow_next() const {
  if (device_group != nullptr) job->watch->follow(ranks[static_cast<size_t>((rank + 1) % size())]);
}

Work ProcessGroup::Impl::start(const Operation& operation) {
  const at::NoGradGuard no_grad;
  auto state = std::make_unique<Work::State>(Work::State{.group = shared_from_this(),
                                                         .operation = operation.call.operation,
                                                         .work = {},
                                                         .finish = operation.finish});
  guarded(operation.call, [&] {
    match(operation.call, /*blocking=*/false);
    state->work = begin(operation, /*async_op=*/true);
  });
  return Work(std::move(state));
}

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;
Work::~Work() = default;

void Work::wait(CallSite site) {
  if (!state_ || !state_->work) return;
  const auto work = std::move(state_->work);
  const at::NoGradGuard no_grad;
  state_->group->guarded(
      {.operation = state_->operation, .site = site, .compared = Compared::kNever}, [&] {
        work->wait();
        if (state_->finish) state_->finish();
      });
}

void ProcessGroup::translate_errors(const std::string& operation, const std::function<void()>& call,
                                    CallSite site) const {
  ++impl().sequence;
  impl_->guarded({.operation = operation, .site = site, .compared = Compared::kNever}, call);
}

void ProcessGroup::run_collective(const std::string& operation, const std::function<void()>& call,
                                  CallSite site) const {
  ++impl().sequence;
  impl_->guarded({.operation = operation, .site = site, .compared = Compared::kWhenStuck}, call);
}

void ProcessGroup::Impl::arrive(const std::string& point) const {
  if (store->add(point, 1) == size()) store->set(point + "/all", "");
}

// All ranks have just left a barrier, so none is far behind.
void ProcessGroup::Impl::wait_for_all(const std::string& point) const {
  store->wait({point + "/all"}, std::min<milliseconds>(timeout, milliseconds(30'000)));
}

// Devices may still be in the last collective: a backend that is destroyed would cut it off.
void ProcessGroup::Impl::end_devices() const {
  for (const auto& device : c10d_group->getDeviceTypes()) {
    if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) continue;
    const auto* driver = c10::impl::getDeviceGuardImpl(device.type());
    driver->synchronizeDevice(driver->getDevice().index());
    c10d_group->getBackend(device.type())->shutdown();
  }
}

void ProcessGroup::close(CallSite site) const {
  impl().check_open();
  if (size() == 1) {
    impl_->closed = true;
    impl_->end_devices();
    return;
  }
  barrier("close", {}, site);  // a peer that is gone shows here, as in any collective
  translate_errors(
      "close",
      [&] {
        // A rank that leaves right after its last collective may leave another waiting in it.
        impl_->arrive("closing");
        impl_->wait_for_all("closing");
        if (impl_->is_world()) impl_->job->stop_watch();
        impl_->closed = true;
        impl_->end_devices();
        impl_->device_group = nullptr;
        impl_->c10d_group.reset();
        impl_->arrive("closed");
        if (rank() == 0) impl_->wait_for_all("closed");
      },
      site);
}

}  // namespace cohort::comm
