// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/arrival_check.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::ps {

namespace {

using std::chrono::steady_clock;

void read_message(Pending& pending) {
  const Request& request = pending.request;
  TORCH_CHECK_VALUE(request.message, "message: there is none");
  pending.message = parse_message(request.message->span());
  const auto expected = request.call == Call::kPush ? MessageKind::kPush : MessageKind::kPull;
  TORCH_CHECK_VALUE(pending.message.header.kind == expected,
                    "message: it is of another kind than its call");
  pending.request.trainer = pending.message.header.trainer;
  pending.request.incarnation = pending.message.header.trainer_incarnation;
}

void check_number(uint32_t trainer, const JobOptions& job) {
  const auto most = static_cast<uint32_t>(job.max_trainers);
  TORCH_CHECK_VALUE(trainer == kNoTrainer || trainer < most, "join: trainer ", trainer,
                    ": expected a number below max_trainers, ", most);
}

}  // namespace

ArrivalCheck::ArrivalCheck(const ServerOptions& options)
    : server_(options.server), save_root_(options.save_root) {}

void ArrivalCheck::set_job(std::shared_ptr<const DeclaredJob> job) {
  const std::lock_guard lock(mutex_);
  job_ = std::move(job);
}

std::shared_ptr<const DeclaredJob> ArrivalCheck::job() const {
  const std::lock_guard lock(mutex_);
  return job_;
}

Pending ArrivalCheck::check(Request request) const {
  TORCH_CHECK_VALUE(request.text.size() <= kMaxTextBytes, "a request's text has ",
                    request.text.size(), " bytes; expected at most ", kMaxTextBytes,
                    ": of a job, cut the parameters into fewer slices");
  Pending pending{.request = std::move(request), .job = job(), .arrived = steady_clock::now()};
  const bool is_hot = pending.request.call == Call::kPush || pending.request.call == Call::kPull;
  if (is_hot) read_message(pending);
  try {
    if (!is_hot) {
      check_control(pending);
    } else if (pending.job) {
      pending.job->check(pending.message);
    }
  } catch (const std::exception& error) {
    pending.mismatch = refusal_text(error);
  }
  return pending;
}

void ArrivalCheck::check_control(Pending& pending) const {
  const Request& request = pending.request;
  switch (request.call) {
    case Call::kJob:
      pending.job = std::make_shared<const DeclaredJob>(JobOptions::parse(request.text), server_);
      return;
    case Call::kJoin:
      if (!pending.job) return;
      pending.job->check_same(request.job, request.text);
      return check_number(request.trainer, pending.job->options());
    case Call::kRestore:
      TORCH_CHECK_VALUE(!pending.job || request.job == pending.job->fingerprint(),
                        "restore: the job is another one");
      if (!request.text.empty()) check_folder("restore", request.text);
      return;
    case Call::kSave:
      TORCH_CHECK_VALUE(request.nonce != 0 && !request.text.empty(),
                        "save: expected a folder and a nonce");
      return check_folder("save", request.text);
    case Call::kFinishSave:
      return check_folder("save", request.text);
    case Call::kPush:
    case Call::kPull:
    case Call::kConfirm:
    case Call::kHeartbeat:
    case Call::kLeave:
    case Call::kStatus:
    case Call::kStop:
      return;
  }
  // Of a newer client.
  TORCH_CHECK_VALUE(false, "unknown call ", static_cast<uint32_t>(request.call));
}

// A caller may name any path, with links and ".." in it.
void ArrivalCheck::check_folder(const char* call, const std::string& folder) const {
  if (save_root_.empty()) return;
  namespace fs = std::filesystem;
  const fs::path root = fs::weakly_canonical(fs::absolute(save_root_));
  const fs::path path = fs::weakly_canonical(fs::absolute(folder));
  const auto [end, ignored] = std::mismatch(root.begin(), root.end(), path.begin(), path.end());
  TORCH_CHECK_VALUE(end == root.end(), call, ": ", folder, ": expected a folder below ",
                    root.string(), " (--save-root)");
}

std::string refusal_text(const std::exception& error) {
  // The standard library throws for failed allocations and invalid paths.
  const bool is_own = dynamic_cast<const c10::Error*>(&error) != nullptr;
  return (is_own ? "" : "the server cannot do it: ") + one_line(error);
}

}  // namespace cohort::ps
