// SPDX-License-Identifier: Apache-2.0
// The update log: every change of a server's state, in order, on disk before it is acknowledged.
//
// A folder of segments "<number of the first record>.log", each a sequence of records:
//   magic u32, checksum of the header u32, number u64, synced u64, kind u32, time u32, bytes u32,
//   checksum of the payload u32, payload, padded to 8 bytes
// Numbers count from 1 without a gap; "synced" is the last record that a sync of the disk had
// covered when this one was written. What a killed process left of its last record is cut off. Any
// other damage is refused with file and offset: the header has a checksum of its own, so that a
// damaged length is never taken for an unfinished record.
//
// After a power cut, pages that were not synced may be missing, or be there without those before
// them. Then the log is cut off where damage begins, unless a later record says that a sync had
// covered the damaged part.
//
// Large records are written on another thread while the caller applies them. A full disk must be
// known before that: such a record goes only to space that was reserved for it behind the end of
// the file (its length does not count that space). A log gives back what it has reserved when it
// begins another segment and when it ends, and after a kill when it is opened again.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cohort/base/fd.h"
#include "cohort/ps/server/side_task.h"
#include "cohort/ps/server/write_behind.h"
#include "cohort/ps/wire/message.h"

namespace cohort::ps {

enum class RecordKind : uint32_t {
  kJob = 1,      ///< JSON of JobOptions.
  kInitial = 2,  ///< A message: values of blocks.
  kJoin = 3,     ///< JoinRecord (parameter_state.h).
  kPush = 4,     ///< A message, as it arrived.
  kLeave = 5,    ///< LeaveRecord.
  kEvict = 6,    ///< Nothing.
  kClose = 7,    ///< Nothing: the open step is applied.
};

struct Record {
  uint64_t number = 0;
  RecordKind kind = RecordKind::kPush;
  uint32_t time = 0;                     ///< Seconds since 1970, never less than the one before.
  std::span<const std::byte> payload{};  ///< Aligned to 8.
  /// What the payload lies in, where others may hold it for longer than the record is there.
  std::shared_ptr<const Buffer> message{};
  std::optional<uint32_t> checksum{};  ///< Of the payload, where it is known.
};

/// Whether the system that wrote a log may have lost what it had not synced.
enum class PowerCut { kImpossible, kPossible };

/// The file of records at its end.
/// Threads: one.
class UpdateLog {
 public:
  /// Reads the records of `folder` from number `from` on, in order, through `visit`, cuts off an
  /// unfinished last one, or what a power cut damaged, and opens the log behind them. The folder is
  /// made if it is not there. `synced`: called on another thread when a sync that sync_soon() asked
  /// for has ended.
  /// Errors: ConfigError that names file and offset: damage, or records missing.
  UpdateLog(const std::string& folder, uint64_t from,
            const std::function<void(const Record&)>& visit,
            PowerCut power_cut = PowerCut::kImpossible, std::function<void()> synced = {});
  ~UpdateLog();

  /// What was cut off as the trace of a power cut: file, offset and damage; "" if nothing was.
  const std::string& cut_off_text() const { return cut_off_text_; }

  /// Hands a record to the system: it survives the death of this process.
  /// `record`: its number is ignored.
  /// `beside`: a record of kLeastBeside bytes or more that has a `message` may be written beside the
  ///           caller, until finish_append(), where there is reserved space for it. Nothing else is
  ///           called before that.
  /// Returns: its number.
  /// Errors:  c10::Error that names the file and the system's reason (a full disk), and a limit of
  ///          file sizes if that is the reason; unless the log is broken it is then as before, and
  ///          the next record may be tried.
  uint64_t begin_append(Record record, bool beside = false);
  /// Waits until the record is written. Nothing may be shown before that of what it changed.
  /// Errors: c10::Error that names the file and the system's reason; the log is broken then.
  void finish_append();
  /// Waits until the disk has all records: they survive the loss of power.
  /// Errors: c10::Error that names the file and the system's reason; the log is broken then.
  void sync();
  /// Asks another thread for a sync of all records that there are. Does not block.
  void sync_soon() { write_behind_.sync_soon(); }
  /// The last record that a sync has covered since the start; 0: none.
  uint64_t synced() const { return std::max(synced_, write_behind_.synced()); }
  /// Whether a record could not be written to reserved space, or the disk has refused what was
  /// handed to the system before. Which records it has is not known then, and a later sync would not
  /// tell: append, sync and begin_segment throw from then on.
  bool is_broken() const { return !broken_.empty(); }
  /// Looks whether it has.
  /// Errors: as sync.
  void check_disk();

  /// Further records go to a new file.
  /// Errors: as sync; ConfigError if there can be none, as before.
  void begin_segment();
  /// Removes the segments that hold only records before `number`.
  void remove_before(uint64_t number);

  static constexpr int64_t kLeastBeside = int64_t{64} << 10;  ///< Below it handing over costs more.
  /// Reserved at a time, or twice the bytes of a larger record.
  static constexpr int64_t kReservedBytes = int64_t{64} << 20;

  uint64_t next_number() const { return next_number_; }
  int64_t bytes() const { return total_bytes_; }  ///< Of the records visited and appended.

 private:
  void open_segment();
  bool cut_off();
  void note_appended(const Record& record);
  bool is_reserved(int64_t bytes) const;
  void reserve(int64_t end, int64_t bytes);
  void give_back();
  void write_beside();
  [[noreturn]] void break_off(const std::string& path, int error);

  std::string folder_;
  std::string path_;
  Fd file_;
  WriteBehind write_behind_;
  uint64_t next_number_ = 1;
  uint64_t synced_ = 0;  // The last record that sync() covered; 0: none.
  std::string cut_off_text_;
  int64_t segment_bytes_ = 0;
  int64_t total_bytes_ = 0;
  bool is_torn_ = false;  // Half a record lies behind the last one.
  std::string broken_;    // Why; "" if it is not.

  // A record between begin_append and finish_append. While there is one it and the three below are
  // the other thread's.
  struct Beside {
    Record record;
    uint64_t synced = 0;
    int error = 0;
  };
  std::optional<Beside> beside_;
  bool can_reserve_ = false;
  int64_t reserved_ = 0;      // The file's bytes before this one have their place on the disk.
  int64_t reserve_from_ = 0;  // No try before the file has this length: the last one failed.
  SideTask writer_;           // The last: it ends before what it uses.
};

/// Writes `records` to a file of the same form.
/// Errors: c10::ValueError that names the file and a record of 4 GiB or more, before anything is
///         written; as write_atomically.
void write_records(const std::string& path, std::span<const Record> records);
/// Reads one, or no more of it than its first `most` records.
/// Errors: ConfigError that names file and offset: damage, or that its end is missing.
void read_records(const std::string& path, const std::function<void(const Record&)>& visit,
                  size_t most = SIZE_MAX);

}  // namespace cohort::ps
