// SPDX-License-Identifier: Apache-2.0
#include <ATen/record_function.h>
#include <map>
#include <optional>
#include <thread>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include "cohort/base/trace_page.h"
#include "cohort/comm/backend.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/names_difference.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace ddp_options_test {

using comm::ProcessGroup;
using parallel::BucketLayout;
using parallel::DistributedDataParallelOptions;
using test::batch_of;
using test::Branches;
using test::Ddp;
using test::loss_of;

std::vector<at::Tensor> mean_gradients(int world_size, bool use_extra = true, int step = 0) {
  Branches reference;
  return test::expected_gradients(reference, world_size, [&](Branches& model, int rank) {
    return loss_of(model->forward(batch_of(rank, step), use_extra));
  });
}

// Another device's backend, which no test calls.
class MetaBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "meta_only"; }
  void setTimeout(std::chrono::milliseconds) override {}
};

// PyTorch has no backend for the tensors then; Gloo, which a group always has, must not step in unasked.
TEST(DdpOptionsTest, AModelThatTheGroupsBackendDoesNotServeIsRefused) {
  comm::register_backend(
      "meta_only",
      {.device = c10::DeviceType::Meta, .make = [](const comm::BackendRequest& request) {
         return c10::make_intrusive<MetaBackend>(request.rank, request.world_size);
       }});
  ProcessGroup group(comm::RankInfo{}, {.backend = "meta_only"});
  Branches model;
  test::expect_error<c10::ValueError>([&] { Ddp ddp(model, group); },
                                      "is on the CPU, which the group's backend meta_only does not "
                                      "serve: move the model, or make the group with a "
                                      "backend of CPU tensors (shm, gloo)");
  test::expect_error<c10::ValueError>(
      [&] { parallel::FullyShardedDataParallel<Branches> sharded(model, group); },
      "which the group's backend meta_only");
  ProcessGroup gloo(comm::RankInfo{}, {});
  Ddp ddp(model, gloo);
  EXPECT_NO_THROW(loss_of(ddp(batch_of(0))).backward());
}

TEST(DdpOptionsTest, UnusedParametersAreNamedAtOnceAndTheGroupGoesOn) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.bucket_cap_mb_list = {1e-6}});
    test::expect_error<c10::ValueError>(
        [&] { loss_of(ddp(batch_of(0), false)).backward(); },
        "rank " + std::to_string(group.rank()) +
            ": backward made no gradient for extra.weight, extra.bias;");
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_gradients(model, mean_gradients(2));
  });
}

TEST(DdpOptionsTest, AfterABackwardThatDidNotPassTheOutputsTheNextForwardNamesThem) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    ddp(batch_of(0));
    loss_of(model->forward(batch_of(0), false)).backward();
    test::expect_error<c10::ValueError>([&] { ddp(batch_of(0)); },
                                        "no gradient for extra.weight, extra.bias;");
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_gradients(model, mean_gradients(2));
  });
}

TEST(DdpOptionsTest, ARankAloneInLeavingOutParametersNamesThemAndTheOthersLoseIt) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    loss_of(ddp(batch_of(0), group.rank() == 0)).backward();
  });
  EXPECT_EQ(ends[0].exit_code, 3) << ends[0].output;
  EXPECT_EQ(ends[1].exit_code, 1) << ends[1].output;
  EXPECT_NE(ends[1].output.find("rank 1: backward made no gradient for extra.weight, extra.bias"),
            std::string::npos);
}

// As calls that do not match anywhere: within some three seconds, long before the timeout.
TEST(DdpOptionsTest, ARankThatCallsAnotherCollectiveThanBackwardIsNamed) {
  const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    loss_of(ddp(batch_of(0))).backward();
    const at::Tensor loss = loss_of(ddp(batch_of(1)));
    if (group.rank() == 1) return group.barrier("skipped the step");
    loss.backward();
    group.barrier("after the step");
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 3);
    EXPECT_TRUE(test::names_difference(end.output, 3, 1,
                                       "barrier \"skipped the step\" at ddp_options_test.cpp",
                                       "all_reduce of gradients"))
        << end.output;
  }
}

// Its reduction counts among the collectives as those of the other ranks, which come to the barrier
// while it is late: they wait for longer than it takes to compare.
TEST(DdpOptionsTest, ARankWhoseBackwardThrewAtItsEndStaysInStep) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    const at::Tensor leaf = batch_of(group.rank()).requires_grad_();
    const at::Tensor input = leaf * 1;  // whose gradient comes after those of all parameters
    if (group.rank() == 1)
      leaf.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "planted"); });
    if (group.rank() == 0) {
      loss_of(ddp(input)).backward();
    } else {
      test::expect_error<c10::Error>([&] { loss_of(ddp(input)).backward(); }, "planted");
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
    group.barrier("after the step");
    if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(4));
    EXPECT_EQ(group.all_reduce_sum(1), 2);
  });
}

TEST(DdpOptionsTest, AForwardWithoutBackwardIsNoError) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    ddp(batch_of(0));
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_gradients(model, mean_gradients(2));
  });
}

TEST(DdpOptionsTest, FindUnusedLetsOneRankLeaveOutParameters) {
  test::ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.find_unused_parameters = true});
    Branches reference;
    const auto expected = test::expected_gradients(reference, 3, [](Branches& each, int rank) {
      return loss_of(each->forward(batch_of(rank), rank == 1));
    });
    loss_of(ddp(batch_of(group.rank()), group.rank() == 1)).backward();
    test::expect_gradients(model, expected);
  });
}

