#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Starts one launcher on each host by ssh:  ./ssh.sh 4 host0 host1 -- ./train
# The number is that of ranks on each host. Run it in a folder that all hosts see. It ends with the code of the first host
# that fails; when it is stopped, ssh's terminals end, and so do the launchers.
set -euo pipefail
usage() { echo "usage: ssh.sh RANKS HOST... -- PROGRAM [ARGUMENT...]" >&2; exit 2; }
(($# > 0)) || usage
ranks=$1
shift
hosts=()
while (($# > 0)) && [[ $1 != -- ]]; do
  hosts+=("$1")
  shift
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] && ((${#hosts[@]} > 0 && $# > 1)) || usage
shift
secret=$PWD/job.secret.$$
(umask 077; head -c 32 /dev/urandom | base64 >"$secret")
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$secret"' EXIT
printf -v command 'cd %q && exec cohort run --nnodes %d --nproc-per-node %d --rdzv-endpoint %q --rdzv-secret-file %q --' \
  "$PWD" "${#hosts[@]}" "$ranks" "${hosts[0]}" "$secret"
printf -v command '%s %q' "$command" "$1"
shift
(($# == 0)) || printf -v command '%s%s' "$command" "$(printf ' %q' "$@")"
for host in "${hosts[@]}"; do
  ssh -tt "$host" "$command" </dev/null &
done
code=0
for _ in "${hosts[@]}"; do
  wait -n || { last=$?; ((code)) || code=$last; }
done
exit "$code"
