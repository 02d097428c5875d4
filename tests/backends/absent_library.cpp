// SPDX-License-Identifier: Apache-2.0
// A library that libcohort_bad_dependency.so needs and the dynamic loader cannot find.
int cohort_test_absent() {
  return 1;
}