TEST(DdpOptionsTest, FindUnusedLeavesTheGradientOfWhatNobodyUsesUndefined) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step), false)).backward();
      EXPECT_FALSE(model->extra->weight.grad().defined());
      test::expect_gradients(model, mean_gradients(2, false, step));
    }
  });
}

// A module whose outputs sit in every kind of container; the loss uses one of them.
struct Nested {
  at::Tensor scores;
  std::vector<std::optional<at::Tensor>> states;
  std::map<std::string, std::tuple<at::Tensor, int>> named;
};
template <class Visit>
void visit_tensors(Nested& value, Visit&& visit) {
  visit(value.scores);
  visit(value.states);
  visit(value.named);
}
struct NestedNetImpl : torch::nn::Module {
  NestedNetImpl() {
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(4, 4));
    register_module("layers", layers);
    to(at::kDouble);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(0.25);
  }
  at::Tensor layer(size_t i, const at::Tensor& x) {
    return layers[i]->as<torch::nn::Linear>()->forward(x);
  }
  Nested forward(const at::Tensor& x) {
    return {layer(0, x),
            {layer(1, x), std::nullopt},
            {{"a", {layer(2, x), 1}}, {"b", {layer(3, x), 2}}}};
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(NestedNet);

TEST(DdpOptionsTest, OutputsThatTheLossLeavesOutAreFoundInsideAnyContainer) {
  test::ranks(2, [](const ProcessGroup& group) {
    NestedNet net;
    parallel::DistributedDataParallel<NestedNet> ddp(net, group, {.find_unused_parameters = true});
    for (int used = 0; used < 3; ++used) {
      net->zero_grad();
      Nested out = ddp(batch_of(group.rank()));
      const at::Tensor loss = used == 0   ? out.scores.sum()
                              : used == 1 ? out.states[0]->sum()
                                          : std::get<0>(out.named.at("b")).sum();
      loss.backward();
      for (int i = 0; i < 4; ++i) {
        const at::Tensor& weight =
            net->layers[static_cast<size_t>(i)]->as<torch::nn::Linear>()->weight;
        EXPECT_EQ(weight.grad().defined(), i == (used == 2 ? 3 : used)) << "output " << i;
      }
    }
  });
}

// Recomputes a layer in its backward, in a nested backward, which gives the layer's parameters
// a gradient each time.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Context = torch::autograd::AutogradContext;
  static at::Tensor forward(Context* context, const at::Tensor& x, torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return layer->forward(x);
  }
  static torch::autograd::variable_list backward(Context* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::AutoGradMode grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

// Branches without its extra branch.
struct RecomputingImpl : test::BranchesImpl {
  at::Tensor forward(const at::Tensor& x) {
    const auto h = at::tanh(Recomputed::apply(at::tanh(first(x)), shared.get()));
    return last(Recomputed::apply(h, shared.get()));
  }
};
TORCH_MODULE(Recomputing);

TEST(DdpOptionsTest, StaticGraphAveragesUnusedAndReusedParameters) {
  test::ranks(2, [](const ProcessGroup& group) {
    Recomputing model;
    Branches same(std::static_pointer_cast<test::BranchesImpl>(model.ptr()));
    parallel::DistributedDataParallel<Recomputing> ddp(
        model, group, {.bucket_cap_mb_list = {1e-4}, .static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      test::expect_gradients(same, mean_gradients(2, false, step));
    }
  });
}

TEST(DdpOptionsTest, StaticGraphAveragesWhatWasAccumulatedFromTheFirstStepOn) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.bucket_cap_mb_list = {1e-4}, .static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      std::optional<parallel::NoSync> guard;
      guard.emplace(ddp.no_sync());  // Moved: the one that is left empty ends nothing.
      loss_of(ddp(batch_of(group.rank(), 2 * step))).backward();
      guard.reset();
      loss_of(ddp(batch_of(group.rank(), 2 * step + 1))).backward();
      auto expected = mean_gradients(2, true, 2 * step);
      const auto more = mean_gradients(2, true, 2 * step + 1);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] = expected[i] + more[i];
      test::expect_gradients(model, expected);
    }
  });
}

TEST(DdpOptionsTest, StaticGraphAveragesWhenTheLossLeavesOutAnOutput) {
  test::ranks(2, [](const ProcessGroup& group) {
    NestedNet net;
    parallel::DistributedDataParallel<NestedNet> ddp(net, group, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(batch_of(group.rank(), step)).scores.sum().backward();
      // Each row of the weight has the sum of the inputs.
      const at::Tensor mean = (batch_of(0, step) + batch_of(1, step)).sum(0) / 2;
      test::expect_near(net->layers[0]->as<torch::nn::Linear>()->weight.grad(), mean.expand({4, 4}),
                        "step " + std::to_string(step));
      EXPECT_FALSE(net->layers[1]->as<torch::nn::Linear>()->weight.grad().defined());
    }
  });
}

