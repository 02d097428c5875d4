// The unchanging parts of a report: its style and its script.
#pragma once

namespace cohort::translate {

extern const char* const kReportStyle;   ///< CSS; light or dark as the reader's system is.
extern const char* const kReportScript;  ///< Shows a chart's values under the pointer.

}  // namespace cohort::translate
