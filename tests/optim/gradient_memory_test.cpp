// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/gradient_memory.h"

#include <gtest/gtest.h>
#include <optional>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace cohort::optim {
namespace gradient_memory_test {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// weight * x, whose backward takes what is offered.
struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weight, double x) {
    context->saved_data["x"] = x;
    context->saved_data["weight"] =
        static_cast<int64_t>(reinterpret_cast<intptr_t>(weight.unsafeGetTensorImpl()));
    return weight * x;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto key = static_cast<intptr_t>(context->saved_data["weight"].toInt());
    const at::Tensor gradient = grads[0] * context->saved_data["x"].toDouble();
    const at::Tensor memory = take_gradient_memory(reinterpret_cast<const at::TensorImpl*>(key),
                                                   gradient.sizes(), gradient.scalar_type());
    if (!memory.defined()) return {gradient, at::Tensor()};
    return {memory.copy_(gradient), at::Tensor()};
  }
};

class GradientMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    offers_.emplace();
    offers_->offer(weight_, [this] { return at::empty({0}).set_(bucket_.storage(), 2, {3}, {1}); });
  }
  bool has(const at::Tensor& gradient) const {
    return gradient.const_data_ptr() == bucket_.const_data_ptr<float>() + 2;
  }
  at::Tensor loss(double x) const { return Scaled::apply(weight_, x).sum(); }

  const at::Tensor weight_ = at::ones({3}).requires_grad_(true);
  const at::Tensor bucket_ = at::full({6}, -1.0F);
  std::optional<GradientMemory> offers_;
};

TEST_F(GradientMemoryTest, AGradientIsWrittenWhereItIsWanted) {
  loss(5).backward();
  EXPECT_TRUE(has(weight_.grad()));
  EXPECT_TRUE(at::equal(weight_.grad(), at::full({3}, 5.0F)));
  EXPECT_TRUE(at::equal(bucket_, at::tensor({-1.F, -1.F, 5.F, 5.F, 5.F, -1.F})));
  weight_.mutable_grad().reset();
  loss(7).backward();
  EXPECT_TRUE(has(weight_.grad())) << "in the next step, too";
}

TEST_F(GradientMemoryTest, AGradientThatIsThereIsAddedTo) {
  loss(5).backward();
  loss(7).backward();
  EXPECT_TRUE(has(weight_.grad()));
  EXPECT_TRUE(at::equal(weight_.grad(), at::full({3}, 12.0F)));
}

TEST_F(GradientMemoryTest, TwoUsesInAGraphAreSummed) {
  (loss(5) + loss(7)).backward();
  EXPECT_TRUE(at::equal(weight_.grad(), at::full({3}, 12.0F)));
}

// Its results are the caller's, and the next backward writes into the memory.
TEST_F(GradientMemoryTest, TheResultsOfGradLieElsewhere) {
  const at::Tensor gradient = torch::autograd::grad({loss(5)}, {weight_})[0];
  EXPECT_FALSE(has(gradient));
  loss(7).backward();
  EXPECT_TRUE(at::equal(gradient, at::full({3}, 5.0F)));
}

TEST_F(GradientMemoryTest, WhatSomebodyKeepsIsNotWrittenOver) {
  at::Tensor kept;
  weight_.register_hook([&kept](const at::Tensor& gradient) {
    if (!kept.defined()) kept = gradient;
  });
  loss(5).backward();
  weight_.mutable_grad().reset();
  loss(7).backward();
  EXPECT_TRUE(at::equal(weight_.grad(), at::full({3}, 7.0F)));
  EXPECT_TRUE(at::equal(kept, at::full({3}, 5.0F)));
}

TEST_F(GradientMemoryTest, AnOfferOfAnotherFormIsNotTaken) {
  for (const at::Tensor& memory :
       {at::full({3}, -1, at::kDouble), at::full({4}, -1.0F), at::full({6}, -1.0F)}) {
    offers_->offer(weight_, [&] {
      return memory.numel() == 6 ? at::empty({0}).set_(memory.storage(), 0, {3}, {2}) : memory;
    });
    loss(7).backward();
    EXPECT_TRUE(at::equal(weight_.grad(), at::full({3}, 7.0F)));
    EXPECT_TRUE(at::equal(memory, at::full_like(memory, -1))) << "it was written to";
    weight_.mutable_grad().reset();
  }
}

TEST_F(GradientMemoryTest, AnOfferEndsWithItsOwner) {
  offers_.reset();
  loss(5).backward();
  EXPECT_FALSE(has(weight_.grad()));
}

TEST(GradientMemoryOutsideTest, NothingIsTakenOutsideABackward) {
  const at::Tensor weight = at::ones({3}).requires_grad_(true);
  GradientMemory offers;
  offers.offer(weight, [] { return at::empty({3}); });
  EXPECT_FALSE(take_gradient_memory(weight.unsafeGetTensorImpl(), {3}, at::kFloat).defined());
}

}  // namespace gradient_memory_test
}  // namespace cohort::optim
