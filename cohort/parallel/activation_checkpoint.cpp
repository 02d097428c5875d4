// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/activation_checkpoint.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <mutex>
#include <set>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <unordered_set>

namespace cohort::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

thread_local int depth = 0;

// The default generator of a device.
RandomSource generator_of(c10::Device device) {
  return [device]() -> std::function<void()> {
    const auto locked = [device](const auto& use) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      return use(generator);
    };
    const at::Tensor state = locked([](at::Generator& generator) { return generator.get_state(); });
    return [locked, state] {
      locked([&](at::Generator& generator) {
        generator.set_state(state);
        return true;
      });
    };
  };
}

// How autocast stands, for the types of device that a body may meet.
class Autocast {
 public:
  explicit Autocast(const std::set<c10::DeviceType>& types)
      : caches_(at::autocast::is_autocast_cache_enabled()) {
    for (const c10::DeviceType type : types) {
      devices_.push_back(
          {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
    }
  }
  void set() const {
    at::autocast::set_autocast_cache_enabled(caches_);
    for (const Device& each : devices_) {
      at::autocast::set_autocast_enabled(each.type, each.enabled);
      at::autocast::set_autocast_dtype(each.type, each.dtype);
    }
  }

 private:
  struct Device {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  bool caches_;
  std::vector<Device> devices_;
};

using Places = std::vector<std::function<void()>>;

Places places_of(const std::vector<RandomSource>& sources) {
  Places places;
  for (const RandomSource& source : sources) places.push_back(source());
  return places;
}

void go_to(const Places& places) {
  for (const auto& place : places) place();
}

// What backward needs besides tensors.
struct Recipe : torch::CustomClassHolder {
  Recipe(ActivationCheckpointBody wanted, size_t count, std::vector<RandomSource> drawn,
         std::set<c10::DeviceType> on)
      : body(std::move(wanted)),
        num_inputs(count),
        random(std::move(drawn)),
        types(std::move(on)),
        start(places_of(random)),
        autocast(types) {}
  ActivationCheckpointBody body;
  size_t num_inputs;  // The other tensors are parameters.
  std::vector<RandomSource> random;
  std::set<c10::DeviceType> types;
  Places start;       // Where the random sources stood ...
  Autocast autocast;  // ... and autocast, when the body first ran.
};

// A second run of the recipe in the first one's surroundings; puts the present ones back.
class Rerun {
 public:
  explicit Rerun(const Recipe& recipe) : here_(places_of(recipe.random)), autocast_(recipe.types) {
    go_to(recipe.start);
    recipe.autocast.set();
    // Casts that autocast keeps are for one graph; they go when the outermost level does.
    at::autocast::increment_nesting();
  }
  ~Rerun() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    autocast_.set();
    go_to(here_);
  }
  Rerun(const Rerun&) = delete;
  Rerun& operator=(const Rerun&) = delete;

 private:
  Places here_;
  Autocast autocast_;
};

struct Inside {
  Inside() { ++depth; }
  ~Inside() { --depth; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// The body's own graph: it begins at copies of the inputs' handles and ends at the results.
struct Graph {
  variable_list inputs;
  variable_list results;
};

// Records also in forward, where nobody needs the record: the operations must be the same ones.
Graph run(const Recipe& recipe, at::TensorList tensors) {
  const at::AutoGradMode recording(true);
  const Inside inside;
  Graph graph;
  for (const at::Tensor& input : tensors.slice(0, recipe.num_inputs)) {
    graph.inputs.push_back(input.defined() ? input.detach().set_requires_grad(input.requires_grad())
                                           : input);
  }
  graph.results = recipe.body(graph.inputs);
  return graph;
}

std::vector<Edge> edges_of(at::TensorList tensors) {
  std::vector<Edge> edges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  return edges;
}

// Visits the nodes behind `edges`, each once; continues behind those for which `visit` is true.
void walk(const std::vector<Edge>& edges, const std::function<bool(const Edge&)>& visit) {
  std::vector<Edge> waiting = edges;
  std::unordered_set<Edge> seen(waiting.begin(), waiting.end());
  while (!waiting.empty()) {
    const Edge edge = waiting.back();
    waiting.pop_back();
    if (!visit(edge)) continue;
    for (const Edge& next : edge.function->next_edges()) {
      if (next.is_valid() && seen.insert(next).second) waiting.push_back(next);
    }
  }
}

// The leaves that require a gradient among what the body used without being given it: all that its
// graph reaches, but for the inputs and `parameters`. `position`: where the recording stood before.
variable_list captured_leaves(const Graph& graph, at::TensorList parameters, uint64_t position) {
  const uint64_t thread = at::RecordFunction::currentThreadId();
  const std::vector<Edge> inputs = edges_of(graph.inputs), named = edges_of(parameters);
  std::unordered_set<Edge> ends(inputs.begin(), inputs.end());
  ends.insert(named.begin(), named.end());
  variable_list leaves;
  walk(edges_of(graph.results), [&](const Edge& edge) {
    if (ends.contains(edge)) return false;
    const Node& node = *edge.function;
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node)) {
      leaves.push_back(leaf->variable);
      ends.insert(edge);
      return false;
    }
    // Its gradient would have to flow through operations that ran before the body. Numbers of other
    // threads tell nothing.
    TORCH_CHECK_VALUE(node.thread_id() != thread || node.sequence_nr() >= position,
                      "activation checkpoint: the body uses a result of ", node.name(),
                      " from outside; expected it among the inputs, or in "
                      "ActivationCheckpointOptions::parameters");
    return true;
  });
  std::vector<Edge> behind_named;
  for (const Edge& edge : named) {
    for (const Edge& next : edge.function->next_edges())
      if (next.is_valid()) behind_named.push_back(next);
  }
  walk(behind_named, [&](const Edge& edge) {
    TORCH_CHECK_VALUE(
        !ends.contains(edge),
        "activation checkpoint: the body uses a tensor and, named in "
        "ActivationCheckpointOptions::parameters, another one computed from it; expected the "
        "latter among the inputs");
    return true;
  });
  return leaves;
}

// Keeps the hooks of leaves from running while it lives: they do when the gradient reaches the leaf.
class HooksAside {
 public:
  explicit HooksAside(const variable_list& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.is_leaf() && tensor.requires_grad())
        hooks_.emplace_back(tensor);
    }
    exchange();
  }
  ~HooksAside() { exchange(); }
  HooksAside(const HooksAside&) = delete;
  HooksAside& operator=(const HooksAside&) = delete;

