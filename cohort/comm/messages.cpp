// SPDX-License-Identifier: Apache-2.0
// send and recv: messages between two ranks.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "cohort/comm/number_hash.h"
#include "cohort/comm/operations.h"

namespace cohort::comm {
namespace {

// What goes before a message: its dtype and number of elements, and its number among those of a tag.
at::Tensor form_of(const at::Tensor& tensor, int64_t number) {
  return at::tensor({static_cast<int64_t>(tensor.scalar_type()), tensor.numel(), number})
      .to(tensor.device());
}

// The tag of the data of the `number`-th message of a tag. Messages of different forms do not match:
// Gloo would write the bytes of another dtype as they are, and end the process for too many. Nor do
// those of different numbers: a receive that was refused takes no later message.
int data_tag(int tag, at::ScalarType type, int64_t numel, int64_t number) {
  return NumberHash().add(tag).add(static_cast<int64_t>(type)).add(numel).add(number).tag();
}

// Two works as one: a message's form and its data.
class MessageSent : public c10d::Work {
 public:
  MessageSent(Tensors tensors, BackendWork form, BackendWork data)
      : tensors_(std::move(tensors)), form_(std::move(form)), data_(std::move(data)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    return form_->wait(timeout) && data_->wait(timeout);
  }

 private:
  Tensors tensors_;  // backends see memory, not tensors: these outlive the works
  BackendWork form_, data_;
};

// Both receives are posted at once: a rank that waits for its own message to be taken before it
// waits for this one blocks no other. `num_received` counts those of a sender and tag; `is_left`:
// the backend leaves a message whose receive was dropped before it came to the next.
class MessageReceived : public c10d::Work {
 public:
  MessageReceived(c10d::ProcessGroup& backend, at::Tensor tensor, int from, int tag,
                  int64_t& num_received, bool is_left)
      : backend_(backend),
        tensor_(std::move(tensor)),
        number_(num_received++),
        form_(form_of(tensor_, number_)),
        bytes_(as_bytes(tensor_)),
        from_(from),
        tag_(tag),
        num_received_(num_received),
        is_left_(is_left) {
    Tensors form{form_}, data{bytes_};
    form_work_ = backend.recv(form, from, tag);
    data_work_ =
        backend.recv(data, from, data_tag(tag, tensor_.scalar_type(), tensor_.numel(), number_));
  }

  ~MessageReceived() override {
    if (is_left_ && form_work_ && !form_work_->isCompleted()) --num_received_;
  }
  MessageReceived(const MessageReceived&) = delete;
  MessageReceived& operator=(const MessageReceived&) = delete;

  bool wait(std::chrono::milliseconds timeout) override {
    form_work_->wait(timeout);
    const at::Tensor sent = form_.cpu();
    const auto type = static_cast<at::ScalarType>(sent[0].item<int64_t>());
    const auto numel = sent[1].item<int64_t>();
    const auto number = sent[2].item<int64_t>();
    TORCH_CHECK_VALUE(number == number_, "recv from ", from_, ": expected message ", number_,
                      " of tag ", tag_, ", got message ", number,
                      ": a receive was dropped without wait() while another one waited, or as its "
                      "message came");
    if (type == tensor_.scalar_type() && numel == tensor_.numel()) return data_work_->wait(timeout);
    // It is taken all the same: its sender waits for that.
    Tensors unwanted{as_bytes(at::empty({numel}, tensor_.options().dtype(type)))};
    backend_.recv(unwanted, from_, data_tag(tag_, type, numel, number_))->wait(timeout);
    TORCH_CHECK_VALUE(false, "recv from ", from_, ": expected ", tensor_.numel(), " elements of ",
                      type_name(tensor_.scalar_type()), ", rank ", from_, " sends ", numel, " of ",
                      type_name(type));
  }

 private:
  c10d::ProcessGroup& backend_;
  const at::Tensor tensor_;
  const int64_t number_;
  const at::Tensor form_, bytes_;
  const int from_, tag_;
  int64_t& num_received_;
  const bool is_left_;
  BackendWork form_work_, data_work_;
};

void check_peer(int peer, int tag, const c10d::ProcessGroup& backend, const char* operation,
                const char* role) {
  check_rank(peer, backend.getSize(), operation, role);
  TORCH_CHECK_VALUE(peer != backend.getRank() && tag >= 0, operation,
                    ": expected another rank and a tag >= 0, got rank ", peer, ", tag ", tag);
}

}  // namespace

void ProcessGroup::send(const at::Tensor& tensor, int to, int tag, CallSite site) const {
  send_async(tensor, to, tag, site).wait(site);
}

Work ProcessGroup::send_async(const at::Tensor& tensor, int to, int tag, CallSite site) const {
  check_tensor(tensor, "send", c10d_group());
  check_peer(to, tag, c10d_group(), "send", "receiver");
  return impl().start({.call = {.operation = "send to " + std::to_string(to),
                                .tensor = tensor,
                                .site = site,
                                .compared = Compared::kNever},
                       .begin = [&, read = readable(tensor)](bool) {
                         Tensors data{as_bytes(read)};
                         if (!impl_->matcher.is_on()) return c10d_group().send(data, to, tag);
                         const int64_t number = impl_->num_sent[{to, tag}]++;
                         Tensors form{form_of(tensor, number)};
                         BackendWork form_sent = c10d_group().send(form, to, tag);
                         BackendWork sent = c10d_group().send(
                             data, to, data_tag(tag, tensor.scalar_type(), tensor.numel(), number));
                         return BackendWork(c10::make_intrusive<MessageSent>(
                             Tensors{form[0], data[0]}, std::move(form_sent), std::move(sent)));
                       }});
}

at::Tensor ProcessGroup::recv(const at::Tensor& tensor, int from, int tag, CallSite site) const {
  recv_async(tensor, from, tag, site).wait(site);
  return tensor;
}

Work ProcessGroup::recv_async(const at::Tensor& tensor, int from, int tag, CallSite site) const {
  check_written(tensor, "recv", c10d_group());
  check_peer(from, tag, c10d_group(), "recv", "sender");
  const Written written = filled(tensor);
  return impl().start({.call = {.operation = "recv from " + std::to_string(from),
                                .tensor = tensor,
                                .site = site,
                                .compared = Compared::kNever},
                       .begin =
                           [&](bool) {
                             written.bump_version();
                             if (impl_->matcher.is_on()) {
                               return BackendWork(c10::make_intrusive<MessageReceived>(
                                   c10d_group(), written.memory, from, tag,
                                   impl_->num_received[{from, tag}],
                                   /*is_left=*/backend() == "shm"));
                             }
                             Tensors data{as_bytes(written.memory)};
                             return c10d_group().recv(data, from, tag);
                           },
                       .finish = [written] { written.finish(); }});
}

}  // namespace cohort::comm
