# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Bare roots of Debian for the tests of a release. Read by scripts that run in a folder of their own, `work`, which is removed at the end.
fail() { echo "${0##*/}: $*" >&2; exit 1; }
[[ $(id -u) == 0 ]] || fail "this needs root, for chroot"
command -v debootstrap >/dev/null || fail "no debootstrap here; install Debian's package debootstrap"
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?$' /etc/apt --include '*.list' --include '*.sources' | sort -u | sed q || true)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# make_root SUITE ROOT
make_root() {
  debootstrap --variant=minbase "$1" "$2" ${mirror:+"$mirror"} >"$work/debootstrap.txt" 2>&1 ||
    fail "debootstrap of $1: $(tail -1 "$work/debootstrap.txt")"
  mkdir -p "$2"/{libtorch,dev/shm,home/user}
  cp --dereference /etc/ssl/certs/ca-certificates.crt "$2/etc/host-certificates.crt"  # Of a proxy of this network, too.
}

# in_root ROOT USER COMMAND: a shell in the root, with libtorch readable at /libtorch, and the variables in `settings`.
settings=()
in_root() {
  unshare --mount --pid --fork --kill-child bash -c '
    mount --bind "$2" "$1/libtorch"
    mount -t proc proc "$1/proc"
    mount -t tmpfs tmpfs "$1/dev/shm"
    exec chroot --userspec="$3" "$1" env -i HOME=/home/user LANG=C.UTF-8 PATH=/cohort/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      PIP_CERT=/etc/host-certificates.crt "${@:5}" bash -euo pipefail -c "$4"' \
    in_root "$1" "${libtorch%/torch}" "$2" "$3" "${settings[@]}"
}
