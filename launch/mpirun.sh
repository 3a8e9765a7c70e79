#!/usr/bin/env bash
# ringattn run on RANKS processes under mpirun, 2 by default. Arguments are overrides:
#   RANKS=4 launch/mpirun.sh tokens=64k pattern=window           MPIRUN_ARGS="-f hosts" RANKS=16 launch/mpirun.sh
# MPICH passes messages within a node through /dev/shm; in Docker use docker run --ipc=host, or --shm-size=1g.
# pip install 'ringattn[mpi]' installs mpi4py and an mpirun; MPIRUN=... selects another mpirun.
set -euo pipefail

ranks="${RANKS:-2}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || { echo "RANKS=$ranks is not a number of ranks; try RANKS=2" >&2; exit 2; }
python="$(command -v "${PYTHON:-python3}")" || {
    echo "no ${PYTHON:-python3} found; set PYTHON=... to another one" >&2
    exit 2
}
# The mpirun beside this Python belongs to the MPI library that mpi4py loads; others may belong to other libraries.
beside="$(dirname "$python")/mpirun"
mpirun="${MPIRUN:-$([ -x "$beside" ] && echo "$beside" || command -v mpirun || true)}"
if [ -z "$mpirun" ]; then
    echo "no mpirun found; try: pip install 'ringattn[mpi]'" >&2
    exit 2
fi

# Name the job's run directory: the default name, the time of day, differs between nodes.
export RINGATTN_RUN_ID="${RINGATTN_RUN_ID:-mpi-$(date +%Y-%m-%d-%H-%M-%S)-$$}"
# shellcheck disable=SC2086  # MPIRUN_ARGS is a list of words
exec "$mpirun" ${MPIRUN_ARGS:-} -n "$ranks" "$python" -m ringattn run transport=mpi "$@"
