// Places where tests kill a server: the moments between two steps that must not be torn apart.
#pragma once

namespace cohort::ps {

/// Kills this process (SIGKILL) if COHORT_PS_KILL_POINT is "<name>:<n>" and this is the n-th time
/// that it comes by `name`; else costs one comparison.
void kill_point(const char* name);

}  // namespace cohort::ps