 private:
  struct Kept {
    explicit Kept(const at::Tensor& of) : leaf(of) {}
    at::Tensor leaf;
    std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
  };
  void exchange() {
    for (Kept& each : hooks_) torch::autograd::impl::hooks(each.leaf).swap(each.hooks);
  }
  std::vector<Kept> hooks_;
};

// The parameters are arguments although the body knows them: so the gradients of backward flow to
// them as from any other operation, and hooks that wait for those still work.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  // `first`: the results of the first run.
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Recipe>& recipe,
                               const variable_list* first, at::TensorList tensors) {
    context->saved_data["recipe"] = at::IValue::make_capsule(recipe);
    context->save_for_backward(tensors.vec());
    context->set_materialize_grads(false);
    variable_list results;
    variable_list constants;
    for (const at::Tensor& result : *first) {
      results.push_back(result.defined() ? result.detach() : result);
      if (!result.defined() || !result.requires_grad()) constants.push_back(results.back());
    }
    context->mark_non_differentiable(constants);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "activation checkpoint: backward with create_graph is not recorded");
    const auto capsule = context->saved_data["recipe"].toCapsule();
    const auto& recipe = static_cast<const Recipe&>(*capsule);
    const variable_list tensors = context->get_saved_variables();
    Graph graph;
    {
      const Rerun rerun(recipe);
      graph = run(recipe, tensors);
    }
    variable_list roots;
    variable_list arriving;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined() || !graph.results[i].requires_grad()) continue;
      roots.push_back(graph.results[i]);
      arriving.push_back(grads[i]);
    }
    const auto wanted = [&](size_t i) {
      return tensors[i].defined() && tensors[i].requires_grad();
    };
    variable_list ends;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (wanted(i)) ends.push_back(i < recipe.num_inputs ? graph.inputs[i] : tensors[i]);
    variable_list found(ends.size());
    if (!roots.empty()) {
      const HooksAside aside(ends);
      found = torch::autograd::grad(roots, ends, arriving, /*retain_graph=*/false,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    }
    variable_list result(2);  // The recipe and the first results have no gradient.
    for (size_t i = 0, next = 0; i < tensors.size(); ++i)
      result.push_back(wanted(i) ? found[next++] : at::Tensor());
    return result;
  }
};

}  // namespace

bool inside_activation_checkpoint() {
  return depth > 0;
}

std::vector<at::Tensor> activation_checkpoint(ActivationCheckpointBody body,
                                              const std::vector<at::Tensor>& inputs,
                                              const ActivationCheckpointOptions& options) {
  std::vector<at::Tensor> tensors = inputs;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : options.parameters)
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) tensors.push_back(parameter);
  if (!at::GradMode::is_enabled()) return body(inputs);
  std::set<c10::DeviceType> types{c10::kCPU};
  std::set<std::pair<c10::DeviceType, c10::DeviceIndex>> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.is_cpu() || tensor.is_meta()) continue;
    types.insert(tensor.device().type());
    devices.emplace(tensor.device().type(), tensor.device().index());
  }
  std::vector<RandomSource> random = options.random;
  if (options.preserve_rng_state) {
    random.push_back(generator_of(c10::kCPU));
    for (const auto& [type, index] : devices) random.push_back(generator_of({type, index}));
  }
  const auto recipe = c10::make_intrusive<Recipe>(std::move(body), inputs.size(), std::move(random),
                                                  std::move(types));
  // Casts that autocast keeps would be results from outside. They are made again in the body.
  if (at::autocast::is_autocast_cache_enabled()) at::autocast::clear_cache();
  const uint64_t position = at::sequence_number::peek();
  const Graph graph = run(*recipe, tensors);
  const at::TensorList parameters = at::TensorList(tensors).slice(inputs.size());
  const variable_list captured = captured_leaves(graph, parameters, position);
  tensors.insert(tensors.end(), captured.begin(), captured.end());
  return Checkpointed::apply(recipe, &graph.results, at::TensorList(tensors));
}

}  // namespace cohort::parallel
