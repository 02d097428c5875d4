// SPDX-License-Identifier: Apache-2.0
// The outermost frame of every program: exceptions become one line and a stable exit code.
#pragma once
#include <functional>
#include <string>

namespace cohort {

/// Exit codes of all programs (a signal's death is 128 + n, as the shell counts it).
enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,   ///< Run-time failure.
  kExitUsage = 2,     ///< Bad flag, file or environment: ConfigError.
  kExitLostPeer = 3,  ///< PeerError and other c10::DistError.
  kExitStopped = 4,   ///< Stopped by request, with a checkpoint saved.
};

/// Runs `body` and returns its result, or the exit code of the exception that left it.
///
/// An exception is written to stderr as one line, "<program>: error: <text>" ("[rank r/W] " before
/// it when RANK and WORLD_SIZE are set), and to the file named by COHORT_ERROR_FILE, where a
/// launcher asked for one: JSON {"rank", "exit_code", "message", "stack", "time"}, the stack one
/// frame a line, innermost first; empty where the exception carries none (c10's carry one). The
/// file is written for kExitStopped, too. It tells the launcher that the exit code has the meaning
/// above.
///
/// A crash (SIGSEGV, SIGABRT and the like) writes its innermost frames to stderr before it ends the
/// program. A file that grows beyond the process's limit (RLIMIT_FSIZE) is an error of the write,
/// not the end of the program.
///
/// Descriptors 0 to 2 that are closed are opened first, by open_standard_descriptors().
int run_program(const std::string& program, const std::function<int()>& body);

/// Opens those of the descriptors 0, 1 and 2 that are closed (`2>&-`), so that no file of the
/// program gets their number, and with it what the program prints. Reading from them and writing
/// to them fails with EBADF, as it does where they are closed.
void open_standard_descriptors();

}  // namespace cohort
