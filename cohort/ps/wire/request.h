// What clients ask of a server and what it answers, as plain values: gRPC (rpc/) carries them
// between processes, tests hand them over directly.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// The trainer number of those that only look: predictions, status.
inline constexpr uint32_t kNoTrainer = 0xffffffff;

/// Numbers are for good, for servers and clients of other versions: new calls are appended.
enum class Call : uint32_t {
  kPush = 0,  ///< `message`: gradients, or initial values (kInitialValues).
  kPull = 1,  ///< `message`: which rows and blocks.
  kJob = 2,   ///< `text`: JSON of JobOptions. Once; the same again is fine.
  /// Trainer `trainer` comes, or comes back as `incarnation` after a server's restart. `text` as of
  /// kJob, so that a job that differs can be named.
  kJoin = 3,
  kHeartbeat = 4,  ///< It lives. `step` as of kConfirm.
  kLeave = 5,      ///< It has no more data.
  /// This server's part of a checkpoint of the state after `step` steps, to folder `text`.
  kSave = 6,
  /// All parts of save `nonce` are in folder `text`: from now on it is what loads.
  kFinishSave = 7,
  kStatus = 8,  ///< `text` of the reply: JSON.
  kStop = 9,    ///< The server ends.
  /// kSync: all servers have acknowledged the trainer's pushes up to `step`, or one of them has
  /// closed it. A server closes a step when every member's process has said so of it: what one
  /// server applies the others can apply, too, whoever is killed, and no step closes that a trainer
  /// which comes anew has still to make. Pushes (of the one before; to a single server, of the
  /// same) and pulls (of `step`) say it, too.
  kConfirm = 10,
  /// The job goes back to the checkpoint of all servers in folder `text`, unless the state is that
  /// one already; "": to its beginning. Trainers join anew; processes that had joined are refused.
  kRestore = 11,
};

struct Request {
  Call call = Call::kHeartbeat;
  uint32_t trainer = kNoTrainer;
  uint64_t job = 0;          ///< kJoin: JobOptions::fingerprint.
  uint64_t incarnation = 0;  ///< kJoin: 0 for a new process.
  uint64_t step = 0;
  /// kJoin of a new process, kSave, kFinishSave: drawn by the caller, for a save once for all
  /// servers. A call that is repeated has the same one, and gets the answer of the first.
  uint64_t nonce = 0;
  std::string text{};
  std::shared_ptr<const Buffer> message{};  ///< Of kPush and kPull.
};

enum class Code {
  kOk,
  kNotYet,      ///< Ask again: what was asked for must be waited for; `text` says for whom.
  kBusy,        ///< Ask again later: the server's queue is full, or its disk.
  kRestarted,   ///< The server is another incarnation than the message says: join again.
  kReplaced,    ///< Another process is this trainer now, or it was given up: end.
  kInvalid,     ///< The request is wrong; `text` says what.
  kFailed,      ///< The job cannot go on, or what kSave asks for is no more; `text` says why.
  kLost,        ///< No answer: the connection broke, or the time was up.
  kNotWritten,  ///< kSave and kFinishSave came to nothing: the disk refuses; `text` says why.
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
  int server = 0;               ///< The one that answers, by its number.
  /// Of kNotYet: changes from answer to answer while what is waited for makes progress by itself (a
  /// checkpoint is written), so that the wait does not age; 0: nothing of the kind.
  uint64_t progress = 0;
  /// Of kPull: its bytes count as the server's until this goes.
  std::shared_ptr<void> hold{};
};

/// The longest text of a request: the JSON of a job, a folder's name.
inline constexpr size_t kMostTextBytes = size_t{1} << 20;

/// Called once, from any thread; must not block.
using Done = std::function<void(Reply)>;

/// A way to one server.
class Channel {
 public:
  virtual ~Channel() = default;
  /// Sends `request`; returns at once. After `timeout_ms` > 0 `done` gets kLost at the latest.
  virtual void send(const Request& request, int64_t timeout_ms, Done done) = 0;
};

const char* to_string(Code code);

}  // namespace cohort::ps
