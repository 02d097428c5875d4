#include "cohort/comm/process_group.h"

#include <ATen/ops/tensor.h>
#include <algorithm>
#include <csignal>
#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/process_group_impl.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

c10d::ProcessGroup::BackendType backend_type(const std::string& backend) {
  return c10d::ProcessGroup::strToBackendType(backend);
}

ProcessGroupOptions with_environment(ProcessGroupOptions options) {
  if (env_int("COHORT_CHECK_COLLECTIVES", 0, 1).value_or(1) == 0) options.check_collectives = false;
  return options;
}

// Numbers of collectives that carry data; comparisons have those below.
constexpr uint32_t kDataNumbers = 1U << 31;

void do_nothing(int) {}

// Backends and stores write to sockets whose other end may be gone: the error they get then names
// the lost rank, and a signal would end this one before. A handler, unlike SIG_IGN, is not
// inherited by programs that this one starts.
void outlive_broken_pipes() {
  struct sigaction action {};
  sigaction(SIGPIPE, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = do_nothing;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, &action, nullptr);
}

Rendezvous rendezvous_of_one() {
  return {.store = c10::make_intrusive<c10d::HashStore>(),
          .watch = {},
          .address = "127.0.0.1",
          .interface = {},
          .hosts = {own_host()}};
}

std::string terms(const RankInfo& info, const ProcessGroupOptions& options) {
  return "world size " + std::to_string(info.world_size) + ", backend " + options.backend +
         ", check_collectives " + (options.check_collectives ? "on" : "off");
}

uint64_t fnv1a(uint64_t hash, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
  return hash;
}

uint64_t fnv1a(uint64_t hash, const std::string& text) {
  return fnv1a(hash, text.c_str(), text.size() + 1);
}

