// SPDX-License-Identifier: Apache-2.0
// The trainers of a job, and the pushes of its open steps. Without a server.
#include "cohort/ps/server/membership.h"

#include <cstdint>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "cohort/ps/server/open_steps.h"

namespace cohort::ps {
namespace membership_test {

using Ids = std::vector<uint32_t>;

// Trainers 0 and 1, who joined before the first step.
Membership two_trainers(bool is_sync) {
  Membership members;
  members.set_expected(2);
  members.join(0, 7, 70, 0, is_sync);
  members.join(1, 7, 71, 0, is_sync);
  return members;
}

TEST(MembershipTest, AStepWaitsForTrainersThatHaveNotJoined) {
  Membership members;
  members.set_expected(2);
  EXPECT_EQ(members.missing(1), (Ids{0, 1}));
  EXPECT_EQ(members.find(1), nullptr);
  members.join(0, 1, 1, 0, true);
  members.push(0, 1);
  EXPECT_FALSE(members.have_pushed(1));
  EXPECT_EQ(members.missing(1), Ids{1});
  members.join(1, 1, 1, 0, true);
  members.push(1, 1);
  EXPECT_TRUE(members.have_pushed(1));
  EXPECT_EQ(members.missing(2), (Ids{0, 1}));
}

TEST(MembershipTest, AStepDoesNotWaitForATrainerThatHasLeft) {
  Membership members = two_trainers(true);
  members.push(0, 1);
  EXPECT_FALSE(members.have_pushed(1));
  members.leave(1);
  EXPECT_TRUE(members.have_pushed(1));
  EXPECT_FALSE(members.find(1)->is_member);
}

TEST(MembershipTest, ClosedStepsAreNotThoseOfATrainerThatComesBack) {
  Membership members = two_trainers(true);
  members.push(0, 1);
  members.push(1, 1);
  members.leave(1);
  for (uint64_t step = 2; step <= 5; ++step) members.push(0, step);
  members.join(1, 8, 72, 5, true);
  EXPECT_EQ(members.find(1)->joined_after, 5U);
  EXPECT_EQ(members.find(1)->last_sequence, 5U);
  EXPECT_EQ(members.missing(6), (Ids{0, 1}));
}

// Its place in the job is the one that the process before it had.
TEST(MembershipTest, ANewProcessOfAMemberContinuesItsPushes) {
  Membership members = two_trainers(true);
  members.push(1, 1);
  members.join(1, 9, 73, 0, true);
  EXPECT_EQ(members.find(1)->incarnation, 9U);
  EXPECT_EQ(members.find(1)->nonce, 73U);
  EXPECT_EQ(members.find(1)->last_sequence, 1U);
  EXPECT_EQ(members.missing(1), Ids{0});
}

TEST(MembershipTest, LeadsAreCountedFromTheSlowestMember) {
  Membership members = two_trainers(false);
  for (uint64_t push = 1; push <= 3; ++push) members.push(0, push);
  members.push(1, 1);
  EXPECT_EQ(members.lead_of(0), 2U);
  EXPECT_EQ(members.lead_of(1), 0U);
  EXPECT_EQ(members.slowest(), Ids{1});
  members.leave(1);
  EXPECT_EQ(members.lead_of(0), 0U);
  EXPECT_EQ(members.lead_of(1), 0U) << "not a member";
  EXPECT_EQ(members.slowest(), Ids{0});
  members.join(1, 8, 72, 0, false);
  EXPECT_EQ(members.find(1)->clock, 3U) << "the slowest clock when it joined";
  EXPECT_EQ(members.find(1)->last_sequence, 1U);
  EXPECT_EQ(members.lead_of(0), 0U);
}

std::shared_ptr<const Buffer> push_of(size_t bytes) {
  Buffer push(bytes);
  std::memset(push.data(), 0, bytes);
  return std::make_shared<const Buffer>(std::move(push));
}

TEST(OpenStepsTest, StepsAreTakenInOrderWithPushesInTheOrderOfTrainers) {
  OpenSteps steps;
  steps.add(2, 0, push_of(8));
  EXPECT_TRUE(steps.is_first(2));
  steps.add(1, 1, push_of(16));
  steps.add(1, 0, push_of(24));
  EXPECT_TRUE(steps.is_first(1));
  EXPECT_FALSE(steps.is_first(2));
  EXPECT_EQ(steps.bytes(), 48);
  const OpenSteps::Pushes first = steps.take_first();
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first.begin()->first, 0U);
  EXPECT_EQ(first.at(0)->size(), 24U);
  EXPECT_EQ(first.at(1)->size(), 16U);
  EXPECT_EQ(steps.bytes(), 8);
  EXPECT_TRUE(steps.is_first(2));
  steps.take_first();
  EXPECT_FALSE(steps.is_first(3));
  EXPECT_EQ(steps.bytes(), 0);
  EXPECT_TRUE(steps.steps().empty());
}

TEST(OpenStepsTest, TheFirstPushOfATrainerToAStepCounts) {
  OpenSteps steps;
  steps.add(1, 0, push_of(8));
  steps.add(1, 0, push_of(80));
  EXPECT_EQ(steps.bytes(), 8);
  EXPECT_EQ(steps.take_first().at(0)->size(), 8U);
}

}  // namespace membership_test
}  // namespace cohort::ps
