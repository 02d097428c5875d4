// SPDX-License-Identifier: Apache-2.0
// What the parameter server is measured beside: a plain gRPC service, and gRPC alone.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace cohort::bench {

/// Serves on a free loopback port: rows in std::unordered_map under a mutex, row-wise Adagrad; and
/// raw calls, answered with as many zeros as rows of that many ids would be.
class PlainServer {
 public:
  PlainServer();
  ~PlainServer();
  int port() const;

 private:
  struct Service;
  std::unique_ptr<Service> service_;
};

/// Calls it, on one connection. Blocking; threads: any.
class PlainClient {
 public:
  explicit PlainClient(int port);
  ~PlainClient();
  void pull(std::span<const uint64_t> ids, std::span<float> weights);
  void push(std::span<const uint64_t> ids, std::span<const float> gradients);
  /// As many bytes as a pull or push of these rows, sent without a copy.
  void raw_pull(std::span<const uint64_t> ids, std::span<float> weights);
  void raw_push(std::span<const uint64_t> ids, std::span<const float> gradients);

 private:
  struct Stub;
  std::unique_ptr<Stub> stub_;
};

inline constexpr size_t kWidth = 16;

}  // namespace cohort::bench