// What must be equal on all ranks, in full: a trace record cuts it.
std::string text_of(const Call& call) {
  if (!call.tensor.defined()) return call.operation;
  std::string text = call.operation + " of " + type_name(call.tensor.scalar_type()) + '[';
  for (int64_t d = 0; d < call.tensor.dim(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(call.tensor.size(d));
  }
  return text + ']';
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

// The group is dead: of a backend that cannot be aborted the timeout remains.
void abort_backend(c10d::ProcessGroup& backend) {
  try {
    backend.abort();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace

Job::Job(const RankInfo& p, const ProcessGroupOptions& o, const std::string& trace_file)
    : info(p), options(o), log(p.rank, p.world_size, RankTrace::open(trace_file)) {}

void Job::add_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& backend) {
  const std::lock_guard lock(mutex_);
  if (aborted_) abort_backend(*backend);
  backends_.emplace_back(backend);
}

void Job::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (const auto& entry : backends_) {
    if (const auto backend = entry.lock()) abort_backend(*backend);
  }
}

ProcessGroup::Impl::Impl(std::shared_ptr<Job> j, std::string group_id, std::string group_name,
                         std::vector<int> global_ranks, int own_rank,
                         const SubgroupOptions& own_options)
    : job(std::move(j)),
      id(std::move(group_id)),
      name(std::move(group_name)),
      ranks(std::move(global_ranks)),
      rank(own_rank),
      backend_name(own_options.backend.value_or(job->options.backend)),
      timeout(own_options.timeout.value_or(job->options.timeout)) {}

void ProcessGroup::Impl::connect(c10::intrusive_ptr<c10d::Store> group_store, milliseconds limit) {
  store = std::move(group_store);
  users_store = c10::make_intrusive<c10d::PrefixStore>("user", store);
  const int size = static_cast<int>(ranks.size());
  backend = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  const auto add = [&](const std::string& type, c10::DeviceType device,
                       const BackendPlugin& plugin) {
    BackendRequest request{
        .store = c10::make_intrusive<c10d::PrefixStore>(c10::DeviceTypeName(device, true), store),
        .rank = rank,
        .world_size = size,
        .timeout = limit,
        .address = job->rendezvous.address,
        .interface = job->rendezvous.interface};
    auto made = make_backend(plugin, request);
    made->setTimeout(timeout);
    backend->setBackend(device, backend_type(type), made);
  };
  const BackendPlugin& plugin = find_backend(backend_name);
  const bool is_gloo = backend_name == "gloo";
  backend->setDefaultBackend(backend_type(backend_name));
  if (!is_gloo) add(backend_name, plugin.device, plugin);
  // Lengths, comparisons and barriers stay on the CPU.
  if (is_gloo || plugin.device != c10::DeviceType::CPU)
    add("gloo", c10::DeviceType::CPU, find_backend("gloo"));
  backend->setGroupName(is_world() ? "cohort" : "cohort/" + name);
  job->add_backend(backend);
}

namespace {

// A launcher whose ranks start again, or are lost, one by one says so.
void check_job_has_groups() {
  if (env_string("COHORT_PROCESS_GROUP").value_or("") != "none") return;
  throw ConfigError(
      "COHORT_PROCESS_GROUP=none: --restart-policy single and --on-trainer-loss continue are for "
      "trainers of servers without a process group, which this program has: expected "
      "--restart-policy group, and no --on-trainer-loss continue");
}

}  // namespace

ProcessGroup::ProcessGroup(const RankInfo& info, const ProcessGroupOptions& options) {
  find_backend(options.backend);
  if (info.world_size > 1) check_job_has_groups();
  if (info.world_size > 1) outlive_broken_pipes();
  std::vector<int> ranks(static_cast<size_t>(info.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto job = std::make_shared<Job>(info, with_environment(options),
                                   env_string(kTraceFileVariable).value_or(""));
  impl_ = std::make_shared<Impl>(job, "", "world", std::move(ranks), info.rank, SubgroupOptions{});
  const int64_t start = steady_now_ns();
  impl_->run_unmatched({.operation = "rendezvous at " + rendezvous_point(info), .site = {}}, [&] {
    job->rendezvous = info.world_size == 1
                          ? rendezvous_of_one()
                          : join_rendezvous(info, {.timeout = options.rendezvous_timeout,
                                                   .interface = options.interface,
                                                   .terms = terms(info, job->options)});
    if (job->info.finds_host) find_host(job->info, job->rendezvous.hosts);
    impl_->connect(job->rendezvous.store, left_of(options.rendezvous_timeout, start));
  });
  if (info.world_size == 1) return;
  const bool rank_0_hosts = info.store_file.empty() && !info.agent_store;
  job->watch = std::make_unique<FailureWatch>(
      std::move(job->rendezvous.watch), info.rank, info.world_size, rank_0_hosts,
      FailureWatchCalls{.flight_record = [job = job.get()] { return job->log.flight_record(); },
                        .waiting_ns = [job = job.get()] { return job->log.waiting_ns(); },
                        .abort = [job = job.get()] { job->abort(); }});
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
  return static_cast<int>(impl().ranks.size());
}
int ProcessGroup::global_rank(int rank) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size(), "global_rank: expected a rank in [0, ", size(),
                    "), got ", rank);
  return impl().ranks[static_cast<size_t>(rank)];
}
std::vector<std::string> ProcessGroup::hosts() const {
  std::vector<std::string> hosts;
  for (const int member : impl().ranks)
    hosts.push_back(impl_->job->rendezvous.hosts[static_cast<size_t>(member)]);
  return hosts;
}
const std::string& ProcessGroup::name() const {
  return impl().name;
}
const RankInfo& ProcessGroup::rank_info() const {
  return impl().job->info;
}
c10d::ProcessGroup& ProcessGroup::c10d_group() const {
  impl().check_open();
  return *impl_->backend;
}
c10d::Store& ProcessGroup::store() const {
  impl().check_open();
  return *impl_->users_store;
}

ProcessGroup ProcessGroup::subgroup(const std::vector<int>& ranks, const std::string& name,
                                    const SubgroupOptions& options, CallSite site) const {
  if (options.backend) find_backend(*options.backend);
  TORCH_CHECK_VALUE(!options.timeout || options.timeout->count() > 0, "subgroup \"", name,
                    "\": expected a timeout above 0, got ", options.timeout->count(), " ms");
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
  impl_->run({.operation = operation, .site = site}, [] {});
  const std::string unique = name + "#" + std::to_string(impl_->num_subgroups++);
  const auto own = std::find(members.begin(), members.end(), impl_->job->info.rank);
  if (own == members.end()) return {};
  const int own_rank = static_cast<int>(own - members.begin());
  const SubgroupOptions own_options{.timeout = options.timeout.value_or(impl_->timeout),
                                    .backend = options.backend.value_or(impl_->backend_name)};
  auto impl = std::make_shared<Impl>(impl_->job, impl_->id + "/" + unique, name, std::move(members),
                                     own_rank, own_options);
  auto store = c10::make_intrusive<c10d::PrefixStore>("sub/" + unique, impl_->backend->getStore());
  impl->run_unmatched({.operation = operation, .site = site},
                      [&] { impl->connect(store, impl_->job->options.rendezvous_timeout); });
  return ProcessGroup(std::move(impl));
}

void ProcessGroup::Impl::fail(const std::string& operation, int64_t start_ns,
                              const std::string& cause, bool disagreement) {
  job->dead = true;
  const auto elapsed = since(start_ns);
  const FailureReport report = job->watch ? job->watch->report() : FailureReport{};
  disagreement = (disagreement || !report.mismatch.empty()) && report.lost.empty();
  std::string text = cause;
  if (disagreement && !report.mismatch.empty()) {
    text = report.mismatch;
  } else if (!report.others.empty()) {
    text = report.others + " (" + cause + ")";
  }
  throw PeerError({.rank = job->info.rank,
                   .lost_ranks = report.lost,
                   .operation = is_world() ? operation : operation + " of group \"" + name + "\"",
                   .sequence = sequence > 0 ? sequence : -1,
                   .elapsed = elapsed,
                   .cause = text,
                   .disagreement = disagreement});
}

// Does `body` under the log's eyes; what a backend throws for a lost peer becomes PeerError.
template <class Body>
void ProcessGroup::Impl::guarded(const Call& call, bool matched, const Body& body) {
  check_open();
  const int64_t start = steady_now_ns();
  if (job->dead) fail(call.operation, start, "the group is dead since it lost a peer", false);
  const TraceRecord entry = record(call);
  std::optional<MatchedCall> matched_call;
  if (matched) {
    matched_call = {.group = id,
                    .number = ++num_matched,
                    .what = text_of(call),
                    .site = entry.call_site.data()};
    history = fnv1a(history, matched_call->what);
  }
  job->log.begin(entry, std::move(matched_call));
  try {
    body();
    job->log.end();
    return;
  } catch (const PeerError&) {
    job->dead = true;
    throw;
  } catch (const c10::DistError& error) {
    fail(call.operation, start, one_line(error), false);
  } catch (const std::bad_alloc&) {
    job->log.end();
    throw;
  } catch (const std::exception& error) {
    // Gloo's IoException is a std::runtime_error and its EnforceNotMet a std::exception; c10d
    // reports a failed collective of the Reducer as a plain c10::Error with Gloo's text in it.
    // Those texts begin with the place in Gloo's sources.
    const std::string text = one_line(error);
    if (text.find("/third_party/gloo/gloo/") == std::string::npos) {
      job->log.end();
      throw;
    }
    fail(call.operation, start, text, false);
  }
}

TraceRecord ProcessGroup::Impl::record(const Call& call) const {
  TraceRecord result;
  set_field(result.group, name);
  set_field(result.operation, call.operation);
  if (call.site.line > 0) set_call_site(result, call.site);
  result.sequence = sequence;
  if (call.tensor.defined()) {
    set_field(result.dtype, type_name(call.tensor.scalar_type()));
    result.num_dims = static_cast<int32_t>(std::min<int64_t>(call.tensor.dim(), 8));
    std::copy_n(call.tensor.sizes().begin(), result.num_dims, result.dims.begin());
  }
  return result;
}

// The greatest history and the greatest complement of one, which is the complement of the least:
// equal if all are.
void ProcessGroup::Impl::compare(const Call& call) {
  if (!compares()) return;
  const int64_t start = steady_now_ns();
  number_next_collective(*backend->getBackend(c10::DeviceType::CPU), num_compared++ % kDataNumbers);
  const auto mine = static_cast<int64_t>(history);
  at::Tensor extremes = at::tensor({mine, ~mine});
  std::vector<at::Tensor> tensors{extremes};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.timeout = call.limit.value_or(timeout);
  backend->allreduce(tensors, options)->wait();
  const auto* values = extremes.const_data_ptr<int64_t>();
  if (values[0] != ~values[1])
    fail(call.operation, start, "their calls part more than 64 calls ago", true);
}

// Ranks whose calls differ then wait for each other until the watching threads compare their logs.
// Gloo would take one's data for the other's, and end the process from its own thread, where nobody
// can catch, if they are longer than expected.
void ProcessGroup::Impl::number_data() {
  if (!compares()) return;
  const auto hash = static_cast<uint32_t>(history ^ (history >> 32));
  number_next_collective(*backend->getBackend(c10::DeviceType::CPU), kDataNumbers | hash);
}

void ProcessGroup::Impl::check_open() const {
  TORCH_CHECK_VALUE(!closed, "expected an open group, but \"", name, "\" was closed");
}

void ProcessGroup::Impl::run(const Call& call, const std::function<void()>& body) {
  const at::NoGradGuard no_grad;
  ++sequence;
  guarded(call, /*matched=*/true, [&] {
    compare(call);
    number_data();
    body();
  });
}

void ProcessGroup::Impl::run_unmatched(const Call& call, const std::function<void()>& body) {
  const at::NoGradGuard no_grad;
  guarded(call, /*matched=*/false, body);
}

Work ProcessGroup::Impl::begun(const Call& call, bool matched,
                               const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
                               std::function<void()> finish) {
  const at::NoGradGuard no_grad;
  auto state = std::make_unique<Work::State>(Work::State{.group = shared_from_this(),
                                                         .operation = call.operation,
                                                         .work = {},
                                                         .finish = std::move(finish)});
  guarded(call, matched, [&] {
    if (matched && known.insert(fnv1a(0, text_of(call))).second) compare(call);
    if (matched) number_data();
    state->work = begin();
  });
  return Work(std::move(state));
}

Work ProcessGroup::Impl::start(const Call& call,
                               const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
                               std::function<void()> finish) {
  ++sequence;
  return begun(call, /*matched=*/true, begin, std::move(finish));
}

Work ProcessGroup::Impl::start_unmatched(
    const Call& call, const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
    std::function<void()> finish) {
  return begun(call, /*matched=*/false, begin, std::move(finish));
}

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;
Work& Work::operator=(Work&&) noexcept = default;
Work::~Work() = default;

void Work::wait(CallSite site) {
  if (!state_ || !state_->work) return;
  const auto work = std::move(state_->work);
  state_->group->run_unmatched({.operation = state_->operation, .site = site}, [&] {
    work->wait();
    if (state_->finish) state_->finish();
  });
}

void ProcessGroup::translate_errors(const std::string& operation, const std::function<void()>& call,
                                    CallSite site) const {
  ++impl().sequence;
  impl_->guarded({.operation = operation, .site = site}, /*matched=*/false, call);
}

void ProcessGroup::Impl::count(const std::string& key) {
  store->add(key, 1);
}

void ProcessGroup::Impl::wait_for_counter(const std::string& key) {
  // All ranks have just left a barrier, so none is far behind.
  const auto limit = std::min<milliseconds>(timeout, milliseconds(30'000));
  const int64_t start = steady_now_ns();
  while (store->add(key, 0) < static_cast<int64_t>(ranks.size())) {
    if (since(start) > limit) C10_THROW_ERROR(DistError, "waited in vain for " + key);
    usleep(500);
  }
}

void ProcessGroup::close(CallSite site) const {
  impl().check_open();
  if (size() == 1) {
    impl_->closed = true;
    return;
  }
  barrier("close", {}, site);  // a peer that is gone shows here, as in any collective
  translate_errors(
      "close",
      [&] {
        // A rank that leaves right after its last collective may leave another waiting in it.
        impl_->count("closing");
        impl_->wait_for_counter("closing");
        if (impl_->is_world()) impl_->job->watch.reset();
        impl_->closed = true;
        impl_->backend.reset();
        impl_->count("closed");
        if (rank() == 0) impl_->wait_for_counter("closed");
      },
      site);
}

}  // namespace cohort::comm