TEST(DdpOptionsTest, StaticGraphNamesWhatALaterStepLeavesOutAndTheGroupGoesOn) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    {
      Ddp ddp(model, group, {.bucket_cap_mb_list = {1e-6}, .static_graph = true});
      loss_of(ddp(batch_of(group.rank()))).backward();
      test::expect_error<c10::ValueError>(
          [&] { loss_of(ddp(batch_of(group.rank()), false)).backward(); },
          "backward made no gradient for extra.weight, extra.bias;");
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank(), 1))).backward();
      test::expect_gradients(model, mean_gradients(2, true, 1));
    }
    Ddp ddp(model, group, {.static_graph = true});
    loss_of(ddp(batch_of(0), false)).backward();
    ddp(batch_of(0), false);
    model->first(batch_of(0)).sum().backward();
    test::expect_error<c10::ValueError>(
        [&] { ddp(batch_of(0), false); },
        "no gradient for shared.weight, shared.bias, last.weight, last.bias;");
  });
}

TEST(DdpOptionsTest, StaticGraphTellsHooksWhichBucketTheyGet) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.bucket_cap_mb_list = {1e-6}, .static_graph = true});
    std::vector<int64_t> order;
    ddp.register_comm_hook([&](const ProcessGroup& peers, const parallel::Bucket& bucket) {
      const std::string name = ddp.bucket_layout().at(static_cast<size_t>(bucket.index)).at(0);
      EXPECT_TRUE(bucket.parameters.at(0).is_same(model->named_parameters()[name])) << name;
      EXPECT_EQ(bucket.gradients.at(0).sizes(), bucket.parameters[0].sizes()) << name;
      EXPECT_EQ(bucket.is_last, bucket.index == 7);
      order.push_back(bucket.index);
      return parallel::start_all_reduce(peers, bucket.buffer.div_(peers.size()));
    });
    for (int step = 0; step < 2; ++step) {
      order.clear();
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
      test::expect_gradients(model, mean_gradients(2, true, step));
    }
  });
}

TEST(DdpOptionsTest, AfterABackwardThatThrewTheGroupGoesOn) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const DistributedDataParallelOptions& options :
         {DistributedDataParallelOptions{.bucket_cap_mb_list = {1e-6}},
          DistributedDataParallelOptions{.bucket_cap_mb_list = {1e-6},
          .find_unused_parameters = true},
          DistributedDataParallelOptions{.bucket_cap_mb_list = {1e-6}, .static_graph = true}}) {
      Branches model;
      Ddp ddp(model, group, options);
      bool broken = false;
      model->first->weight.register_hook([&](const at::Tensor& gradient) {
        TORCH_CHECK_VALUE(!broken, "the gradient is broken");
        return gradient;
      });
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        broken = step % 2 == 0;
        const at::Tensor loss = loss_of(ddp(batch_of(group.rank(), step)));
        if (broken) {
          test::expect_error<c10::ValueError>([&] { loss.backward(); }, "the gradient is broken");
        } else {
          loss.backward();
          test::expect_gradients(model, mean_gradients(2, true, step));
        }
      }
    }
  });
}

TEST(DdpOptionsTest, SkippedBucketsAreNotSent) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool skip : {false, true}) {
      Branches model;
      Ddp ddp(model, group,
              {.bucket_cap_mb_list = {1e-6},
               .find_unused_parameters = true,
               .skip_all_reduce_unused_params = skip});
      int sent = 0;
      ddp.register_comm_hook([&sent](const ProcessGroup& peers, parallel::Bucket bucket) {
        ++sent;
        return parallel::start_all_reduce(peers, bucket.buffer.div_(peers.size()));
      });
      loss_of(ddp(batch_of(group.rank()), false)).backward();
      EXPECT_EQ(ddp.num_buckets(), 8) << "one parameter each";
      EXPECT_EQ(sent, skip ? 6 : 8) << "extra's weight and bias are unused";
      test::expect_gradients(model, mean_gradients(2, false));
    }
  });
}

// The unused ones are last: a hook that counts backwards by their last bucket counts every one.
TEST(DdpOptionsTest, ABucketIsTheLastOneThatIsSent) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool skip : {false, true}) {
      Branches model;
      Ddp ddp(model, group,
              {.find_unused_parameters = true,
               .skip_all_reduce_unused_params = skip,
               .bucket_layout = {{"first.weight", "first.bias", "shared.weight", "shared.bias"},
                                 {"last.weight", "last.bias"},
                                 {"extra.weight"},
                                 {"extra.bias"}}});
      std::vector<int64_t> last;
      ddp.register_comm_hook([&last](const ProcessGroup& peers, parallel::Bucket bucket) {
        if (bucket.is_last) last.push_back(bucket.index);
        return parallel::start_all_reduce(peers, bucket.buffer.div_(peers.size()));
      });
      for (const bool use_extra : {false, true, false}) {
        model->zero_grad();
        loss_of(ddp(batch_of(group.rank()), use_extra)).backward();
      }
      EXPECT_EQ(last, skip ? (std::vector<int64_t>{1, 3, 1}) : (std::vector<int64_t>{3, 3, 3}));
    }
  });
}

TEST(DdpOptionsTest, SeveralForwardsBeforeOneBackward) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    Branches reference;
    const auto expected = test::expected_gradients(reference, 2, [](Branches& each, int rank) {
      return loss_of(each->forward(batch_of(rank))) + loss_of(each->forward(batch_of(rank, 1)));
    });
    const auto one = ddp(batch_of(group.rank()));
    const auto two = ddp(batch_of(group.rank(), 1));
    (loss_of(one) + loss_of(two)).backward();
    test::expect_gradients(model, expected);
  });
}

