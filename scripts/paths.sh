# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
# Sourced by the other scripts: where scripts/setup keeps what it makes, and which versions those are.
# COHORT_CACHE moves the folder; COHORT_LIBTORCH_VERSION chooses one of the versions in CMakeLists.txt (default: the first), or
# COHORT_LIBTORCH names a libtorch of your own of one of them; COHORT_BUNDLE an archive of scripts/bundle.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$(sed -nE 's/^project\(cohort VERSION ([0-9.]+).*/\1/p' "$root/CMakeLists.txt")
sentencepiece_version=0.2.1
# Both are made absolute, also for what the scripts start: scripts change their folder.
cache=$(realpath -ms "${COHORT_CACHE:-${HOME:?set HOME or COHORT_CACHE}/.cache/cohort}")
read -ra libtorch_versions < <(sed -nE 's/^set\(COHORT_LIBTORCH_VERSIONS (.*)\)/\1/p' "$root/CMakeLists.txt")
# libtorch_version_of FOLDER: prints the version of the libtorch there, nothing if there is none.
libtorch_version_of() {
  [[ ! -f $1/include/torch/headeronly/version.h ]] ||
    sed -nE 's/^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) +([0-9]+).*/\2/p' "$1/include/torch/headeronly/version.h" | paste -sd.
}
libtorch_version=${COHORT_LIBTORCH_VERSION:-$(libtorch_version_of "${COHORT_LIBTORCH:-}")}
libtorch_version=${libtorch_version:-${libtorch_versions[0]}}
if [[ " ${libtorch_versions[*]} " != *" $libtorch_version "* ]]; then
  echo "${0##*/}: libtorch $libtorch_version: expected ${libtorch_versions[*]/%/ or}" |
    sed 's/ or$/; set COHORT_LIBTORCH_VERSION or COHORT_LIBTORCH to one of these/' >&2
  exit 2
fi
libtorch=$(realpath -ms "${COHORT_LIBTORCH:-$cache/libtorch-$libtorch_version/torch}")
for folder in "$root" "$cache" "$libtorch"; do
  [[ $folder != *[[:space:]]* ]] || { echo "${0##*/}: $folder: expected a path without spaces" >&2; exit 2; }
done
[[ -z ${COHORT_CACHE:-} ]] || export COHORT_CACHE=$cache
[[ -z ${COHORT_LIBTORCH:-} ]] || export COHORT_LIBTORCH=$libtorch
sentencepiece=$cache/sentencepiece-$sentencepiece_version
test_python=$cache/venv/bin/python
# What is built with another libtorch than the default says so in its name.
other_libtorch=
[[ $libtorch_version == "${libtorch_versions[0]}" ]] || other_libtorch=-libtorch$libtorch_version
release_build=build/release$other_libtorch
bundle_name=cohort-$version-linux-x86_64$other_libtorch
bundle=$(realpath -ms "${COHORT_BUNDLE:-$cache/$bundle_name.tar.xz}")
