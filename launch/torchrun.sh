#!/usr/bin/env bash
# ringattn run on this machine under torchrun, one process per GPU, or RANKS processes. Arguments are overrides:
#   launch/torchrun.sh transport=nccl tokens=1M            RANKS=2 launch/torchrun.sh tokens=8k backward=true
# RESTARTS=2 restarts all ranks after a rank has failed, at most twice.
# On several machines, run this script on each with NODES=4 NODE=0..3 HEAD=host:port, a free port of the first. If
# NCCL or Gloo picks the wrong network, set NCCL_SOCKET_IFNAME=eth0 or GLOO_SOCKET_IFNAME=eth0.
# In Docker, NCCL needs more /dev/shm than the default 64 MB: use docker run --ipc=host, or --shm-size=8g.
set -euo pipefail

gpus="$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)"
ranks="${RANKS:-$((gpus > 0 ? gpus : 2))}"
[[ "$ranks" =~ ^[1-9][0-9]*$ ]] || { echo "RANKS=$ranks is not a number of ranks; try RANKS=2" >&2; exit 2; }

# Without a GPU, one process says that NCCL needs them, in one line and without torchrun's report about all ranks.
if [ "$gpus" = 0 ] && [[ " $* " == *" transport=nccl "* ]]; then exec "${PYTHON:-python3}" -m ringattn run "$@"; fi

# torchrun finds a free port for a single node; several nodes meet at HEAD.
place=(--standalone)
if [ "${NODES:-1}" -gt 1 ]; then
    : "${HEAD:?NODES > 1 needs HEAD=host:port of the first node}"
    # Static, not c10d, whose ranks would meet at the first node's own name, whatever HEAD says.
    host="${HEAD%:*}" host="${host#[}"
    place=(--nnodes "$NODES" --node-rank "${NODE:?NODE=0..NODES-1 is needed}"
           --master-addr "${host%]}" --master-port "${HEAD##*:}")
fi

# torchrun's default is one thread per rank; divide the cores among the ranks instead.
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}"
exec "${PYTHON:-python3}" -m torch.distributed.run "${place[@]}" --nproc-per-node "$ranks" \
    --max-restarts "${RESTARTS:-0}" -m ringattn run "$@"
