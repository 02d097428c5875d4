// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels' arithmetic on the host: their threads one after another, in the same blocks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "cohort/nmt/kernels/cuda/arithmetic.h"
#include "cohort/nmt/kernels/cuda/attention.h"
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::test {

/// While this lives, tensors of `device` are computed as on CUDA, by loops over memory that the host
/// has `offset` bytes behind the tensors' addresses.
class HostLaunches {
 public:
  explicit HostLaunches(c10::DeviceType device = c10::DeviceType::CPU, std::ptrdiff_t offset = 0) {
    static constexpr nmt::CudaLaunches kLaunches{.drop = drop,
                                                 .relu_backward = relu_backward,
                                                 .softmax = softmax,
                                                 .softmax_backward = softmax_backward,
                                                 .has_attention = has_attention,
                                                 .attention = attention,
                                                 .attention_backward = attention_backward,
                                                 .cross_entropy = cross_entropy};
    state() = {.offset = offset};
    nmt::use_cuda_launches(&kLaunches, device);
  }
  ~HostLaunches() { nmt::use_cuda_launches(nullptr, c10::DeviceType::CPU); }
  HostLaunches(const HostLaunches&) = delete;
  HostLaunches& operator=(const HostLaunches&) = delete;

  int calls() const { return state().calls; }
  void* stream() const { return state().stream; }  ///< Of the last call.

 private:
  struct State {
    std::ptrdiff_t offset = 0;
    int calls = 0;
    void* stream = nullptr;
  };
  static State& state() {
    static State state;
    return state;
  }
  template <class T>
  static T* host(T* device) {
    return reinterpret_cast<T*>(reinterpret_cast<intptr_t>(device) + state().offset);
  }

  // As kernels.cu's BlockLanes and WarpLanes.
  template <int kCount = nmt::kLanes>
  struct Lanes {
    bool first() const { return true; }
    template <class Part, class Join>
    auto reduce(const Part& part, const Join& join) const {
      std::vector<decltype(part(0))> parts;
      for (int lane = 0; lane < kCount; ++lane) parts.push_back(part(lane));
      for (size_t half = kCount / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane)
          parts[lane] = join(parts[lane], parts[lane + half]);
      }
      return parts[0];
    }
    template <class Part>
    void for_each(const Part& part) const {
      for (int lane = 0; lane < kCount; ++lane) part(lane);
    }
  };

  template <class In, class Out>
  static void drop_all(const nmt::DropLaunch& launch) {
    for (int64_t first = 0; first < launch.count; first += nmt::kElements) {
      const auto* added = static_cast<const Out*>(launch.added);
      nmt::drop_elements(launch, static_cast<const In*>(launch.in) + first,
                         added == nullptr ? nullptr : added + first,
                         static_cast<Out*>(launch.out) + first, first,
                         static_cast<int>(std::min<int64_t>(nmt::kElements, launch.count - first)));
    }
  }
  static const char* drop(const nmt::DropLaunch& device, void* stream) {
    state() = {state().offset, state().calls + 1, stream};
    nmt::DropLaunch launch = device;
    launch.in = host(launch.in);
    if (launch.added != nullptr) launch.added = host(launch.added);
    launch.out = host(launch.out);
    const bool same = launch.in_type == launch.out_type;
    if (launch.in_type == nmt::ElementType::kFloat64) {
      drop_all<double, double>(launch);
    } else if (launch.in_type == nmt::ElementType::kBFloat16) {
      same ? drop_all<nmt::BFloat16Bits, nmt::BFloat16Bits>(launch)
           : drop_all<nmt::BFloat16Bits, float>(launch);
    } else if (same) {
      drop_all<float, float>(launch);
    } else {
      drop_all<float, nmt::BFloat16Bits>(launch);
    }
    return nullptr;
  }
  // Of a launch's element type: body(value of its class).
  template <class Body>
  static const char* for_type(nmt::ElementType type, void* stream, const Body& body) {
    state() = {state().offset, state().calls + 1, stream};
    if (type == nmt::ElementType::kFloat64) {
      body(double());
    } else if (type == nmt::ElementType::kBFloat16) {
      body(nmt::BFloat16Bits());
    } else {
      body(float());
    }
    return nullptr;
  }
  static const char* relu_backward(const nmt::ReluBackwardLaunch& device, void* stream) {
    nmt::ReluBackwardLaunch launch = device;
    launch.out = host(launch.out);
    launch.grad = host(launch.grad);
    launch.to = host(launch.to);
    return for_type(launch.type, stream, [&]<class T>(T) {
      for (int64_t first = 0; first < launch.count; first += nmt::kElements) {
        nmt::relu_backward_elements(
            launch, static_cast<const T*>(launch.out) + first,
            static_cast<const T*>(launch.grad) + first, static_cast<T*>(launch.to) + first,
            static_cast<int>(std::min<int64_t>(nmt::kElements, launch.count - first)));
      }
    });
  }
  static const char* softmax(const nmt::SoftmaxLaunch& device, void* stream) {
    nmt::SoftmaxLaunch launch = device;
    launch.scores = host(launch.scores);
    launch.probs = host(launch.probs);
    if (launch.dropped != nullptr) launch.dropped = host(launch.dropped);
    launch.shape.key_lengths = host(launch.shape.key_lengths);
    const int64_t rows = launch.shape.batch * launch.shape.heads * launch.shape.queries;
    return for_type(launch.type, stream, [&]<class T>(T) {
      for (int64_t row = 0; row < rows; ++row)
        nmt::softmax_row<T>(Lanes<nmt::kSoftmaxLanes>(), launch, row);
    });
  }
  static const char* softmax_backward(const nmt::SoftmaxBackwardLaunch& device, void* stream) {
    nmt::SoftmaxBackwardLaunch launch = device;
    launch.probs = host(launch.probs);
    launch.grad = host(launch.grad);
    launch.to = host(launch.to);
    return for_type(launch.type, stream, [&]<class T>(T) {
      for (int64_t row = 0; row < launch.rows; ++row)
        nmt::softmax_backward_row<T>(Lanes<nmt::kSoftmaxLanes>(), launch, row);
    });
  }
  // As kernels.cu's AttentionThread, all lanes of a warp.
  struct Warp {
    nmt::AttentionLane lanes[32];

    template <class Body>
    void each(const Body& body) {
      for (int lane = 0; lane < 32; ++lane) body(lane, lanes[lane]);
    }

    template <class Select>
    void multiply(const Select& select) {
      const auto half_of = [](nmt::BFloat16Pair pair, int half) {
        return half == 0 ? nmt::low_of(pair) : nmt::high_of(pair);
      };
      float a[16][16], b[16][8];
      for (int lane = 0; lane < 32; ++lane) {
        const nmt::AttentionProduct of = select(lanes[lane]);
        for (int i = 0; i < 4; ++i) {
          for (int half = 0; half < 2; ++half)
            a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] = half_of(of.a[i], half);
        }
        for (int i = 0; i < 2; ++i) {
          for (int half = 0; half < 2; ++half)
            b[lane % 4 * 2 + i * 8 + half][lane / 4] = half_of(of.b[i], half);
        }
      }
      for (int lane = 0; lane < 32; ++lane) {
        const nmt::AttentionProduct of = select(lanes[lane]);
        for (int i = 0; i < 4; ++i) {
          for (int k = 0; k < 16; ++k)
            of.c[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
        }
      }
    }

    template <class Join>
    void of_row(float (nmt::AttentionLane::*member)[2], const Join& join) {
      for (int first = 0; first < 32; first += 4) {
        for (int half = 0; half < 2; ++half) {
          const auto value = [&](int lane) { return (lanes[first + lane].*member)[half]; };
          const float all = join(join(value(0), value(1)), join(value(2), value(3)));
          for (int lane = 0; lane < 4; ++lane) (lanes[first + lane].*member)[half] = all;
        }
      }
    }
  };
  static nmt::HeadRows host(nmt::HeadRows rows) {
    rows.data = host(rows.data);
    return rows;
  }
  // body(warp, its number) for as many as `rows` rows of each head take.
  template <class Body>
  static void for_warps(const nmt::SoftmaxShape& shape, int64_t rows, const Body& body) {
    const int64_t count = (rows + nmt::kAttentionRows - 1) / nmt::kAttentionRows;
    const auto warp = std::make_unique<Warp>();
    for (int64_t number = 0; number < shape.batch * shape.heads * count; ++number)
      body(*warp, number);
  }
  static bool has_attention() { return true; }
  static const char* attention(const nmt::AttentionLaunch& device, void* stream) {
    state() = {state().offset, state().calls + 1, stream};
    nmt::AttentionLaunch launch = device;
    for (auto* rows : {&launch.q, &launch.k, &launch.v, &launch.out}) *rows = host(*rows);
    launch.log_sums_BHQ = host(launch.log_sums_BHQ);
    launch.shape.key_lengths = host(launch.shape.key_lengths);
    for_warps(launch.shape, launch.shape.queries,
              [&](Warp& warp, int64_t number) { nmt::attention_warp(warp, launch, number); });
    return nullptr;
  }
  static const char* attention_backward(const nmt::AttentionBackwardLaunch& device, void* stream) {
    state() = {state().offset, state().calls + 1, stream};
    nmt::AttentionBackwardLaunch launch = device;
    for (auto* rows : {&launch.q, &launch.k, &launch.v, &launch.out, &launch.grad_out,
                       &launch.grad_q, &launch.grad_k, &launch.grad_v})
      *rows = host(*rows);
    launch.log_sums_BHQ = host(launch.log_sums_BHQ);
    launch.dots_BHQ = host(launch.dots_BHQ);
    launch.shape.key_lengths = host(launch.shape.key_lengths);
    for_warps(launch.shape, launch.shape.queries, [&](Warp& warp, int64_t number) {
      nmt::attention_queries_backward_warp(warp, launch, number);
    });
    for_warps(launch.shape, launch.shape.keys, [&](Warp& warp, int64_t number) {
      nmt::attention_keys_backward_warp(warp, launch, number);
    });
    return nullptr;
  }
  static const char* cross_entropy(const nmt::CrossEntropyLaunch& device, void* stream) {
    nmt::CrossEntropyLaunch launch = device;
    launch.logits_NV = host(launch.logits_NV);
    launch.labels_N = host(launch.labels_N);
    launch.losses_N2 = host(launch.losses_N2);
    return for_type(launch.type, stream, [&]<class T>(T) {
      for (int64_t n = 0; n < launch.rows; ++n) nmt::cross_entropy_row<T>(Lanes<>(), launch, n);
    });
  }
};

}  // namespace cohort::test
