#!/bin/sh
# Starts the program of this name in lib/cohort/bin with libtorch's libraries.
#
# libtorch is looked for in this order: COHORT_LIBTORCH, the folder that holds include/ and lib/libtorch_cpu.so; the
# cache of scripts/setup (COHORT_CACHE, default ~/.cache/cohort); the package torch of python3. Exit code 2 if there is none
# of the version that the programs are built with.
version=@libtorch_version@
cache=${COHORT_CACHE:-${HOME:-}/.cache/cohort}
self=$(readlink -f "$0")
prefix=${self%/bin/*}

# version_of FOLDER: prints the version of the libtorch there, nothing if there is none.
version_of() {
  [ -f "$1/lib/libtorch_cpu.so" ] && [ -f "$1/include/torch/headeronly/version.h" ] &&
    sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\).*/\2/p' \
      "$1/include/torch/headeronly/version.h" | paste -sd. -
}

refuse() {
  echo "${0##*/}: $1; expected libtorch $version. Install it by 'pip install torch==$version', or set COHORT_LIBTORCH to its folder" >&2
  exit 2
}

if [ -n "${COHORT_LIBTORCH:-}" ]; then
  found=$(version_of "$COHORT_LIBTORCH")
  [ "$found" = "$version" ] || refuse "COHORT_LIBTORCH=$COHORT_LIBTORCH holds ${found:-no} libtorch"
  libtorch=$COHORT_LIBTORCH
else
  libtorch=$cache/libtorch-$version/torch
  if [ "$(version_of "$libtorch")" != "$version" ]; then
    libtorch=$(python3 -c 'import importlib.util as util; print(util.find_spec("torch").submodule_search_locations[0])' 2>/dev/null)
    [ -n "$libtorch" ] || refuse "no libtorch in $cache, and python3 has no package torch"
    found=$(version_of "$libtorch")
    [ "$found" = "$version" ] || refuse "the package torch of python3 has ${found:-no} libtorch"
  fi
fi
export COHORT_LIBTORCH="$libtorch"
export LD_LIBRARY_PATH="$libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
program=$prefix/lib/cohort/bin/${0##*/}
exec "$program" "$@"