TEST(DdpOptionsTest, FrozenParametersStayOut) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    model->first->weight.set_requires_grad(false);
    Ddp ddp(model, group);
    loss_of(ddp(batch_of(group.rank()))).backward();
    auto expected = mean_gradients(2);
    expected[0] = at::Tensor();
    test::expect_gradients(model, expected);
    for (const auto& bucket : ddp.bucket_layout()) {
      for (const auto& name : bucket) EXPECT_NE(name, "first.weight");
    }
  });
}

TEST(DdpOptionsTest, AParameterThatIsThawedAfterwardsIsRefused) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    model->first->weight.set_requires_grad(false);
    Ddp ddp(model, group);
    loss_of(ddp(batch_of(group.rank()))).backward();
    model->first->weight.set_requires_grad(true);
    test::expect_error<c10::ValueError>([&] { ddp(batch_of(group.rank())); },
                                        "first.weight requires a gradient, but was frozen when");
    const at::NoGradGuard no_grad;
    ddp(batch_of(group.rank()));
  });
}

// The backward within no_sync takes the averaging, so the earlier forward's own is refused.
TEST(DdpOptionsTest, ABackwardWithinNoSyncDoesNotStandForThatOfAForwardBefore) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    const at::Tensor before = loss_of(ddp(batch_of(group.rank())));
    {
      const auto local = ddp.no_sync();
      loss_of(ddp(batch_of(group.rank(), 1))).backward();
    }
    test::expect_error<c10::ValueError>([&] { before.backward(); },
                                        "got a gradient that is not averaged");
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank(), 2))).backward();
    test::expect_gradients(model, mean_gradients(2, true, 2));
  });
}

// As an auxiliary loss of the module's own.
TEST(DdpOptionsTest, ALossBesideTheOutputsWithinNoSyncAccumulatesToo) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    loss_of(ddp(batch_of(group.rank()))).backward();
    const auto local = ddp.no_sync();
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank(), 1)));
    const at::Tensor before = model->first->weight.grad().clone();
    model->first(batch_of(0)).sum().backward();
    EXPECT_FALSE(model->first->weight.grad().equal(before));
    loss.backward();
  });
}

TEST(DdpOptionsTest, ABackwardAfterTheEndOfTheWrapperIsRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    std::optional<Ddp> ddp;
    ddp.emplace(model, group);
    const at::Tensor loss = loss_of((*ddp)(batch_of(group.rank())));
    ddp.reset();
    test::expect_error<c10::Error>([&] { loss.backward(); },
                                   "a backward after the end of its DistributedDataParallel");
  });
}

TEST(DdpOptionsTest, GradientsOfGradientsAreRefused) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    test::expect_error<c10::NotImplementedError>(
        [&] { loss_of(ddp(batch_of(0))).backward({}, true, /*create_graph=*/true); },
        "create_graph");
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_gradients(model, mean_gradients(2));
    const auto guard = ddp.no_sync();
    loss_of(ddp(batch_of(0))).backward({}, true, /*create_graph=*/true);  // nothing would be sent
    model->zero_grad();
  });
}

TEST(DdpOptionsTest, SparseGradientsOfEmbeddings) {
  test::ranks(3, [](const ProcessGroup& group) {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).sparse(true)),
                              torch::nn::Linear(4, 2));
    torch::nn::Embedding reference(torch::nn::EmbeddingOptions(9, 4));
    net->to(at::kDouble);
    reference->to(at::kDouble);
    const auto ids = [](int rank) { return at::arange(3 + rank).mul(2 + rank).remainder(9); };
    parallel::DistributedDataParallel<torch::nn::Sequential> ddp(net, group);
    reference->weight.set_data(net->at<torch::nn::EmbeddingImpl>(0).weight.detach().clone());
    auto& linear = net->at<torch::nn::LinearImpl>(1);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      reference->zero_grad();
      ddp(ids(group.rank())).pow(2).sum().backward();
      for (int rank = 0; rank < 3; ++rank) {
        const at::Tensor out =
            at::linear(reference(ids(rank)), linear.weight.detach(), linear.bias.detach());
        (out.pow(2).sum() / 3).backward();
      }
      const at::Tensor gradient = net->at<torch::nn::EmbeddingImpl>(0).weight.grad();
      ASSERT_TRUE(gradient.is_sparse());
      test::expect_near(gradient.to_dense(), reference->weight.grad(), "embedding");
    }
  });
}

TEST(DdpOptionsTest, SparseGradientsOfEmbeddingBags) {
  test::ranks(2, [](const ProcessGroup& group) {
    torch::nn::EmbeddingBag bag(
        torch::nn::EmbeddingBagOptions(5, 3).sparse(true).mode(torch::kSum));
    parallel::DistributedDataParallel<torch::nn::EmbeddingBag> ddp(bag, group);
    ddp(at::tensor({int64_t{group.rank()}, int64_t{4}}).view({1, 2})).sum().backward();
    const at::Tensor expected = at::zeros({5, 3});
    expected[0].fill_(0.5);
    expected[1].fill_(0.5);
    expected[4].fill_(1);
    EXPECT_TRUE(bag->weight.grad().to_dense().equal(expected));
  });
}

