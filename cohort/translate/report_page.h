// SPDX-License-Identifier: Apache-2.0
// The fixed parts of a report. They are the files of cohort/translate/report, embedded at build time.
#pragma once

namespace cohort::translate {

/// HTML with placeholders: {{name}}, {{state}}, {{summary}}, {{body}}, {{style}}, {{script}}.
extern const char* const kReportPage;
extern const char* const kReportStyle;   ///< CSS; light or dark as the reader's system is.
extern const char* const kReportScript;  ///< Shows a chart's values under the pointer.

}  // namespace cohort::translate
