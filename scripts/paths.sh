# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
# Sourced by the other scripts: where scripts/setup keeps what it makes, and which versions those are.
# COHORT_CACHE moves the folder; COHORT_LIBTORCH names a libtorch of your own; COHORT_BUNDLE an archive of scripts/bundle.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$(sed -nE 's/^project\(cohort VERSION ([0-9.]+).*/\1/p' "$root/CMakeLists.txt")
libtorch_version=2.11.0
sentencepiece_version=0.2.1
# Both are made absolute, also for what the scripts start: scripts change their folder.
cache=$(realpath -ms "${COHORT_CACHE:-${HOME:?set HOME or COHORT_CACHE}/.cache/cohort}")
libtorch=$(realpath -ms "${COHORT_LIBTORCH:-$cache/libtorch-$libtorch_version/torch}")
[[ -z ${COHORT_CACHE:-} ]] || export COHORT_CACHE=$cache
[[ -z ${COHORT_LIBTORCH:-} ]] || export COHORT_LIBTORCH=$libtorch
sentencepiece=$cache/sentencepiece-$sentencepiece_version
test_python=$cache/venv/bin/python
bundle_name=cohort-$version-linux-x86_64
bundle=${COHORT_BUNDLE:-$cache/$bundle_name.tar.xz}
