// `cohort run`: flags to options.
#pragma once

/// Reads the flags in argv[1..], runs the workers, and returns the job's exit code.
/// Errors: ConfigError.
int run_command(int argc, char** argv);
