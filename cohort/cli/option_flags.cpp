// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/option_flags.h"

#include <type_traits>

#include "cohort/cli/parse.h"

namespace cohort::cli {
namespace {

CLI::Option* add_flag_of(CLI::App& app, const Option& option, bool* value) {
  return app.add_flag(option.flag, *value, option.help);
}

CLI::Option* add_flag_of(CLI::App& app, const Option& option, const TextValue& value) {
  const std::vector<std::string> defaults = value.get();
  CLI::Option* flag =
      app.add_option_function<std::vector<std::string>>(option.flag, value.set, option.help);
  if (!value.words.empty()) flag->check(one_of(value.words));
  const std::string text = CLI::detail::join(defaults);
  return flag->expected(1)->default_str(defaults.size() == 1 ? text : "[" + text + "]");
}

// Without a value there is no default to show.
template <class T>
CLI::Option* add_flag_of(CLI::App& app, const Option& option, T* value) {
  CLI::Option* flag = app.add_option(option.flag, *value, option.help);
  constexpr bool has_default = std::is_arithmetic_v<T> || std::is_same_v<T, std::array<double, 3>>;
  return has_default ? flag->capture_default_str() : flag;
}

}  // namespace

void add_options(CLI::App& app, const Options& options, const std::string& group) {
  for (const Option& option : options) {
    const OptionRule& rule = option.rule;
    CLI::Option* flag = std::visit(
        [&](const auto& value) { return add_flag_of(app, option, value); }, option.value);
    flag->required(rule.required);
    if (!group.empty()) flag->group(group);
    if (rule.max_values > 1) flag->expected(rule.min_values, rule.max_values);
    if (*rule.unit != '\0') flag->type_name(rule.unit);
    if (rule.limits.holds != nullptr) flag->check(number_that(rule.limits));
    if (*rule.needs != '\0') flag->needs(rule.needs);
    if (*rule.shown_default != '\0') flag->default_str(rule.shown_default);
    if (*rule.excludes != '\0') flag->excludes(rule.excludes);
  }
}

}  // namespace cohort::cli