TEST(DdpOptionsTest, CapsCutBucketsInTheOrderOfSending) {
  test::ranks(2, [](const ProcessGroup& group) {
    constexpr double kByte = 1.0 / (1 << 20);
    // Bytes: first 4*6*8 + 48, shared and extra 6*6*8 + 48, last 2*6*8 + 16.
    Branches model;
    Ddp two(model, group, {.bucket_cap_mb = 600 * kByte, .first_bucket_mb = 16 * kByte});
    // A bucket is closed once it has reached its cap.
    const BucketLayout expected{
        {"last.bias"},
        {"last.weight", "extra.bias", "extra.weight", "shared.bias", "shared.weight"},
        {"first.bias", "first.weight"}};
    EXPECT_EQ(two.bucket_layout(), expected);
    Branches other;
    Ddp listed(other, group, {.bucket_cap_mb_list = {16 * kByte, 16 * kByte, 1}});
    EXPECT_EQ(listed.bucket_layout()[0], std::vector<std::string>{"last.bias"});
    EXPECT_EQ(listed.bucket_layout()[1], std::vector<std::string>{"last.weight"});
    EXPECT_EQ(listed.num_buckets(), 3);
    EXPECT_EQ(listed.logging_data().bucket_sizes_bytes[1], 2 * 6 * 8);
  });
}

TEST(DdpOptionsTest, BucketsFollowTheForwardOrderAndALargeParameterHasOneOfItsOwn) {
  test::ranks(2, [](const ProcessGroup& group) {
    constexpr double kByte = 1.0 / (1 << 20);
    Branches model;
    Ddp ddp(model, group,
            {.bucket_cap_mb_list = {250 * kByte},
             .forward_order = {"extra.weight", "first.weight", "first.bias", "last.weight",
                               "last.bias", "extra.bias", "shared.weight", "shared.bias"}});
    const BucketLayout expected{
        {"shared.bias"},
        {"shared.weight"},
        {"extra.bias", "last.bias", "last.weight", "first.bias", "first.weight"},
        {"extra.weight"}};
    EXPECT_EQ(ddp.bucket_layout(), expected);
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_gradients(model, mean_gradients(2));
  });
}

TEST(DdpOptionsTest, GradientsAreViewsOfBucketsOnlyOnRequest) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool views : {false, true}) {
      Branches model;
      Ddp ddp(model, group, {.gradient_as_bucket_view = views});
      loss_of(ddp(batch_of(group.rank()))).backward();
      EXPECT_EQ(model->first->weight.grad().is_alias_of(model->first->bias.grad()), views);
      test::expect_gradients(model, mean_gradients(2));
    }
  });
}

TEST(DdpOptionsTest, LibtorchsOptimizersTakeGradientsThatAreViews) {
  test::ranks(2, [](const ProcessGroup& group) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool views : {false, true}) {
      for (const bool set_to_none : {false, true}) {
        Branches model;
        Ddp ddp(model, group, {.gradient_as_bucket_view = views});
        torch::optim::SGD sgd(ddp.parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          {
            const auto local = ddp.no_sync();
            loss_of(ddp(batch_of(group.rank(), step))).backward();
          }
          loss_of(ddp(batch_of(group.rank(), step + 4))).backward();
          sgd.step();
          sgd.zero_grad(set_to_none);
        }
        results.push_back(model->parameters());
      }
    }
    for (const auto& result : results)
      for (size_t i = 0; i < result.size(); ++i)
        EXPECT_TRUE(result[i].equal(results.front()[i])) << i;
  });
}

TEST(DdpOptionsTest, WithoutInitSyncRanksKeepTheirState) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool sync : {false, true}) {
      Branches model;
      torch::NoGradGuard no_grad;
      model->first->bias.fill_(group.rank());
      const Ddp ddp(model, group, {.init_sync = sync});
      EXPECT_EQ(model->first->bias[0].item<double>(), sync ? 0 : group.rank());
    }
  });
}

TEST(DdpOptionsTest, BuffersStayWithTheirRankOnRequest) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool follow : {false, true}) {
      Branches model;
      Ddp ddp(model, group, {.broadcast_buffers = follow});
      model->calls.fill_(group.rank() + 5);
      loss_of(ddp(batch_of(0))).backward();
      EXPECT_EQ(model->calls.item<double>(), follow ? 5 : group.rank() + 5);
    }
  });
}

TEST(DdpOptionsTest, IgnoredTensorsAreLeftAlone) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    {
      // Of another shape on each rank: neither verified nor sent.
      torch::NoGradGuard no_grad;
      model->calls.set_data(at::full({1 + group.rank()}, group.rank(), at::kDouble));
      model->last->bias.set_data(at::full({2 - group.rank()}, group.rank(), at::kDouble));
    }
    Ddp ddp(model, group, {.ignored = {"last.bias", "calls"}});
    EXPECT_EQ(model->last->bias[0].item<double>(), group.rank());
    (ddp(batch_of(0)).sum() * (group.rank() + 1)).backward();
    EXPECT_EQ(model->calls[0].item<double>(), group.rank());
    EXPECT_EQ(model->last->bias.grad().sum().item<double>(), 6 * (group.rank() + 1))
        << "not averaged";
    test::expect_error<c10::ValueError>([&] { Ddp(model, group, {.ignored = {"nobody"}}); },
                                        "got nobody");
  });
}

