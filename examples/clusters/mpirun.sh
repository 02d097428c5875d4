#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Starts a program by Open MPI:  ./mpirun.sh host0:4,host1:4 ./train
# What follows a host's name is its number of ranks. Rank 0 runs on the first one.
set -euo pipefail
hosts=$1
shift
export MASTER_ADDR=${hosts%%[:,]*} MASTER_PORT=${MASTER_PORT:-29500}
COHORT_JOB_SECRET=$(head -c 32 /dev/urandom | base64)
export COHORT_JOB_SECRET
exec mpirun --host "$hosts" -x COHORT_JOB_SECRET -x MASTER_ADDR -x MASTER_PORT "$@"
