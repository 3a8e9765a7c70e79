#!/usr/bin/env bash
# ringattn run on RANKS processes under mpirun, 2 by default. Arguments are overrides:
#   RANKS=4 launch/mpirun.sh tokens=64k pattern=window           MPIRUN_ARGS="-f hosts" RANKS=16 launch/mpirun.sh
# MPICH keeps messages of one node in /dev/shm; in Docker: docker run --ipc=host, or --shm-size=1g.
# pip install 'ringattn[mpi]' brings mpi4py and an mpirun; MPIRUN=... chooses another mpirun.
set -euo pipefail

ranks="${RANKS:-2}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || { echo "RANKS=$ranks is not a number of ranks; try RANKS=2" >&2; exit 2; }
python="$(command -v "${PYTHON:-python3}")" || {
    echo "no ${PYTHON:-python3} found; PYTHON=... chooses another" >&2
    exit 2
}
# The mpirun beside this Python belongs to the MPI library that mpi4py loads; another mpirun may belong to another.
beside="$(dirname "$python")/mpirun"
mpirun="${MPIRUN:-$([ -x "$beside" ] && echo "$beside" || command -v mpirun || true)}"
if [ -z "$mpirun" ]; then
    echo "no mpirun found; try: pip install 'ringattn[mpi]'" >&2
    exit 2
fi

# One run directory per job: without this name it would be the time of day, which differs between nodes.
export RINGATTN_RUN_ID="${RINGATTN_RUN_ID:-mpi-$(date +%Y-%m-%d-%H-%M-%S)-$$}"
# shellcheck disable=SC2086  # MPIRUN_ARGS is a list of words
exec "$mpirun" ${MPIRUN_ARGS:-} -n "$ranks" "$python" -m ringattn run transport=mpi "$@"
