// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/call_site.h"

namespace cohort {
namespace {

thread_local CallSite outermost_site;  // line 0: there is none

}  // namespace

CallSiteScope::CallSiteScope(CallSite site) : is_outermost_(outermost_site.line == 0) {
  if (is_outermost_) outermost_site = site;
}

CallSiteScope::~CallSiteScope() {
  if (is_outermost_) outermost_site = {};
}

CallSite CallSiteScope::outermost_or(CallSite site) {
  return outermost_site.line > 0 ? outermost_site : site;
}

}  // namespace cohort