// While it lives, notes each all-reduce that starts, and what is pushed.
class Starts {
 public:
  static constexpr char kAllReduce = 'r';
  Starts() {
    seen.clear();
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
          if (std::string(call.name()) == "c10d::allreduce_") seen.push_back(kAllReduce);
          return nullptr;
        }));
  }
  ~Starts() { at::removeCallback(handle_); }
  Starts(const Starts&) = delete;
  Starts& operator=(const Starts&) = delete;

  static inline std::string seen;

 private:
  at::CallbackHandle handle_ = 0;
};

TEST(DdpOptionsTest, DelayedParametersStartTogetherAfterTheTrigger) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    model->first->bias.set_requires_grad(false);
    Ddp ddp(model, group,
            {.bucket_cap_mb_list = {1e-6},
             .delay_all_reduce_named_params = {"last.weight", "extra.bias"},
             .param_to_hook_all_reduce = "first.weight"});
    model->first->weight.register_hook([](const at::Tensor& gradient) {
      Starts::seen.push_back('t');
      return gradient;
    });
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank())));
    const Starts starts;
    loss.backward();
    EXPECT_EQ(Starts::seen, "rrrrtrr")
        << "four buckets of one, the trigger, its bucket and the delayed ones";
    auto expected = mean_gradients(2);
    expected[1] = at::Tensor();
    test::expect_gradients(model, expected);
  });
}

TEST(DdpOptionsTest, DelayedParametersAreAveragedInOnePiece) {
  test::ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group,
            {.delay_all_reduce_named_params = {"last.weight", "extra.bias"},
             .param_to_hook_all_reduce = "first.weight"});
    for (const auto& bucket : ddp.bucket_layout()) {
      for (const auto& name : bucket) EXPECT_TRUE(name != "last.weight" && name != "extra.bias");
    }
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank(), step))).backward();
      test::expect_gradients(model, mean_gradients(3, true, step));
    }
    model->zero_grad();
    {
      const auto guard = ddp.no_sync();
      loss_of(ddp(batch_of(group.rank(), 0))).backward();
    }
    loss_of(ddp(batch_of(group.rank(), 1))).backward();
    auto expected = mean_gradients(3, true, 0);
    const auto more = mean_gradients(3, true, 1);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = expected[i] + more[i];
    test::expect_gradients(model, expected);
    test::expect_error<c10::ValueError>(
        [&] { Ddp(model, group, {.delay_all_reduce_named_params = {"last.weight"}}); },
        "expected both or neither");
  });
}

TEST(DdpOptionsTest, AChangedParameterIsNamed) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    model->extra->to(at::kFloat);
    test::expect_error<c10::ValueError>([&] { ddp(batch_of(0)); },
                                        "extra.weight: expected Double [6, 6] on cpu");
  });
}

TEST(DdpOptionsTest, DifferentOptionsAreNamedOnEveryRank) {
  const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
    Branches model;
    const Ddp ddp(model, group, {.static_graph = group.rank() == 2});
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 1);
    EXPECT_NE(end.output.find("rank 2 has static_graph 1 where rank 0 has static_graph 0"),
              std::string::npos)
        << end.output;
  }
}

TEST(DdpOptionsTest, OptionsThatDecideWhatTravelsMustAgree) {
  test::ranks(2, [](const ProcessGroup& group) {
    const bool other = group.rank() == 1;
    const auto refused = [&](const DistributedDataParallelOptions& options,
                             const std::string& part) {
      Branches model;
      test::expect_error<c10::ValueError>([&] { Ddp(model, group, options); }, part);
    };
    refused({.delay_all_reduce_named_params = {other ? "last.bias" : "last.weight"},
             .param_to_hook_all_reduce = "first.weight"},
            "rank 1 has delay_all_reduce_named_params last.bias where rank 0 has "
            "delay_all_reduce_named_params last.weight");
    refused({.delay_all_reduce_named_params = {"last.bias"},
             .param_to_hook_all_reduce = other ? "first.bias" : "first.weight"},
            "rank 1 has param_to_hook_all_reduce first.bias where");
    parallel::MixedPrecision low_precision;
    if (other) low_precision.param_dtype = at::kFloat;
    refused({.mixed_precision = low_precision},
            "rank 1 has mixed_precision.param_dtype Float where");
    parallel::MixedPrecision reduced;
    if (other) reduced.reduce_dtype = at::kFloat;
    refused({.mixed_precision = reduced}, "rank 1 has mixed_precision.reduce_dtype Float where");
    parallel::MixedPrecision cast;
    if (other) cast.buffer_dtype = at::kFloat;
    refused({.mixed_precision = cast}, "rank 1 has mixed_precision.buffer_dtype Float where");
    refused({.bucket_cap_mb_list = {other ? 1e-6 : 1}},
            "rank 1 has bucket 0 of last.bias where rank 0 has bucket 0 of last.bias last.weight");
  });
}

