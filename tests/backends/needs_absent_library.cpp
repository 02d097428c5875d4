// SPDX-License-Identifier: Apache-2.0
// A plug-in whose dependency is nowhere.
int cohort_test_absent();
extern "C" int cohort_test_needs_absent() {
  return cohort_test_absent();
}
