#include "cohort/nmt/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <utility>

namespace cohort::nmt {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What backward needs besides tensors.
struct Recipe : torch::CustomClassHolder {
  Recipe(RecomputedBody wanted, size_t count, DropoutStream& used)
      : body(std::move(wanted)), num_inputs(count), stream(used), start(used) {}
  RecomputedBody body;
  size_t num_inputs;      // The other tensors are parameters.
  DropoutStream& stream;  // What the body draws from ...
  DropoutStream start;    // ... and where it began.
};

// The body's own graph: it begins at copies of the inputs' handles and ends at the result.
struct Graph {
  variable_list inputs;
  at::Tensor result;
};

// Records also in forward, where nobody needs the record: the operations must be the same ones.
Graph run(const Recipe& recipe, at::TensorList tensors) {
  const at::AutoGradMode recording(true);
  Graph graph;
  for (const at::Tensor& input : tensors.slice(0, recipe.num_inputs))
    graph.inputs.push_back(input.detach().set_requires_grad(input.requires_grad()));
  graph.result = recipe.body(graph.inputs);
  return graph;
}

// The parameters are arguments although the body knows them: so the gradients of backward flow to
// them as from any other operation, and whoever waits for those is not surprised.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(AutogradContext* context, const c10::intrusive_ptr<Recipe>& recipe,
                            at::TensorList tensors) {
    context->saved_data["recipe"] = at::IValue::make_capsule(recipe);
    context->save_for_backward(tensors.vec());
    return run(*recipe, tensors).result.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["recipe"].toCapsule();
    auto& recipe = static_cast<Recipe&>(*capsule);
    const variable_list tensors = context->get_saved_variables();
    const DropoutStream now = std::exchange(recipe.stream, recipe.start);
    const Graph graph = run(recipe, tensors);
    recipe.stream = now;

    variable_list ends;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& end = i < recipe.num_inputs ? graph.inputs[i] : tensors[i];
      if (end.requires_grad()) ends.push_back(end);
    }
    const variable_list found = torch::autograd::grad(
        {graph.result}, ends, grads, /*retain_graph=*/false, /*create_graph=*/false,
        /*allow_unused=*/true);
    variable_list result(1);  // The recipe has no gradient.
    for (size_t i = 0, next = 0; i < tensors.size(); ++i)
      result.push_back(tensors[i].requires_grad() ? found[next++] : at::Tensor());
    return result;
  }
};

}  // namespace

at::Tensor recomputed(RecomputedBody body, const std::vector<at::Tensor>& inputs,
                      const std::vector<at::Tensor>& parameters, DropoutStream& stream) {
  if (!at::GradMode::is_enabled()) return body(inputs);
  std::vector<at::Tensor> tensors = inputs;
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  return Recomputed::apply(c10::make_intrusive<Recipe>(std::move(body), inputs.size(), stream),
                           at::TensorList(tensors));
}

}  // namespace cohort::nmt