TEST(DdpOptionsTest, ContradictingOptionsAreRefused) {
  test::ranks(1, [](const ProcessGroup& group) {
    Branches model;
    const auto refused = [&](const DistributedDataParallelOptions& options,
                             const std::string& part) {
      test::expect_error<c10::ValueError>([&] { Ddp(model, group, options); }, part);
    };
    refused({.bucket_cap_mb = 0}, "bucket_cap_mb: expected more than 0");
    refused({.skip_all_reduce_unused_params = true}, "expected find_unused_parameters with it");
    refused({.find_unused_parameters = true,
             .static_graph = true,
             .skip_all_reduce_unused_params = true},
            "skip_all_reduce_unused_params: expected no static_graph with it");
    refused({.find_unused_parameters = true, .rebuild_buckets = true},
            "rebuild_buckets: expected no");
    refused({.find_unused_parameters = true,
             .delay_all_reduce_named_params = {"last.bias"},
             .param_to_hook_all_reduce = "first.weight"},
            "expected neither find_unused_parameters nor static_graph");
    refused({.static_graph = true,
             .delay_all_reduce_named_params = {"last.bias"},
             .param_to_hook_all_reduce = "first.weight"},
            "expected neither find_unused_parameters nor static_graph");
    refused({.mixed_precision = {.param_dtype = at::kInt}},
            "mixed_precision.param_dtype: expected a floating-point type, got Int");
    refused({.mixed_precision = {.reduce_dtype = at::kInt}},
            "mixed_precision.reduce_dtype: expected a floating-point type, got Int");
    refused({.mixed_precision = {.buffer_dtype = at::kLong}},
            "mixed_precision.buffer_dtype: expected a floating-point type, got Long");
    refused({.bucket_layout = {{"first.weight"}}}, "it lacks extra.bias");
    refused({.bucket_layout = {{"nobody"}}}, "got nobody twice, not of the model");
    refused({.forward_order = {"first.weight"}},
            "forward_order: expected each parameter of the model once, it lacks extra.bias");
    refused({.rebuild_buckets = true, .forward_order = {"first.weight"}},
            "forward_order: expected neither bucket_layout nor rebuild_buckets");
  });
}

// A communication hook: halves what travels. Gradients stay exact where they fit into float32.
parallel::TensorFuture send_float32(const ProcessGroup& group, const parallel::Bucket& bucket) {
  const at::Tensor small = bucket.buffer.div(group.size()).to(at::kFloat);
  return parallel::then(parallel::start_all_reduce(group, small),
                        [](const at::Tensor& sum) { return sum.to(at::kDouble); });
}

TEST(DdpOptionsTest, AHookCarriesTheGradients) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool views : {false, true}) {
      Branches model;
      Ddp ddp(model, group, {.bucket_cap_mb_list = {1e-6}, .gradient_as_bucket_view = views});
      std::vector<int64_t> order;
      ddp.register_comm_hook(
          [&](const ProcessGroup& peers, const parallel::Bucket& bucket) {
            order.push_back(bucket.index);
            EXPECT_EQ(bucket.is_last, bucket.index == 7);
            EXPECT_TRUE(bucket.gradients[0].sizes() == bucket.parameters[0].sizes());
            return send_float32(peers, bucket);
          },
          "float32");
      loss_of(ddp(batch_of(group.rank()))).backward();
      EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
      const auto expected = mean_gradients(2);
      size_t i = 0;
      for (const auto& item : model->named_parameters()) {
        // Two roundings to float32 and one sum: 3 x 6e-8 of the largest; not float64's digits.
        test::expect_near(item.value().grad(), expected[i], item.key(), 2e-7);
        EXPECT_FALSE(item.value().grad().equal(expected[i]))
            << item.key() << " did not pass the hook";
        ++i;
      }
      EXPECT_EQ(ddp.logging_data().comm_hook, "float32");
      test::expect_error<c10::ValueError>([&] { ddp.register_comm_hook(send_float32); },
                                          "float32 is there");
    }
  });
}

TEST(DdpOptionsTest, WhatAHookThrowsArrivesAndTheGroupGoesOn) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    bool broken = true;
    ddp.register_comm_hook([&](const ProcessGroup& peers, const parallel::Bucket& bucket) {
      TORCH_CHECK_VALUE(!broken, "hook is broken");
      return send_float32(peers, bucket);
    });
    test::expect_error<c10::ValueError>([&] { loss_of(ddp(batch_of(0))).backward(); },
                                        "hook is broken");
    broken = false;
    model->zero_grad();
    loss_of(ddp(batch_of(group.rank()))).backward();
    test::expect_near(model->first->weight.grad(), mean_gradients(2)[0], "first.weight", 2e-7);
  });
}

constexpr int64_t kForwardNs = 4'000'000;
constexpr int64_t kBackwardNs = 6'000'000;

void compute_for(int64_t nanoseconds) {
  for (const int64_t end = steady_now_ns() + nanoseconds; steady_now_ns() < end;) continue;
}

struct SlowBranchesImpl : test::BranchesImpl {
  at::Tensor forward(const at::Tensor& x) {
    compute_for(kForwardNs);
    return test::BranchesImpl::forward(x);
  }
};
TORCH_MODULE(SlowBranches);

