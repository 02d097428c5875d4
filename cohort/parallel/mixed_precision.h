// Lends a module's parameters in low precision to one forward and its backward.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <memory>
#include <vector>

#include "cohort/parallel/mixed_precision_options.h"

namespace torch::autograd {
struct Node;
}

namespace cohort::parallel {

/// Swaps parameters for copies of another type before a forward, and back.
///
/// A libtorch module holds its parameters by value in typed members, so the copies go into the same
/// tensors: between `lend` and `restore`, a parameter's data are the copy's, and its gradient
/// passes a cast back to the master's type. Every consumer of a parameter has run when that cast
/// runs, so it gives the parameter its master data back on the spot, and the gradient arrives at a
/// float32 parameter in float32. What no gradient reaches is restored when the backward ends.
///
/// Owner: GradientEngine. Threads: one. Local. One backward per forward; a retained graph cannot
/// run a second time.
class LentParameters {
 public:
  /// `parameters`: leaves; those not of floating point are left alone, and one named twice is lent
  /// once. `type`: a floating-point type.
  LentParameters(const std::vector<at::Tensor>& parameters, c10::ScalarType type);
  /// Restores.
  ~LentParameters();
  LentParameters(const LentParameters&) = delete;
  LentParameters& operator=(const LentParameters&) = delete;

  void lend();     ///< Casts anew from the master data. Nothing happens to a parameter that is lent
                   ///< already.
  void restore();  ///< Gives back the master data of what is still lent.
  bool is_lent() const;  ///< Some parameter is.

 private:
  struct Loan;
  struct Loans;
  class CastBackward;
  c10::ScalarType type_;
  std::shared_ptr<Loans> loans_;
};

/// Returns `tensor` in `type` if it is of another floating-point type, else itself.
at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType type);
/// What comes into a model's forward, and what leaves it, in the types that `types` asks for.
at::Tensor cast_input(const MixedPrecision& types, const at::Tensor& input);
at::Tensor cast_output(const MixedPrecision& types, const at::Tensor& output);

}  // namespace cohort::parallel
