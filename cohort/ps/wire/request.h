// SPDX-License-Identifier: Apache-2.0
// Requests of clients and replies of servers, as plain values: gRPC (rpc/) carries them between
// processes, tests pass them directly.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// The trainer number of clients that only read: predictions, status.
inline constexpr uint32_t kNoTrainer = 0xffffffff;

/// The numbers are part of the protocol: new calls are appended.
enum class Call : uint32_t {
  kPush = 0,  ///< `message`: gradients, or initial values (kInitialValues).
  kPull = 1,  ///< `message`: which rows and blocks.
  kJob = 2,   ///< `text`: JSON of JobOptions. Once; the same job again is ignored.
  /// Trainer `trainer` joins, or rejoins as `incarnation` after a server's restart. `text` as of
  /// kJob, so that an error can say how the jobs differ.
  kJoin = 3,
  kHeartbeat = 4,  ///< The trainer is alive. `step` as of kConfirm.
  kLeave = 5,      ///< The trainer has no more data.
  /// This server's part of a checkpoint of the state after `step` steps, to folder `text`.
  kSave = 6,
  /// All parts of save `nonce` are in folder `text`: loading uses this save from now on.
  kFinishSave = 7,
  kStatus = 8,  ///< `text` of the reply: JSON.
  kStop = 9,    ///< The server ends.
  /// kSync: all servers have acknowledged the trainer's pushes up to `step`, or one of them has
  /// closed it. A server closes a step when every member has confirmed it: a step that one server
  /// applies can be applied by all others, whichever process is killed, and no step closes that a
  /// restarted trainer has still to push. Pushes (for the step before; with a single server, for
  /// the same step) and pulls (for `step`) confirm as well.
  kConfirm = 10,
  /// Rolls the job back to the checkpoint of all servers in folder `text`, unless the state is that
  /// one already; "": to its beginning. Trainers join again; processes that joined before are
  /// rejected.
  kRestore = 11,
};

struct Request {
  Call call = Call::kHeartbeat;
  uint32_t trainer = kNoTrainer;
  uint64_t job = 0;          ///< kJoin: JobOptions::fingerprint.
  uint64_t incarnation = 0;  ///< kJoin: 0 for a new process.
  uint64_t step = 0;
  /// kJoin of a new process, kSave, kFinishSave: drawn by the caller, for a save once for all
  /// servers. A repeated call has the same nonce, and gets the reply of the first.
  uint64_t nonce = 0;
  std::string text{};
  std::shared_ptr<const Buffer> message{};  ///< Of kPush and kPull.
  size_t answer_bytes = 0;                  ///< kPull, at a client: of the answer's message.
  BufferMaker answer_maker{};               ///< kPull, at a server: where its answer is written.
};

enum class Code {
  kOk,
  kNotYet,      ///< Retry: the request has to wait; `text` says for what.
  kBusy,        ///< Retry later: the server's queue or disk is full.
  kRestarted,   ///< The server is another incarnation than the message says: join again.
  kReplaced,    ///< Another process is this trainer now, or it was dropped: end.
  kInvalid,     ///< The request is wrong; `text` says what.
  kFailed,      ///< The job cannot continue, or the step of kSave has passed; `text` says why.
  kLost,        ///< No reply: the connection broke, or the request timed out.
  kNotWritten,  ///< kSave and kFinishSave: a disk error; `text` says why.
};
constexpr Code kLastCode = Code::kNotWritten;

struct Reply {
  Code code = Code::kOk;
  std::string text{};
  Buffer message{};                 ///< Of kPull.
  uint64_t server_incarnation = 0;  ///< Of kJoin, as all below.
  uint64_t trainer_incarnation = 0;
  uint64_t last_sequence = 0;  ///< Of the trainer's pushes here.
  uint64_t steps = 0;
  bool is_initialised = false;
  uint64_t joined_after = 0;    ///< The last step that is none of the trainer's: `steps` when it,
                                ///< as whatever process, became a member.
  uint64_t steps_at_start = 0;  ///< `steps` when the job began, with a checkpoint maybe.
  int server = 0;               ///< Number of the server that replies.
  /// Of kNotYet: changes from reply to reply while the awaited work makes progress (a checkpoint is
  /// being written), so that the wait does not time out; 0: no such work.
  uint64_t progress = 0;
  /// Of kPull: its bytes count towards the server's limit until this is destroyed.
  std::shared_ptr<void> hold{};
};

/// The longest text of a request: the JSON of a job, a folder's name.
inline constexpr size_t kMaxTextBytes = size_t{1} << 20;

/// Called once, from any thread; must not block.
using Done = std::function<void(Reply)>;

/// A channel to one server.
class Channel {
 public:
  virtual ~Channel() = default;
  /// Memory for a message of `bytes` that will be sent here; where the server reads it, if there is
  /// such memory. Any thread.
  virtual Buffer make_buffer(size_t bytes) { return Buffer(bytes); }
  /// Sends `request`; returns at once. After `timeout_ms` > 0 `done` gets kLost at the latest.
  virtual void send(const Request& request, int64_t timeout_ms, Done done) = 0;
};

const char* to_string(Code code);

}  // namespace cohort::ps