TEST(DdpOptionsTest, TimesAreMeasured) {
  test::ranks(2, [](const ProcessGroup& group) {
    SlowBranches model;
    // The first layer's gradient is the last; all other buckets are under way before it.
    model->first->weight.register_hook([](const at::Tensor&) { compute_for(kBackwardNs); });
    parallel::DistributedDataParallel<SlowBranches> ddp(
        model, group, {.bucket_cap_mb_list = {1e-4}, .logging_sample_rate = 1});
    int64_t longest_forward = 0, longest_backward = 0;
    for (int step = 0; step < 13; ++step) {
      const int64_t start = steady_now_ns();
      const at::Tensor output = ddp(batch_of(group.rank(), step));
      const int64_t middle = steady_now_ns();
      loss_of(output).backward();
      longest_forward = std::max(longest_forward, steady_now_ns() - start);
      longest_backward = std::max(longest_backward, steady_now_ns() - middle);
    }
    const parallel::DdpLoggingData data = ddp.logging_data();
    EXPECT_GT(data.iteration, 10) << "the first 10 are sampled at any rate";
    EXPECT_EQ(data.num_parameter_tensors, 8);
    EXPECT_EQ(data.total_parameter_size_bytes, (30 + 42 + 42 + 14) * 8);
    EXPECT_EQ(data.bucket_sizes_bytes.size(), static_cast<size_t>(ddp.num_buckets()));
    EXPECT_FALSE(data.has_rebuilt_buckets);
    // Averages, each between what a step takes at least and what the longest one took. The engine's
    // forward ends where its backward begins.
    const auto expect_between = [](int64_t least, int64_t time, int64_t most, const char* name) {
      EXPECT_GE(time, least) << name;
      EXPECT_LE(time, most) << name;
    };
    expect_between(kForwardNs, data.forward_compute_time, longest_forward, "forward");
    expect_between(kBackwardNs, data.backward_compute_time, longest_backward, "backward");
    expect_between(kBackwardNs, data.backward_comm_time, longest_backward, "communication");
    expect_between(kBackwardNs, data.backward_compute_comm_overlap_time,
                   std::min(data.backward_compute_time, data.backward_comm_time), "overlap");
  });
}

// Layers used in another order than that of registration, float32, with enough terms that another
// cut of the buckets gives other bits on three ranks.
struct ShuffledImpl : torch::nn::Module {
  ShuffledImpl() {
    torch::manual_seed(3);
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(40, 40));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (const size_t i : {4, 1, 5, 0, 3, 2})
      x = at::tanh(layers[i]->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Shuffled);
using ShuffledDdp = parallel::DistributedDataParallel<Shuffled>;

void train(ShuffledDdp& ddp, int rank, int from, int to) {
  for (int step = from; step < to; ++step) {
    const at::Tensor x = at::arange(400).mul(1 + rank + 0.1 * step).sin().view({10, 40});
    ddp(x).pow(2).sum().backward();
    test::descend(*ddp.module(), 0.1);
  }
}

bool same_parameters(const Shuffled& a, const Shuffled& b) {
  const auto x = a->parameters();
  const auto y = b->parameters();
  for (size_t i = 0; i < x.size(); ++i) {
    if (!x[i].equal(y[i])) return false;
  }
  return true;
}

// Over shm sums are in the order of ranks, however buckets are cut.
const comm::ProcessGroupOptions kGloo{.backend = "gloo"};

// Trains 4 steps at once, and 2 + 2 with a new DDP in between that is given `layout_kept`; are they
// bit-equal?
bool resumed_equals_uninterrupted(const ProcessGroup& group, bool rebuild, bool layout_kept) {
  const DistributedDataParallelOptions options{.bucket_cap_mb_list = {0.01},
                                               .rebuild_buckets = rebuild};
  Shuffled whole;
  ShuffledDdp uninterrupted(whole, group, options);
  train(uninterrupted, group.rank(), 0, 4);
  Shuffled model;
  BucketLayout layout;
  {
    ShuffledDdp before(model, group, options);
    train(before, group.rank(), 0, 2);
    layout = before.bucket_layout();
    EXPECT_EQ(before.logging_data().has_rebuilt_buckets, rebuild);
  }
  DistributedDataParallelOptions resumed = options;
  if (layout_kept) {
    resumed.rebuild_buckets = false;
    resumed.bucket_layout = layout;
  }
  ShuffledDdp after(model, group, resumed);
  train(after, group.rank(), 2, 4);
  EXPECT_EQ(after.bucket_layout() == uninterrupted.bucket_layout(), true);
  return same_parameters(whole, model);
}

TEST(DdpOptionsTest, ResumedIsBitEqualWithTheFixedLayout) {
  test::ranks(
      3,
      [](const ProcessGroup& group) {
        EXPECT_TRUE(resumed_equals_uninterrupted(group, false, false));
      },
      kGloo);
}

TEST(DdpOptionsTest, ResumedIsBitEqualWithTheSavedLayoutOfRebuiltBuckets) {
  test::ranks(
      3,
      [](const ProcessGroup& group) {
        EXPECT_TRUE(resumed_equals_uninterrupted(group, true, true));
      },
      kGloo);
}

// Shows that the two tests above can fail.
TEST(DdpOptionsTest, ResumedDiffersWhenRebuiltBucketsAreForgotten) {
  test::ranks(
      3,
      [](const ProcessGroup& group) {
        EXPECT_FALSE(resumed_equals_uninterrupted(group, true, false));
      },
      kGloo);
}

TEST(DdpOptionsTest, RebuiltBucketsFollowTheOrderOfGradients) {
  test::ranks(2, [](const ProcessGroup& group) {
    Shuffled model;
    ShuffledDdp ddp(model, group, {.bucket_cap_mb_list = {0.005}, .rebuild_buckets = true});
    EXPECT_EQ(ddp.num_buckets(), 1);
    train(ddp, group.rank(), 0, 2);
    EXPECT_EQ(ddp.num_buckets(), 6);
    EXPECT_EQ(ddp.bucket_layout().front().front().substr(0, 9), "layers.2.");
    EXPECT_EQ(ddp.bucket_layout().back().front().substr(0, 9), "layers.4.");
  });
}

}  // namespace ddp_options_test
}  // namespace cohort
