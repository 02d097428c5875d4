# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What scripts/bundle and scripts/gpu-check share: an archive holds what its programs need, except libtorch and what every Debian has.
# Read after paths.sh, by scripts that have `fail`.
system_libraries='(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libutil|libstdc\+\+|libgcc_s)\.so'
most_mebibytes=55

check_packing_tools() {
  local each
  for each in patchelf:patchelf strip:binutils xz:xz-utils; do
    command -v "${each%:*}" >/dev/null || fail "no ${each%:*} here; install Debian's package ${each#*:}"
  done
}

# libraries_of BINARY...: the shared libraries that these need and an archive is to hold, one a line.
libraries_of() {
  LD_LIBRARY_PATH=$libtorch/lib ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE "^${libtorch%/torch}/" | grep -vE "/$system_libraries" || true
}

# check_all_is_packed TREE FOLDER...: what a file of the tree needs is in these folders, in libtorch, in every Debian, or, for the
# backend of MPI, in the package of MPI.
check_all_is_packed() {
  local provided needed file
  provided="$(ls "${@:2}") $(ls "$libtorch/lib" "${libtorch%/torch}"/nvidia/*/lib 2>/dev/null || true)"
  while read -r needed file; do
    [[ " ${provided//$'\n'/ } " == *" $needed "* || $needed =~ ^$system_libraries || $file/$needed == */libcohort_mpi.so/libmpi.so* ]] ||
      fail "$file needs $needed, which the archive does not hold"
  done < <(find "$1" -type f \( -path '*/bin/*' -o -name '*.so*' \) -exec sh -c \
    'for file; do readelf -d "$file" 2>/dev/null | sed -n "s|.*(NEEDED).*\[\(.*\)\]|\1 $file|p"; done' sh {} +)
}

# pack_folder FOLDER NAME ARCHIVE [OPTION OF tar...]: packs FOLDER/NAME, and says so. None is left that is too large.
pack_folder() {
  local mebibytes
  tar -C "$1" --owner=0 --group=0 --numeric-owner "${@:4}" -c "$2" | xz -T0 -6 >"$1/archive"
  mebibytes=$(du -m "$1/archive" | cut -f1)
  ((mebibytes <= most_mebibytes)) || fail "the archive has $mebibytes MiB, expected at most $most_mebibytes"
  mv "$1/archive" "$3"
  echo "${0##*/}: $3 ($mebibytes MiB)"
}
